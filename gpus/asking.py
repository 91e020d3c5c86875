"""Questions to NVIDIA's library about one GPU: what is not told is None, what the driver does not know is asked once.

Numbers stand here instead of names of `pynvml`, where an interpreter of somebody's may have an older one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

import pynvml
from pynvml import NVMLError

LOST = frozenset({15, 16})  # the GPU is lost; it needs a reset
NOT_THERE = frozenset({999})  # what a driver answers of a GPU that fell off the bus before it was opened
REOPEN = frozenset({1, 18})  # NVML is not initialized; the driver is another one than the library's
UNKNOWN = frozenset({3, 13, 25, 26})  # not supported, no such function, no such version, deprecated
ALL_LINKS = 0xFFFF_FFFF
_TYPES = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


class Questions:
    """To one GPU. Raises NVMLError only where NVML must be opened anew."""

    def __init__(self) -> None:
        self.handle: Any = None
        self.is_lost = False
        self._unknown: set[object] = set()

    def open(self, name: str) -> None:
        """By index or UUID."""
        by_index = name.isdecimal()
        find = pynvml.nvmlDeviceGetHandleByIndex if by_index else pynvml.nvmlDeviceGetHandleByUUID
        self.handle = self._try(find, int(name) if by_index else name, lost=LOST | NOT_THERE)

    def ask(self, *names: str, more: tuple[Any, ...] = ()) -> Any:
        """The answer to the first of these functions that the driver knows; `more` are its arguments after the GPU."""
        for name in names:
            key = (name, *(one for one in more if isinstance(one, int)))
            if self.handle is None or key in self._unknown:
                continue
            function = getattr(pynvml, name, None)
            answer = self._try(function, self.handle, *more, key=key) if function else None
            if answer is not None:
                return answer
        return None

    def fields(self, wanted: Mapping[str, tuple[int, int]]) -> dict[str, float]:
        """Field values by name; each is asked by (id, scope), and has an error of its own."""
        asked = {name: field for name, field in wanted.items() if field not in self._unknown}
        values = self.ask("nvmlDeviceGetFieldValues", more=([*asked.values()],)) if asked else None
        found: dict[str, float] = {}
        for name, value in zip(asked, values or (), strict=False):
            error = value.nvmlReturn
            if error in REOPEN:
                raise NVMLError(error)
            self.is_lost = self.is_lost or error in LOST
            if error in UNKNOWN:
                self._unknown.add(asked[name])
            if error == 0 and value.valueType < len(_TYPES):
                found[name] = getattr(value.value, _TYPES[value.valueType])
        return found

    def forget(self) -> None:
        """What was not known may be by now: slices have been made or removed."""
        self._unknown.clear()

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
                self._unknown.add(key)
        except TypeError:  # an older pynvml takes no such argument
            self._unknown.add(key)
        return None


def address(handle: Any) -> int | None:
    """What a handle points to: two of the same GPU are the same there."""
    return ctypes.cast(handle, ctypes.c_void_p).value
