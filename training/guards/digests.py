"""Digests of tensors over their raw bits, computed where the tensors are; only one number is fetched at the end.

Σ wordᵢ·wᵢ modulo 2⁶⁴ over words of at most 32 bits, with odd pseudo-random weights wᵢ that depend on the position: a
single flipped bit always changes the digest (an odd number has no factor in common with 2⁶⁴), and any other change does
so except with a probability of about 2⁻³². Integer sums do not depend on the order. NaN and −0 count by their bits.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from training.step.optimizer import local

CHUNK = 1 << 22
"""Numbers processed at once: their weights and products take 64 MiB."""
_MULTIPLIER = 0x2545F4914F6CDD1D
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_SIGN, _RANGE = 1 << 63, 1 << 64


@torch.no_grad()
def digest(tensor: Tensor) -> Tensor:
    """Return the digest of this rank's part of a tensor: an int64 scalar on its device."""
    part = local(tensor.detach())
    bits = part.contiguous().reshape(-1)
    if bits.is_complex():
        bits = torch.view_as_real(bits).reshape(-1)
    bits = bits.view(_WORDS[bits.element_size()])
    total = torch.full((), bits.numel(), dtype=torch.int64, device=bits.device)
    weights = torch.arange(1, min(CHUNK, bits.numel()) + 1, dtype=torch.int64, device=bits.device)
    weights.mul_(_MULTIPLIER)
    weights.bitwise_xor_(weights >> 29).mul_(_MULTIPLIER).bitwise_or_(1)
    for number, chunk in enumerate(torch.split(bits, CHUNK) if bits.numel() else ()):
        salt = _signed((2 * number + 1) * 0x9E3779B97F4A7C15)
        total = total + (chunk.long() * weights[: chunk.numel()]).sum() * salt
    return total


def digests(tensors: Iterable[Tensor]) -> list[int]:
    """Return the digest of each tensor; waits for the device only once."""
    scalars = [digest(tensor) for tensor in tensors]
    if not scalars:
        return []
    return [int(number) for number in torch.stack([scalar.to(scalars[0].device) for scalar in scalars]).tolist()]


def combine(numbers: Iterable[int]) -> int:
    """Combine several numbers into one that depends on their order."""
    total = 0
    for number in numbers:
        total = ((total ^ (number % _RANGE)) * _MULTIPLIER + 1) % _RANGE
        total ^= total >> 29
    return total


def _signed(number: int) -> int:
    """Return a 64-bit number as torch stores it, signed."""
    number %= _RANGE
    return number - _RANGE if number >= _SIGN else number
