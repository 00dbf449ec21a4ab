"""What can go wrong with the ledger, as three kinds that callers treat differently.

Every message is one line that names the ledger, so that it can be shown to a person as it is. It
never holds a password: only the database's address without credentials.
"""

from __future__ import annotations


class LedgerError(Exception):
    """The ledger itself is wrong (not ours, damaged, too new, forbidden): a person must act."""


class LedgerUnavailable(LedgerError):
    """The ledger does not answer now (unreachable, locked, disk full): try again later."""


class LedgerConflict(LedgerError):
    """The ledger is well and refuses the request (unknown, ended or stale): repeating is no use."""
