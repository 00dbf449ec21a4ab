"""Partitions, outages and random faults, judged afterwards by what the ledger says."""
