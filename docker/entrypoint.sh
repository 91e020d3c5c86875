#!/bin/sh
# What one container does. Settings come from the environment, a secret from the file that NAME_FILE names.
#   prepare          migrate, collect static files, make the first sysadmin; ends
#   web              answer HTTP and websockets on $VIGIL_PORT
#   worker QUEUE     do the tasks of one queue: follow, work, diagnose; tail where VIGIL_REPORTS=tail, pull with VIGIL_DCGM_EXPORTERS
#   beat             tick; exactly one a site
# web, worker and beat run under a watcher that ends one that hangs: the engine starts it again.
#   agent            report on the node that it runs on
#   vigil …, manage …  the command line; Django's own
set -eu
umask 027
cd "$(dirname "$0")/.."
role=${1:-web}
[ $# -eq 0 ] || shift

case $role in
prepare) exec python manage.py prepare "$@" ;;
web)
    # Only the proxy reaches this port, and it overwrites the header that says who asks.
    exec python -m portal.run.watched python -m console.web --host "${VIGIL_HOST:-0.0.0.0}" --port "${VIGIL_PORT:-8000}" --trusted-proxies '*' "$@"
    ;;
worker)
    if [ "${1:-}" = follow ] && [ "${VIGIL_SCHEDULER:-local}" = local ] &&
        ! "${VIGIL_JOB_PYTHON:-python}" -c 'import importlib.util as u; raise SystemExit(u.find_spec("torch") is None)'; then
        echo "Jobs of the local scheduler run in this container, and there is no torch in it: build the target trainer" >&2
    fi
    exec python -m portal.run.watched python -m console.worker "$@"
    ;;
beat) exec python -m portal.run.watched python -m portal.ticks beat --schedule "$VIGIL_HOME/beat-schedule" "$@" ;;
agent) exec python -P -m nodes.agent "$@" ;;
vigil) exec vigil "$@" ;;
manage) exec python manage.py "$@" ;;
*)
    echo "Unknown role '$role': prepare, web, worker QUEUE, beat, agent, vigil … or manage …" >&2
    exit 2
    ;;
esac
