#!/bin/sh
# As the official image begins: a first start makes the cluster, with the user, password and database asked for.
set -eu
PATH=$(echo /usr/lib/postgresql/*/bin):$PATH
export PATH PGDATA=/var/lib/postgresql/data
if [ "$(id -u)" = 0 ]; then
    exec setpriv --reuid postgres --regid postgres --init-groups "$0" "$@"
fi
if [ ! -s "$PGDATA/PG_VERSION" ]; then
    initdb --username "$POSTGRES_USER" --pwfile "$POSTGRES_PASSWORD_FILE" --auth-local trust --auth-host scram-sha-256 \
        --encoding UTF8 --no-sync >/dev/null
    echo "host all all all scram-sha-256" >>"$PGDATA/pg_hba.conf"
    echo "CREATE DATABASE $POSTGRES_DB" | postgres --single postgres >/dev/null
fi
exec "$@"
