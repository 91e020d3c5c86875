#!/bin/sh
# Run one role of Vigil in a container. Settings come from the environment, secrets from the files named by NAME_FILE.
#   prepare          migrate, collect static files, create the first sysadmin, then exit
#   web              serve HTTP and websockets on $VIGIL_PORT
#   worker QUEUE     run the tasks of one queue: follow, work, diagnose; tail with VIGIL_REPORTS=tail, pull with VIGIL_DCGM_EXPORTERS
#   beat             queue periodic tasks; exactly one per site
# web, worker and beat run under a watcher that ends a process that hangs, so that the engine restarts it.
#   agent            report on the node on which it runs
#   vigil …, manage …  Vigil's command line; Django's manage.py
set -eu
umask 027
cd "$(dirname "$0")/.."
role=${1:-web}
[ $# -eq 0 ] || shift

case $role in
prepare) exec python manage.py prepare "$@" ;;
web)
    # Only the proxy can reach this port, and it overwrites the header with the client's address.
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
