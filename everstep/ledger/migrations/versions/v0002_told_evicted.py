"""Machines: whether the agent was last told that it is evicted.

A released machine must not be leased before its agent has heard of the release, since it refuses to
start anything until then. Machines that are evicted now are taken to have been told.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the schema from the revision before to this one."""
    op.add_column(
        "machines",
        sa.Column("told_evicted", sa.Boolean(), server_default=sa.false(), nullable=False),
    )
    op.execute(
        "UPDATE machines SET told_evicted = true WHERE machine_id IN "
        "(SELECT machine_id FROM blocks WHERE released_at IS NULL)"
    )
