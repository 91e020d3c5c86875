"""Find the processes of a run on the nodes of a private Slurm, which are all on this machine."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil


def processes_on_node(run: Path, node: str) -> list[psutil.Process]:
    """Return a run's processes on one of the nodes that this machine plays, Slurm's own first."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.name().startswith("slurmstepd"):
                below = process.children(recursive=True)
                if any(_belongs_to_run(child, run, node) for child in below):
                    found += [process, *below]
    return found


def _belongs_to_run(process: psutil.Process, run: Path, node: str) -> bool:
    """Return whether it belongs to this run: another cluster may have nodes and jobs of the same names."""
    with suppress(psutil.Error):
        return str(run) in process.cmdline() and process.environ().get("SLURMD_NODENAME") == node
    return False


def launcher_parent(run: Path, node: str) -> psutil.Process:
    """Return the process that keeps a run's launcher alive on one of the nodes that this machine plays."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if is_launcher(process) and not is_launcher(process.parents()[0]) and _belongs_to_run(process, run, node):
                return process
    raise AssertionError(f"no launcher of {run.name} on {node}")


def is_launcher(process: psutil.Process) -> bool:
    return any(word.endswith("start.py") for word in process.cmdline()[1:2])
