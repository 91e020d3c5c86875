"""Run one rank of a comparison: the normal trainer, observed with regard to time and memory.

    python -m training.compare.rank run.toml

The measurements are in `lab/<rank>.json` of the attempt's folder once the rank has succeeded.

On a CPU, memory is what Linux counts as resident, and malloc retains freed memory in pieces that may or may not fit the
next tensor: the figure would reflect fragmentation (FSDP, which gathers and frees, seemed to need more than DDP). So
while memory is measured, freed tensors are returned to the system at once; after that, while speed is measured, malloc
works as usual.
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
from training.runtime.imports import garbage_collection_paused
from training.units import MIB

FOLDER = "lab"
GPU_BLOCK = 5
"""Steps between two readings of the clock on a GPU; each waits for the GPU to work through its queue."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h


def main(arguments: list[str]) -> int:
    options = rank.parse(arguments)
    run = run_file.load(options.run)
    with garbage_collection_paused():
        _import_all()
    import torch

    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    if not run.on_cpu and 0 < (gpus := torch.cuda.device_count()) < ranks:
        print(
            f"ConfigError: {ranks} ranks need a GPU each, but only {gpus} are available. Write --ranks {gpus}.",
            file=sys.stderr,
        )
        return 1
    _set_malloc_threshold(MIB)
    _reset_peak()
    _MeasuringHeartbeat.baseline = _process_size("VmRSS")
    code = rank.train(run, options, heartbeat_type=_MeasuringHeartbeat)
    if code == 0 and _MeasuringHeartbeat.last is not None:
        _MeasuringHeartbeat.last.write(Path(os.environ["VIGIL_ATTEMPT_DIR"]), int(os.environ["RANK"]))
    return code


def _import_all() -> None:
    """Import what any configuration may need: otherwise one configuration's memory would include its imports."""
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.distributed.tensor.parallel  # noqa: F401

    from training import trainer  # noqa: F401
    from training.checkpoint import storage  # noqa: F401
    from training.models import llama  # noqa: F401


class _MeasuringHeartbeat(Heartbeat):
    """A heartbeat that also measures: the clock when a step begins, and memory while steps are trained."""

    baseline = 0
    last: _MeasuringHeartbeat | None = None

    def __init__(self, file: int, incarnation: int) -> None:
        super().__init__(file, incarnation)
        self._peak = 0
        self._moments: list[tuple[int, float]] = []
        """(finished steps, seconds)."""
        _MeasuringHeartbeat.last = self

    def beat(self, phase: str, step: int = 0) -> None:
        super().beat(phase, step)
        if phase == "data":
            self._measure(step)

    def _measure(self, step: int) -> None:
        import torch

        from training.trainer import STEPS_BEFORE_SAVES

        on_gpu = bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
        if on_gpu and step % GPU_BLOCK == 0:
            torch.cuda.synchronize()
        if not on_gpu or step % GPU_BLOCK == 0:
            self._moments.append((step, time.perf_counter()))
        if on_gpu:
            self._peak = torch.cuda.max_memory_allocated()
        elif step < STEPS_BEFORE_SAVES:  # later, the buffers for checkpoints count too
            self._peak = _process_size("VmHWM") - self.baseline
        elif step == STEPS_BEFORE_SAVES:
            _set_malloc_threshold(
                32 * MIB
            )  # the threshold that malloc would have reached by itself with tensors of this size

    def write(self, attempt_dir: Path, rank: int) -> None:
        folder = attempt_dir / FOLDER
        folder.mkdir(exist_ok=True)
        measured = {"peak_bytes": self._peak, "baseline_bytes": self.baseline, "moments": self._moments}
        (folder / f"{rank}.json").write_text(json.dumps(measured))


def _set_malloc_threshold(size: int) -> None:
    """Return freed memory of this size or more to the system at once. No effect if malloc is not glibc's."""
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_THRESHOLD, size)
        libc.mallopt(_TRIM_THRESHOLD, 2 * size)


def _process_size(name: str) -> int:
    """Return a size of this process in bytes, as Linux counts it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def _reset_peak() -> None:
    """Reset VmHWM: imports may have used more for a moment."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
