"""One rank of a comparison: the trainer as always, with an eye on the clock and on memory.

    python -m training.compare.rank run.toml

What it saw lies in `lab/<rank>.json` of the attempt's folder once the rank has ended well.

On a CPU memory is what Linux counts as resident, and malloc keeps what is freed, in pieces that fit the next tensor or
do not: the figure would tell of pieces (FSDP, which gathers and frees, seemed to need more than DDP). So while memory
is looked at, freed tensors go back to the system at once; from then on, while speed is, malloc works as always.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from training import rank, run_file
from training.attempt.heartbeat import Heartbeat
from training.runtime.imports import without_collections
from training.units import MIB

FOLDER = "lab"
GPU_BLOCK = 5
"""Steps between two looks at the clock on a GPU, which is waited for then: it works through a queue."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h


def main(arguments: list[str]) -> int:
    options = rank.parse(arguments)
    run = run_file.load(options.run)
    with without_collections():
        _import_all()
    import torch

    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    if not run.on_cpu and 0 < (gpus := torch.cuda.device_count()) < ranks:
        print(
            f"ConfigError: {ranks} ranks need a GPU each, and here are {gpus}. Write --ranks {gpus}.", file=sys.stderr
        )
        return 1
    _return_from(MIB)
    _forget_peak()
    _Watched.baseline = _status("VmRSS")
    code = rank.train(run, options, heart=_Watched)
    if code == 0 and _Watched.last is not None:
        _Watched.last.write(Path(os.environ["VIGIL_ATTEMPT_DIR"]), int(os.environ["RANK"]))
    return code


def _import_all() -> None:
    """What any configuration may need: otherwise the memory of one would be that of its imports."""
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.distributed.tensor.parallel  # noqa: F401

    from training import trainer  # noqa: F401
    from training.checkpoint import storage  # noqa: F401
    from training.models import llama  # noqa: F401


class _Watched(Heartbeat):
    """The loop says where it is; this looks at the clock when a step begins, and at memory while steps are trained."""

    baseline = 0
    last: _Watched | None = None

    def __init__(self, file: int, incarnation: int) -> None:
        super().__init__(file, incarnation)
        self._peak = 0
        self._moments: list[tuple[int, float]] = []
        """(finished steps, seconds)."""
        _Watched.last = self

    def beat(self, phase: str, step: int = 0) -> None:
        super().beat(phase, step)
        if phase == "data":
            self._look(step)

    def _look(self, step: int) -> None:
        import torch

        from training.trainer import STEPS_BEFORE_SAVES

        on_gpu = bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
        if on_gpu and step % GPU_BLOCK == 0:
            torch.cuda.synchronize()
        if not on_gpu or step % GPU_BLOCK == 0:
            self._moments.append((step, time.perf_counter()))
        if on_gpu:
            self._peak = torch.cuda.max_memory_allocated()
        elif step < STEPS_BEFORE_SAVES:  # after these, what a checkpoint is copied into is there, too
            self._peak = _status("VmHWM") - self.baseline
        elif step == STEPS_BEFORE_SAVES:
            _return_from(32 * MIB)  # where malloc would have got to by itself, with tensors that large

    def write(self, attempt_dir: Path, rank: int) -> None:
        folder = attempt_dir / FOLDER
        folder.mkdir(exist_ok=True)
        told = {"peak_bytes": self._peak, "baseline_bytes": self.baseline, "moments": self._moments}
        (folder / f"{rank}.json").write_text(json.dumps(told))


def _return_from(size: int) -> None:
    """What is freed of this size or more goes back to the system at once. Nothing where malloc is not glibc's."""
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_THRESHOLD, size)
        libc.mallopt(_TRIM_THRESHOLD, 2 * size)


def _status(name: str) -> int:
    """A size of this process, as Linux counts it, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def _forget_peak() -> None:
    """VmHWM begins anew: imports may have held more for a moment."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
