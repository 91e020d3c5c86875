"""Prepare a rank to leave evidence when it hangs: stacks on SIGUSR2, the flight recorder from a helper thread.

    hang.install(attempt_dir, rank=rank, incarnation=incarnation)     # first thing in a rank

A C signal handler writes the stacks, so it works whatever Python is stuck in. The helper thread sleeps in read() on a
pipe to the launcher (VIGIL_CONTROL); it works as long as the stuck call has released the interpreter lock.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

DUMP = b"d"


def install(attempt_dir: Path, *, rank: int, incarnation: int) -> None:
    """Install once per process.

    SIGUSR2 writes stacks/<incarnation>.<rank>.txt, a DUMP byte flight/<incarnation>.<rank>.json.
    """
    (attempt_dir / "stacks").mkdir(parents=True, exist_ok=True)
    # A bare descriptor, as faulthandler writes to it for the life of the process.
    path = attempt_dir / "stacks" / f"{incarnation}.{rank}.txt"
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, file=file, all_threads=True, chain=False)
    if (control := os.environ.get("VIGIL_CONTROL", "")).isdecimal():
        target = attempt_dir / "flight" / f"{incarnation}.{rank}.json"
        threading.Thread(target=_serve, args=(int(control), target), name="vigil-hang", daemon=True).start()


def _serve(control: int, target: Path) -> None:
    while os.read(control, 1) == DUMP:
        with suppress(Exception):
            _dump_flight_recorder(target)


def _dump_flight_recorder(target: Path) -> None:
    """Write the collectives that this rank was in, as far as torch records them (TORCH_FR_BUFFER_SIZE).

    NCCL has a recorder of its own, which builds of torch for CPUs lack.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return
    c10d = torch._C._distributed_c10d
    merged: dict[str, Any] = {}
    for dump in (getattr(c10d, "_dump_nccl_trace_json", None), c10d._dump_fr_trace_json):
        trace = json.loads(dump()) if dump is not None else {}
        merged = {**trace, **merged, "entries": [*merged.get("entries", ()), *trace.get("entries", ())]}
    target.parent.mkdir(exist_ok=True)
    temporary = target.with_name(f".{target.name}")
    temporary.write_text(json.dumps(merged))
    os.replace(temporary, target)
