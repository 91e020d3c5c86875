"""Detect the GPUs once, in a child process that is abandoned if the driver hangs."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress

from gpus.reader import command, environment
from gpus.reports import GpuInventory, ReportParser

LIBRARY = "libnvidia-ml.so.1"
KILLED_SECONDS = 1.0  # to wait for a killed child to exit
DRIVER_FILES = ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/dxg")  # the last one: WSL


def has_driver() -> bool:
    """Return whether there may be an NVIDIA driver, by files alone: every start checks, and most machines have none."""
    folders = [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    places = [*DRIVER_FILES, *(os.path.join(folder, LIBRARY) for folder in folders)]
    # There may be no device file yet: the first query loads the driver then.
    return any(map(os.path.exists, places)) or shutil.which("nvidia-smi") is not None


def detect(names: Sequence[str] | None = None, *, seconds: float, detailed: bool = False) -> GpuInventory | None:
    """Return the GPUs; None if no driver responds in time. `names` as in CUDA_VISIBLE_DEVICES, None is all."""
    child = subprocess.Popen(
        command(0, names, detailed=detailed),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment(),
    )
    try:
        output, _ = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        child.kill()
        with suppress(subprocess.TimeoutExpired):
            child.communicate(timeout=KILLED_SECONDS)
        return None
    parser = ReportParser()
    for line in output.splitlines():
        parser.parse(line)
    return parser.inventory
