#!/bin/sh
# Creates or updates Temporal's two databases. Harmless when it is run again.
set -eu
SQL_PASSWORD="$(cat "$PASSWORD_FILE")"
export SQL_PASSWORD

for name in temporal temporal_visibility; do
    tool="temporal-sql-tool --plugin postgres12 --endpoint $POSTGRES_HOST --port $POSTGRES_PORT --user $POSTGRES_USER --database $name"
    schema=/etc/temporal/schema/postgresql/v12/${name#temporal_}/versioned
    $tool create
    $tool setup-schema --version 0.0
    $tool update-schema --schema-dir "$schema"
done
