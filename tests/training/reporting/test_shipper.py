"""Test that every report arrives once, whatever happens between the spool and the portal."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.training.intake import Server
from tests.training.reporting.shipped import losses, reporter_of
from tests.waiting import until
from training import shipper as shipping
from training.shipper import Shipper

_opened: list[Shipper] = []


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(shipping, "GAP_SECONDS", 0.0)
    monkeypatch.setattr(shipping, "MAX_WAIT", 0.02)
    yield
    while _opened:
        _opened.pop().close()


def _shipper(attempt: Path, *, node: str = "dgx01") -> Shipper:
    _opened.append(Shipper(attempt.parent.parent, attempt, node=node))
    return _opened[-1]


def _ship(shipper: Shipper) -> None:
    """Work until the portal has everything on disk."""
    until(lambda: not shipper.work() and shipper.is_done, "everything to be shipped", at_most_s=0.001)


def test_streams_of_a_node_travel_in_a_single_post(server: Server, attempt: Path) -> None:
    server.leave_token(attempt.parent.parent)
    for rank in range(4):
        reporter = reporter_of(attempt, rank)
        reporter.log(1, loss=float("nan") if rank == 3 else rank, gradient_norm=1.0)
        reporter.event("run.started", world_size=4)
        reporter.close()
    _ship(_shipper(attempt))
    assert len(server.intake.posts[0]["streams"]) == 4
    assert losses(server) == [(0, 1, 0.0), (1, 1, 1.0), (2, 1, 2.0), (3, 1, "NaN")]
    assert [event["kind"] for event in server.intake.events] == ["run.started"] * 4
    assert len(server.intake.ended) == 4


def test_streams_of_other_nodes_are_left_to_their_shippers(server: Server, attempt: Path) -> None:
    server.leave_token(attempt.parent.parent)
    for rank, node in ((0, "dgx01"), (1, "dgx02")):
        reporter = reporter_of(attempt, rank, node=node)
        reporter.log(0, loss=rank)
        reporter.close()
    _ship(_shipper(attempt))
    assert losses(server) == [(0, 0, 0.0)]
    _ship(_shipper(attempt, node="dgx02"))
    assert losses(server) == [(0, 0, 0.0), (1, 0, 1.0)]


def test_a_stream_is_found_though_its_folder_seems_unchanged(
    server: Server, attempt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks may open theirs within a tick of the file system's clock, and the shipper look between them."""
    monkeypatch.setattr(shipping, "LIST_SECONDS", 0.0)
    server.leave_token(attempt.parent.parent)
    shipper = _shipper(attempt)
    for rank in range(2):
        reporter = reporter_of(attempt, rank)
        reporter.log(1, loss=rank)
        reporter.close()
        os.utime(attempt / "spool", (1, 1))
        _ship(shipper)
    assert losses(server) == [(0, 1, 0.0), (1, 1, 1.0)]


@pytest.mark.parametrize("submission", [{"scheduler_id": "2"}, {"restart_count": 1}])
def test_a_token_of_another_submission_is_not_used(
    server: Server, attempt: Path, submission: dict[str, object]
) -> None:
    """A requeued job waits for the token of the new attempt, and then ships from the beginning."""
    run_dir = attempt.parent.parent
    server.leave_token(run_dir, **submission)  # type: ignore[arg-type]
    reporter = reporter_of(attempt)
    reporter.log(0, loss=1.0)
    reporter.close()
    shipper = _shipper(attempt)
    for _ in range(20):
        shipper.work()
    assert server.intake.posts == []
    server.leave_token(run_dir)
    _ship(shipper)
    assert losses(server) == [(0, 0, 1.0)]


def test_an_answer_that_was_lost_doubles_nothing(server: Server, attempt: Path) -> None:
    server.leave_token(attempt.parent.parent)
    server.intake.forget = 2
    reporter = reporter_of(attempt)
    shipper = _shipper(attempt)
    for step in range(50):
        reporter.log(step, loss=step)
        if step % 10 == 9:
            assert reporter.flush(wait=10)
            _ship(shipper)
    reporter.close()
    _ship(shipper)
    assert losses(server) == [(0, step, float(step)) for step in range(50)]


def test_trouble_at_the_portal_is_waited_out(server: Server, attempt: Path) -> None:
    server.leave_token(attempt.parent.parent)
    server.intake.statuses = [500, 503, 429, 401, 404]
    reporter = reporter_of(attempt)
    reporter.log(0, loss=1.0)
    reporter.close()
    _ship(_shipper(attempt))
    assert losses(server) == [(0, 0, 1.0)]


def test_a_log_on_a_full_disk_is_no_trouble(server: Server, attempt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.leave_token(attempt.parent.parent)
    with contextlib.closing(reporter_of(attempt)) as reporter:
        reporter.log(1, loss=0.5)
    with io.TextIOWrapper(io.FileIO("/dev/full", "w"), write_through=True) as full:
        monkeypatch.setattr(sys, "stderr", full)
        _ship(_shipper(attempt))
    assert losses(server) == [(0, 1, 0.5)]


def test_a_lower_cursor_is_obeyed(server: Server, attempt: Path) -> None:
    """The portal came back from a backup: what it no longer has is sent again."""
    server.leave_token(attempt.parent.parent)
    reporter = reporter_of(attempt)
    shipper = _shipper(attempt)
    for step in range(20):
        reporter.log(step, loss=step)
        assert reporter.flush(wait=10)
        _ship(shipper)
    (stream,) = server.intake.cursors
    stored = server.intake.cursors[stream] = 5
    server.intake.points = [point for point in server.intake.points if point[0][4] < stored]
    before = len(server.intake.points)
    reporter.log(20, loss=20)
    reporter.close()
    _ship(shipper)
    assert before < 20
    assert losses(server) == [(0, step, float(step)) for step in range(21)]


def test_a_backlog_larger_than_a_post_is_cut(server: Server, attempt: Path) -> None:
    """Ten minutes' worth of eight ranks at ten steps a second while the portal was off, then all of it, once."""
    run_dir = attempt.parent.parent
    server.leave_token(run_dir)
    server.stop()
    shipper = _shipper(attempt)
    for rank in range(8):
        reporter = reporter_of(attempt, rank)
        for step in range(6_000):
            reporter.log(step, loss=step, step_seconds=0.1)
        reporter.event("checkpoint.committed", step=6_000)
        reporter.close()
        shipper.work()
    server.start()
    server.leave_token(run_dir)
    _ship(shipper)
    assert losses(server) == [(rank, step, float(step)) for rank in range(8) for step in range(6_000)]
    assert len(server.intake.identities()) == len(set(server.intake.identities())) == 96_000
    assert len(server.intake.events) == 8
    assert len(server.intake.posts) < 40


def test_a_post_that_is_refused_is_cut_down_to_the_batch_to_blame(server: Server, attempt: Path) -> None:
    """A batch that the portal rejects for good is named and skipped; everything else arrives."""
    server.leave_token(attempt.parent.parent)
    reporter = reporter_of(attempt)
    for step in range(8):
        reporter.log(step, loss=step)
        assert reporter.flush(wait=10)
    reporter.close()
    server.intake.statuses = [413, 422, 422, 422]
    _ship(_shipper(attempt))
    steps = [step for _, step, _ in losses(server)]
    assert len(steps) == len(set(steps)) >= 7
    refused = [event for event in server.intake.events if event["kind"] == "report.refused"]
    assert len(refused) == 8 - len(steps)
    assert len(server.intake.ended) == 1


def test_a_new_shipper_goes_on_where_the_portal_stands(
    server: Server, attempt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipping, "LARGE", 1000)
    server.leave_token(attempt.parent.parent)
    reporter = reporter_of(attempt)
    for step in range(100):
        reporter.log(step, loss=step)
        assert reporter.flush(wait=10)
    _ship(_shipper(attempt))
    sent = len(server.intake.posts)
    reporter.log(100, loss=100)
    reporter.close()
    _ship(_shipper(attempt))
    assert losses(server) == [(0, step, float(step)) for step in range(101)]
    again = server.intake.posts[sent:]
    assert sum(len(post["series"].get("loss", {"step": []})["step"]) for post in again) == 1


def test_damage_passes_through(server: Server, attempt: Path) -> None:
    server.leave_token(attempt.parent.parent)
    reporter = reporter_of(attempt)
    reporter.log(0, loss=0)
    assert reporter.flush(wait=10)
    (path,) = (attempt / "spool").iterdir()
    seq = path.read_text().count("\n") - 1
    with open(path, "a") as file:
        file.write("garbage\n" + json.dumps({"seq": seq + 1, "time": 1.0, "series": {"loss": [[1, 1]]}}) + "\n")
    _ship(_shipper(attempt))
    assert losses(server) == [(0, 0, 0.0), (0, 1, 1.0)]
    assert [event["kind"] for event in server.intake.events] == ["report.damaged"]
    path.unlink()
    reporter.close()


def test_a_shipper_that_is_not_to_post_does_not(server: Server, attempt: Path) -> None:
    """Nodes that cannot reach the portal do not post; at the end nobody waits for it."""
    server.leave_token(attempt.parent.parent, reports="tail")
    reporter = reporter_of(attempt)
    reporter.log(1, loss=1.0)
    reporter.close()
    shipper = _shipper(attempt)
    for _ in range(5):
        assert not shipper.work()
    assert shipper.is_done
    assert shipper.pause == shipping.IDLE_SECONDS
    assert server.intake.posts == []


def test_the_portal_may_change_its_mind(server: Server, attempt: Path) -> None:
    """It changes either way while the rank runs; every point is stored once, whoever takes it."""
    server.leave_token(attempt.parent.parent)
    reporter, shipper = reporter_of(attempt), _shipper(attempt)
    reporter.log(1, loss=1.0)
    reporter.flush()
    _ship(shipper)
    server.leave_token(attempt.parent.parent, reports="tail")
    reporter.log(2, loss=2.0)
    reporter.flush()
    assert not shipper.work()
    posts = len(server.intake.posts)
    shipper.work()
    assert len(server.intake.posts) == posts
    server.leave_token(attempt.parent.parent)
    reporter.log(3, loss=3.0)
    reporter.close()
    _ship(shipper)
    assert losses(server) == [(0, step, float(step)) for step in (1, 2, 3)]


def test_a_single_shipper_serves_every_node_if_configured(server: Server, attempt: Path) -> None:
    server.leave_token(attempt.parent.parent)
    for node in ("dgx01", "dgx02"):
        with contextlib.closing(reporter_of(attempt, rank=int(node[-1]), node=node)) as reporter:
            reporter.log(1, loss=0.5)
    _opened.append(Shipper(attempt.parent.parent, attempt, node=None))
    _ship(_opened[-1])
    assert {rank for _, _, rank, _, _ in server.intake.identities()} == {1, 2}
