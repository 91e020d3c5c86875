"""Query NVIDIA's library (NVML) about one GPU. Unavailable values are None, and unsupported queries are not repeated.

Constants are numbers instead of `pynvml` names, because a user's interpreter may have an older pynvml.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

import pynvml
from pynvml import NVMLError

LOST = frozenset({15, 16})  # the GPU is lost; it needs a reset
NOT_THERE = frozenset({999})  # a driver's error for a GPU that fell off the bus before it was opened
REOPEN = frozenset({1, 18})  # NVML is not initialised; driver and library versions differ
UNKNOWN = frozenset({3, 13, 25, 26})  # not supported, no such function, no such version, deprecated
ALL_LINKS = 0xFFFF_FFFF
_TYPES = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


class NvmlQueries:
    """Queries to one GPU. Raises NVMLError only if NVML must be reopened."""

    def __init__(self) -> None:
        self.handle: Any = None
        self.is_lost = False
        self._unsupported: set[object] = set()

    def open(self, name: str) -> None:
        """Find the GPU by index or UUID."""
        by_index = name.isdecimal()
        find = pynvml.nvmlDeviceGetHandleByIndex if by_index else pynvml.nvmlDeviceGetHandleByUUID
        self.handle = self._try(find, int(name) if by_index else name, lost=LOST | NOT_THERE)

    def first_available(self, *names: str, more: tuple[Any, ...] = ()) -> Any:
        """Return the result of the first of these functions that works; `more` are arguments after the handle."""
        for name in names:
            key = (name, *(argument for argument in more if isinstance(argument, int)))
            if self.handle is None or key in self._unsupported:
                continue
            function = getattr(pynvml, name, None)
            result = self._try(function, self.handle, *more, key=key) if function else None
            if result is not None:
                return result
        return None

    def fields(self, wanted: Mapping[str, tuple[int, int]]) -> dict[str, float]:
        """Return field values by name. Each is requested by (id, scope) and may fail on its own."""
        requested = {name: field for name, field in wanted.items() if field not in self._unsupported}
        values = self.first_available("nvmlDeviceGetFieldValues", more=([*requested.values()],)) if requested else None
        found: dict[str, float] = {}
        for name, value in zip(requested, values or (), strict=False):
            error = value.nvmlReturn
            if error in REOPEN:
                raise NVMLError(error)
            self.is_lost = self.is_lost or error in LOST
            if error in UNKNOWN:
                self._unsupported.add(requested[name])
            if error == 0 and value.valueType < len(_TYPES):
                found[name] = getattr(value.value, _TYPES[value.valueType])
        return found

    def retry_unsupported(self) -> None:
        """Query unsupported functions again: MIG slices have been created or removed."""
        self._unsupported.clear()

    def _try(
        self, function: Callable[..., Any], *arguments: Any, key: object = None, lost: frozenset[int] = LOST
    ) -> Any:
        try:
            return function(*arguments)
        except NVMLError as error:
            if error.value in REOPEN:
                raise
            self.is_lost = self.is_lost or error.value in lost
            if error.value in UNKNOWN:
                self._unsupported.add(key)
        except TypeError:  # an older pynvml takes no such argument
            self._unsupported.add(key)
        return None


def address(handle: Any) -> int | None:
    """Return the address behind a handle; two handles of one GPU have the same."""
    return ctypes.cast(handle, ctypes.c_void_p).value
