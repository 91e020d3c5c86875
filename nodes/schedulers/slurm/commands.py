"""Slurm's own commands beside Vigil's worker, in a person's name by token: for what an old slurmrestd cannot do."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from nodes.schedulers.base import SchedulerError
from nodes.schedulers.slurm.tokens import Tokens

TIMEOUT_S = 10


class Commands:
    """`scontrol`: its name or path; the others lie beside it."""

    def __init__(self, tokens: Tokens, scontrol: str) -> None:
        self.tokens, self.scontrol = tokens, scontrol

    def call(self, name: str, *words: str, user: str, why: str) -> str:
        """The output of one; raises what it said. `why`: what this Slurm does not do otherwise, if it is missing."""
        place = Path(self.scontrol)
        command = shutil.which(str(place.with_name(name)) if len(place.parts) > 1 else name)
        if command is None:
            message = f"{why} by {name} only, which is not installed beside Vigil's worker."
            raise SchedulerError(
                f"{message} Install Slurm's client commands there, or use Slurm 23.11.", permanent=True
            )
        code, output, said = run(command, *words, token=self.tokens.of(user))
        if code and (said or name != "scancel"):  # 22.05's ends with 229 after a signal that it sent
            raise SchedulerError(f"{name}: {said}", permanent=True)
        return output


def run(command: str, *words: str, token: str) -> tuple[int, str, str]:
    """Exit code, output, and what it said to people. Nothing of our own environment but where Slurm's commands look."""
    kept = {name: value for name, value in os.environ.items() if name in {"PATH", "SLURM_CONF", "LANG"}}
    try:
        done = subprocess.run(
            [command, *words], env={**kept, "SLURM_JWT": token}, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, errors="replace", timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise SchedulerError(f"{os.path.basename(command)} did not answer: {error}") from None
    return done.returncode, done.stdout, done.stderr.strip() or done.stdout.strip()
