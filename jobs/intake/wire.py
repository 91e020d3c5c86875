"""Parse report posts as shippers send them (protocols.md §3), from bytes to clean columns.

A malformed frame is refused whole (`Malformed`), as its meaning is unknown. In a well-formed frame a batch with bad
content (a value that is not a number, an invalid name) is quarantined: it is dropped and counted, and the stream's
cursor passes it, because sending it again would not repair it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from portal.http.posts import UNREADABLE, Malformed, check_text
from training.reporting import lines
from training.reporting.lines import DEPTH, EVENT_BYTES, SERIES_NAME, STEP_LIMIT
from vigil_core.bounded import Bounds
from vigil_core.masking import masked

POINTS = 50_000
STREAMS = 2_048
BATCHES = 50_000
EVENTS = 2_000
PLACE_BYTES = 64  # of an event in a post: its stream and batch
# All that the limits above allow, and as much again for the content of events: 16 MiB of empty lists take 360 MB.
ITEMS = 1_000_000
BOUNDS = Bounds(depth=ITEMS, items=ITEMS)  # the depth is checked for each event
LATEST_TIME = 32_503_680_000.0  # the year 3000, in Unix seconds

EXCERPTS = {"run.failed": "error", "client.dropped": "traceback"}  # by the kind of event, where it quotes a log
EXCERPT_CHARACTERS = 8_000  # twice what our trainer sends; bounds what masking costs

BatchIndex = tuple[int, int]  # index of the stream in the post, index of the batch in the stream

_Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_Cursor = Annotated[int, Meta(ge=0, le=2**53)]
_Rank = Annotated[int, Meta(ge=-100_000, le=1_000_000)]
_Uid = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
_Text = Annotated[str, Meta(max_length=255, pattern=r"^[^\x00]*\Z")]
_Short = Annotated[str, Meta(max_length=64, pattern=r"^[^\x00]*\Z")]
_Step = Annotated[int, Meta(ge=0, lt=STEP_LIMIT)]
_Value = float | Literal["NaN", "Infinity", "-Infinity"]
_Kind = Annotated[str, Meta(pattern=r"^[^\x00-\x1f]{1,64}\Z")]
_Time = Annotated[float, Meta(ge=0, lt=LATEST_TIME)]


class StreamBatches(msgspec.Struct):
    """The batches that one stream sends: `first` .. `first + len(times)`, with the time of each."""

    id: _Uid
    incarnation: _Count
    rank: _Rank
    first: _Cursor
    times: list[_Time]
    node: _Text = ""
    boot_id: _Short = ""
    restart_count: _Count = 0
    end: bool = False


@dataclass(frozen=True)
class SeriesColumns:
    """Points of one series; `runs` cut the columns: (stream, batch, number of points) each."""

    runs: list[tuple[int, int, int]]
    step: NDArray[np.int64]
    value: NDArray[np.float64]


@dataclass(frozen=True)
class ReportedEvent:
    """An event of a batch; `data` has its fields apart from kind and time (Unix seconds)."""

    batch: BatchIndex
    kind: str
    time: float
    data: dict[str, Any]
    bytes: int = 0  # as it was sent


@dataclass(frozen=True)
class ReportPost:
    """A well-formed post. Content of the batches in `bad` (with the reason) is to be left out."""

    streams: list[StreamBatches]
    series: dict[str, SeriesColumns]
    events: list[ReportedEvent]
    bad: dict[BatchIndex, str] = field(default_factory=dict)


class _SentColumns(msgspec.Struct):
    runs: list[tuple[int, int, int]]
    step: list[_Step]
    value: list[_Value]


class _PostFrame(msgspec.Struct):
    version: Literal[1]
    streams: list[StreamBatches]
    series: dict[str, _SentColumns] = {}
    events: list[msgspec.Raw] = []


class _RawSentColumns(msgspec.Struct):
    runs: list[tuple[int, int, int]]
    step: list[msgspec.Raw]
    value: list[msgspec.Raw]


class _RawPostFrame(msgspec.Struct):
    """A frame whose content is not decoded yet, to find out which batches are bad."""

    version: Literal[1]
    streams: list[StreamBatches]
    series: dict[str, _RawSentColumns] = {}
    events: list[msgspec.Raw] = []


class _EventPlace(msgspec.Struct):
    stream: int
    batch: int


class _EventHead(msgspec.Struct):
    kind: _Kind
    time: _Time


# Every escape of a JSON string; the second group are halves of surrogate pairs without the other half.
_ESCAPE = re.compile(
    rb"(\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.", re.DOTALL
)
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
_frames = msgspec.json.Decoder(_PostFrame)
_raw_frames = msgspec.json.Decoder(_RawPostFrame)
_places = msgspec.json.Decoder(_EventPlace)
_heads = msgspec.json.Decoder(_EventHead)
_objects = msgspec.json.Decoder(dict[str, Any])
_steps = msgspec.json.Decoder(_Step)
_values = msgspec.json.Decoder(_Value)


def parse(body: bytes) -> ReportPost:
    """Parse a body. Raises Malformed."""
    check_text(body, BOUNDS)
    bad: dict[BatchIndex, str] = {}
    frame = _decode(body)
    _check_streams(frame.streams)
    series = {name: _columns(name, sent, frame.streams, bad) for name, sent in frame.series.items()}
    if sum(len(columns.step) for columns in series.values()) > POINTS:
        raise Malformed("series", f"more than {POINTS} points; send fewer at once", status=413)
    if len(frame.events) > EVENTS:
        raise Malformed("events", f"more than {EVENTS}; send fewer at once", status=413)
    events = [event for i, raw in enumerate(frame.events) if (event := _event(i, raw, frame.streams, bad))]
    _quarantine_oversized(events, bad)
    return ReportPost(frame.streams, series, events, bad)


def post_from_spool(header: lines.StreamHeader, batches: Sequence[lines.ReportBatch], *, end: bool) -> ReportPost:
    """Return the post that a shipper would send for these consecutive batches of one stream."""
    bad: dict[BatchIndex, str] = {}
    part = StreamBatches(
        id=header.stream,
        incarnation=header.incarnation,
        rank=header.rank,
        first=batches[0].seq if batches else 0,
        times=[batch.time if 0 <= batch.time < LATEST_TIME else 0.0 for batch in batches],
        node=storable(header.node),
        boot_id=storable(header.boot_id),
        restart_count=header.restart_count,
        end=end,
    )
    runs: dict[str, list[tuple[int, int, int]]] = {}
    points: dict[str, list[tuple[int, float]]] = {}
    events = []
    for i, batch in enumerate(batches):
        for name, column in batch.series.items():
            if column:
                runs.setdefault(name, []).append((0, i, len(column)))
                points.setdefault(name, []).extend(column)
        for event in batch.events:
            # Parsed like a body that came by HTTP, so that both accept the same content.
            text = json.dumps({**event, "stream": 0, "batch": i}, separators=(",", ":"))
            raw = msgspec.Raw(_without_lone_surrogates(text.encode()))
            if reported := _event(0, raw, [part], bad):
                events.append(reported)
    series = {
        name: SeriesColumns(
            runs[name], np.array([s for s, _ in column], np.int64), np.array([v for _, v in column], np.float64)
        )
        for name, column in points.items()
    }
    return ReportPost([part], series, events, bad)


def _decode(body: bytes) -> _PostFrame | _RawPostFrame:
    try:
        return _frames.decode(body)
    except msgspec.ValidationError:
        return _decode_raw(body)
    except UNREADABLE as error:
        if (mended := _without_lone_surrogates(body)) != body:
            return _decode(mended)
        raise Malformed("body", f"is not JSON: {error}") from None


def _decode_raw(body: bytes) -> _RawPostFrame:
    try:
        return _raw_frames.decode(body)
    except UNREADABLE as error:
        message, _, place = str(error).partition(" - at `$.")
        raise Malformed(place.rstrip("`") or "body", message) from None


def _check_streams(streams: list[StreamBatches]) -> None:
    if len(streams) > STREAMS or sum(len(part.times) for part in streams) > BATCHES:
        raise Malformed("streams", f"more than {STREAMS} streams or {BATCHES} batches; send fewer at once", status=413)
    if len({part.id for part in streams}) < len(streams):
        raise Malformed("streams", "the same stream twice")


def _columns(
    name: str, sent: _SentColumns | _RawSentColumns, streams: list[StreamBatches], bad: dict[BatchIndex, str]
) -> SeriesColumns:
    place = f"series.{name[:128]}"
    if not sent.runs:
        raise Malformed(place, "is empty: leave it out")
    if len(sent.step) != len(sent.value):
        raise Malformed(place, f"{len(sent.step)} steps but {len(sent.value)} values")
    total = 0
    for stream, batch, count in sent.runs:
        _check_place(place, stream, batch, streams)
        if count < 1:
            raise Malformed(place, f"a run of {count} points")
        total += count
    if total != len(sent.step):
        raise Malformed(place, f"runs of {total} points in all, but {len(sent.step)} steps")
    if not SERIES_NAME.fullmatch(name):
        bad.update(dict.fromkeys(((run[0], run[1]) for run in sent.runs), f"no name for a series: {name[:64]!r}"))
        return SeriesColumns(sent.runs, np.zeros(total, np.int64), np.zeros(total))
    if isinstance(sent, _SentColumns):
        return SeriesColumns(sent.runs, np.array(sent.step, np.int64), np.array(sent.value, np.float64))
    return _decode_points(name, sent, bad)


def _decode_points(name: str, sent: _RawSentColumns, bad: dict[BatchIndex, str]) -> SeriesColumns:
    """Read point by point, and mark the batches whose points cannot be read."""
    step, value = np.zeros(len(sent.step), np.int64), np.zeros(len(sent.value))
    at = 0
    for stream, batch, count in sent.runs:
        for i in range(at, at + count):
            try:
                step[i], value[i] = _steps.decode(sent.step[i]), float(_values.decode(sent.value[i]))
            except UNREADABLE as error:
                bad[stream, batch] = f"{name}: {error}"
        at += count
    return SeriesColumns(sent.runs, step, value)


def _event(
    index: int, raw: msgspec.Raw, streams: list[StreamBatches], bad: dict[BatchIndex, str]
) -> ReportedEvent | None:
    try:
        place = _places.decode(raw)
    except UNREADABLE as error:
        raise Malformed(f"events.{index}", str(error)) from None
    _check_place(f"events.{index}", place.stream, place.batch, streams)
    batch = (place.stream, place.batch)
    try:
        head = _heads.decode(raw)
        if len(bytes(raw)) > EVENT_BYTES + 1024:
            bad[batch] = f"event {head.kind}: more than {EVENT_BYTES} bytes"
            return None
        data = without_nul(_objects.decode(raw))
    except UNREADABLE as error:
        bad[batch] = f"event: {error}"
        return None
    for key in ("stream", "batch", "kind", "time"):
        del data[key]
    _mask_excerpt(head.kind, data)
    return ReportedEvent(batch, head.kind, head.time, data, len(bytes(raw)))


def _quarantine_oversized(events: Sequence[ReportedEvent], bad: dict[BatchIndex, str]) -> None:
    """Quarantine batches with more events or bytes than a line of a spool may have: one transaction stores a batch."""
    counts = Counter(event.batch for event in events)
    size: Counter[BatchIndex] = Counter()
    for event in events:
        size[event.batch] += event.bytes
    reason = f"more than {lines.BATCH_EVENTS} events"
    bad.update({batch: reason for batch, count in counts.items() if count > lines.BATCH_EVENTS})
    reason = f"more than {lines.BATCH_BYTES >> 20} MiB of events"
    # A post repeats the place of its batch with each event, which a line of a spool does not.
    bad.update({batch: reason for batch in counts if size[batch] > lines.BATCH_BYTES + PLACE_BYTES * counts[batch]})


def _mask_excerpt(kind: str, data: dict[str, Any]) -> None:
    """Mask the secrets in what an event quotes of a log, before anything stores it, and cut what nobody reads."""
    key = EXCERPTS.get(kind, "")
    if isinstance(text := data.get(key), str):
        data[key] = masked(text[:EXCERPT_CHARACTERS])


def _without_lone_surrogates(text: bytes) -> bytes:
    """Replace lone surrogates in JSON by U+FFFD: an undecodable file name in an error becomes such halves."""
    return _ESCAPE.sub(lambda match: b"\\ufffd" if match[2] else match[0], text)


def without_nul(value: Any, *, room: int = DEPTH) -> Any:
    """Replace NUL in a JSON value by U+FFFD, as PostgreSQL cannot store NUL; a log line may well contain one.

    Raises RecursionError if it is nested more than `room` deep: a later reader may have less stack left.
    """
    if isinstance(value, str):
        return value.replace("\x00", "\ufffd")
    if isinstance(value, list | dict) and not room:
        raise RecursionError(f"nested more than {DEPTH} deep")
    if isinstance(value, list):
        return [without_nul(item, room=room - 1) for item in value]
    if isinstance(value, dict):
        return {without_nul(key): without_nul(item, room=room - 1) for key, item in value.items()}
    return value


def storable(text: str) -> str:
    """Replace characters in a file's text that no database stores, NUL and lone surrogates, by U+FFFD."""
    return _UNSTORABLE.sub("\ufffd", text)


def _check_place(where: str, stream: int, batch: int, streams: list[StreamBatches]) -> None:
    if not 0 <= stream < len(streams) or not 0 <= batch < len(streams[stream].times):
        raise Malformed(where, f"no batch {batch} in stream {stream} of this post")
