"""What a job's GPUs did, in words and as a picture: facts in, sentences and rows out. Pure; jobs.gathering asks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vigil_core import formatting

Floats = NDArray[np.float64]
NBSP = formatting.NBSP
GIB = 1 / 1024  # of MiB
LOW_USE, LOW_USE_HOURS = 0.30, 1
"""Used less than this for so long is a finding."""

MOST_ROWS = 512  # beyond, a row is a node
TALL_ROWS, WIDE_ROWS = 24, 160
ODD = 3.0  # times the median distance from the median
BETWEEN = 6  # pixels between nodes
AXIS = 22


@dataclass(frozen=True)
class Field:
    """What the map may show, its unit, and how it is coloured from where to where."""

    name: str
    title: str
    unit: str
    ramp: str
    low: float
    high: float | None  # None: as far as it goes
    factor: float = 1.0
    digits: int = 0

    def text(self, value: float | None) -> str:
        """A value with its unit; it is in the map's unit already."""
        if value is None or not math.isfinite(value):
            return formatting.MISSING
        number = f"{value:.{self.digits}f}" if self.digits else formatting.count(round(value))
        return f"{number}{NBSP}{self.unit}"


FIELDS = (
    Field("gpu_percent", "Utilisation", "%", "seq", 0, 100),
    Field("memory_mib", "Memory", "GiB", "seq", 0, None, GIB, 1),
    Field("temperature_c", "Temperature", "°C", "heat", 30, None),
    Field("watts", "Power", "W", "seq", 0, None),
)
BY_NAME = {one.name: one for one in FIELDS}
SOURCES = {
    "agent": "each GPU as its machine’s agent told it",
    "launcher": "all GPUs of a node together, as the job’s launchers logged them: no agent told of these machines",
}


@dataclass(frozen=True)
class Told:
    """One GPU in the hands of the job; or a node's GPUs together, `gpu` and `uuid` empty."""

    node: str
    gpu: int | None
    uuid: str
    mean: Floats  # a value a column


@dataclass
class Row:
    """A row of the map, over all attempts."""

    node: str
    gpu: int | None
    uuid: str
    values: Floats  # in the map's unit
    field: Field
    rank: int | None = None
    is_odd: bool = False

    @property
    def key(self) -> str:
        """What names it in an address."""
        return self.node if self.gpu is None else f"{self.node}:{self.gpu}"

    @property
    def label(self) -> str:
        if self.gpu is None:
            return self.node
        return f"GPU{NBSP}{self.gpu}" if self.rank is None else f"rank{NBSP}{self.rank}"

    @property
    def mean(self) -> float | None:
        told = self.values[np.isfinite(self.values)]
        return float(told.mean()) if len(told) else None

    @property
    def text(self) -> tuple[str, str, str]:
        """Its mean, least and most, with their unit."""
        least, most = self.span or (None, None)
        return self.field.text(self.mean), self.field.text(least), self.field.text(most)

    @property
    def span(self) -> tuple[float, float] | None:
        """Its least and its most."""
        told = self.values[np.isfinite(self.values)]
        return (float(told.min()), float(told.max())) if len(told) else None


@dataclass
class Picture:
    """The map: rows by node, and how it is coloured."""

    field: Field
    rows: list[Row] = dataclasses.field(default_factory=list)
    is_folded: bool = False  # a row is a node, for there are very many GPUs

    @property
    def nodes(self) -> dict[str, list[Row]]:
        found: dict[str, list[Row]] = {}
        for row in self.rows:
            found.setdefault(row.node, []).append(row)
        return found

    @property
    def high(self) -> float:
        """Where the ramp ends: a round number at or above all that there is."""
        if self.field.high is not None:
            return self.field.high
        most = max((row.span[1] for row in self.rows if row.span), default=0.0)
        step: float = 10.0 ** math.floor(math.log10(max(most, 1.0))) / 2
        return max(math.ceil(most / step) * step, self.field.low + 1)

    @property
    def row_height(self) -> int:
        if len(self.rows) <= TALL_ROWS:
            return 18
        return 9 if len(self.rows) <= WIDE_ROWS else 4

    @property
    def height(self) -> int:
        """In pixels, so that its place is kept before anything is drawn."""
        return len(self.rows) * self.row_height + len(self.nodes) * BETWEEN + AXIS

    @property
    def mean(self) -> float | None:
        told = [row.mean for row in self.rows if row.mean is not None]
        return sum(told) / len(told) if told else None

    def as_json(self) -> dict[str, Any]:
        """What the script draws."""
        digits = self.field.digits
        groups = [{"name": node, "rows": [_row(row, digits) for row in rows]} for node, rows in self.nodes.items()]
        same = {"unit": self.field.unit, "ramp": self.field.ramp, "low": self.field.low, "high": self.high}
        return {"field": self.field.name, "rowHeight": self.row_height, **same, "groups": groups}


def picture(chosen: Field, told: Sequence[Told], ranks: Mapping[str, int] | None = None) -> Picture:
    """The rows of all attempts, one a GPU: what one attempt told nothing of, another may have."""
    rows: dict[tuple[str, int | None, str], Row] = {}
    for one in told:
        values = one.mean * chosen.factor
        known = rows.get((one.node, one.gpu, one.uuid))
        if known is None:
            rank = (ranks or {}).get(one.uuid)
            rows[one.node, one.gpu, one.uuid] = Row(one.node, one.gpu, one.uuid, values, chosen, rank)
        else:
            known.values = np.where(np.isfinite(values), values, known.values)
    found = sorted(rows.values(), key=lambda row: (row.node, -1 if row.gpu is None else row.gpu))
    if len(found) > MOST_ROWS:
        return Picture(chosen, _mark_odd(_by_node(found)), is_folded=True)
    return Picture(chosen, _mark_odd(found))


def _by_node(rows: Sequence[Row]) -> list[Row]:
    nodes: dict[str, list[Floats]] = {}
    for row in rows:
        nodes.setdefault(row.node, []).append(row.values)
    return [Row(node, None, "", _nanmean(np.stack(parts)), rows[0].field) for node, parts in nodes.items()]


def _nanmean(values: Floats) -> Floats:
    told = np.isfinite(values)
    with np.errstate(invalid="ignore"):
        mean: Floats = np.where(told, values, 0.0).sum(axis=0) / told.sum(axis=0)
    return mean


def _mark_odd(rows: list[Row]) -> list[Row]:
    """Which stand out: by three times what is usual among them, and by a twentieth at least."""
    means = np.array([row.mean for row in rows if row.mean is not None])
    if len(means) < 4:
        return rows
    middle = float(np.median(means))
    usual = float(np.median(np.abs(means - middle)))
    for row in rows:
        apart = abs(row.mean - middle) if row.mean is not None else 0.0
        row.is_odd = apart > max(ODD * usual, 0.05 * abs(middle), 1e-9)
    return rows


def _row(row: Row, digits: int) -> dict[str, Any]:
    values = [None if not math.isfinite(value) else round(value, digits) for value in row.values.tolist()]
    about = {"key": row.key, "label": row.label, "gpu": row.gpu, "uuid": row.uuid, "odd": row.is_odd}
    return {**about, "note": row.text[0], "values": values}


def say(shown: Picture, *, source: str, is_alive: bool) -> tuple[str, str]:
    """The sentence above the map: what all did on average, and who stands out."""
    if not source or shown.mean is None:
        return _nothing(is_alive), ""
    what = "Its GPUs" if shown.is_folded or source != "agent" else formatting.plural(len(shown.rows), "GPU")
    lead = f"{what}: {shown.field.title.lower()} {shown.field.text(shown.mean)} on average."
    odd = [row for row in shown.rows if row.is_odd]
    if not odd:
        return lead, ""
    worst = max(odd, key=lambda row: abs((row.mean or 0.0) - (shown.mean or 0.0)))
    where = worst.node if worst.gpu is None else f"GPU {worst.gpu} of {worst.node}"
    more = f", and {formatting.plural(len(odd) - 1, 'more', 'more')}" if len(odd) > 1 else ""
    return lead, f"{where} stands out with {shown.field.text(worst.mean)}{more}."


def _nothing(is_alive: bool) -> str:
    when = "They come seconds after its start" if is_alive else "None came while it ran"
    return f"No samples of its GPUs. {when}, from its machines’ agents or from its launchers."


@dataclass(frozen=True)
class Finding:
    """Something about a job that wants a look."""

    title: str
    text: str


def finding(mean_percent: float | None, gpus: int) -> Finding | None:
    """Whether its GPUs do too little; None where that is not so, or not known."""
    if mean_percent is None or mean_percent >= LOW_USE * 100:
        return None
    which = "Its GPU was" if gpus == 1 else f"Its {formatting.plural(gpus, 'GPU')} were" if gpus else "Its GPUs were"
    most = formatting.share(LOW_USE)
    text = f"{which} used {formatting.share(mean_percent / 100)} on average over an hour, less than {most}."
    return Finding("GPUs that do little", text)
