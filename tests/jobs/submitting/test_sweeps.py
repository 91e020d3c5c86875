"""Test sweeps: the values that a specification sweeps over, the jobs, and handing them over together, once."""

from __future__ import annotations

import time
import tomllib
from typing import Any

import pytest
from django.utils import timezone

from jobs.disk import rundir, tokens, upload
from jobs.errors import IdempotencyConflict, SpecError
from jobs.following.submission import arrays
from jobs.models import Attempt, Job, Predecessor, Stray, Sweep
from jobs.spec import JobSpec, SweepSpec
from jobs.submitting.submit import delete
from nodes.schedulers.base import SchedulerError
from portal.models import User
from tests.jobs.schedulers import ScriptedScheduler
from tests.jobs.submissions import ENTRIES, its_code, submit_spec, text_of
from tests.jobs.submitting.sweeping import TEXT, firsts, later, make, tick

pytestmark = pytest.mark.django_db


def test_every_combination_is_a_separate_job(oskar: User) -> None:
    sweep = make(oskar)
    jobs = list(sweep.jobs.order_by("sweep_index").select_related("latest"))
    assert [job.name for job in jobs] == [f"rates-{n}" for n in range(6)]
    assert jobs[4].sweep_values == {"run.learning_rate": 2e-3, "run.seed": 2}
    assert (jobs[4].spec["run"]["learning_rate"], jobs[4].spec["run"]["seed"]) == (2e-3, 2)
    assert jobs[4].spec_toml.startswith('# Which rate?\nname = "rates-4"\n')
    assert "steps = 40  # short" in jobs[4].spec_toml
    assert "sweep" not in jobs[4].spec_toml
    assert all(job.latest is not None and job.latest.number == 1 for job in jobs)
    assert (sweep.at_once, sweep.counts(), sweep.is_over()) == (2, {"pending": 6}, False)


@pytest.mark.parametrize(
    ("line", "field", "message"),
    [
        ('"run.seed" = [1, -2]', "sweep.over.run.seed", "-2 is too small"),
        ('"run.sed" = [1, 2]', "sweep.over.run.sed", 'Did you mean "seed"'),
        ('"run.global_batch" = [32, 33]', "sweep.over.run.global_batch", "33 does not divide"),
        ('"resources.nodes" = [1, 2]', "sweep.over.resources.nodes", "request the same resources"),
        ('"name" = ["a"]', "sweep.over.name", "script.args"),
        ('"run.seed" = []', "sweep.over.run.seed", "no values"),
        ('"run.seed" = [1, 1]', "sweep.over.run.seed", "twice"),
        ('"run.seed" = 3', "sweep.over.run.seed", "not a list"),
        ('"run.seed" = [1]\n"run.micro_batch" = [16, 7]', "sweep.over.run.micro_batch", "7 does not divide"),
        ('"run.language.layers" = [1, 2]\n"run.parallelism" = ["pipeline"]', "run.mesh.pp", "run.language.layers = 1"),
        ("", "sweep.over", "No values are given"),
        (f'"run.seed" = {list(range(1001))}', "sweep.over", "1,000 at most"),
    ],
)
def test_what_does_not_hold_names_the_path_and_the_value(line: str, field: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        SweepSpec.parse_toml(f'name = "x"\n[resources]\nranks_per_node = 2\n[sweep.over]\n{line}\n')
    assert any(p.field == field and message in p.message for p in caught.value.problems), caught.value.problems


ALGORITHMS = """\
name = "which"
kind = "federated"

[run]
clients = 12
rounds = 3
split = "iid"

[run.fedprox]  # how near
mu = 0.1

[run.deadline]
quantile = 0.5

[sweep.over]
"run.algorithm" = ["fedavg", "fedprox"]
"run.pace" = ["rounds", "deadline"]
"""


def test_options_of_what_a_job_does_not_use_are_left_out_of_it(oskar: User) -> None:
    jobs = list(make(oskar, ALGORITHMS).jobs.order_by("sweep_index"))
    assert [
        (job.spec["run"].get("fedprox"), (job.spec["run"].get("deadline") or {}).get("quantile")) for job in jobs
    ] == [
        (None, None),
        (None, 0.5),
        ({"mu": 0.1}, None),
        ({"mu": 0.1}, 0.5),
    ]
    assert ["[run.fedprox]  # how near" in job.spec_toml for job in jobs] == [False, False, True, True]
    for job in jobs:
        JobSpec.parse_toml(job.spec_toml)  # a clone of it is taken


@pytest.mark.parametrize(
    ("chosen", "table"),
    [
        ('"run.aggregation" = ["mean", "trimmed_mean"]', "[run.trimmed_mean]\ntrim = 2"),
        ('"run.selection" = ["uniform", "by_loss"]', "[run.by_loss]\ncandidates = 12"),
        ('"run.split" = ["iid", "dirichlet"]', "[run.dirichlet]\nalpha = 0.5"),
        ('"run.filters" = [[], ["topk"]]', "[run.topk]\ndensity = 0.2"),
        ('"run.algorithm" = ["fedavg", "fedprox"]', "[run.options.fedprox]\nmu = 0.2"),
    ],
)
def test_so_are_those_of_every_other_choice(chosen: str, table: str) -> None:
    text = f'name = "x"\nkind = "federated"\n[run]\nclients = 12\n{table}\n[sweep.over]\n{chosen}\n'
    without, with_it = SweepSpec.parse_toml(text).points
    name = table.partition("]")[0].rpartition(".")[2]
    assert without.spec.run is not None
    assert with_it.spec.run is not None
    assert name not in without.spec.run.options
    assert name in with_it.spec.run.options
    assert name not in without.spec_toml.replace(f'"{name}"', "")


def test_jobs_that_differ_only_in_unused_options_are_a_single_job(oskar: User) -> None:
    text = 'name = "x"\nkind = "federated"\n[sweep.over]\n"run.algorithm" = ["fedavg", "fedprox"]\n'
    jobs = list(make(oskar, f'{text}"run.fedprox.mu" = [0.1, 1.0]\n').jobs.order_by("sweep_index"))
    assert [job.sweep_values for job in jobs] == [
        {"run.algorithm": "fedavg"},
        {"run.algorithm": "fedprox", "run.fedprox.mu": 0.1},
        {"run.algorithm": "fedprox", "run.fedprox.mu": 1.0},
    ]


def test_options_of_what_no_job_uses_are_refused_as_ever() -> None:
    with pytest.raises(SpecError, match=r"run\.fedyogi"):
        SweepSpec.parse_toml(ALGORITHMS.replace("fedprox]", "fedyogi]").replace("mu = 0.1", ""))


@pytest.mark.parametrize("text", ['name = "x"\n[sweep]\n', 'name = "x"\n[sweep]\nover = {}\n'])
def test_a_sweep_over_nothing_is_refused_with_how_to_write_it(text: str) -> None:
    with pytest.raises(SpecError) as caught:
        SweepSpec.parse_toml(text)
    (problem,) = caught.value.problems
    assert problem.field == "sweep.over"
    assert 'Write a line [sweep.over], and below it the values, such as "run.learning_rate" =' in problem.message


@pytest.mark.lengthy
def test_a_thousand_jobs_are_made_in_seconds(oskar: User, django_assert_max_num_queries: Any) -> None:
    text = f'name = "many"\n[sweep.over]\n"run.seed" = {list(range(1000))}\n'
    began = time.process_time()  # allocations of others do not count
    with django_assert_max_num_queries(100):  # SQLite takes fewer rows at once the more columns an attempt has
        sweep = make(oskar, text)
    assert time.process_time() - began < 10
    assert sweep.jobs.count() == 1000


def test_a_repeated_request_makes_a_single_sweep(oskar: User) -> None:
    first = make(oskar, key="k")
    assert make(oskar, key="k") == first
    assert Job.objects.count() == 6
    with pytest.raises(IdempotencyConflict):
        make(oskar, TEXT.replace("40", "41"), key="k")


def test_all_are_handed_over_as_one_array(oskar: User, scheduler: ScriptedScheduler) -> None:
    oskar.slurm_user = "oskar"
    oskar.save()
    sweep = make(oskar)
    assert arrays.due() == [sweep.pk]
    tick(scheduler)
    ((array, tasks, at_once),) = scheduler.arrays
    assert (array.key, array.name, array.output, array.user) == (sweep.key, "rates", "/dev/null", "oskar")
    assert (tasks, at_once, scheduler.submissions) == ([0, 1, 2, 3, 4, 5], 2, [])
    rows = firsts(sweep)
    assert [row.scheduler_id for row in rows] == [f"501_{n}" for n in range(6)]
    assert {row.scheduler_user for row in rows} == {"oskar"}
    assert all(row.token_digest and row.submitted_at for row in rows)
    script = (rundir.path_of(rows[0].job.directory) / "portal" / "array.sh").read_text()
    for row in rows:
        root = rundir.path_of(row.job.directory)
        assert f"{row.job.sweep_index}) run={root} key={row.key} ;;" in script
        assert f"seed = {row.job.spec['run']['seed']}\n" in (root / "portal" / "run.toml").read_text()
    assert "#SBATCH --signal=B:USR1@30" in script
    tick(scheduler)
    assert len(scheduler.arrays) == 1


def test_they_are_followed_by_the_sweeps_key(oskar: User, scheduler: ScriptedScheduler) -> None:
    sweep = make(oskar)
    tick(scheduler)
    scheduler.update_job("501_3", state="running", nodes=("dgx-01",), started_at=time.time())
    tick(scheduler)
    assert [attempt.state for attempt in firsts(sweep)] == ["pending"] * 3 + ["running"] + ["pending"] * 2
    scheduler.update_job("501_3", key="f" * 16)
    tick(scheduler)
    assert "another one" in firsts(sweep)[3].reason


def test_a_request_with_a_lost_answer_is_not_repeated(oskar: User, scheduler: ScriptedScheduler) -> None:
    sweep = make(oskar)
    scheduler.loses_answers = True
    tick(scheduler)
    scheduler.loses_answers = False
    assert {attempt.scheduler_id for attempt in firsts(sweep)} == {""}
    assert "no answer" in firsts(sweep)[5].reason
    assert arrays.due() == []  # not before any request must have ended
    later()
    tick(scheduler)
    assert len(scheduler.arrays) == 1
    assert [attempt.scheduler_id for attempt in firsts(sweep)] == [f"501_{n}" for n in range(6)]


@pytest.mark.parametrize(
    "step", ["_prepare", "_claim", "_submit", "array_submission", "_record_submissions", "tokens.leave"]
)
@pytest.mark.parametrize("is_done", [False, True])
def test_a_worker_that_died_at_any_step_leaves_what_the_next_tick_finds(
    step: str, is_done: bool, oskar: User, scheduler: ScriptedScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before the step, or when it was done and nothing after it: all are handed over, and once."""
    sweep = make(oskar)
    place, _, name = f"arrays.{step}".rpartition(".")
    module = arrays if place == "arrays" else tokens
    does = getattr(module, name)

    def dies(*words: Any, **more: Any) -> None:
        if is_done:
            does(*words, **more)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, name, dies)
        with pytest.raises(KeyboardInterrupt):
            arrays.hand_over(sweep.pk, scheduler, until=time.monotonic() + 5)
    for _ in range(2):
        later()
        tick(scheduler)
    assert len(scheduler.arrays) == 1
    assert [attempt.scheduler_id for attempt in firsts(sweep)] == [f"501_{n}" for n in range(6)]
    assert all(attempt.token_digest for attempt in firsts(sweep))
    assert not scheduler.submissions
    assert not scheduler.cancelled
    assert not Stray.objects.exists()


def test_a_deactivated_account_starts_no_sweep(oskar: User, scheduler: ScriptedScheduler) -> None:
    sweep = make(oskar)
    User.objects.filter(pk=oskar.pk).update(is_active=False)
    tick(scheduler)
    assert not scheduler.arrays
    assert {(attempt.state, attempt.cause) for attempt in firsts(sweep)} == {("failed", "rejected")}


def test_run_directories_are_written_as_there_is_time(oskar: User, scheduler: ScriptedScheduler) -> None:
    sweep = make(oskar)
    for written in range(1, 6):
        arrays.hand_over(sweep.pk, scheduler, until=0)
        sweep.refresh_from_db()
        assert (sweep.prepared, scheduler.arrays) == (written, [])
    arrays.hand_over(sweep.pk, scheduler, until=0)
    assert len(scheduler.arrays) == 1
    assert not any(attempt.token_digest for attempt in firsts(sweep))
    tick(scheduler)
    assert all(attempt.token_digest for attempt in firsts(sweep))


def test_a_refusal_ends_them_all_with_its_words(oskar: User, scheduler: ScriptedScheduler) -> None:
    sweep = make(oskar)
    scheduler.refuses_submissions = SchedulerError("Slurm takes no array of 6 jobs.", permanent=True)
    tick(scheduler)
    scheduler.refuses_submissions = None
    tick(scheduler)
    assert {(attempt.state, attempt.cause, attempt.reason) for attempt in firsts(sweep)} == {
        ("failed", "rejected", "Slurm takes no array of 6 jobs.")
    }
    assert scheduler.arrays == []


def test_a_restart_is_a_separate_submission(oskar: User, scheduler: ScriptedScheduler) -> None:
    sweep = make(oskar)
    tick(scheduler)
    scheduler.update_job("501_4", state="node_fail", started_at=time.time(), ended_at=time.time(), nodes=("dgx-01",))
    tick(scheduler)
    Attempt.objects.filter(scheduler_id="501_4").update(collected_at=timezone.now(), collecting_since=timezone.now())
    tick(scheduler)
    job = sweep.jobs.get(sweep_index=4)
    second = job.attempts.get(number=2)
    assert second.scheduler_id == "101"
    assert scheduler.submissions[0].key == second.key
    assert scheduler.submissions[0].environment == {"VIGIL_SUBMISSION": second.key}
    assert len(scheduler.arrays) == 1


def test_it_waits_for_the_jobs_before_it(oskar: User, scheduler: ScriptedScheduler) -> None:
    before, _ = submit_spec(oskar)
    sweep = make(oskar, f"after = [{before.pk}]\n{TEXT}")
    tick(scheduler)
    assert (scheduler.arrays, len(scheduler.submissions)) == ([], 1)
    assert firsts(sweep)[0].reason == f"Waits for #{before.pk} to complete."
    Predecessor.objects.update(met=True)
    tick(scheduler)
    assert len(scheduler.arrays) == 1


@pytest.mark.parametrize(("table", "over"), [("script", "script.env.RATE"), ("client", "run.client.hidden")])
def test_each_job_has_the_code(oskar: User, scheduler: ScriptedScheduler, settings: Any, table: str, over: str) -> None:
    settings.VIGIL_LOCAL_TRUST = "everyone"
    sweep = make(oskar, f'{text_of(table)}[sweep.over]\n"{over}" = ["1", "2"]\n', code=its_code(table))
    assert upload.pending_uploads() == {sweep.key}
    tick(scheduler)
    for attempt in firsts(sweep):
        root = rundir.path_of(attempt.job.directory)
        assert (root / "job" / "code" / ENTRIES[table]).read_text() == "print(1)"
        run = tomllib.loads((root / "portal" / "run.toml").read_text())
        assert table == "script" or run["run"]["client"]["hidden"] == attempt.job.sweep_values[over]
    assert upload.pending_uploads() == set()


def test_code_has_the_files_of_every_job(oskar: User, settings: Any) -> None:
    settings.VIGIL_LOCAL_TRUST = "everyone"
    text = f'{text_of("client")}[run]\nrecipe = "client"\n[sweep.over]\n"run.algorithm" = ["fedavg", "own"]\n'
    with pytest.raises(SpecError) as error:
        make(oskar, text, code=its_code("client"))
    assert [problem.field for problem in error.value.problems] == ["client.algorithm"]


def test_the_last_job_that_is_deleted_takes_the_sweep_along(oskar: User, scheduler: ScriptedScheduler) -> None:
    sweep = make(oskar, key="k")
    Attempt.objects.update(ended_at=timezone.now(), decided_at=timezone.now(), state="cancelled")
    for job in list(sweep.jobs.all()):
        assert Sweep.objects.exists()
        delete(oskar, job)
    assert not Sweep.objects.exists()
    assert make(oskar, key="k").jobs.count() == 6


class TestWithoutArrays:
    """The local scheduler has none: they are submitted one by one, and Vigil counts."""

    @pytest.fixture
    def scheduler(self) -> ScriptedScheduler:
        return ScriptedScheduler()

    def test_so_many_are_under_way_at_once(self, oskar: User, scheduler: ScriptedScheduler) -> None:
        sweep = make(oskar)
        tick(scheduler)
        assert [attempt.scheduler_id for attempt in firsts(sweep)] == ["101", "102", "", "", "", ""]
        assert firsts(sweep)[2].reason == "Waiting for its turn: its sweep runs 2 jobs at once."
        scheduler.update_job("101", state="node_fail", ended_at=time.time(), nodes=("here",))
        tick(scheduler)  # its restart keeps the place
        later()
        tick(scheduler)
        assert [attempt.scheduler_id for attempt in firsts(sweep)][2:] == ["", "", "", ""]
        Attempt.objects.filter(job__sweep_index=0).update(ended_at=timezone.now(), decided_at=timezone.now())
        tick(scheduler)
        assert [bool(attempt.scheduler_id) for attempt in firsts(sweep)] == [True, True, True, False, False, False]

    def test_without_a_limit_all_are(self, oskar: User, scheduler: ScriptedScheduler) -> None:
        sweep = make(oskar, TEXT.replace("at_once = 2", ""))
        tick(scheduler)
        assert all(attempt.scheduler_id for attempt in firsts(sweep))
        assert {submission.key for submission in scheduler.submissions} == {attempt.key for attempt in firsts(sweep)}
