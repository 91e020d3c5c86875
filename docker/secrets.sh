#!/bin/sh
# Create the compose file's secrets in docker/secrets/; existing ones are kept.
set -eu
cd "$(dirname "$0")"
umask 077
mkdir -p secrets
random() { od -An -N24 -tx1 /dev/urandom | tr -d ' \n'; }
[ -s secrets/database_password ] || random >secrets/database_password
[ -s secrets/database_url ] ||
    printf 'postgresql://vigil:%s@database/vigil' "$(cat secrets/database_password)" >secrets/database_url
[ -s secrets/secret_key ] || { random; random; } >secrets/secret_key
# The containers run as a different user, so the files must be readable; the folder stays closed to others.
chmod 644 secrets/*
