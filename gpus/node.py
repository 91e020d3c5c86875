"""NVML, opened, with the GPUs of this node and its events."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pynvml
from pynvml import NVMLError

from gpus import facts
from gpus.asking import address
from gpus.device import Device
from gpus.told import MOST_GPUS

__all__ = ["NVMLError", "Node", "may_change"]

LIBRARY_NOT_FOUND = 12
TIMEOUT = 10
KINDS = {0x8: "xid", 0x8000: "recovery", 0x100: "mig", 0x2: "ecc"}


class Node:
    """Raises NVMLError where NVML cannot be opened, or must be opened anew."""

    def __init__(self, names: list[str], *, everything: bool) -> None:
        """`names` as in CUDA_VISIBLE_DEVICES; empty: all that there are."""
        pynvml.nvmlInit()
        names = names or [str(index) for index in range(min(pynvml.nvmlDeviceGetCount(), MOST_GPUS))]
        self._devices = [Device(name) for name in names]
        for device in self._devices:
            device.open()
        self._everything = everything
        self._events = self._listen() if everything else None
        self._told: set[tuple[int, str, int]] = set()

    def about(self) -> dict[str, Any]:
        """The driver, the CUDA that it speaks, and the GPUs."""
        found: dict[str, Any] = {}
        with suppress(NVMLError):
            found["driver"] = pynvml.nvmlSystemGetDriverVersion()
        with suppress(NVMLError):
            found["nvml"] = pynvml.nvmlSystemGetNVMLVersion()
        with suppress(NVMLError):
            cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
            found["cuda"] = f"{cuda // 1000}.{cuda % 1000 // 10}"
        found["gpus"] = [device.about(everything=self._everything) for device in self._devices]
        if self._everything:
            found["topology"] = facts.topology([device.questions for device in self._devices])
        return found

    def has_changed(self, *, slices: bool) -> bool:
        """Whether `about` would tell something else of a GPU; that its `slices` did is asked for only now and then."""
        changed = [device.has_changed(slices=slices) for device in self._devices]
        return any(changed)

    def looks(self) -> list[dict[str, Any]]:
        self._told.clear()
        at = time.monotonic()
        return [device.look(at) for device in self._devices]

    def counters(self) -> list[dict[str, Any]]:
        return [device.counters() for device in self._devices]

    def processes(self) -> list[list[dict[str, int]] | None]:
        return [device.processes() for device in self._devices]

    def wait(self, until: float) -> Iterator[dict[str, Any]]:
        """Events as they come, until then by the monotonic clock; equal ones once between two looks."""
        while (left := until - time.monotonic()) > 0:
            if self._events is None:
                time.sleep(left)
                return
            try:
                # At least a millisecond: with none at all it would come back again and again.
                told = pynvml.nvmlEventSetWait_v2(self._events, max(1, int(left * 1000)))
            except NVMLError as error:
                if error.value != TIMEOUT:  # one GPU that is lost says so in everybody's place
                    time.sleep(max(0.0, until - time.monotonic()))
                continue
            if event := self._event(told):
                yield event

    def _event(self, told: Any) -> dict[str, Any] | None:
        places = [
            place for place, one in enumerate(self._devices) if address(one.questions.handle) == address(told.device)
        ]
        kind = KINDS.get(told.eventType)
        if not places or kind is None:
            return None
        key = (places[0], kind, int(told.eventData))
        if key in self._told:
            return None
        self._told.add(key)
        return {"place": key[0], "kind": key[1], "value": key[2]}

    def _listen(self) -> Any:
        """A set of the events that these GPUs can tell; None where none of them can."""
        with suppress(NVMLError):
            events, registered = pynvml.nvmlEventSetCreate(), 0
            for device in self._devices:
                supported = device.questions.ask("nvmlDeviceGetSupportedEventTypes") or 0
                if wanted := supported & sum(KINDS):
                    with suppress(NVMLError):
                        pynvml.nvmlDeviceRegisterEvents(device.questions.handle, wanted, events)
                        registered += 1
            return events if registered else None
        return None


def may_change(error: NVMLError) -> bool:
    """A driver that does not answer may be loaded later; where its library is missing there is none."""
    return int(error.value) != LIBRARY_NOT_FOUND
