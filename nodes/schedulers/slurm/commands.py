"""Run Slurm's client commands as a user by token, for what an old slurmrestd cannot do."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from nodes.schedulers.base import SchedulerError
from nodes.schedulers.slurm.tokens import TokenSource

TIMEOUT_S = 10
# What Slurm's commands print if slurmctld, or the backup that takes over, does not answer (src/common/slurm_errno.c).
_UNREACHABLE = re.compile(
    r"Unable to contact slurm controller|Socket timed out|Connection (?:refused|reset|timed out)|Zero Bytes"
    r"|Communication (?:connection|shutdown|timeout) failure|in standby mode|No route to host"
    r"|Name or service not known|Temporary failure in name resolution",
    re.IGNORECASE,
)
_UNCONFIGURED = re.compile(r"establish a configuration source|process configuration file|cannot stat file")
SINCE_REST = ", or use Slurm 23.11 or later"


class SlurmCommands:
    """Slurm's commands on the worker's machine. `scontrol` is a name or path; the others are next to it."""

    def __init__(self, tokens: TokenSource, scontrol: str) -> None:
        self.tokens, self.scontrol = tokens, scontrol

    def call(self, name: str, *words: str, user: str, why: str, otherwise: str = SINCE_REST) -> str:
        """Run one command as `user` and return its output. Raise SchedulerError with its error message.

        `why` starts the message if the command is missing, and says what this Slurm needs it for; `otherwise` ends it
        with what helps besides installing the command.
        """
        path = Path(self.scontrol)
        command = shutil.which(str(path.with_name(name)) if len(path.parts) > 1 else name)
        if command is None:
            message = f"{why} only through {name}, which is not installed on the worker's machine."
            raise SchedulerError(f"{message} Install Slurm's client commands there{otherwise}.", permanent=True)
        code, output, message = run(command, *words, token=self.tokens.token_for(user))
        if code and (message or name != "scancel"):  # 22.05's exits with 229 although it sent the signal
            if _UNCONFIGURED.search(message):
                last, where = message.splitlines()[-1], "/etc/slurm on the worker's machine, or set SLURM_CONF there"
                raise SchedulerError(
                    f"{name} finds no slurm.conf ({last}). Copy this cluster's to {where}.", permanent=True
                )
            raise SchedulerError(f"{name}: {message}", permanent=_UNREACHABLE.search(message) is None)
        return output


def run(command: str, *words: str, token: str) -> tuple[int, str, str]:
    """Run a command and return (exit code, output, message).

    The environment has only what Slurm's commands need to find their configuration.
    """
    environment = {name: value for name, value in os.environ.items() if name in {"PATH", "SLURM_CONF", "LANG"}}
    try:
        done = subprocess.run(
            [command, *words], env={**environment, "SLURM_JWT": token}, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, errors="replace", timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise SchedulerError(f"{os.path.basename(command)} did not respond: {error}") from None
    return done.returncode, done.stdout, done.stderr.strip() or done.stdout.strip()
