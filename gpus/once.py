"""Asks once what GPUs there are, in a child that is not waited for where a driver holds it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress

from gpus.reader import command, environment
from gpus.told import Lines, Machine

LIBRARY = "libnvidia-ml.so.1"
KILLED_SECONDS = 1.0  # for a child that was killed to be gone
SIGNS = ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/dxg")  # the last one: Windows' own Linux


def has_driver() -> bool:
    """Whether asking may tell anything: by files alone, since most machines have no GPU and ask at every start."""
    folders = [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    places = [*SIGNS, *(os.path.join(folder, LIBRARY) for folder in folders)]
    # Before anybody has asked there may be no device yet: then the driver is loaded by who asks first.
    return any(map(os.path.exists, places)) or shutil.which("nvidia-smi") is not None


def ask(names: Sequence[str] | None = None, *, seconds: float, everything: bool = False) -> Machine | None:
    """What the GPUs are; `names` as in CUDA_VISIBLE_DEVICES, None is all. None where no driver answers in time."""
    child = subprocess.Popen(
        command(0, names, everything=everything),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment(),
    )
    try:
        said, _ = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        child.kill()
        with suppress(subprocess.TimeoutExpired):
            child.communicate(timeout=KILLED_SECONDS)
        return None
    lines = Lines()
    for line in said.splitlines():
        lines.read(line)
    return lines.machine
