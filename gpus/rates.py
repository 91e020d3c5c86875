"""Measure activity and counter rates between two samples."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import pynvml
from pynvml import NVMLError

from gpus.queries import NvmlQueries


class GpmActivity:
    """Activity measured by GPUs from Hopper on (GPM), which does not interfere with profilers."""

    METRICS = {"sm_percent": 2, "pcie_tx_mib": 20, "pcie_rx_mib": 21}

    def __init__(self, queries: NvmlQueries) -> None:
        self._queries = queries
        support = queries.first_available("nvmlGpmQueryDeviceSupport")
        self._samples: list[Any] = []
        if support is not None and support.isSupportedDevice:
            with suppress(NVMLError):
                self._samples = [pynvml.nvmlGpmSampleAlloc() for _ in range(2)]
        self._has_first = False

    def sample(self) -> dict[str, float]:
        """Return activity since the last sample; empty at the first."""
        if not self._samples:
            return {}
        self._samples.reverse()
        had_first = self._has_first
        self._has_first = self._queries.first_available("nvmlGpmSampleGet", more=(self._samples[1],)) is not None
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
        metrics = zip(self.METRICS, wanted.metrics, strict=False)
        return {
            name: metric_value.value
            for name, metric_value in metrics
            if metric_value.nvmlReturn == 0 and math.isfinite(metric_value.value)
        }


class CounterRates:
    """Rates per second of counters."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, float]] = {}

    def rate(self, name: str, count: float | None, at: float) -> float | None:
        """Return the rate since the last sample; None at the first one and after a counter reset."""
        if count is None:
            return None
        last_count, last_at = self._last.get(name, (count, at))
        self._last[name] = (count, at)
        return (count - last_count) / (at - last_at) if count >= last_count and at > last_at else None
