"""Test the attempt's folder, the fence, and where to resume from: rules on files, without processes."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from training.attempt.lineage import Fenced, check_fence, newest_on_lineage, raise_generation, read_generation
from training.launch.attempt import take_attempt
from training.launch.failures import RankFailure, classify_exit
from training.launch.outcome import EndedIncarnation, RestartBudget, judge
from training.launch.plan import BadPlan, CodePlan, LaunchPlan, read_plan
from training.launch.stop import AttemptStop


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    for name in ("portal", "job"):
        (tmp_path / name).mkdir()
    return tmp_path


def _plan(run_dir: Path, job: str = "100", restart: int = 0, **more: Any) -> LaunchPlan:
    return LaunchPlan(run_dir=run_dir, scheduler_id=job, restart_count=restart, node="dgx01", **more)


def _hint(run_dir: Path, number: int, resume: str | None = None) -> None:
    (run_dir / "portal" / "attempt.json").write_text(json.dumps({"number": number, "resume": resume}))


def test_the_portals_number_is_taken(run_dir: Path) -> None:
    _hint(run_dir, 3, "step-400")
    attempt = take_attempt(_plan(run_dir))
    assert (attempt.number, attempt.resume, attempt.folder.name) == (3, "step-400", "attempt-3")
    assert json.loads((attempt.folder / "owner.json").read_text()) == {"scheduler_id": "100", "restart_count": 0}


def test_the_folder_of_the_submission_is_found_again(run_dir: Path) -> None:
    """Another node of the same submission, and a launcher that was started again."""
    _hint(run_dir, 1)
    first = take_attempt(_plan(run_dir))
    _hint(run_dir, 2)
    assert take_attempt(_plan(run_dir, node_rank=1)).folder == first.folder


def test_a_requeue_is_the_next_attempt_without_the_chosen_checkpoint(run_dir: Path) -> None:
    """A person's choice was for the submission that they requested."""
    _hint(run_dir, 1, "step-200")
    assert take_attempt(_plan(run_dir)).resume == "step-200"
    again = take_attempt(_plan(run_dir, restart=1))
    assert (again.number, again.resume) == (2, "")


def test_without_a_portal_numbers_rise(run_dir: Path) -> None:
    assert [take_attempt(_plan(run_dir, job)).number for job in ("7", "8", "9")] == [1, 2, 3]


@pytest.mark.parametrize(
    "hint", ["", "[]", "[" * 100_000, '{"number": -1}', '{"number": "x", "resume": 5}', '{"number": true}']
)
def test_a_hint_that_makes_no_sense_is_none(run_dir: Path, hint: str) -> None:
    (run_dir / "portal" / "attempt.json").write_text(hint)
    assert take_attempt(_plan(run_dir)).number == 1


@pytest.mark.parametrize("resume", ["../../../etc", "step-4/..", ".step-4.1", "step--1", ""])
def test_a_chosen_checkpoint_must_have_the_name_of_a_checkpoint(run_dir: Path, resume: str) -> None:
    _hint(run_dir, 1, resume)
    assert take_attempt(_plan(run_dir)).resume == ""


def test_a_folder_that_cannot_be_put_in_place_is_no_reason_to_try_forever(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "rename", fails)
    with pytest.raises(OSError, match="Input/output error"):
        take_attempt(_plan(run_dir))
    assert not list((run_dir / "job").iterdir())


def test_a_file_by_an_attempts_name_is_passed_by(run_dir: Path) -> None:
    _hint(run_dir, 1)
    (run_dir / "job" / "attempt-1").touch()
    assert take_attempt(_plan(run_dir)).number == 2


def test_many_at_once_agree(run_dir: Path) -> None:
    """Twelve launchers of three submissions: three folders, each submission's in one."""
    _hint(run_dir, 1)
    plans = [_plan(run_dir, job) for job in ("100", "101", "102")] * 4
    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(take_attempt, plans))
    assert {attempt.number for attempt in found} == {1, 2, 3}
    assert len({(plan.scheduler_id, attempt.number) for plan, attempt in zip(plans, found, strict=True)}) == 3
    assert not list((run_dir / "job").glob(".attempt-*"))


def test_generations_rise_and_fence(run_dir: Path) -> None:
    job = run_dir / "job"
    assert read_generation(job) == 0
    first = raise_generation(job, previous=None, resume="")
    assert (first, read_generation(job)) == (1, 1)
    second = raise_generation(job, previous=first, resume="step-10")
    assert second == 2
    with pytest.raises(Fenced, match="generation 2 has replaced 1"):
        raise_generation(job, previous=first, resume="")
    (job / "generations" / "3").touch()  # taken by a launch that died before it published
    assert raise_generation(job, previous=None, resume="") == 4


def test_a_generation_that_is_replaced_while_it_is_read_is_read_again(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = run_dir / "job"
    raise_generation(job, previous=None, resume="")
    raise_generation(job, previous=None, resume="")
    real, left = Path.read_text, [OSError(errno.ESTALE, "stale"), OSError(errno.EIO, "bad")]

    def read_text(path: Path, *arguments: Any, **options: Any) -> str:
        if path.name == "GENERATION" and left:
            raise left.pop()
        return real(path, *arguments, **options)

    monkeypatch.setattr(Path, "read_text", read_text)
    with pytest.raises(Fenced, match="generation 2 has replaced 1"):
        check_fence(job, 1)
    assert not left


def test_no_generation_is_taken_twice(run_dir: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        taken = list(pool.map(lambda _: raise_generation(run_dir / "job", previous=None, resume=""), range(48)))
    assert len(set(taken)) == 48


def _commit(run_dir: Path, step: int, generation: int, *, name: str = "", whole: bool = True) -> None:
    folder = run_dir / "job" / "checkpoints" / (name or f"step-{step}")
    folder.mkdir(parents=True)
    (folder / "data").write_bytes(b"1234" if whole else b"12")
    file = {"file": "data", "bytes": 4, "sha256": hashlib.sha256(b"1234").hexdigest()}
    manifest = {
        "version": 1, "step": step, "generation": generation, "parent": None, "ancestors": [], "consumed_samples": 0,
        "world_size": 1, "layout": {}, "config_hash": "", "config": {}, "data": "", "state": {}, "files": [file],
        "created": 1.0, "seconds": 0.5, "versions": {},
    }  # fmt: skip
    (folder / "COMMITTED").write_text(json.dumps(manifest))


def _launches(run_dir: Path, *starts: str) -> None:
    for start in starts:
        raise_generation(run_dir / "job", previous=None, resume=start)


def test_a_fresh_job_starts_from_the_start(run_dir: Path) -> None:
    assert newest_on_lineage(run_dir / "job") == ""
    _launches(run_dir, "", "")
    assert newest_on_lineage(run_dir / "job") == ""


def test_the_newest_commit_of_the_newest_launch_with_a_commit(run_dir: Path) -> None:
    _launches(run_dir, "", "step-200", "step-200")
    _commit(run_dir, 100, 1)
    _commit(run_dir, 200, 1)
    assert newest_on_lineage(run_dir / "job") == "step-200"
    _commit(run_dir, 300, 3)
    assert newest_on_lineage(run_dir / "job") == "step-300"


def test_a_line_that_was_left_is_not_gone_back_to(run_dir: Path) -> None:
    """A person resumed from 200 though 400 exists; that launch has committed nothing yet, then 300."""
    for step in (200, 400):
        _commit(run_dir, step, 1)
    _launches(run_dir, "", "step-200")
    assert newest_on_lineage(run_dir / "job") == "step-200"
    _commit(run_dir, 300, 2)
    assert newest_on_lineage(run_dir / "job") == "step-300"


def test_starting_over_forgets_what_was(run_dir: Path) -> None:
    _commit(run_dir, 200, 1)
    _launches(run_dir, "", "")
    assert newest_on_lineage(run_dir / "job") == ""


def test_what_is_broken_is_passed_by(run_dir: Path) -> None:
    _launches(run_dir, "", "step-200")
    _commit(run_dir, 100, 1)
    _commit(run_dir, 200, 1)
    _commit(run_dir, 300, 2, whole=False)
    assert newest_on_lineage(run_dir / "job") == "step-200"
    (run_dir / "job" / "checkpoints" / "step-200" / "COMMITTED").write_text("{")
    assert newest_on_lineage(run_dir / "job") == "step-100"


def test_the_budget_is_refilled_by_commits_and_ports_do_not_count() -> None:
    lost, port = RankFailure(0, "signal", signal=9), RankFailure(0, "address_in_use", 1)
    budget = RestartBudget(2, "")
    assert [budget.grant(lost, newest) for newest in ("", "step-1", "step-1", "step-2", "step-2", "step-2")] == [
        True, True, True, True, True, False,
    ]  # fmt: skip
    assert [RestartBudget(0, "").grant(lost, "")] == [False]
    budget = RestartBudget(0, "")
    assert [budget.grant(port, "") for _ in range(4)] == [True, True, True, False]


@pytest.mark.parametrize(("regroups", "is_restarted"), [(True, True), (False, False)])
def test_a_save_for_more_nodes_that_failed_costs_a_restart_and_not_the_attempt(
    regroups: bool, is_restarted: bool, run_dir: Path
) -> None:
    log = run_dir / "0.0.log"
    log.write_text("CheckpointError: step 30 could not be saved: rank 0: [Errno 28] No space left on device\n")
    full = classify_exit(0, 1, None, log, order=0.0)
    ended = EndedIncarnation(number=0, failures=[full], abort=None, newest="", started_from="", regroups=regroups)
    stop = AttemptStop(run_dir, run_dir, run_dir)
    verdicts = [judge(ended, stop=stop, budget=RestartBudget(in_place, "")) for in_place in (1, 0)]
    assert [verdict is None for verdict in verdicts] == [is_restarted, False]


def test_a_plan_is_read_from_the_run_and_the_scheduler(run_dir: Path) -> None:
    (run_dir / "portal" / "run.toml").write_text(
        'kind = "script"\n[launch]\nnodes = 4\ngpus_per_node = 8\nranks_per_node = 1\nin_place = 0\nmax_nodes = 4\n'
        '[launch.watchdog]\nstep = 90\n[script]\nentry = "a.py"\nargs = ["--x", "1"]\n[script.env]\nA = "b"\n'
    )
    payload = {"SLURM_JOB_ID": "5_1", "SLURM_RESTART_COUNT": "2", "SLURM_NODEID": "1", "SLURM_NNODES": "3"}
    plan = read_plan(run_dir, payload)
    assert (plan.scheduler_id, plan.restart_count, plan.node_rank, plan.nodes) == ("5_1", 2, 1, 3)
    assert (plan.ranks_per_node, plan.min_nodes, plan.max_nodes, plan.is_first) == (8, 3, 3, False)
    assert plan.limits == {"step": 90.0}
    assert plan.script is not None
    assert (plan.script.args, plan.script.env) == (("--x", "1"), {"A": "b"})
    assert plan.code == CodePlan(table="script")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ('kind = "federated"\n', None),
        ('kind = "federated"\n[client]\nentry = "client.py"\n', CodePlan(table="client")),
        ('kind = "federated"\n[client]\ngit = "g"\nref = "r"\n', CodePlan(table="client", git="g", ref="r")),
        ('kind = "distributed"\n[client]\ngit = "g"\n', None),
    ],
)
def test_the_code_of_a_federation_is_no_program(run_dir: Path, text: str, code: CodePlan | None) -> None:
    (run_dir / "portal" / "run.toml").write_text(text)
    plan = read_plan(run_dir, {})
    assert (plan.code, plan.script) == (code, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kind = ", "cannot be read"),
        ("[launch]\nnodes = 0\n", "launch.nodes must be a whole number of at least 1"),
        ('[launch]\nranks_per_node = "2"\n', "launch.ranks_per_node"),
        ("[launch]\ngrace_seconds = true\n", "launch.grace_seconds"),
        ('kind = "script"\n', r"\[script\] is missing"),
        ('kind = "script"\n[script]\nentry = 5\n', "script.entry must be text"),
        ('kind = "federated"\nclient = 1\n', r"\[client\] is missing"),
        ('kind = "federated"\n[client]\nref = 1\n', "client.ref must be text"),
    ],
)
def test_an_invalid_plan_names_the_problem(run_dir: Path, text: str, message: str) -> None:
    (run_dir / "portal" / "run.toml").write_text(text)
    with pytest.raises(BadPlan, match=message):
        read_plan(run_dir, {})


def test_an_id_that_is_none_is_refused(run_dir: Path) -> None:
    (run_dir / "portal" / "run.toml").write_text("")
    with pytest.raises(BadPlan, match="SLURM_JOB_ID"):
        read_plan(run_dir, {"SLURM_JOB_ID": "../1"})
    with pytest.raises(BadPlan, match="SLURM_NODEID"):
        read_plan(run_dir, {"SLURM_NODEID": "-1"})
    assert read_plan(run_dir, {}).scheduler_id != read_plan(run_dir, {}).scheduler_id
