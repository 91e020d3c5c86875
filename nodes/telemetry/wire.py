"""Parse agents' posts (docs/reference/protocols.md §11) into clean columns. A malformed post is rejected as a whole.

Agents' data is untrusted, and process names and kernel log lines contain anything: everything is bounded here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from nodes.telemetry.fields import GPU_FIELDS, PLACE
from portal.http.posts import UNREADABLE, Malformed, check_text
from vigil_core import untrusted
from vigil_core.bounded import Bounds

BATCHES = 60
GPUS = 64
SAMPLES = 600  # of a batch
VALUES = 1_000_000  # of a post
HOST = 200  # host values of a batch
PROCESSES = 500
EVENTS = 2_000  # of a post; fewer per batch, which one transaction stores
EVENTS_PER_BATCH = 200
NAMED_GPUS = 128  # of a post: twice what a machine may have, as GPUs are replaced
EVENT_BYTES = 32 * 1024
# Twice a post's values, to include its events. Without a limit 16 MiB of JSON could be 360 MB of empty lists.
ITEMS = 2 * VALUES
BOUNDS = Bounds(depth=ITEMS, items=ITEMS)  # the types limit the depth
MISSING = -(2**31)  # marks a missing value in a column
LATEST = 32_503_680_000  # the year 3000, in Unix seconds

Values = NDArray[np.int32]

_Uid = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
_Short = Annotated[str, Meta(max_length=64, pattern=r"^[^\x00]*\Z")]
_Name = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,47}(:[^\x00-\x1f]{1,72})?\Z")]
_Uuid = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,95}\Z")]
_Cursor = Annotated[int, Meta(ge=0, le=2**53)]
_At = Annotated[int, Meta(ge=0, lt=LATEST)]
_Time = Annotated[float, Meta(ge=0, lt=LATEST)]
_Value = Annotated[int, Meta(ge=-(2**31) + 1, le=2**31 - 1)]


class ReportedProcess(msgspec.Struct):
    """A process that uses a GPU."""

    gpu: _Uuid
    pid: Annotated[int, Meta(ge=0, lt=2**31)]
    user: Annotated[str, Meta(max_length=64)] = ""
    name: Annotated[str, Meta(max_length=128)] = ""
    memory_mib: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    job: Annotated[str, Meta(max_length=64)] = ""

    def __post_init__(self) -> None:
        """Drop characters that pages and databases reject: processes choose their own names."""
        self.user, self.name = untrusted.line(self.user, 64), untrusted.line(self.name, 128)
        self.job = untrusted.name(self.job, 64)


class MachineEvent(msgspec.Struct):
    """The fields that every event has; the rest is in `more`."""

    kind: Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_.]{0,31}\Z")]
    at: _Time
    gpu: _Uuid | None = None
    more: dict[str, Any] = {}


class _Batch(msgspec.Struct):
    at: _At
    period: Annotated[int, Meta(ge=1, le=60)] = 1
    n: Annotated[int, Meta(ge=0, le=SAMPLES)] = 0
    gpus: Annotated[list[_Uuid], Meta(max_length=GPUS)] = []
    columns: dict[str, list[list[_Value | None]]] = {}
    host: dict[_Name, float | None] = {}
    processes: Annotated[list[ReportedProcess], Meta(max_length=PROCESSES)] | None = None
    events: list[msgspec.Raw] = []


class _Post(msgspec.Struct):
    version: Literal[1]
    stream: _Uid
    first: _Cursor
    boot_id: _Short
    sent_at: _Time
    batches: Annotated[list[_Batch], Meta(max_length=BATCHES)]
    given_up: _Cursor = 0
    agent: _Short = ""


class SampleBatch(msgspec.Struct):
    """Samples of some seconds: `values` are fields × GPUs × seconds, `host` a value each, NaN if missing."""

    at: int
    period: int
    gpus: list[str]
    values: Values
    host: dict[str, float]
    processes: list[ReportedProcess] | None
    events: list[MachineEvent]

    @property
    def n(self) -> int:
        return int(self.values.shape[2])


class TelemetryPost(msgspec.Struct):
    """A well-formed post."""

    stream: str
    first: int
    given_up: int
    boot_id: str
    agent: str
    sent_at: float
    batches: list[SampleBatch]


_post_decoder = msgspec.json.Decoder(_Post)
_object_decoder = msgspec.json.Decoder(dict[str, Any])
_event_decoder = msgspec.json.Decoder(MachineEvent)


def parse(body: bytes) -> TelemetryPost:
    """Return the post in a request body. Raises Malformed."""
    check_text(body, BOUNDS)
    try:
        sent = _post_decoder.decode(body)
    except UNREADABLE as error:
        message, _, place = str(error).partition(" - at `$")
        raise Malformed(place.strip("`.") or "body", message) from None
    if sum(len(batch.gpus) * batch.n for batch in sent.batches) * len(GPU_FIELDS) > VALUES:
        raise Malformed("batches", f"more than {VALUES} values; send fewer at once", status=413)
    if sum(len(batch.events) for batch in sent.batches) > EVENTS:
        raise Malformed("batches", f"more than {EVENTS} events; send fewer at once", status=413)
    if any(len(batch.events) > EVENTS_PER_BATCH for batch in sent.batches):
        raise Malformed("batches", f"more than {EVENTS_PER_BATCH} events in one; cut it", status=413)
    if len({uuid for batch in sent.batches for uuid in batch.gpus}) > NAMED_GPUS:
        raise Malformed("batches", f"more than {NAMED_GPUS} different GPUs; send fewer at once", status=413)
    batches = [_batch(f"batches.{i}", batch) for i, batch in enumerate(sent.batches)]
    return TelemetryPost(
        sent.stream, sent.first, sent.given_up, sent.boot_id, untrusted.line(sent.agent), sent.sent_at, batches
    )


def _batch(place: str, sent: _Batch) -> SampleBatch:
    if len(set(sent.gpus)) < len(sent.gpus):
        raise Malformed(f"{place}.gpus", "the same GPU twice")
    if len(sent.host) > HOST:
        raise Malformed(f"{place}.host", f"more than {HOST} values")
    values = np.full((len(GPU_FIELDS), len(sent.gpus), sent.n), MISSING, np.int32)
    for name, rows in sent.columns.items():
        if len(rows) != len(sent.gpus) or any(len(row) != sent.n for row in rows):
            raise Malformed(f"{place}.columns.{name[:48]}", f"not {sent.n} values for each of {len(sent.gpus)} GPUs")
        if (field := PLACE.get(name)) is not None and sent.gpus and sent.n:  # a newer agent may send further columns
            values[field] = _column_values(rows)
    host = {untrusted.line(name): float("nan") if value is None else value for name, value in sent.host.items()}
    events = [_event(f"{place}.events.{i}", raw) for i, raw in enumerate(sent.events)]
    return SampleBatch(sent.at, sent.period, sent.gpus, values, host, sent.processes, events)


def _column_values(rows: Sequence[Sequence[int | None]]) -> Values:
    try:
        return np.array(rows, np.int32)
    except TypeError:  # None among them
        return np.array([[MISSING if value is None else value for value in row] for row in rows], np.int32)


def _event(place: str, raw: msgspec.Raw) -> MachineEvent:
    if len(bytes(raw)) > EVENT_BYTES:
        raise Malformed(place, f"more than {EVENT_BYTES} bytes")
    try:
        event, more = _event_decoder.decode(raw), _object_decoder.decode(raw)
    except UNREADABLE as error:
        raise Malformed(place, str(error)) from None
    event.more = {name: value for name, value in more.items() if name not in {"kind", "at", "gpu", "more"}}
    return event
