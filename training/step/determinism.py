"""Select which kernels torch may use, according to a run's `determinism`."""

from __future__ import annotations

import os
import sys

import torch


def set_determinism(level: str) -> None:
    """Set the level. bitwise: only kernels that give the same bits every time; scientific: any; fast: the fastest."""
    if "torch._inductor" in sys.modules:
        torch.use_deterministic_algorithms(level == "bitwise")
    else:
        # The public function also imports torch.compile to inform it, which takes as long as importing torch itself. So
        # leave a variable for when it is imported; without it, it would time kernels and choose others at each start.
        os.environ["TORCHINDUCTOR_DETERMINISTIC"] = str(int(level == "bitwise"))
        torch._C._set_deterministic_algorithms(level == "bitwise", warn_only=False)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = level == "fast"
    torch.set_float32_matmul_precision("high" if level == "fast" else "highest")
    torch.backends.cudnn.allow_tf32 = level == "fast"  # for convolutions
