"""Test agreement of launchers by files: each turn is decided once, generations only rise, sizes are usable."""

from __future__ import annotations

import errno
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.waiting import until
from training.attempt.lineage import Fenced, claim_generation, publish_generation, read_generation, withdraw_claim
from training.launch.failures import RankFailure
from training.launch.incarnation import Ending, Incarnation
from training.launch.members import Members
from training.launch.node_counts import max_usable_nodes
from training.launch.plan import LaunchPlan, read_plan
from training.launch.stop import AttemptStop, Regroup


@pytest.fixture
def members(tmp_path: Path) -> tuple[Members, Members, Members]:
    """Return three launchers, of nodes 0, 1 and 2, that have announced themselves."""
    plan = LaunchPlan(run_dir=tmp_path, scheduler_id="1", restart_count=0, node="a", nodes=3, min_nodes=1, max_nodes=3)
    created = [Members(tmp_path, replace(plan, node=f"dgx0{node}", node_rank=node)) for node in range(3)]
    for item in created:
        item.refresh()
    return created[0], created[1], created[2]


def _incarnation(leading: Members, *others: Members, number: int = 0) -> Incarnation:
    who = tuple(item.me for item in (leading, *others))
    return Incarnation(number, number + 1, "", "127.0.0.1", 1234, who, {"newest": "", "used": 0, "ports": 0})


def test_a_turn_is_decided_once_and_read_by_all(members: tuple[Members, Members, Members]) -> None:
    first, second, third = members
    ours, theirs = _incarnation(first, second), _incarnation(second, third)
    assert first.decision(0) is None
    assert first.decide(0, ours)
    assert not second.decide(0, theirs)
    assert second.decision(0) == third.decision(0) == ours
    assert first.decide(0, ours), "requested twice, as when an answer was lost"
    assert not third.decide(0, Ending({"exit_code": 1}))
    assert second.decide(1, Ending({"exit_code": 75, "cause": "stopped"}))
    found = first.decision(1)
    assert isinstance(found, Ending)
    assert found.exit_code == 75
    assert [ours.node_index(member.me) for member in members] == [0, 1, -1]


def test_how_ranks_ended_is_read_by_all_releases(members: tuple[Members, Members, Members], tmp_path: Path) -> None:
    """An upgrade may come between two launchers of one attempt: a leader of before reads no new field of a failure."""
    first, second, _ = members
    failures = [
        RankFailure(1, "exception", 3, last_lines=["epoch 3", "done"]),
        RankFailure(2, "signal", None, 9, "killed"),
    ]
    second.report_ended(0, failures)
    assert first.reported_failures(0, second.me) == failures
    (path,) = tmp_path.rglob(f"ended-0.{second.me.id}.json")
    payload = json.loads(path.read_text())
    fields = {"rank", "kind", "exit_code", "signal", "error", "order"}
    assert all(set(failure) == fields for failure in payload["failures"])
    path.write_text(json.dumps({"failures": payload["failures"]}))
    assert first.reported_failures(0, second.me) == [replace(failures[0], last_lines=[]), failures[1]]


def test_the_first_that_lives_leads(members: tuple[Members, Members, Members]) -> None:
    first, second, third = members
    assert [member.leads(None) for member in members] == [True, False, False]
    last = _incarnation(second, third)
    assert [member.leads(last) for member in members] == [False, True, False]
    for lost in (second, third):
        first.forget(lost.me)
    until(lambda: first.leads(last))  # nobody else is left


def test_time_in_which_a_launcher_was_suspended_is_no_silence_of_others(
    members: tuple[Members, Members, Members], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file system of them all hung for a minute: who goes on first finds no sign of the others yet."""
    first, second, _ = members
    ahead = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead, time_ns=time.time_ns)
    monkeypatch.setattr("training.launch.members.time", clock)
    assert first.is_live(second.me)
    ahead += 60
    assert first.is_live(second.me)
    for _ in range(25):
        ahead += 1
        first.refresh()
    assert not first.is_live(second.me)


def test_a_later_launcher_of_a_node_replaces_the_earlier(tmp_path: Path) -> None:
    plan = LaunchPlan(run_dir=tmp_path, scheduler_id="1", restart_count=0, node="a")
    earlier = Members(tmp_path, plan)
    earlier.refresh()
    assert not earlier.is_replaced
    later = Members(tmp_path, plan)
    later.refresh()
    earlier._listed_at = 0.0
    assert earlier.is_replaced
    assert not earlier.leads(None)
    assert not later.is_live(earlier.me)
    assert later.leads(_incarnation(earlier))


def test_the_later_launcher_is_so_by_whatever_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = LaunchPlan(run_dir=tmp_path, scheduler_id="1", restart_count=0, node="a")
    earlier = Members(tmp_path, plan)
    earlier.refresh()
    monkeypatch.setattr(time, "time_ns", lambda: 1)
    later = Members(tmp_path, plan)
    later.refresh()
    earlier._listed_at = 0.0
    assert earlier.is_replaced
    assert not later.is_replaced


def test_a_file_system_that_errs_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shared file system errs while its server changes: that is no reason to end what runs."""
    reading, errs = os.stat, True

    def stat(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        if errs and str(path).startswith(str(tmp_path)):
            raise OSError(errno.ESTALE, "Stale file handle")
        return reading(path, *arguments, **options)

    (tmp_path / "portal").mkdir()
    (tmp_path / "portal" / "cancelled").touch()
    stop, regroup = AttemptStop(tmp_path, tmp_path, tmp_path / "told"), Regroup(tmp_path)
    monkeypatch.setattr(os, "stat", stat)
    assert not stop.poll(None)
    assert not stop.is_saved
    assert not regroup.is_requested(0)
    errs = False
    assert stop.poll(None)
    assert stop.reason == "cancel"


def test_a_claimed_generation_fences_nobody_before_it_is_published(tmp_path: Path) -> None:
    first = claim_generation(tmp_path, previous=None, resume="")
    second = claim_generation(tmp_path, previous=None, resume="")
    assert (first, second, read_generation(tmp_path)) == (1, 2, 0)
    withdraw_claim(tmp_path, first)
    publish_generation(tmp_path, second)
    publish_generation(tmp_path, first)  # by one that was paused in between
    assert read_generation(tmp_path) == 2
    with pytest.raises(Fenced):
        claim_generation(tmp_path, previous=first, resume="")


@pytest.mark.parametrize(
    ("run", "sizes"),
    [
        ({}, [0, 1, 2, 3, 4, 4]),
        ({"parallelism": '"fsdp"', "mesh.tp": 2}, [0, 0, 2, 2, 4, 4]),
        ({"global_batch": 3}, [0, 1, 2, 3, 3, 3]),
        ({"global_batch": 10}, [0, 1, 2, 3, 4, 4]),
        ({"global_batch": 5, "mesh.pp": 2}, [0, 0, 2, 2, 2, 2]),
        ({"recipe": '"no such recipe"'}, [0, 1, 2, 3, 4, 4]),
    ],
    ids=["any", "pairs", "a small batch", "uneven shares", "a pipeline's even shares", "nothing that can be checked"],
)
def test_a_run_takes_as_many_nodes_as_it_can_share_its_work_over(
    tmp_path: Path, run: dict[str, Any], sizes: list[int]
) -> None:
    (tmp_path / "portal").mkdir()
    lines = "".join(f"{name} = {value}\n" for name, value in {"global_batch": 12, **run}.items())
    text = f'kind = "distributed"\n[launch]\nnodes = 1\nmax_nodes = 4\n[run]\n{lines}'
    (tmp_path / "portal" / "run.toml").write_text(text)
    plan = read_plan(tmp_path, {})
    assert (plan.nodes, plan.min_nodes, plan.max_nodes, plan.return_seconds) == (4, 1, 4, 120.0)
    assert [max_usable_nodes(plan, there) for there in range(6)] == sizes
