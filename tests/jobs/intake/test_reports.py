"""Test intake: every point exactly once, by whichever route and however often it is sent."""

from __future__ import annotations

import itertools
import math
from datetime import timedelta

import pytest
from django.utils import timezone
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jobs import tasks
from jobs.intake import reports, wire
from jobs.models import Attempt, Checkpoint, Event, Stream
from portal.models import Chunk, Series
from portal.series import read, store
from tests.examples import examples
from tests.jobs.reporting import Spooled, attempt_of, frame, job_of, post, send, stored, world

pytestmark = pytest.mark.django_db


def test_points_events_and_progress_are_taken() -> None:
    attempt = attempt_of()
    stream = Spooled()
    stream.add_event("run.started", steps=200, start_step=0).add_event("phase", phase="step", step=0)
    stream.log(1, loss=2.5, step_seconds=0.1).log(2, loss=2.25, step_seconds=0.2)
    answer = reports.ingest(attempt.pk, post(stream))
    assert answer == reports.ReportResponse({stream.uid: 4}, 1, True)
    attempt.refresh_from_db()
    assert (attempt.step, attempt.steps, attempt.phase, attempt.version) == (2, 200, "step", 1)
    assert attempt.latest == {"loss": 2.25, "step_seconds": 0.2}
    assert attempt.last_report_at is not None
    assert stored(attempt)["loss", 0, 0, 2] == [2.25]
    assert list(Event.objects.values_list("kind", "rank", "incarnation")) == [("run.started", 0, 0), ("phase", 0, 0)]
    assert store.names([reports.owner_of(attempt.pk)]) == ["loss", "step_seconds"]


def test_the_same_post_again_changes_nothing() -> None:
    attempt = attempt_of()
    sent = post(Spooled().log(1, loss=1.0).add_event("phase", phase="step", step=1))
    first = reports.ingest(attempt.pk, sent)
    before = world(attempt)
    assert reports.ingest(attempt.pk, sent) == reports.ReportResponse(first.streams, first.version, False)
    assert world(attempt) == before


def test_a_stream_out_of_place_does_not_hold_up_the_others() -> None:
    attempt = attempt_of()
    good, ahead = Spooled(rank=0).log(1, loss=1.0), Spooled(rank=1).log(1, loss=2.0).log(2, loss=3.0)
    answer = reports.ingest(attempt.pk, post(good, (ahead, 1, 2)))
    assert answer.streams == {good.uid: 1, ahead.uid: 0}
    assert set(stored(attempt)) == {("loss", 0, 0, 1)}
    answer = reports.ingest(attempt.pk, post((ahead, 0, 2)))
    assert answer.streams == {ahead.uid: 2}
    assert set(stored(attempt)) == {("loss", 0, 0, 1), ("loss", 0, 1, 1), ("loss", 0, 1, 2)}


def test_an_ended_stream_is_recorded_as_such() -> None:
    attempt = attempt_of()
    stream = Spooled(ended=True).log(1, loss=1.0)
    reports.ingest(attempt.pk, post((stream, 0, 1)))
    assert Stream.objects.get().ended
    late = Spooled(rank=1, ended=True).log(1, loss=1.0)
    late.ended = False
    reports.ingest(attempt.pk, post(late))
    late.ended = True
    assert reports.ingest(attempt.pk, post((late, 1, 1))).taken, "an end without batches counts"
    assert Stream.objects.filter(ended=True).count() == 2


@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
@pytest.mark.lengthy
def test_any_cutting_repeating_and_reordering_stores_each_identity_once(data: st.DataObject) -> None:
    """Test the central property: a shipper that obeys the cursors, over a network with any fault."""
    attempt = attempt_of(job_of())
    streams = []
    for incarnation, rank in itertools.product(range(2), range(2)):
        stream = Spooled(rank=rank, incarnation=incarnation)
        for i in range(data.draw(st.integers(1, 6))):
            stream.log(3 * incarnation + i, loss=rank + i / 8).add_event("note", number=i)
        streams.append(stream)
    cursors = {stream.uid: 0 for stream in streams}
    old: list[wire.ReportPost] = []
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
        for item in [sent, *data.draw(st.lists(st.sampled_from(old), max_size=2))]:
            cursors |= reports.ingest(attempt.pk, item).streams
    else:
        for stream in streams:  # an unlucky draw: the rest in one go
            reports.ingest(attempt.pk, post((stream, cursors[stream.uid], len(stream.batches))))
    expected = {
        ("loss", s.incarnation, s.rank, step): [value]
        for s in streams
        for batch in s.batches
        for step, value in batch.series.get("loss", [])
    }
    assert stored(attempt) == expected
    report = Event.objects.filter(attempt=attempt, kind="note").count()
    assert report == sum(len(s.batches) // 2 for s in streams)
    for rank in range(2):
        line = read.curve([reports.owner_of(attempt.pk)], "loss", rank=rank, points=None)
        steps = line.step.tolist()
        assert steps == sorted({step for _, _, r, step in expected if r == rank}), "each step once"


def test_what_is_not_finite_is_stored() -> None:
    attempt = attempt_of()
    values = [math.nan, math.inf, -math.inf, 1e308, 5e-324, 0.1]
    stream = Spooled()
    for step, value in enumerate(values):
        stream.log(step, loss=value)
    reports.ingest(attempt.pk, post(stream))
    retained = [stored(attempt)["loss", 0, 0, step][0] for step in range(len(values))]
    assert [str(v) for v in retained] == [str(v) for v in values]
    reports.ingest(attempt.pk, post(Spooled(rank=0, uid="a" * 16).log(9, loss=math.nan)))
    attempt.refresh_from_db()
    assert attempt.latest == {"loss": "NaN"}


def test_steps_out_of_order_are_stored_and_the_last_value_of_a_step_wins() -> None:
    attempt = attempt_of()
    stream = Spooled().log(5, loss=5.0).log(3, loss=3.0).log(5, loss=5.5)
    reports.ingest(attempt.pk, post(stream))
    line = read.curve([reports.owner_of(attempt.pk)], "loss")
    assert line.step.tolist() == [3, 5]
    assert line.value is not None
    assert line.value.tolist() == [3.0, 5.5]


def test_a_node_whose_clock_is_slow_is_not_taken_for_silent() -> None:
    """Its times are from 1970: only the portal's clock shows that it still reports, so no short chunk is made."""
    attempt = attempt_of()
    stream = Spooled()
    for step in range(1, 5):
        stream.log(step, loss=1.0)
        reports.ingest(attempt.pk, post(stream))
    kinds = Chunk.objects.order_by("kind").values_list("kind", flat=True).distinct()
    tasks.compact()
    assert list(kinds.all()) == [Chunk.Kind.LOOSE]
    Attempt.objects.update(last_report_at=timezone.now() - timedelta(minutes=11))
    tasks.compact()
    assert list(kinds.all()) == [Chunk.Kind.MERGED]


def test_a_superseded_incarnation_does_not_move_the_attempt_back() -> None:
    attempt = attempt_of()
    reports.ingest(attempt.pk, post(Spooled(incarnation=0).log(50, loss=1.0)))
    reports.ingest(attempt.pk, post(Spooled(incarnation=1).log(40, loss=2.0)))
    reports.ingest(attempt.pk, post(Spooled(incarnation=0, uid="b" * 16).log(51, loss=3.0)))
    attempt.refresh_from_db()
    assert (attempt.incarnation, attempt.step, attempt.latest) == (1, 40, {"loss": 2.0})


def test_a_launcher_cannot_change_the_step() -> None:
    attempt = attempt_of()
    launcher = Spooled(rank=-1).log(1_700_000_000, cpu_cores=3.5).add_event("progress", step=9, steps=10)
    reports.ingest(attempt.pk, post(launcher, Spooled().log(4, loss=1.0)))
    attempt.refresh_from_db()
    assert (attempt.step, attempt.steps, attempt.latest) == (4, None, {"loss": 1.0})
    assert stored(attempt)["cpu_cores", 0, -1, 1_700_000_000] == [3.5]


def test_a_committed_checkpoint_is_registered_once() -> None:
    attempt = attempt_of()
    stream = Spooled().add_event("checkpoint.committed", step=100, generation=1, name="step-100", bytes=10, seconds=0.5)
    reports.ingest(attempt.pk, post(stream))
    reports.ingest(attempt.pk, post(stream))
    assert list(Checkpoint.objects.values_list("step", "generation", "name")) == [(100, 1, "step-100")]


def test_too_many_series_leave_the_first_and_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "SERIES", 3)
    attempt = attempt_of()
    stream = Spooled().log(1, **{f"s{i}": 1.0 for i in range(5)}).log(2, **{f"s{i}": 1.0 for i in range(6)})
    for cut in ((stream, 0, 1), (stream, 1, 2)):
        reports.ingest(attempt.pk, post(cut))
    assert Series.objects.count() == 3
    assert {key[0] for key in stored(attempt)} == {"s0", "s1", "s2"}
    assert {key[3] for key in stored(attempt)} == {1, 2}
    assert Event.objects.filter(kind="report.too_many_series").count() == 1


def test_too_many_events_are_dropped_with_a_single_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "EVENTS", 3)
    attempt = attempt_of()
    stream = Spooled()
    for i in range(6):
        stream.add_event("note", number=i)
    reports.ingest(attempt.pk, post((stream, 0, 5)))
    reports.ingest(attempt.pk, post((stream, 5, 6)))
    assert Event.objects.filter(kind="note").count() == 3
    assert Event.objects.filter(kind="report.too_many_events").count() == 1


def test_progress_at_every_step_takes_no_room_from_what_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks that reported each of their steps once filled an attempt's events; its checkpoints went missing."""
    monkeypatch.setattr(reports, "EVENTS", 3)
    monkeypatch.setattr(reports, "MAX_PROGRESS", 4)
    attempt = attempt_of()
    stream, sent = Spooled(), 0
    for till in range(5, 31, 5):
        for step in range(till - 5, till):
            stream.add_event("progress", step=step, steps=100)
        reports.ingest(attempt.pk, post((stream, sent, till)))
        sent = till
    stood = Event.objects.filter(kind="progress").values_list("data__step", flat=True)
    assert list(stood) == [4, 9, 14, 19], "the last of each post, as many as there is room for"
    attempt.refresh_from_db()
    assert (attempt.step, attempt.steps) == (29, 100), "it is known all the same"
    reports.ingest(attempt.pk, post((stream.add_event("note", number=1), 30, 31)))
    assert Event.objects.filter(kind="note").exists()
    assert not Event.objects.filter(kind="report.too_many_events").exists()


def test_only_the_attempts_living_token_opens_the_door() -> None:
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


def test_pace_does_not_count_what_was_done_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that restores a checkpoint reports step 0 until it has."""
    attempt = attempt_of()
    stream = Spooled()
    now = timezone.now()
    for second in range(4):
        monkeypatch.setattr(timezone, "now", lambda at=now + timedelta(seconds=10 * second): at)
        if second == 0:
            stream.add_event("phase", phase="restore", step=0)
        elif second == 1:
            stream.add_event("run.started", steps=2000, start_step=900)
        else:
            stream.log(900 + 10 * (second - 1), loss=1.0)
        reports.ingest(attempt.pk, post((stream, second, second + 1)))
        attempt.refresh_from_db()
        assert (attempt.step, attempt.phase) == (None if second == 0 else 890 + 10 * max(second, 1), "restore")
    assert attempt.pace_seconds / attempt.pace_steps == pytest.approx(1.0)


def test_pace_counts_wall_time_and_survives_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds a step as the clock saw them: 1 s a step at first, then 600 s of silence in which 300 were done."""
    attempt = attempt_of()
    stream = Spooled()
    now = timezone.now()
    for sent, (seconds, step) in enumerate([(0, 1), (10, 11), (20, 21), (620, 321)]):
        monkeypatch.setattr(timezone, "now", lambda at=now + timedelta(seconds=seconds): at)
        reports.ingest(attempt.pk, post((stream.log(step, loss=1.0), sent, sent + 1)))
        attempt.refresh_from_db()
        if seconds == 20:
            assert attempt.pace_seconds / attempt.pace_steps == pytest.approx(1.0)
    assert attempt.pace_seconds / attempt.pace_steps == pytest.approx(2.0, rel=0.01)
