"""Compare version numbers of drivers, kernels and firmware. No Django."""

from __future__ import annotations

import re
from functools import lru_cache

MAX_PARTS = 8
Numbers = tuple[int, ...]
_DECIMAL = re.compile(r"[0-9]{1,9}")
_HEXADECIMAL = re.compile(r"[0-9A-Fa-f]{1,8}")


@lru_cache(maxsize=4096)
def version_numbers(text: str, *, is_hexadecimal: bool = False) -> Numbers:
    """Return the numbers of a version, such as (550, 54, 15); () if there are none.

    NVIDIA writes the parts of a VBIOS version in hexadecimal: 96.00.A5.00.01.
    """
    if is_hexadecimal:
        return tuple(int(part, 16) for part in _HEXADECIMAL.findall(text)[:MAX_PARTS])
    return tuple(int(part) for part in _DECIMAL.findall(text)[:MAX_PARTS])


def is_below(version: Numbers, minimum: Numbers) -> bool:
    """Return whether the version is older. 12.8 is not older than 12.8.0; an unknown version is not older either."""
    if not version:
        return False
    length = max(len(version), len(minimum))
    return _padded(version, length) < _padded(minimum, length)


def is_of_branch(version: Numbers, branch: Numbers) -> bool:
    """Return whether the version belongs to the branch: 550.54.15 to 550, and every version to ()."""
    return version[: len(branch)] == branch


def _padded(numbers: Numbers, length: int) -> Numbers:
    return numbers + (0,) * (length - len(numbers))
