"""Migrations of the ledger, run by ``everstep.ledger.schema``; never edited once released."""
