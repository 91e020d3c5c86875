"""Test an attempt's reports as evidence: NaN or diverged loss, gradients, throughput, memory."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

import numpy as np
import pytest
from django.utils import timezone

from jobs.following.end_causes.cause import AttemptEnd
from jobs.models import Attempt, Job
from portal.models import Chunk, Series
from portal.series import codec, store
from tests.jobs.postmortem.attempt_files import Left, texts
from tests.jobs.reporting import Spooled, frame, send

pytestmark = pytest.mark.django_db

EXIT_1 = {"cause": "failed", "first_failure": {"rank": 0, "kind": "exception", "exit_code": 1, "error": "leaving"}}
KILLED = {"cause": "failed", "first_failure": {"rank": 0, "kind": "signal", "signal": 9, "error": ""}}
NAN = float("nan")


@pytest.fixture
def script(left: Left) -> Left:
    """Return a script that left with exit code 1 and an empty log."""
    Job.objects.filter(pk=left.attempt.job_id).update(kind="script")
    left.attempt.refresh_from_db()
    for rank in range(2):
        left.write(f"logs/0.{rank}.log", "reading the data\nbuilding the model\n")
    left.failure = EXIT_1
    return left


def report(left: Left, *, rank: int = 0, incarnation: int = 0, **series: Iterable[float]) -> None:
    """Report a value for every step from 1, one second apart, the last of them now."""
    stream = Spooled(rank=rank, incarnation=incarnation, uid=f"{rank & 0xFF:04x}{incarnation:012x}")
    columns = {name: list(values) for name, values in series.items()}
    now, length = timezone.now().timestamp(), max(map(len, columns.values()))
    for step in range(1, length + 1):
        values = {name: column[step - 1] for name, column in columns.items() if step <= len(column)}
        stream.log(step, now - length + step, **values)
    assert send(left.attempt, frame(stream)).status_code == 200


def falling(steps: int) -> list[float]:
    return [3.0 / math.sqrt(step) for step in range(1, steps + 1)]


class TestLoss:
    def test_a_loss_that_was_nan_explains_exit_code_1(self, script: Left) -> None:
        report(script, loss=[*falling(19), *[NAN] * 38])
        incident, verdict = script.diagnosed()
        assert incident.cause == "numerics.nan"
        assert texts(verdict, "root") == [
            "loss was NaN from step 20 to its last point at step 57, as the program reported it"
        ]
        assert 0.7 <= verdict["confidence"] <= 0.85, "reported, and observed by nothing else"
        assert verdict["evidence"][0]["file"] == "reported series"

    def test_infinity_is_called_so(self, script: Left) -> None:
        report(script, **{"train/loss": [2.0, 1.0, float("inf")]})
        assert texts(script.diagnosed()[1], "root") == [
            "train/loss was Infinity at its last step, 3, as the program reported it"
        ]

    def test_a_loss_that_recovered_is_no_cause(self, script: Left) -> None:
        report(script, loss=[*falling(10), NAN, NAN, *falling(10)])
        assert script.diagnosed()[0].cause == "unknown"

    def test_a_loss_far_above_its_minimum_has_diverged(self, script: Left) -> None:
        report(script, loss=[*falling(60), *[0.4 * 1.2**step for step in range(20)]])
        incident, verdict = script.diagnosed()
        assert incident.cause == "numerics.divergence"
        (root,) = texts(verdict, "root")
        assert root.startswith("loss rose from its minimum of 0.3873 to 12.78 by step 80")

    def test_a_spike_that_recovers_is_none(self, script: Left) -> None:
        report(script, loss=[*falling(40), 9.0, 12.0, 7.0, *falling(40)])
        assert script.diagnosed()[0].cause == "unknown"

    @pytest.mark.parametrize("name", ["validation_loss", "policy_loss", "loss_scale", "eval/loss", "reward"])
    def test_what_rises_by_design_is_no_divergence(self, script: Left, name: str) -> None:
        report(script, **{name: [*falling(60), *[0.4 * 1.2**step for step in range(20)]]})
        assert script.diagnosed()[0].cause == "unknown"

    def test_a_rank_other_than_the_first_is_named(self, script: Left) -> None:
        report(script, loss=falling(30))
        report(script, rank=1, loss=[*falling(25), *[NAN] * 5])
        incident, _ = script.diagnosed()
        assert (incident.cause, incident.rank) == ("numerics.nan", 1)

    def test_a_gradient_that_exploded_supports_it(self, script: Left) -> None:
        report(script, loss=[*falling(50), *[NAN] * 5], grad_norm=[*[0.8] * 48, 2.0, 411.0])
        _, verdict = script.diagnosed()
        assert "grad_norm was 411 by step 50, 514 × its usual 0.8, as the program reported it" in texts(
            verdict, "confirmation"
        )

    def test_rounds_of_a_federation_count_alike(self, script: Left) -> None:
        Job.objects.filter(pk=script.attempt.job_id).update(kind="federated", spec={"kind": "federated"})
        script.attempt.refresh_from_db()
        report(script, loss=[*falling(9), NAN, NAN], client_loss_max=[NAN] * 11)
        assert script.diagnosed()[0].cause == "numerics.nan"


class TestOtherEvidence:
    def test_what_the_log_shows_of_the_loss_is_confirmed(self, script: Left) -> None:
        script.write("logs/0.0.log", "".join(f"step {step} loss {2.0 if step < 20 else NAN}\n" for step in range(58)))
        report(script, loss=[*falling(19), *[NAN] * 38])
        incident, verdict = script.diagnosed()
        assert (incident.cause, verdict["confidence"]) == ("numerics.nan", 0.96)
        assert any("as the program reported it" in text for text in texts(verdict, "confirmation"))

    def test_an_error_with_a_name_in_the_log_comes_first(self, script: Left) -> None:
        script.write("logs/0.0.log", "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB\n")
        report(script, loss=[*falling(19), *[NAN] * 38])
        assert script.diagnosed()[0].cause == "memory.gpu_oom"

    def test_an_exception_that_has_nothing_to_do_with_numbers_comes_first(self, script: Left) -> None:
        frame = '  File "/home/mira/train.py", line 3, in <module>\n    main()'
        script.write("logs/0.0.log", f"Traceback (most recent call last):\n{frame}\nLookupError: no such metric\n")
        report(script, loss=[*falling(19), *[NAN] * 38])
        assert script.diagnosed()[0].cause == "program.exception"

    def test_an_exception_about_the_loss_is_the_losss(self, script: Left) -> None:
        frame = '  File "/home/mira/train.py", line 3, in <module>\n    main()'
        script.write("logs/0.0.log", f"Traceback (most recent call last):\n{frame}\nStopTraining: the loss went bad\n")
        report(script, loss=[*falling(19), *[NAN] * 38])
        assert script.diagnosed()[0].cause == "numerics.nan"

    def test_a_rank_that_was_killed_did_not_die_of_its_loss(self, script: Left) -> None:
        script.failure = KILLED
        report(script, loss=[*falling(19), *[NAN] * 38])
        incident, verdict = script.diagnosed()
        assert incident.cause == "unknown"
        assert any("loss was NaN from step 20" in text for text in texts(verdict, "context"))

    def test_a_time_limit_is_no_loss(self, script: Left) -> None:
        report(script, loss=[*falling(19), *[NAN] * 38])
        incident, _ = script.diagnosed(AttemptEnd("timeout", None))
        assert incident.cause == "scheduler.time_limit"

    @pytest.mark.parametrize("state", ["cancelled", "completed"])
    def test_a_diverged_run_that_was_ended_or_completed_is_no_failure(self, script: Left, state: str) -> None:
        from jobs.following import ending
        from jobs.models import Incident

        report(script, loss=[*falling(19), *[NAN] * 38])
        assert ending.end(script.attempt, AttemptEnd(state, 0))
        assert not Incident.objects.filter(attempt=script.attempt).exists()

    def test_memory_that_grew_to_the_limit_supports_a_kill(self, script: Left) -> None:
        Job.objects.filter(pk=script.attempt.job_id).update(spec={"kind": "script", "resources": {"memory_gib": 64}})
        script.attempt.refresh_from_db()
        script.failure = KILLED
        report(script, rank=-1, memory_gib=[12.0 + step for step in range(52)])
        incident, verdict = script.diagnosed()
        assert incident.cause == "memory.host_oom"
        assert "memory grew from 24.5 to 63.0 of 64 GiB, as the launcher measured it" in texts(verdict, "confirmation")

    def test_throughput_that_collapsed_is_worth_knowing(self, script: Left) -> None:
        report(script, tokens_per_second=[*[40_000.0] * 90, *[9_000.0] * 10])
        incident, verdict = script.diagnosed()
        assert incident.cause == "unknown"
        assert any("tokens_per_second fell from 4e+04 to 9,000" in text for text in texts(verdict, "context"))


def chunks(attempt: Attempt, name: str, values: np.ndarray) -> None:
    """A series as it is stored once it is long: merged, 1,024 points a row."""
    ids = store.declare(("attempt", attempt.pk), [name])
    rows = []
    for start in range(0, len(values), codec.POINTS):
        part = values[start : start + codec.POINTS]
        step = np.arange(start + 1, start + len(part) + 1, dtype=np.int64)
        rows.append(store.merged_row(ids[name], 0, 0, codec.Points(step, 1e9 + step.astype(float), part)))
    store.insert(rows)


def test_a_million_points_and_a_thousand_series_are_read_in_seconds_of_cpu(script: Left) -> None:
    values = 3 / np.sqrt(np.arange(1, 1_000_001, dtype=float))
    values[900_123:] = np.nan
    chunks(script.attempt, "loss", values)
    store.declare(("attempt", script.attempt.pk), [f"layer.{number}/grad_norm" for number in range(1_000)])
    assert Series.objects.filter(owner_id=script.attempt.pk).count() == 1_001
    assert Chunk.objects.count() == 977
    began = time.process_time()
    incident, verdict = script.diagnosed()
    assert time.process_time() - began < 5
    assert incident.cause == "numerics.nan"
    assert texts(verdict, "root") == [
        "loss was NaN from step 900,124 to its last point at step 1,000,000, as the program reported it"
    ]
