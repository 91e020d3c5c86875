#!/bin/sh
# Tells Vigil at once that something happened to a job; without it Vigil notices within two seconds. In slurm.conf, with
# a restart of slurmctld, for which `scontrol reconfigure` is not enough:
#
#   JobCompType=jobcomp/script
#   JobCompLoc=/etc/slurm/vigil/jobcomp.sh           # jobs that ended; Slurm calls this for nothing else
#   PrologSlurmctld=/etc/slurm/vigil/jobcomp.sh      # jobs that start, if you want that as well
#
# and beside this file push.conf, of SlurmUser alone (chmod 0600), which curl reads, so that no process list shows it:
#
#   url = "https://vigil.lab.example/api/v1/scheduler/wake"
#   header = "Authorization: Bearer what VIGIL_PUSH_SECRET says"
#
# Try it as SlurmUser: `sh jobcomp.sh --test` prints {"woken":true}, or what is wrong.
#
# It never holds up slurmctld, nor a job: curl runs in a session of its own, where Slurm does not end it with this
# script, has two seconds, and whatever becomes of it, this script succeeds.

conf=${VIGIL_PUSH_CONF:-$(dirname "$0")/push.conf}
PATH=$PATH:/usr/local/bin:/usr/bin:/bin
push="curl --config \"\$0\" --request POST --max-time 2 --silent --show-error --noproxy '*'"

if [ "${1:-}" = --test ]; then
    sh -c "$push --write-out '\\n'" "$conf"
    exit
fi
# It goes on once that session is there: its first act closes what this waits for.
# shellcheck disable=SC2034
started=$(setsid sh -c "exec >/dev/null 2>&1; exec $push" "$conf" </dev/null 2>/dev/null &)
exit 0
