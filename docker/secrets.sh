#!/bin/sh
# Makes the compose file's secrets in docker/secrets/, once; what is there is kept.
set -eu
cd "$(dirname "$0")"
umask 077
mkdir -p secrets
random() { od -An -N24 -tx1 /dev/urandom | tr -d ' \n'; }
[ -s secrets/database_password ] || random >secrets/database_password
[ -s secrets/database_url ] ||
    printf 'postgresql://vigil:%s@database/vigil' "$(cat secrets/database_password)" >secrets/database_url
[ -s secrets/secret_key ] || { random; random; } >secrets/secret_key
# The containers' user is not the one who made them; the folder itself stays closed to others.
chmod 644 secrets/*
