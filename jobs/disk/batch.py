"""Write batch.sh, the one script that both schedulers run (docs/decisions/0002). Text only, without Django.

Every value in it is quoted for bash; in an #SBATCH line, where nothing can be quoted, a value that could end the line
is refused.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

BARRED = """\
# A path that this user may not read is not the same as one that does not exist: its owner has to grant access.
barred() {
    local at who shown='%A, of %U and the group %G'
    case $1 in */*) at=$(readlink -m -- "$1") who=$(id -un) ;; *) return ;; esac
    [ ! -f "$at" ] || [ -x "$at" ] || fail "$who may not run $at: it is $(stat -c "$shown" -- "$at"). Give them access."
    while [ ! -e "$at" ] && [ "$at" != / ]; do at=$(dirname -- "$at"); done
    [ ! -d "$at" ] || [ -x "$at" ] ||
        fail "$who may not enter $at, so $1 cannot be run: it is $(stat -c "$shown" -- "$at"). Give them access."
}
"""

# If one attempt is submitted twice (a response was lost, so it was sent again), the first job takes the claim, a link
# that is made with its content in one step; the other ends at once. A requeue of the first finds its own id there.
#
# The last task of an array to start has the array's id as its own, so tasks are called "<array>_<task>" everywhere.
#
# srun kills its tasks at once when it gets TERM (22.05 and 24.11), and passes USR1 on. So it always gets USR1, and a
# file names the original signal. Launchers check for the file by themselves: in the first seconds, when a signal would
# end an srun or a Python that has no handler yet, only the file is written.
# `wait` returns early when a trapped signal arrives, so it is repeated until the step itself has ended.
#
# Without --cpus-per-task, and without the environment variables that stand for it, a step has all CPUs of the
# allocation on each node. 24.11 would otherwise give it one task's share.
#
# srun exits with the highest code of its tasks. The leading launcher's own exit code counts, if it wrote one.
_SCRIPT = """\
#!/bin/bash
{directives}
# Written by Vigil. It names no attempt and holds no secret: the launcher finds in the run directory what to do.
set -u
umask 027
run={run}
python={python}
[ -n "${{HOME:-}}" ] || {{ HOME=~; export HOME; }}

claim="$run/job/claimed/${{VIGIL_SUBMISSION:-$SLURM_JOB_ID}}"
mkdir -p "$run/job/claimed"
ln -sT "$SLURM_JOB_ID" "$claim" 2>/dev/null || [ "$(readlink "$claim")" = "$SLURM_JOB_ID" ] || exit 0
id=${{VIGIL_SCHEDULER_ID:-$SLURM_JOB_ID}}
told="$run/job/told/$id.${{SLURM_RESTART_COUNT:-0}}"
mkdir -p "$told" && rm -f "$told/asked" "$told/code" "$told/failed"

fail() {{ printf '%s\\n' "$*" | tee "$told/failed" >&2; exit 2; }}

{barred}

asked= ended=
pass_on() {{
    asked=$1
    [ "$1" != TERM ] || ended=1
    echo "$1" > "$told/asked"
    [ -z "${{step:-}}" ] || [ "$SECONDS" -lt "$ready" ] || kill -s USR1 "$step" 2>/dev/null
}}
trap 'pass_on TERM' TERM
trap 'pass_on USR1' USR1
{prepare}
options=(--nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --cpu-bind=none)
options+=(--kill-on-bad-exit=0 --export=ALL{options})
unset SLURM_CPUS_PER_TASK SLURM_TRES_PER_TASK SLURM_NTASKS SLURM_NPROCS SLURM_NTASKS_PER_NODE
srun "${{options[@]}}" {inside}"$python" {start} "$run" &
step=$! ready=$((SECONDS + 3))
while asked=; wait "$step"; code=$?; [ -n "$asked" ]; do :; done
last=$(cat "$told/code" 2>/dev/null)
case $last in ''|*[!0-9]*|????*) ;; *) code=$last ;; esac

# Stopped with a committed checkpoint: ask for another turn, unless a person wanted the end. If that fails, Vigil acts.
# TERM is Slurm ending the job: scancel, which a requeue would undo; what it preempts it requeues by itself.
if [ "$code" -eq 75 ] && [ -z "$ended" ] && [ ! -e "$run/portal/cancelled" ]; then
    scontrol requeue "$id"
fi
exit "$code"
"""

# `module` is a function that only login shells have: a batch script sources it from the usual places.
_MODULES = """
before=$'\\n'$(compgen -e)$'\\n'
set +u
for file in "${{MODULESHOME:-/usr/share/modules}}/init/bash" /etc/profile.d/lmod.sh /etc/profile.d/modules.sh \\
    /usr/share/lmod/lmod/init/bash; do
    type module >/dev/null 2>&1 || [ ! -r "$file" ] || . "$file"
done
type module >/dev/null 2>&1 || fail 'environment.modules: this node has no module command.'
modules=({names})
for name in "${{modules[@]}}"; do
    module load "$name" || fail "environment.modules: $name cannot be loaded on this node; see module avail."
done
set -u
"""
_CONDA = """
[ -n "${{before:-}}" ] || before=$'\\n'$(compgen -e)$'\\n'
conda={conda}
set +u
if type conda >/dev/null 2>&1; then
    eval "$(conda shell.bash hook)"
    conda activate "$conda" || fail "environment.conda: $conda cannot be activated on this node."
elif [ -x "$conda/bin/python" ]; then
    export CONDA_PREFIX=$conda PATH=$conda/bin:$PATH
else
    barred "$conda/bin/python"
    fail "environment.conda: no conda on this node, and $conda is not the folder of an environment. Give its folder."
fi
set -u
python=$(type -P python) || fail "environment.conda: $conda has no python."
"""
# The launcher passes only listed variables on to ranks: list those that were set since `before`.
_PASS_ON = """
VIGIL_PASS_ON=
for name in $(compgen -e); do
    case $before in *$'\\n'"$name"$'\\n'*) ;; *) VIGIL_PASS_ON+=" $name" ;; esac
done
export VIGIL_PASS_ON
"""
_PYTHON = """
[ ! -d "$python" ] || python=$python/bin/python
type -P -- "$python" >/dev/null || {
    barred "$python"
    fail "$python is not an interpreter on this node. Name another under [environment]."
}
"""
_LINE = re.compile(r"[\x21-\x7e]*\Z")


# One array for the first attempts of a sweep's jobs: each task executes its own job's batch script.
_ARRAY = """\
#!/bin/bash
{directives}
# Written by Vigil. Each task goes on as the batch script of its own job.
set -u
umask 027
case "$SLURM_ARRAY_TASK_ID" in
{cases}
*) exit 2 ;;
esac
export VIGIL_SUBMISSION="$key" VIGIL_SCHEDULER_ID="${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID"
cd "$run" && exec /bin/bash "$run/portal/batch.sh" >> "$run/job/batch.1.log" 2>&1
"""


def array_text(batch: str, runs: Mapping[int, tuple[Path, str]]) -> str:
    """Return array.sh, built from any job's batch script. `runs`: run directory and attempt's key by array index."""
    directives = [line for line in batch.splitlines() if line.startswith("#SBATCH ")]
    cases = [f"{task}) run={_quoted(run)} key={_quoted(key)} ;;" for task, (run, key) in sorted(runs.items())]
    return _ARRAY.format(directives="\n".join(directives), cases="\n".join(cases))


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The values of a batch script, unquoted."""

    run: Path
    start: Path  # training/start.py
    lead: int  # seconds
    python: str
    modules: tuple[str, ...] = ()
    conda: str = ""
    container: str = ""  # as its engine wants it
    engine: str = ""  # pyxis or apptainer, where there is a container
    mounts: tuple[str, ...] = ()
    gpus: bool = False
    is_elastic: bool = False  # in the nodes that are left
    required_nodes: tuple[str, ...] = ()
    excluded_nodes: tuple[str, ...] = ()

    def text(self) -> str:
        return _SCRIPT.format(
            directives="\n".join(f"#SBATCH {line}" for line in self._directives()),
            run=_quoted(self.run),
            python=_quoted(self.python),
            start=_quoted(self.start),
            barred=BARRED.rstrip("\n"),
            prepare=self._prepare(),
            options="".join(f" {option}" for option in self._options()),
            inside="".join(f"{_quoted(word)} " for word in self._inside()),
        )

    def _directives(self) -> list[str]:
        """Return the options for sbatch that stand in the script itself, whatever the REST request can carry."""
        lines = [f"--signal=B:USR1@{self.lead}", "--open-mode=append"]
        lines += ["--no-kill"] if self.is_elastic else []
        lines += [f"--nodelist={','.join(self.required_nodes)}"] if self.required_nodes else []
        lines += [f"--exclude={','.join(self.excluded_nodes)}"] if self.excluded_nodes else []
        if wrong := [line for line in lines if not _LINE.match(line)]:
            raise ValueError(f"{wrong[0]!r} cannot stand in a line of a batch script")
        return lines

    def _prepare(self) -> str:
        parts = []
        if self.modules:
            parts.append(_MODULES.format(names=" ".join(map(_quoted, self.modules))))
        if self.conda:
            parts.append(_CONDA.format(conda=_quoted(self.conda)))
        if parts:
            parts.append(_PASS_ON)
        if not self.container:
            parts.append(_PYTHON)
        return "".join(parts)

    def _options(self) -> list[str]:
        """Return the options for srun: --no-kill for an elastic job, the container's for pyxis."""
        found = ["--no-kill"] if self.is_elastic else []
        if self.container and self.engine == "pyxis":
            found.append(_quoted(f"--container-image={self.container}"))
            found.append(_quoted(f"--container-mounts={','.join(self.mounts)}"))
        return found

    def _inside(self) -> list[str]:
        """Return the command that starts the interpreter, unless srun itself does."""
        if not self.container or self.engine == "pyxis":
            return []
        binds = [word for mount in self.mounts for word in ("--bind", mount)]
        return ["apptainer", "exec", *(["--nv"] if self.gpus else []), *binds, self.container]


def _quoted(text: object) -> str:
    """Quote a value as one word for bash."""
    return shlex.quote(str(text))
