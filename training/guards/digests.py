"""Digests of tensors over their raw bits, computed where the tensors are, one number fetched at the end.

Σ wordᵢ·wᵢ modulo 2⁶⁴ over words of at most 32 bits, with odd weights wᵢ that look random and differ by place: a single
flipped bit always changes it (an odd number has no factor in common with 2⁶⁴), and anything else does but by a chance
of some 2⁻³². Integer sums come out the same in any order. NaN and −0 count as the bits they are.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from training.step.optimizer import local

CHUNK = 1 << 22
"""Numbers at once: the weights and products of so many take 64 MiB."""
_MULTIPLIER = 0x2545F4914F6CDD1D
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_SIGN, _RANGE = 1 << 63, 1 << 64


@torch.no_grad()
def digest(tensor: Tensor) -> Tensor:
    """The digest of what this rank holds of a tensor: an int64 scalar on its device."""
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
    """One after the other; the device is waited for once."""
    found = [digest(tensor) for tensor in tensors]
    if not found:
        return []
    return [int(number) for number in torch.stack([one.to(found[0].device) for one in found]).tolist()]


def together(numbers: Iterable[int]) -> int:
    """One number for several, in their order."""
    total = 0
    for number in numbers:
        total = ((total ^ (number % _RANGE)) * _MULTIPLIER + 1) % _RANGE
        total ^= total >> 29
    return total


def _signed(number: int) -> int:
    """The 64 bits of a number as torch writes them, signed."""
    number %= _RANGE
    return number - _RANGE if number >= _SIGN else number
