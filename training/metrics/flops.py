"""Look up GPUs' peak performance, and compute the fraction that a run reaches (MFU, protocols.md §7); no torch.

MFU = (6N + 12·L·d·T) · tokens/s ÷ (GPUs · dense bf16 peak), as PaLM defines it (Chowdhery et al., 2022, arXiv
2204.02311, appendix B): N without the input embedding, the full T², recomputation not counted. The denominator is the
bf16 peak even where a run multiplies in FP8 or fp32, so that runs can be compared.
"""

from __future__ import annotations

import math
import re

TERA = 10**12

PEAKS: tuple[tuple[str, float], ...] = (
    # Dense, that is half of what a data sheet prints "with sparsity". The first matching pattern counts.
    (r"\bGB[23]00\b", 2500),  # GB200 NVL72 data sheet: 360 PF for 72 GPUs with sparsity
    (r"\bB[23]00\b", 2250),  # DGX/HGX B200 and B300 data sheets: 36 PF for 8 GPUs with sparsity
    (r"\bH200 NVL\b", 835.5),  # H200 data sheet, NVL column: 1,671 with sparsity
    (r"\b(GH200|H200)\b", 989.5),  # H200 data sheet, SXM column, and GH200's: 1,979 with sparsity
    (r"\bH100 NVL\b", 835.5),  # H100 data sheet, NVL column: 1,671 with sparsity
    (r"\bH100 PCIe\b", 756.5),  # H100 PCIe product brief PB-11133: 1,513 with sparsity
    (r"\bH[18]00\b", 989.5),  # H100 data sheet, SXM column: 1,979 with sparsity; the H800 multiplies as fast
    (r"\bA[18]00\b", 312),  # A100 data sheet, PCIe and SXM alike: 312
    (r"\bA30\b", 165),  # A30 data sheet: 165
    (r"\bA40\b", 149.7),  # A40 data sheet: 149.7
    (r"\bA10\b", 125),  # A10 data sheet: 125
    (r"\bRTX A6000\b", 154.8),  # GA102 whitepaper, table of the RTX A6000: 154.8 accumulating in fp32
    (r"\bL40S\b", 362.05),  # L40S data sheet: 362.05
    (r"\bL40\b", 181.05),  # L40 data sheet: 181.05
    (r"\bL4\b", 121),  # L4 data sheet: 242 with sparsity
    (r"\bRTX 6000 Ada\b", 364.25),  # Ada professional whitepaper: 364.25
    (r"\bRTX 4090\b(?! (D|Laptop))", 165.2),  # Ada whitepaper: 165.2 accumulating in fp32
    (r"\bRTX 3090\b(?! Ti)", 71),  # GA102 whitepaper: 71 accumulating in fp32
    (r"\bMI3(00|25)X\b", 1307.4),  # MI300X and MI325X data sheets: 1,307.4
    (r"\bMI2(50X)\b", 191.5),  # MI250X data sheet: 383 for a card, which is two devices
    # Volta and Turing do not support bf16: this is their fp16 peak.
    (r"\bV100S\b", 130),  # V100 data sheet, V100S column: 130
    (r"\bV100-PCIE\b", 112),  # V100 data sheet, PCIe column: 112
    (r"\bV100\b", 125),  # V100 data sheet, SXM2 column: 125
    (r"\bT4\b", 65),  # T4 data sheet: 65
)
"""Dense 16-bit peaks by torch's name of a device, in TFLOP/s per device."""


def peak(name: str) -> float | None:
    """Return a GPU's dense bf16 peak in FLOP/s by torch's name for it; None for unknown devices and CPUs."""
    if "MIG" in name:  # a slice of a GPU: the name gives its memory, not its multiprocessors
        return None
    return next((tera * TERA for pattern, tera in PEAKS if re.search(pattern, name, re.IGNORECASE)), None)


def mfu(flops_per_token: float, tokens_per_second: float, peaks: float) -> float | None:
    """Return the fraction of all GPUs' peaks together (FLOP/s) that goes into the model; None where that is unknown."""
    if not (math.isfinite(peaks) and peaks > 0 and flops_per_token > 0):
        return None
    return flops_per_token * tokens_per_second / peaks
