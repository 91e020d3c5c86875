"""Test bad posts: well-addressed ones are quarantined and skipped; a malformed frame is refused as a whole."""

from __future__ import annotations

import gzip
import json
import os
from typing import Any

import pytest

from jobs.intake import reports, wire
from jobs.models import Event, Stream
from portal.http.posts import COMPRESSED_BYTES, INFLATED_BYTES
from tests.jobs.reporting import Spooled, attempt_of, frame, job_of, packed, post, send, stored, world

pytestmark = pytest.mark.django_db


# -- bad content, well addressed: quarantined ------------------------------------------------------------------------


def spoiled(change: Any) -> dict[str, Any]:
    """Three batches of two series; `change` spoils the middle one."""
    stream = Spooled().log(1, loss=1.0, norm=1.0).log(2, loss=2.0, norm=2.0).log(3, loss=3.0, norm=3.0)
    body = frame(stream)
    change(body)
    return body


def value_is(value: Any) -> Any:
    return lambda body: body["series"]["loss"]["value"].__setitem__(1, value)


def step_is(step: Any) -> Any:
    return lambda body: body["series"]["loss"]["step"].__setitem__(1, step)


def event_is(**event: Any) -> Any:
    return lambda body: body["events"].append({"stream": 0, "batch": 1, "kind": "k", "time": 1.0, **event})


@pytest.mark.parametrize(
    "change",
    [
        value_is(True), value_is("2.5"), value_is(None), value_is([2.0]), value_is("nan"),
        step_is(2.0), step_is(True), step_is(-1), step_is(2**53), step_is("2"), step_is(None),
        event_is(kind=""), event_is(kind=7), event_is(kind="k" * 65), event_is(time=True), event_is(time=1e300),
        event_is(text="x" * 70_000),
    ],
)  # fmt: skip
def test_bad_content_is_quarantined_and_the_cursor_passes(change: Any) -> None:
    attempt = attempt_of()
    answer = reports.ingest(attempt.pk, wire.parse(json.dumps(spoiled(change)).encode()))
    (uid,) = answer.streams
    assert answer.streams == {uid: 3}
    assert {key[3] for key in stored(attempt)} == {1, 3}, "the batch as a whole, and no other"
    assert Stream.objects.get().quarantined == 1
    event = Event.objects.get(kind="report.quarantined")
    assert event.data["seq"] == 1
    assert event.data["reason"]


def test_a_number_beyond_float64_is_quarantined() -> None:
    attempt = attempt_of()
    body = json.dumps(spoiled(value_is(2.0))).replace("2.0, 3.0]", "1e999, 3.0]")
    assert "1e999" in body
    reports.ingest(attempt.pk, wire.parse(body.encode()))
    assert Stream.objects.get().quarantined == 1


def test_a_name_that_is_none_is_quarantined() -> None:
    for name in ("", "../etc", "a" * 129, "nul\x00", "ein Name", "\N{SNOWMAN}"):
        attempt = attempt_of(job_of())
        body = frame(Spooled().log(1, loss=1.0).log(2, **{name: 1.0}))
        reports.ingest(attempt.pk, wire.parse(json.dumps(body).encode()))
        assert set(stored(attempt)) == {("loss", 0, 0, 1)}, name
        assert Event.objects.filter(attempt=attempt, kind="report.quarantined").exists()


def test_a_nul_in_a_text_does_not_lose_the_event() -> None:
    attempt = attempt_of()
    reports.ingest(attempt.pk, post(Spooled().add_event("run.failed", error="a\x00b", nested={"k\x00": ["\x00"]})))
    assert Event.objects.get(kind="run.failed").data == {"error": "a\ufffdb", "nested": {"k\ufffd": ["\ufffd"]}}


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("depth", [64, 100, 300, 450])
def test_a_deep_event_is_quarantined(depth: int) -> None:
    attempt = attempt_of()
    stream = Spooled().add_event("deep", data=nested(depth)).log(5, loss=1.0)
    assert send(attempt, frame(stream)).json()["streams"] == {stream.uid: 2}
    assert Event.objects.get().kind == "report.quarantined"
    assert len(stored(attempt)) == 1


def test_the_deepest_event_is_stored() -> None:
    reports.ingest(attempt_of().pk, post(Spooled().add_event("deep", data=nested(63))))
    assert Event.objects.get().data == {"data": nested(63)}


def test_half_a_surrogate_pair_does_not_lose_the_event() -> None:
    attempt = attempt_of()
    sent = (
        Spooled()
        .add_event("run.failed", error=os.fsdecode(b"no file caf\xe9"))
        .add_event("note", text="\U0001f600 \\ud800")
    )
    reports.ingest(attempt.pk, post(sent))
    assert Event.objects.get(kind="run.failed").data == {"error": "no file caf\ufffd"}
    assert Event.objects.get(kind="note").data == {"text": "\U0001f600 \\ud800"}


def test_what_the_spool_parser_found_damaged_is_counted() -> None:
    attempt = attempt_of()
    reports.ingest(attempt.pk, post(Spooled().add_event("report.damaged", seq=0, problem="?").log(1, loss=1.0)))
    assert Stream.objects.get().quarantined == 1
    assert stored(attempt)


# -- malformed frames: refused whole ---------------------------------------------------------------------------------


def drop(*path: Any) -> Any:
    return lambda body: _at(body, path[:-1]).pop(path[-1])


def put(value: Any, *path: Any) -> Any:
    def change(body: Any) -> None:
        _at(body, path[:-1])[path[-1]] = value

    return change


def _at(body: Any, path: Any) -> Any:
    for key in path:
        body = body[key]
    return body


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (drop("version"), "body"), (put(2, "version"), "version"), (put("1", "version"), "version"),
        (put({}, "streams"), "streams"), (put("x", "streams", 0, "id"), "streams"),
        (put("A" * 16, "streams", 0, "id"), "streams"), (put(-1, "streams", 0, "first"), "streams"),
        (put(True, "streams", 0, "rank"), "streams"), (put(1.5, "streams", 0, "incarnation"), "streams"),
        (put(-1, "streams", 0, "incarnation"), "streams"), (put("n\x00", "streams", 0, "node"), "streams"),
        (put(["x", 1.0, 1.0], "streams", 0, "times"), "streams"), (put([1e300] * 3, "streams", 0, "times"), "streams"),
        (drop("series", "loss", "step", 0), "series.loss"), (drop("series", "loss", "value", 0), "series.loss"),
        (put([], "series", "loss", "runs"), "series.loss"),
        (put({"runs": [], "step": [], "value": []}, "series", "empty"), "series.empty"),
        (put([0, 0, 0], "series", "loss", "runs", 0), "series.loss"),
        (put([0, 0, -1], "series", "loss", "runs", 0), "series.loss"),
        (put([0, 0, 2], "series", "loss", "runs", 0), "series.loss"),
        (put([1, 0, 1], "series", "loss", "runs", 0), "series.loss"),
        (put([-1, 0, 1], "series", "loss", "runs", 0), "series.loss"),
        (put([0, 3, 1], "series", "loss", "runs", 0), "series.loss"),
        (put([0, 0], "series", "loss", "runs", 0), "series"),
        (put([0, 0, True], "series", "loss", "runs", 0), "series"),
        (put([{"stream": 0, "batch": 9, "kind": "k", "time": 1}], "events"), "events.0"),
        (put([{"kind": "k", "time": 1}], "events"), "events.0"),
        (put([7], "events"), "events.0"),
    ],
)  # fmt: skip
def test_a_malformed_frame_is_refused_whole_and_named(change: Any, field: str) -> None:
    attempt = attempt_of()
    before = world(attempt)
    response = send(attempt, spoiled(change))
    assert response.status_code == 422, response.content
    problem = response.json()
    assert problem["errors"][0]["field"].startswith(field), problem
    assert world(attempt) == before


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"NaN", b'{"version":1,"stre', b"[" * 10_000])
def test_what_is_not_json_is_refused(body: bytes) -> None:
    attempt = attempt_of()
    assert send(attempt, gzip.compress(body)).status_code == 422
    assert not Stream.objects.exists()


def test_the_same_stream_twice_in_a_post_is_refused() -> None:
    attempt = attempt_of()
    stream = Spooled().log(1, loss=1.0)
    assert send(attempt, frame(stream, stream)).status_code == 422


def test_a_stream_that_changes_its_name_is_refused() -> None:
    attempt = attempt_of()
    reports.ingest(attempt.pk, post(Spooled(rank=0, uid="c" * 16).log(1, loss=1.0)))
    before = world(attempt)
    other = Spooled(rank=1, uid="c" * 16).log(1, loss=1.0).log(2, loss=1.0)
    assert send(attempt, frame((other, 1, 2))).status_code == 422
    assert world(attempt) == before


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"node": "', b'"node": "\xff'),
        (b'"loss"', b'"lo\xc3ss"'),
        (b'"kind": "k"', b'"kind": "\x80"'),
        (b'"kind": "k"', b'"kind": "k", "text": "\xe2\x82"'),
        (b'"kind": "k"', b'"kind": "\\ud800", "text": "\xf0\x9f"'),
    ],
)
def test_bytes_that_are_no_utf_8_are_refused(old: bytes, new: bytes) -> None:
    """These used to be answered with 500: msgspec raises an error that is not one of its own classes."""
    attempt = attempt_of()
    body = json.dumps(frame(Spooled().add_event("k").log(1, loss=1.0))).encode()
    assert old in body
    before = world(attempt)
    response = send(attempt, gzip.compress(body.replace(old, new)))
    assert response.status_code == 400, response.content
    assert "UTF-8" in response.json()["detail"]
    assert world(attempt) == before


def test_an_escape_cut_off_before_a_wide_letter_is_refused() -> None:
    """Repairing half of a surrogate pair would split the character."""
    attempt = attempt_of()
    body = json.dumps(frame(Spooled().add_event("k"))).encode().replace(b'"k"', '"\\ud8aé"'.encode())
    assert send(attempt, gzip.compress(body)).status_code == 422


def test_a_post_of_millions_of_empty_lists_is_refused_before_it_is_read() -> None:
    attempt = attempt_of()
    body = json.dumps(frame(Spooled().log(1, loss=1.0))).encode()[:-1] + b', "more": [' + b"[]," * 3_000_000 + b"[]]}"
    assert send(attempt, gzip.compress(body)).status_code == 413


def test_truncated_and_oversized_bodies() -> None:
    attempt = attempt_of()
    whole = packed(frame(Spooled().log(1, loss=1.0)))
    before = world(attempt)
    assert send(attempt, whole[:-5]).status_code == 422
    assert send(attempt, whole + b"more").status_code == 422
    assert send(attempt, b"no gzip at all").status_code == 422
    assert send(attempt, whole, encoding="br").status_code == 415
    bomb = gzip.compress(b" " * (INFLATED_BYTES + 1))
    assert len(bomb) < 20_000
    assert send(attempt, bomb).status_code == 413
    assert send(attempt, gzip.compress(os.urandom(COMPRESSED_BYTES))).status_code == 413
    many = {"runs": [[0, 0, wire.POINTS + 1]], "step": [1] * (wire.POINTS + 1), "value": [1] * (wire.POINTS + 1)}
    assert send(attempt, spoiled(put(many, "series", "many"))).status_code == 413
    assert world(attempt) == before
    assert send(attempt, whole).status_code == 200
    assert send(attempt, json.dumps(frame(Spooled(rank=1).log(1, loss=1.0))).encode(), encoding="").status_code == 200
