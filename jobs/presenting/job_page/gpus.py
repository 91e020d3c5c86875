"""Present a job's GPU use as a heat map and in words. Pure; facts in, rows and sentences out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nodes.presenting.gpu_fields import GpuField
from portal.series.codec import Floats
from vigil_core import formatting
from vigil_core.formatting import NBSP

LOW_USE, LOW_USE_HOURS = 0.30, 1
"""Utilisation below this for this long is a finding."""

MAX_ROWS = 512  # with more, each row is a node
TALL_ROWS, WIDE_ROWS = 24, 160
ODD = 3.0  # times the median distance from the median
NODE_GAP_PX = 6  # pixels between nodes
AXIS = 22


@dataclass(frozen=True)
class Ramp:
    """The colours of a field's values, from `low` to `high`."""

    name: str
    low: float
    high: float | None = None  # None: up to the largest value


RAMPS = {
    "gpu_percent": Ramp("seq", 0, 100),
    "memory_mib": Ramp("seq", 0),
    "temperature_c": Ramp("heat", 30),
    "watts": Ramp("seq", 0),
}
SOURCES = {
    "agent": "each GPU, as reported by its node’s agent",
    "launcher": "all GPUs of a node combined, as logged by the job’s launchers; no agent reports from these nodes",
}


@dataclass(frozen=True)
class GpuUsage:
    """Samples of one GPU allocated to the job; or of all GPUs of a node together, with `gpu` and `uuid` empty."""

    node: str
    gpu: int | None
    uuid: str
    mean: Floats  # one value per column


@dataclass
class GpuMapRow:
    """A row of the map, over all attempts."""

    node: str
    gpu: int | None
    uuid: str
    values: Floats  # in the map's unit
    field: GpuField
    rank: int | None = None
    is_odd: bool = False

    @property
    def key(self) -> str:
        """Return the row's identifier in URLs."""
        return self.node if self.gpu is None else f"{self.node}:{self.gpu}"

    @property
    def label(self) -> str:
        if self.gpu is None:
            return self.node
        return f"GPU{NBSP}{self.gpu}" if self.rank is None else f"rank{NBSP}{self.rank}"

    @property
    def mean(self) -> float | None:
        finite = self.values[np.isfinite(self.values)]
        return float(finite.mean()) if len(finite) else None

    @property
    def text(self) -> tuple[str, str, str]:
        """Return mean, minimum and maximum with their unit."""
        least, most = self.span or (None, None)
        return self.field.text(self.mean), self.field.text(least), self.field.text(most)

    @property
    def span(self) -> tuple[float, float] | None:
        """Return minimum and maximum; None if there are no values."""
        finite = self.values[np.isfinite(self.values)]
        return (float(finite.min()), float(finite.max())) if len(finite) else None


@dataclass
class GpuMap:
    """The map: rows by node, and the range of its colours."""

    field: GpuField
    rows: list[GpuMapRow] = dataclasses.field(default_factory=list)
    is_folded: bool = False  # each row is a node, because there are very many GPUs

    @property
    def nodes(self) -> dict[str, list[GpuMapRow]]:
        found: dict[str, list[GpuMapRow]] = {}
        for row in self.rows:
            found.setdefault(row.node, []).append(row)
        return found

    @property
    def high(self) -> float:
        """Return the upper end of the colour ramp: a round number at or above the largest value."""
        ramp = RAMPS[self.field.name]
        if ramp.high is not None:
            return ramp.high
        most = max((row.span[1] for row in self.rows if row.span), default=0.0)
        step: float = 10.0 ** math.floor(math.log10(max(most, 1.0))) / 2
        return max(math.ceil(most / step) * step, ramp.low + 1)

    @property
    def row_height(self) -> int:
        if len(self.rows) <= TALL_ROWS:
            return 18
        return 9 if len(self.rows) <= WIDE_ROWS else 4

    @property
    def height(self) -> int:
        """Return the height in pixels, so that the page reserves the space before the map is drawn."""
        return len(self.rows) * self.row_height + len(self.nodes) * NODE_GAP_PX + AXIS

    @property
    def mean(self) -> float | None:
        means = [row.mean for row in self.rows if row.mean is not None]
        return sum(means) / len(means) if means else None

    def as_json(self) -> dict[str, Any]:
        """Return the data for the drawing script."""
        digits = self.field.digits
        groups = [{"name": node, "rows": [_row(row, digits) for row in rows]} for node, rows in self.nodes.items()]
        ramp = RAMPS[self.field.name]
        same = {"unit": self.field.unit, "ramp": ramp.name, "low": ramp.low, "high": self.high}
        return {"field": self.field.name, "rowHeight": self.row_height, **same, "groups": groups}


def gpu_map(chosen: GpuField, samples: Sequence[GpuUsage], ranks: Mapping[str, int] | None = None) -> GpuMap:
    """Build the map with one row per GPU, merging all attempts: one attempt may have samples that another lacks."""
    rows: dict[tuple[str, int | None, str], GpuMapRow] = {}
    for gpu in samples:
        values = gpu.mean * chosen.factor
        row = rows.get((gpu.node, gpu.gpu, gpu.uuid))
        if row is None:
            rank = (ranks or {}).get(gpu.uuid)
            rows[gpu.node, gpu.gpu, gpu.uuid] = GpuMapRow(gpu.node, gpu.gpu, gpu.uuid, values, chosen, rank)
        else:
            row.values = np.where(np.isfinite(values), values, row.values)
    sorted_rows = sorted(rows.values(), key=lambda row: (row.node, -1 if row.gpu is None else row.gpu))
    if len(sorted_rows) > MAX_ROWS:
        return GpuMap(chosen, _mark_odd(_by_node(sorted_rows)), is_folded=True)
    return GpuMap(chosen, _mark_odd(sorted_rows))


def _by_node(rows: Sequence[GpuMapRow]) -> list[GpuMapRow]:
    nodes: dict[str, list[Floats]] = {}
    for row in rows:
        nodes.setdefault(row.node, []).append(row.values)
    return [GpuMapRow(node, None, "", _nanmean(np.stack(parts)), rows[0].field) for node, parts in nodes.items()]


def _nanmean(values: Floats) -> Floats:
    finite = np.isfinite(values)
    with np.errstate(invalid="ignore"):
        mean: Floats = np.where(finite, values, 0.0).sum(axis=0) / finite.sum(axis=0)
    return mean


def _mark_odd(rows: list[GpuMapRow]) -> list[GpuMapRow]:
    """Mark outliers: rows further from the median than three times the median distance, and than 5 % of the median."""
    means = np.array([row.mean for row in rows if row.mean is not None])
    if len(means) < 4:
        return rows
    middle = float(np.median(means))
    usual = float(np.median(np.abs(means - middle)))
    for row in rows:
        apart = abs(row.mean - middle) if row.mean is not None else 0.0
        row.is_odd = apart > max(ODD * usual, 0.05 * abs(middle), 1e-9)
    return rows


def _row(row: GpuMapRow, digits: int) -> dict[str, Any]:
    values = [None if not math.isfinite(value) else round(value, digits) for value in row.values.tolist()]
    about = {"key": row.key, "label": row.label, "gpu": row.gpu, "uuid": row.uuid, "odd": row.is_odd}
    return {**about, "note": row.text[0], "values": values}


def summary(shown: GpuMap, *, source: str, is_alive: bool) -> tuple[str, str]:
    """Return the sentences above the map: the average of all GPUs, and outliers."""
    if not source or shown.mean is None:
        return _no_samples(is_alive), ""
    what = "Its GPUs" if shown.is_folded or source != "agent" else formatting.plural(len(shown.rows), "GPU")
    lead = f"{what}: {shown.field.title.lower()} {shown.field.text(shown.mean)} on average."
    odd = [row for row in shown.rows if row.is_odd]
    if not odd:
        return lead, ""
    worst = max(odd, key=lambda row: abs((row.mean or 0.0) - (shown.mean or 0.0)))
    where = worst.node if worst.gpu is None else f"GPU {worst.gpu} of {worst.node}"
    more = f", and {formatting.plural(len(odd) - 1, 'more', 'more')}" if len(odd) > 1 else ""
    return lead, f"{where} stands out with {shown.field.text(worst.mean)}{more}."


def _no_samples(is_alive: bool) -> str:
    if is_alive:
        return "No GPU samples yet. Node agents or launchers send them within seconds of the start."
    return "No GPU samples. Neither node agents nor launchers sent any while the job ran."


@dataclass(frozen=True)
class GpuFinding:
    """Something about a job that deserves attention."""

    title: str
    text: str


def finding(mean_percent: float | None, gpus: int) -> GpuFinding | None:
    """Return a finding if the GPUs are underused; None if they are not, or if that is unknown."""
    if mean_percent is None or mean_percent >= LOW_USE * 100:
        return None
    which = "Its GPU was" if gpus == 1 else f"Its {formatting.plural(gpus, 'GPU')} were" if gpus else "Its GPUs were"
    most = formatting.share(LOW_USE)
    text = f"{which} used {formatting.share(mean_percent / 100)} on average over an hour, less than {most}."
    return GpuFinding("Low GPU use", text)
