"""What is measured between two looks: activity by the GPU itself, and what counters make a second."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import pynvml
from pynvml import NVMLError

from gpus.asking import Questions


class Activity:
    """What a GPU from Hopper on measures between two looks (GPM), which gets in the way of nobody's profiler."""

    METRICS = {"sm_percent": 2, "pcie_tx_mib": 20, "pcie_rx_mib": 21}

    def __init__(self, questions: Questions) -> None:
        self._questions = questions
        support = questions.ask("nvmlGpmQueryDeviceSupport")
        self._samples: list[Any] = []
        if support is not None and support.isSupportedDevice:
            with suppress(NVMLError):
                self._samples = [pynvml.nvmlGpmSampleAlloc() for _ in range(2)]
        self._has_first = False

    def look(self) -> dict[str, float]:
        """Since the last look; nothing at the first."""
        if not self._samples:
            return {}
        self._samples.reverse()
        had_first = self._has_first
        self._has_first = self._questions.ask("nvmlGpmSampleGet", more=(self._samples[1],)) is not None
        return self._between() if had_first and self._has_first else {}

    def _between(self) -> dict[str, float]:
        wanted = pynvml.c_nvmlGpmMetricsGet_t()
        wanted.version, wanted.numMetrics = 1, len(self.METRICS)
        wanted.sample1, wanted.sample2 = self._samples
        for metric, number in zip(wanted.metrics, self.METRICS.values(), strict=False):
            metric.metricId = number
        try:
            pynvml.nvmlGpmMetricsGet(wanted)
        except NVMLError:
            return {}
        told = zip(self.METRICS, wanted.metrics, strict=False)
        return {name: one.value for name, one in told if one.nvmlReturn == 0 and math.isfinite(one.value)}


class Rates:
    """What counters make a second, between two looks."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, float]] = {}

    def of(self, name: str, count: float | None, at: float) -> float | None:
        """None at the first look, and where the counter began anew."""
        if count is None:
            return None
        before, then = self._last.get(name, (count, at))
        self._last[name] = (count, at)
        return (count - before) / (at - then) if count >= before and at > then else None
