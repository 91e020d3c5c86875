"""Derive seeds from numbers alone."""

from __future__ import annotations

_WORD = 2**64 - 1


def derive_seed(*parts: int) -> int:
    """Return a 64-bit seed derived from these numbers (protocols.md §4).

    There is nothing to save, and it does not depend on the number of ranks.
    """
    seed = 0
    for part in parts:
        seed = _mix_int(seed ^ (part & _WORD) + 0x9E3779B97F4A7C15 & _WORD)
    return seed


def _mix_int(value: int) -> int:
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _WORD
    return value ^ value >> 31
