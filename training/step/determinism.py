"""Which kernels a process may take: what `determinism` in a run's configuration means to torch."""

from __future__ import annotations

import os
import sys

import torch


def set_determinism(wanted: str) -> None:
    """bitwise: only kernels that give the same bits every time; scientific: any; fast: whatever is fastest."""
    if "torch._inductor" in sys.modules:
        torch.use_deterministic_algorithms(wanted == "bitwise")
    else:
        # The public function also tells torch.compile, importing it for that: as long again as torch's own import. So
        # it is left a word for when it comes, without which it would time kernels and take others at each start.
        os.environ["TORCHINDUCTOR_DETERMINISTIC"] = str(int(wanted == "bitwise"))
        torch._C._set_deterministic_algorithms(wanted == "bitwise", warn_only=False)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = wanted == "fast"
    torch.set_float32_matmul_precision("high" if wanted == "fast" else "highest")
    torch.backends.cudnn.allow_tf32 = wanted == "fast"  # of convolutions
