"""Intake: every point exactly once, whichever door and however often; bad posts change nothing."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jobs import reports, tasks, wire
from jobs.models import Attempt, Checkpoint, Event, Stream
from portal.models import Chunk, Series
from portal.series import codec, read, store
from tests.jobs.reporting import SECRET, Spooled, attempt_of, frame, job_of, packed, post
from training.spool import Header, Spool

pytestmark = pytest.mark.django_db


def stored(attempt: Attempt) -> dict[tuple[str, int, int, int], list[float]]:
    """Every value in the database by identity: more than one in a list is a point stored twice."""
    found: dict[tuple[str, int, int, int], list[float]] = {}
    rows = Chunk.objects.filter(series__owner_id=attempt.pk, series__column="", kind=Chunk.Kind.LOOSE)
    for name, incarnation, data in rows.order_by("id").values_list("series__name", "incarnation", "data"):
        for rank, points in codec.decode_loose(bytes(data)):
            for step, value in zip(points.step.tolist(), points.value.tolist(), strict=True):
                found.setdefault((name, incarnation, rank, step), []).append(value)
    return found


def world(attempt: Attempt) -> tuple[Any, ...]:
    """All that an intake may change."""
    attempt.refresh_from_db()
    row = {k: v for k, v in vars(attempt).items() if not k.startswith("_")}
    streams = list(Stream.objects.order_by("id").values())
    return row, streams, list(Event.objects.order_by("id").values()), list(Chunk.objects.order_by("id").values())


def send(attempt: Attempt, body: Any, *, secret: str = SECRET, encoding: str = "gzip") -> Any:
    data = body if isinstance(body, bytes) else packed(body)
    headers = {"Authorization": f"Bearer {secret}"} | ({"Content-Encoding": encoding} if encoding else {})
    return Client().post(
        f"/api/v1/attempts/{attempt.pk}/reports", data, content_type="application/json", headers=headers
    )


def test_points_events_and_progress_are_taken() -> None:
    attempt = attempt_of()
    stream = Spooled()
    stream.tell("run.started", steps=200, start_step=0).tell("phase", phase="step", step=0)
    stream.log(1, loss=2.5, step_seconds=0.1).log(2, loss=2.25, step_seconds=0.2)
    answer = reports.take(attempt.pk, post(stream))
    assert answer == reports.Answer({stream.uid: 4}, 1, True)
    attempt.refresh_from_db()
    assert (attempt.step, attempt.steps, attempt.phase, attempt.version) == (2, 200, "step", 1)
    assert attempt.latest == {"loss": 2.25, "step_seconds": 0.2}
    assert attempt.last_report_at is not None
    assert stored(attempt)["loss", 0, 0, 2] == [2.25]
    assert list(Event.objects.values_list("kind", "rank", "incarnation")) == [("run.started", 0, 0), ("phase", 0, 0)]
    assert store.names([reports.owner_of(attempt.pk)]) == ["loss", "step_seconds"]


def test_the_same_post_again_changes_nothing() -> None:
    attempt = attempt_of()
    sent = post(Spooled().log(1, loss=1.0).tell("phase", phase="step", step=1))
    first = reports.take(attempt.pk, sent)
    before = world(attempt)
    assert reports.take(attempt.pk, sent) == reports.Answer(first.streams, first.version, False)
    assert world(attempt) == before


def test_one_stream_out_of_place_does_not_hold_up_the_others() -> None:
    attempt = attempt_of()
    good, ahead = Spooled(rank=0).log(1, loss=1.0), Spooled(rank=1).log(1, loss=2.0).log(2, loss=3.0)
    answer = reports.take(attempt.pk, post(good, (ahead, 1, 2)))
    assert answer.streams == {good.uid: 1, ahead.uid: 0}
    assert set(stored(attempt)) == {("loss", 0, 0, 1)}
    answer = reports.take(attempt.pk, post((ahead, 0, 2)))
    assert answer.streams == {ahead.uid: 2}
    assert set(stored(attempt)) == {("loss", 0, 0, 1), ("loss", 0, 1, 1), ("loss", 0, 1, 2)}


def test_an_ended_stream_is_known_as_such() -> None:
    attempt = attempt_of()
    stream = Spooled(ended=True).log(1, loss=1.0)
    reports.take(attempt.pk, post((stream, 0, 1)))
    assert Stream.objects.get().ended
    late = Spooled(rank=1, ended=True).log(1, loss=1.0)
    late.ended = False
    reports.take(attempt.pk, post(late))
    late.ended = True
    assert reports.take(attempt.pk, post((late, 1, 1))).taken, "an end without batches counts"
    assert Stream.objects.filter(ended=True).count() == 2


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_any_cutting_repeating_and_reordering_stores_each_identity_once(data: st.DataObject) -> None:
    """The property that everything hangs on: a shipper that obeys the cursors, over a network that does anything."""
    attempt = attempt_of(job_of())
    streams = []
    for incarnation, rank in itertools.product(range(2), range(2)):
        stream = Spooled(rank=rank, incarnation=incarnation)
        for i in range(data.draw(st.integers(1, 6))):
            stream.log(3 * incarnation + i, loss=rank + i / 8).tell("note", number=i)
        streams.append(stream)
    cursors = {stream.uid: 0 for stream in streams}
    old: list[wire.Post] = []
    for _ in range(200):
        left = [s for s in streams if cursors[s.uid] < len(s.batches)]
        if not left:
            break
        cuts = []
        for stream in data.draw(st.lists(st.sampled_from(left), min_size=1, unique_by=lambda s: s.uid)):
            first = data.draw(st.sampled_from([cursors[stream.uid], cursors[stream.uid], 0, 1]))
            stop = data.draw(st.integers(first, len(stream.batches))) if first <= len(stream.batches) else first
            cuts.append((stream, first, stop))
        sent = post(*cuts)
        old.append(sent)
        for one in [sent, *data.draw(st.lists(st.sampled_from(old), max_size=2))]:
            cursors |= reports.take(attempt.pk, one).streams
    else:
        for stream in streams:  # an unlucky draw: the rest in one go
            reports.take(attempt.pk, post((stream, cursors[stream.uid], len(stream.batches))))
    expected = {
        ("loss", s.incarnation, s.rank, step): [value]
        for s in streams
        for batch in s.batches
        for step, value in batch.series.get("loss", [])
    }
    assert stored(attempt) == expected
    told = Event.objects.filter(attempt=attempt, kind="note").count()
    assert told == sum(len(s.batches) // 2 for s in streams)
    for rank in range(2):
        line = read.curve([reports.owner_of(attempt.pk)], "loss", rank=rank, points=None)
        steps = line.step.tolist()
        assert steps == sorted({step for _, _, r, step in expected if r == rank}), "each step once"


def test_what_is_not_finite_is_kept() -> None:
    attempt = attempt_of()
    values = [math.nan, math.inf, -math.inf, 1e308, 5e-324, 0.1]
    stream = Spooled()
    for step, value in enumerate(values):
        stream.log(step, loss=value)
    reports.take(attempt.pk, post(stream))
    kept = [stored(attempt)["loss", 0, 0, step][0] for step in range(len(values))]
    assert [str(v) for v in kept] == [str(v) for v in values]
    reports.take(attempt.pk, post(Spooled(rank=0, uid="a" * 16).log(9, loss=math.nan)))
    attempt.refresh_from_db()
    assert attempt.latest == {"loss": "NaN"}


def test_steps_out_of_order_are_kept_and_the_last_word_on_a_step_wins() -> None:
    attempt = attempt_of()
    stream = Spooled().log(5, loss=5.0).log(3, loss=3.0).log(5, loss=5.5)
    reports.take(attempt.pk, post(stream))
    line = read.curve([reports.owner_of(attempt.pk)], "loss")
    assert line.step.tolist() == [3, 5]
    assert line.value is not None
    assert line.value.tolist() == [3.0, 5.5]


def test_a_node_whose_clock_is_slow_is_not_taken_for_silent() -> None:
    """Its times are from 1970: only the portal's clock tells that it still reports, so no short chunk is made."""
    attempt = attempt_of()
    stream = Spooled()
    for step in range(1, 5):
        stream.log(step, loss=1.0)
        reports.take(attempt.pk, post(stream))
    kinds = Chunk.objects.order_by("kind").values_list("kind", flat=True).distinct()
    tasks.compact()
    assert list(kinds.all()) == [Chunk.Kind.LOOSE]
    Attempt.objects.update(last_report_at=timezone.now() - timedelta(minutes=11))
    tasks.compact()
    assert list(kinds.all()) == [Chunk.Kind.MERGED]


def test_a_superseded_incarnation_does_not_move_the_attempt_back() -> None:
    attempt = attempt_of()
    reports.take(attempt.pk, post(Spooled(incarnation=0).log(50, loss=1.0)))
    reports.take(attempt.pk, post(Spooled(incarnation=1).log(40, loss=2.0)))
    reports.take(attempt.pk, post(Spooled(incarnation=0, uid="b" * 16).log(51, loss=3.0)))
    attempt.refresh_from_db()
    assert (attempt.incarnation, attempt.step, attempt.latest) == (1, 40, {"loss": 2.0})


def test_a_launcher_has_no_say_in_the_step() -> None:
    attempt = attempt_of()
    launcher = Spooled(rank=-1).log(1_700_000_000, cpu_cores=3.5).tell("progress", step=9, steps=10)
    reports.take(attempt.pk, post(launcher, Spooled().log(4, loss=1.0)))
    attempt.refresh_from_db()
    assert (attempt.step, attempt.steps, attempt.latest) == (4, None, {"loss": 1.0})
    assert stored(attempt)["cpu_cores", 0, -1, 1_700_000_000] == [3.5]


def test_a_committed_checkpoint_is_registered_once() -> None:
    attempt = attempt_of()
    stream = Spooled().tell("checkpoint.committed", step=100, generation=1, name="step-100", bytes=10, seconds=0.5)
    reports.take(attempt.pk, post(stream))
    reports.take(attempt.pk, post(stream))
    assert list(Checkpoint.objects.values_list("step", "generation", "name")) == [(100, 1, "step-100")]


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
    answer = reports.take(attempt.pk, wire.parse(json.dumps(spoiled(change)).encode()))
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
    reports.take(attempt.pk, wire.parse(body.encode()))
    assert Stream.objects.get().quarantined == 1


def test_a_name_that_is_none_is_quarantined() -> None:
    for name in ("", "../etc", "a" * 129, "nul\x00", "ein Name", "\N{SNOWMAN}"):
        attempt = attempt_of(job_of())
        body = frame(Spooled().log(1, loss=1.0).log(2, **{name: 1.0}))
        reports.take(attempt.pk, wire.parse(json.dumps(body).encode()))
        assert set(stored(attempt)) == {("loss", 0, 0, 1)}, name
        assert Event.objects.filter(attempt=attempt, kind="report.quarantined").exists()


def test_a_nul_in_a_text_does_not_lose_the_event() -> None:
    attempt = attempt_of()
    reports.take(attempt.pk, post(Spooled().tell("run.failed", error="a\x00b", nested={"k\x00": ["\x00"]})))
    assert Event.objects.get(kind="run.failed").data == {"error": "a\ufffdb", "nested": {"k\ufffd": ["\ufffd"]}}


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("depth", [64, 100, 300, 450])
def test_a_deep_event_is_quarantined(depth: int) -> None:
    attempt = attempt_of()
    stream = Spooled().tell("deep", data=nested(depth)).log(5, loss=1.0)
    assert send(attempt, frame(stream)).json()["streams"] == {stream.uid: 2}
    assert Event.objects.get().kind == "report.quarantined"
    assert len(stored(attempt)) == 1


def test_the_deepest_event_is_kept() -> None:
    reports.take(attempt_of().pk, post(Spooled().tell("deep", data=nested(63))))
    assert Event.objects.get().data == {"data": nested(63)}


@pytest.mark.parametrize("depth", [64, 485, 20_000])
def test_a_deep_event_in_a_spool_is_passed(depth: int, tmp_path: Path) -> None:
    attempt = attempt_of(directory="attempt-1")
    path = spool(tmp_path, Spooled(rank=0).tell("deep", data="?").log(5, loss=1.0))
    path.write_text(path.read_text().replace('"?"', "[" * depth + "]" * depth))
    assert reports.sweep(attempt, tmp_path) == 2
    assert Event.objects.get().kind == "report.damaged"
    assert len(stored(attempt)) == 1


def test_half_a_surrogate_pair_does_not_lose_the_event() -> None:
    attempt = attempt_of()
    sent = Spooled().tell("run.failed", error=os.fsdecode(b"no file caf\xe9")).tell("note", text="\U0001f600 \\ud800")
    reports.take(attempt.pk, post(sent))
    assert Event.objects.get(kind="run.failed").data == {"error": "no file caf\ufffd"}
    assert Event.objects.get(kind="note").data == {"text": "\U0001f600 \\ud800"}


def test_what_the_spool_parser_found_damaged_is_counted() -> None:
    attempt = attempt_of()
    reports.take(attempt.pk, post(Spooled().tell("report.damaged", seq=0, problem="?").log(1, loss=1.0)))
    assert Stream.objects.get().quarantined == 1
    assert stored(attempt)


def test_too_many_series_leave_the_first_ones_and_one_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "SERIES", 3)
    attempt = attempt_of()
    stream = Spooled().log(1, **{f"s{i}": 1.0 for i in range(5)}).log(2, **{f"s{i}": 1.0 for i in range(6)})
    for cut in ((stream, 0, 1), (stream, 1, 2)):
        reports.take(attempt.pk, post(cut))
    assert Series.objects.count() == 3
    assert {key[0] for key in stored(attempt)} == {"s0", "s1", "s2"}
    assert {key[3] for key in stored(attempt)} == {1, 2}
    assert Event.objects.filter(kind="report.too_many_series").count() == 1


def test_too_many_events_are_dropped_with_one_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "EVENTS", 3)
    attempt = attempt_of()
    stream = Spooled()
    for i in range(6):
        stream.tell("note", number=i)
    reports.take(attempt.pk, post((stream, 0, 5)))
    reports.take(attempt.pk, post((stream, 5, 6)))
    assert Event.objects.filter(kind="note").count() == 3
    assert Event.objects.filter(kind="report.too_many_events").count() == 1


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


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff", b"NaN", b'{"version":1,"stre', b"[" * 10_000])
def test_what_is_not_json_is_refused(body: bytes) -> None:
    attempt = attempt_of()
    assert send(attempt, gzip.compress(body)).status_code == 422
    assert not Stream.objects.exists()


def test_the_same_stream_twice_in_one_post_is_refused() -> None:
    attempt = attempt_of()
    stream = Spooled().log(1, loss=1.0)
    assert send(attempt, frame(stream, stream)).status_code == 422


def test_a_stream_that_changes_its_name_is_refused() -> None:
    attempt = attempt_of()
    reports.take(attempt.pk, post(Spooled(rank=0, uid="c" * 16).log(1, loss=1.0)))
    before = world(attempt)
    other = Spooled(rank=1, uid="c" * 16).log(1, loss=1.0).log(2, loss=1.0)
    assert send(attempt, frame((other, 1, 2))).status_code == 422
    assert world(attempt) == before


def test_truncated_and_oversized_bodies() -> None:
    attempt = attempt_of()
    whole = packed(frame(Spooled().log(1, loss=1.0)))
    before = world(attempt)
    assert send(attempt, whole[:-5]).status_code == 422
    assert send(attempt, whole + b"more").status_code == 422
    assert send(attempt, b"no gzip at all").status_code == 422
    assert send(attempt, whole, encoding="br").status_code == 415
    bomb = gzip.compress(b" " * (wire.INFLATED_BYTES + 1))
    assert len(bomb) < 20_000
    assert send(attempt, bomb).status_code == 413
    assert send(attempt, gzip.compress(os.urandom(wire.COMPRESSED_BYTES))).status_code == 413
    many = {"runs": [[0, 0, wire.POINTS + 1]], "step": [1] * (wire.POINTS + 1), "value": [1] * (wire.POINTS + 1)}
    assert send(attempt, spoiled(put(many, "series", "many"))).status_code == 413
    assert world(attempt) == before
    assert send(attempt, whole).status_code == 200
    assert send(attempt, json.dumps(frame(Spooled(rank=1).log(1, loss=1.0))).encode(), encoding="").status_code == 200


def test_only_the_attempts_own_living_token_opens_the_door() -> None:
    attempt, other = attempt_of(), attempt_of(job_of(), secret="another's")
    body = frame(Spooled().log(1, loss=1.0))
    before = world(attempt)
    for secret in ("another's", "", "x"):
        response = send(attempt, body, secret=secret)
        assert response.status_code == 401
        assert "WWW-Authenticate" in response
    assert send(other, body).status_code == 401
    Attempt.objects.filter(pk=attempt.pk).update(token_digest="")
    assert send(attempt, body, secret="").status_code == 401
    Attempt.objects.filter(pk=attempt.pk).update(token_digest=before[0]["token_digest"], closed_at=timezone.now())
    assert send(attempt, body).status_code == 401
    Attempt.objects.filter(pk=attempt.pk).update(closed_at=None)
    attempt.pk += 1000
    assert send(attempt, body).status_code == 401
    assert not Stream.objects.exists()


def test_the_answer_over_http() -> None:
    attempt = attempt_of()
    stream = Spooled().log(1, loss=1.0)
    response = send(attempt, frame(stream))
    assert response.status_code == 200
    assert response.json() == {"streams": {stream.uid: 1}, "version": 1}
    # A cursor is obeyed even when it is lower than the shipper's: here it believes that 7 batches were taken.
    ahead = {**frame(stream)["streams"][0], "first": 7}
    assert send(attempt, {"version": 1, "streams": [ahead]}).json()["streams"] == {stream.uid: 1}


# -- the sweep -------------------------------------------------------------------------------------------------------


def spool(root: Path, stream: Spooled, *, torn: bytes = b"", end: bool = False) -> Path:
    """The file that the stream's rank left behind."""
    folder = root / "job" / "attempt-1" / "spool"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stream.incarnation}.{stream.rank}.{stream.uid}.jsonl"
    header = {
        "stream": stream.uid, "version": 1, "incarnation": stream.incarnation, "rank": stream.rank,
        "node": "n", "boot_id": "b", "restart_count": 0, "time": 1000.0,
    }  # fmt: skip
    lines: list[dict[str, Any]] = [header]
    for seq, batch in enumerate(stream.batches):
        lines.append({"seq": seq, "time": batch.time, "series": batch.series, "events": batch.events})
    if end:
        lines.append({"end": True, "seq": len(stream.batches), "time": 1.0})
    path.write_bytes(b"".join(json.dumps(line).encode() + b"\n" for line in lines) + torn)
    return path


def test_a_sweep_takes_what_was_never_posted_and_only_that(tmp_path: Path) -> None:
    attempt = attempt_of(directory="attempt-1")
    posted, unknown = Spooled(rank=0), Spooled(rank=1)
    for step in range(200):
        posted.log(step, loss=step / 2).tell("note", number=step)
        unknown.log(step, loss=step / 4)
    reports.take(attempt.pk, post((posted, 0, 150)))
    spool(tmp_path, posted, torn=b'{"seq": 400, "ser')
    spool(tmp_path, unknown, end=True)
    assert reports.sweep(attempt, tmp_path) == 250 + 200
    found = stored(attempt)
    assert len(found) == 400
    assert all(len(values) == 1 for values in found.values())
    assert dict(Stream.objects.values_list("rank", "ended")) == {0: False, 1: True}
    before = world(attempt)
    assert reports.sweep(attempt, tmp_path) == 0
    assert world(attempt) == before


def test_a_sweep_goes_on_where_the_one_before_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a job that was killed: no end line, nearly everything posted. Nothing is counted a second time."""
    attempt = attempt_of(directory="attempt-1")
    stream = Spooled()
    for step in range(300):
        stream.log(step, loss=step / 2)
    reports.take(attempt.pk, post((stream, 0, 290)))
    path = spool(tmp_path, stream)
    assert reports.sweep(attempt, tmp_path) == 10
    row = Stream.objects.get()
    assert (row.next_seq, row.place_seq, row.place_offset) == (300, 300, path.stat().st_size)
    monkeypatch.setattr(Spool, "_leap", None)
    stream.log(300, loss=1.0)
    spool(tmp_path, stream)
    assert reports.sweep(attempt, tmp_path) == 1
    assert Stream.objects.get().place_seq == 301


def test_a_sweep_of_hostile_spools_takes_the_good_one(tmp_path: Path) -> None:
    attempt = attempt_of(directory="attempt-1")
    good = spool(tmp_path, Spooled(rank=0).log(1, loss=1.0))
    folder = good.parent
    (folder / f"0.1.{'1' * 16}.jsonl").symlink_to(good)
    os.mkfifo(folder / f"0.2.{'2' * 16}.jsonl")
    (folder / f"0.3.{'3' * 16}.jsonl").mkdir()
    (folder / f"0.4.{'4' * 16}.jsonl").write_bytes(b"{}\n")
    sparse = folder / f"0.5.{'5' * 16}.jsonl"
    with sparse.open("wb") as file:
        file.truncate(1 << 40)
    stranger = Spooled(rank=6)
    stranger.batches.append(stranger.log(1, loss=1.0).batches[0])
    spool(tmp_path, stranger).write_text('{"stream": "nonsense"}\n' * 3)
    spool(tmp_path, Spooled(rank=7).tell("weird", text="\ud800", big=2**70).log(2, loss=2.0))
    reports.sweep(attempt, tmp_path)
    assert set(stored(attempt)) == {("loss", 0, 0, 1), ("loss", 0, 7, 2)}
    assert Event.objects.get(kind="weird").data == {"text": "\ufffd", "big": 2**70}


def test_a_node_with_half_a_surrogate_pair_is_swept(tmp_path: Path) -> None:
    attempt = attempt_of(directory="attempt-1")
    path = spool(tmp_path, Spooled(rank=0).log(1, loss=1.0))
    path.write_text(path.read_text().replace('"node": "n"', r'"node": "n\udc80"'))
    assert reports.sweep(attempt, tmp_path) == 1
    assert Stream.objects.get().node == "n\ufffd"


def test_a_stream_that_nobody_can_take_does_not_hold_up_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = attempt_of(directory="attempt-1")
    for rank in range(3):
        spool(tmp_path, Spooled(rank=rank).log(1, loss=1.0))
    of_spool = wire.of_spool

    def failing(header: Header, batches: Any, *, end: bool) -> wire.Post:
        if header.rank == 1:
            raise KeyError("something that nobody thought of")
        return of_spool(header, batches, end=end)

    monkeypatch.setattr(wire, "of_spool", failing)
    assert reports.sweep(attempt, tmp_path) == 2
    assert {rank for _, _, rank, _ in stored(attempt)} == {0, 2}


def test_a_spool_folder_that_leads_elsewhere_is_not_followed(tmp_path: Path) -> None:
    attempt = attempt_of(directory="attempt-1")
    elsewhere = tmp_path / "elsewhere"
    spool(elsewhere, Spooled().log(1, loss=1.0))
    (tmp_path / "run" / "job").mkdir(parents=True)
    (tmp_path / "run" / "job" / "attempt-1").symlink_to(elsewhere / "job" / "attempt-1")
    assert reports.sweep(attempt, tmp_path / "run") == 0
    attempt.directory = ""
    assert reports.sweep(attempt, tmp_path / "run") == 0
    assert not Stream.objects.exists()


def test_a_closed_attempt_is_not_swept(tmp_path: Path) -> None:
    attempt = attempt_of(directory="attempt-1", closed_at=timezone.now())
    spool(tmp_path, Spooled().log(1, loss=1.0))
    assert reports.sweep(attempt, tmp_path) == 0


def test_pace_counts_wall_time_and_survives_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds a step as the clock saw them: 1 s a step at first, then 600 s of silence in which 300 were done."""
    attempt = attempt_of()
    stream = Spooled()
    now = timezone.now()
    for sent, (seconds, step) in enumerate([(0, 1), (10, 11), (20, 21), (620, 321)]):
        monkeypatch.setattr(timezone, "now", lambda at=now + timedelta(seconds=seconds): at)
        reports.take(attempt.pk, post((stream.log(step, loss=1.0), sent, sent + 1)))
        attempt.refresh_from_db()
        if seconds == 20:
            assert attempt.pace_seconds / attempt.pace_steps == pytest.approx(1.0)
    assert attempt.pace_seconds / attempt.pace_steps == pytest.approx(2.0, rel=0.01)
