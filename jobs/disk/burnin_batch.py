"""Write the batch script of a burn-in: on every node, one `python -m training.burnin`. Text only, without Django."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from jobs.disk.batch import BARRED, Batch

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
options=(--nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --cpu-bind=none)
options+=(--kill-on-bad-exit=0 --export=ALL --no-kill)
unset SLURM_CPUS_PER_TASK SLURM_TRES_PER_TASK SLURM_NTASKS SLURM_NPROCS SLURM_NTASKS_PER_NODE
exec srun "${{options[@]}}" "$python" -P -m training.burnin "$run"
"""


@dataclass(frozen=True, kw_only=True)
class BurnInBatch(Batch):
    """The values of a burn-in's script, unquoted. `variables`: of the site's environment for jobs."""

    variables: Mapping[str, str] = field(default_factory=dict)

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
        )
