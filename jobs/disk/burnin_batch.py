"""Write the batch script of a burn-in: on every node, one `python -m training.burnin`. Text only, without Django.

Nodes with different numbers of GPUs are different steps of one job (`nodes.burnin.plan.gpu_groups`).
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from jobs.disk.batch import BARRED, Batch
from nodes.burnin.plan import GpuGroup

_SCRIPT = """\
#!/bin/bash
{directives}
# Written by Vigil. It tests the nodes that it runs on; the plan is in the run directory.
set -u
umask 007
run={run}
python={python}
[ -n "${{HOME:-}}" ] || {{ HOME=~; export HOME; }}
fail() {{ printf '%s\\n' "$*" >&2; exit 2; }}
{barred}{variables}{prepare}
export PYTHONPATH={code}${{PYTHONPATH:+:$PYTHONPATH}}
options=(--ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=0 --export=ALL --no-kill)
unset SLURM_CPUS_PER_TASK SLURM_TRES_PER_TASK SLURM_NTASKS SLURM_NPROCS SLURM_NTASKS_PER_NODE
command=("$python" -P -m training.burnin "$run")
{steps}
"""
_ONE_STEP = 'exec srun "${options[@]}" --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" "${command[@]}"'
# Slurm 22.05 refuses such steps: it compares them with the last node's GPUs. A step without GPUs would inherit the
# variable from the first node.
_BEGIN = """\
case $(srun --version) in *" 22."*)
    fail 'Slurm 22.05 cannot test nodes with different numbers of GPUs together: start a burn-in for each number.' ;;
esac
unset CUDA_VISIBLE_DEVICES
steps=()"""
# GPUs that a job has because it is alone on its nodes reach only the steps that request them by number.
_STEP = """\
srun "${{options[@]}}" --nodes={number} --ntasks={number} --nodelist={nodes} --gres={gres} "${{command[@]}}" &
steps+=($!)"""
_WAIT = """\
code=0
for started in "${steps[@]}"; do wait "$started" || code=$?; done
exit $code"""


@dataclass(frozen=True, kw_only=True)
class BurnInBatch(Batch):
    """The values of a burn-in's script, unquoted. `variables`: of the site's environment for jobs."""

    variables: Mapping[str, str] = field(default_factory=dict)
    groups: tuple[GpuGroup, ...] = ()

    def text(self) -> str:
        return _SCRIPT.format(
            directives="\n".join(f"#SBATCH {line}" for line in self._directives()),
            run=shlex.quote(str(self.run)),
            python=shlex.quote(self.python),
            barred=BARRED,
            variables="".join(
                f"export {name}={shlex.quote(value)}\n" for name, value in self.variables.items() if name.isidentifier()
            ),
            prepare=self._prepare(),
            code=shlex.quote(str(self.start.parent.parent)),
            steps=self._steps(),
        )

    def _steps(self) -> str:
        """Return one step for all nodes, or one for each number of GPUs, at the same time."""
        if len(self.groups) < 2:
            return _ONE_STEP
        lines = [
            _STEP.format(
                number=len(group.nodes),
                nodes=shlex.quote(",".join(group.nodes)),
                gres=f"gpu:{group.gpus}" if group.gpus else "none",
            )
            for group in self.groups
        ]
        return "\n".join([_BEGIN, *lines, _WAIT])
