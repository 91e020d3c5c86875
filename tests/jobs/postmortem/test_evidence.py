"""Test what each source adds to an attempt's verdict, and what it reports if it was unavailable."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path

import pytest
from django.utils import timezone

from diagnosis.signs import node_snapshot, rank_exits
from jobs.following.end_causes.cause import AttemptEnd
from jobs.models import Attempt, Checkpoint, Event, Incident, Job
from jobs.postmortem import incidents
from nodes.health.temperature import is_hot
from nodes.models import Gpu, Holding, Node, NodeOrder
from tests.jobs.disk.test_captured import CAPTURED
from tests.jobs.postmortem.attempt_files import ALONE, Left, texts
from tests.jobs.reporting import attempt_of, job_of
from tests.nodes.telemetry.reporting import Machine

pytestmark = pytest.mark.django_db


class TestEnds:
    def test_a_killed_rank_is_named_with_its_node_and_its_memory(self, left: Left) -> None:
        left.ends(0, r0=(1, None, 0.1))
        left.ends(1, r1=(None, 9, 0.5))
        incident, report = left.diagnosed()
        assert (incident.cause, incident.rank, incident.node) == ("unknown", 1, "dgx-02")
        assert texts(report, "root") == ["rank 1 ended by SIGKILL after 60.0 s, with 2,048 MiB peak resident memory"]

    def test_the_rank_that_ended_first_began_it(self, left: Left) -> None:
        """Both raise, and their logs have no times."""
        left.write(
            "logs/0.0.log", 'Traceback (most recent call last):\n  File "a.py", line 1, in f\nValueError: late\n'
        )
        left.write("logs/0.1.log", 'Traceback (most recent call last):\n  File "b.py", line 1, in g\nKeyError: 1\n')
        left.ends(0, r0=(1, None, 1.0))
        left.ends(1, r1=(1, None, 31.0))
        incident, report = left.diagnosed()
        assert (incident.cause, incident.rank, report["exception"]) == ("program.exception", 1, "KeyError")

    def test_a_peer_that_was_quicker_to_leave_did_not_begin_it(self) -> None:
        ends = [
            rank_exits.RankExit(0, "a", exit_code=1, at=100.0),
            rank_exits.RankExit(1, "b", exit_code=1, at=100.6),
            rank_exits.RankExit(2, "b", signal=9, at=100.7, by_launcher=True),
        ]
        assert rank_exits.first_failed_rank(ends, 1) == 1
        assert rank_exits.first_failed_rank(ends, None) is None
        assert rank_exits.first_failed_rank([*ends, rank_exits.RankExit(3, "a", signal=11, at=99.9)], 1) == 3

    def test_a_restart_in_place_is_explained_by_its_ends(self, left: Left) -> None:
        left.ends(0, incarnation=0, r0=(None, 11, 60.0))
        left.ends(0, incarnation=1, r0=(1, None, 1.0))
        left.write("logs/1.0.log", ALONE)
        incident, report = left.diagnosed()
        assert "SIGSEGV" not in str(report)
        restart = Incident.objects.create(
            attempt=left.attempt,
            incarnation=0,
            at=timezone.now(),
            due_at=timezone.now(),
            project=left.attempt.job.project,
        )
        assert incidents.diagnose(restart.pk)
        verdict = restart.diagnoses.get().verdict
        assert [text for text in texts(verdict, "root") if "rank 0 ended by SIGSEGV" in text]

    def test_a_thousand_ranks_are_a_few_signs(self) -> None:
        ends = [rank_exits.RankExit(rank, "a", exit_code=1, at=float(rank)) for rank in range(1024)]
        assert len(rank_exits.signs_of_exits(ends)) == rank_exits.MAX_SIGNS

    def test_a_file_that_is_a_link_a_pipe_or_too_large_is_none(self, left: Left, tmp_path: Path) -> None:
        left.ends(0, r0=(1, None, 1.0))
        for name in ("0.1.json", "0.2.json", "0.3.json"):
            left.write(f"looks/{name}", "x")
            (left.folder / "looks" / name).unlink()
        (left.folder / "looks/0.1.json").symlink_to("/etc/passwd")
        os.mkfifo(left.folder / "looks/0.2.json")
        left.write("looks/0.3.json", " " * (node_snapshot.MAX_BYTES + 1))
        left.write("ends/0.1.json", '{"ranks": [{"rank": 5}, 7, {"rank": "x"}, {"rank": 1, "ended_at": 1e400}]}')
        incident, report = left.diagnosed()
        assert incident.version == 1
        assert "memory and disk of dgx-01, dgx-02: no snapshot was taken" in report["not_seen"]


class TestRanks:
    def test_what_a_program_printed_last_is_context_of_its_exit_code(self, left: Left) -> None:
        lines = ["epoch 3", "saved to /data/out"]
        left.failure["first_failure"] |= {"kind": "exception", "signal": None, "exit_code": 3, "error": ""}
        left.failure["first_failure"]["last_lines"] = lines
        left.write("logs/0.0.log", "\n".join(lines))
        left.ends(r1=(3, None, 1))
        _, verdict = left.diagnosed(AttemptEnd("failed", 3, result=left.failure))
        assert "rank 1 ended with exit code 3" in texts(verdict, "root")[0]
        assert "saved" not in "".join(texts(verdict, "confirmation")), "it is not the scheduler's word"
        assert texts(verdict, "context") == [
            "the log of rank 1 names no error and ends with: epoch 3 / saved to /data/out"
        ]

    def test_a_hung_rank_is_named_with_where_it_was(self, left: Left) -> None:
        left.failure["cause"] = "hang"
        left.failure["first_failure"] |= {"rank": 1, "kind": "hang", "error": "rank 1 did nothing for 60 s in data"}
        stack = 'Thread 0x1 (most recent call first):\n  File "/usr/lib/python3.11/selectors.py", line 4 in select\n\n'
        stack += 'Current thread 0x2 (most recent call first):\n  File "/home/mira/data.py", line 88 in read_batch\n'
        left.write("stacks/0.1.txt", stack + '  File "/home/mira/train.py", line 40 in main\n')
        waits = (
            'Current thread 0x2 (most recent call first):\n  File "/x/torch/distributed/distributed_c10d.py", line 9 '
        )
        left.write("stacks/0.0.txt", waits + 'in all_reduce\n  File "/home/mira/train.py", line 44 in main\n')
        left.write("heartbeat/0.0", {"incarnation": 0, "phase": "step", "step": 42, "begun": 42, "monotonic": 1.0})
        left.write("heartbeat/0.1", {"incarnation": 0, "phase": "data", "step": 41, "begun": 41, "monotonic": 1.0})
        incident, report = left.diagnosed()
        assert (incident.cause, incident.rank) == ("collective.timeout", 1)
        assert report["frame"] == "/home/mira/data.py:read_batch"
        text = texts(report, "confirmation")
        assert "rank 1 was in read_batch (/home/mira/data.py:88), while the others waited for it" in text
        assert "rank 1 was at step 41 (data), others up to 42" in text

    def test_what_the_guards_found_where_no_log_is_left(self, left: Left) -> None:
        for log in (left.folder / "logs").iterdir():
            log.unlink()
        data = {"step": 1204, "what": "loss nan", "where": "the output of blocks.11.mlp", "rank": 1}
        Event.objects.create(
            attempt=left.attempt, time=timezone.now(), kind="guard.nonfinite", rank=0, incarnation=0, data=data
        )
        ranks = [{"rank": 1, "loss": "NaN", "output": "blocks.11.mlp", "gradient": "", "parameters": []}]
        left.write("numerics/step-1204.json", {"step": 1204, "losses": {"0": 2.1, "1": "NaN"}, "ranks": ranks})
        left.ends(1, r1=(1, None, 0.5))
        incident, report = left.diagnosed()
        assert (incident.cause, incident.rank, incident.node) == ("numerics.nan", 1, "dgx-02")
        text = "step 1,204, when repeated: 1 of 2 ranks had a loss that is not finite, "
        text += "first in the output of blocks.11.mlp"
        assert text in texts(report, "confirmation")

    def test_a_rank_cannot_name_a_node(self, left: Left) -> None:
        data = {"step": 9, "check": "replica", "ranks": [1], "what": "differs", "node": "dgx-77"}
        Event.objects.create(
            attempt=left.attempt, time=timezone.now(), kind="guard.corruption", rank=0, incarnation=0, data=data
        )
        left.ends(1, r1=(1, None, 0.5))
        incident, report = left.diagnosed()
        assert (incident.cause, incident.rank, incident.node) == ("numerics.corruption", 1, "dgx-02")
        assert "dgx-77" not in str(report)


class TestHistory:
    def test_a_checkpoint_that_was_found_damaged(self, left: Left) -> None:
        attempt = left.attempt
        for step, state in ((200, "verified"), (400, "corrupt")):
            Checkpoint.objects.create(
                job=attempt.job, attempt=attempt, step=step, name=f"step-{step}", generation=1, state=state,
                created_at=timezone.now(),
            )  # fmt: skip
        data = {"name": "step-400", "step": 400, "generation": 1, "reason": "its sha256 differs"}
        Event.objects.create(
            attempt=attempt, time=timezone.now(), kind="checkpoint.damaged", rank=0, incarnation=0, data=data
        )
        raised = "CheckpointError: step-400 can't be resumed from: it was found damaged: see the file DAMAGED in it\n"
        left.write("logs/0.1.log", raised)
        incident, report = left.diagnosed()
        assert incident.cause == "checkpoint.corrupt"
        assert "step-400 was found damaged: its sha256 differs" in texts(report, "confirmation")
        assert "checkpoints to resume from: step-200" in texts(report, "context")

    def test_what_changed_since_the_attempt_before_is_shown_and_no_reason(self, left: Left) -> None:
        left.write("environment.json", CAPTURED)
        later = left.folder.parent / "attempt-2"
        later.mkdir()
        changed = {**CAPTURED, "packages": {**CAPTURED["packages"], "numpy": "2.5.0"}}
        (later / "environment.json").write_text(json.dumps(changed))
        attempt = Attempt.objects.create(
            job=left.attempt.job, number=2, directory="attempt-2", state="running", nodes=["dgx-01"], scheduler_id="8"
        )
        Job.objects.filter(pk=attempt.job_id).update(latest=attempt)
        incident, report = Left(attempt, later, left.failure).diagnosed()
        assert incident.cause == "unknown"
        assert texts(report, "context") == ["changed since attempt 1: numpy 2.4.6 → 2.5.0"]

    def test_others_that_failed_are_counted_and_never_named(self, left: Left) -> None:
        left.write("logs/0.1.log", "OSError: [Errno 116] Stale file handle: '/data/shard-7'\n")
        for number in range(4):
            job = job_of("eve", f"secret-{number}")
            other = attempt_of(job, nodes=["dgx-09"], scheduler_id=f"9{number}")
            Incident.objects.create(
                attempt=other,
                project=job.project,
                at=timezone.now(),
                cause="storage.io" if number else "unknown",
                node="dgx-02",
            )
        far = attempt_of(job_of("eve", "far"), scheduler_id="99")
        Incident.objects.create(
            attempt=far, project=far.job.project, at=timezone.now() - timedelta(minutes=3), cause="storage.io"
        )
        incident, report = left.diagnosed()
        assert incident.cause == "storage.io"
        text = "4 other jobs failed within two minutes, 3 of them for the same cause: file system error"
        assert text in texts(report, "confirmation")
        assert "4 other jobs failed on dgx-02 within 10 minutes" in texts(report, "context")
        assert "secret" not in str(report)
        assert "eve" not in str(report["evidence"])


class TestCluster:
    def test_the_node_that_went_down_is_named(self, left: Left) -> None:
        now = timezone.now()
        Node.objects.create(name="dgx-01", state="idle")
        Node.objects.create(name="dgx-02", state="down", reason="Not responding", reason_at=now)
        incident, report = left.diagnosed(AttemptEnd("node_fail"))
        assert (incident.cause, incident.node) == ("scheduler.node_fail", "dgx-02")
        assert "dgx-02 is down: Not responding" in texts(report, "context")

    def test_a_drain_around_the_end_is_shown(self, left: Left) -> None:
        NodeOrder.objects.create(node="dgx-01", action="drain", reason="a fan", state="done", ended_at=timezone.now())
        NodeOrder.objects.create(node="dgx-03", action="drain", reason="other", state="done", ended_at=timezone.now())
        _, report = left.diagnosed()
        assert texts(report, "context") == ["dgx-01 was drained: a fan"]

    @pytest.mark.parametrize("temperature_c", [60, 85, 86, 88])
    def test_a_gpu_that_is_hot(self, left: Left, temperature_c: int) -> None:
        machine = Machine(node="dgx-02")
        now = int(timezone.now().timestamp())
        assert machine.post(machine.facts(now - 60)).status_code == 200
        assert machine.post(machine.batch(now - 30, temperature_c=[[60] * 10, [temperature_c] * 10])).status_code == 200
        Gpu.objects.update(slowdown_c=89)
        for gpu in Gpu.objects.all():
            since = timezone.now() - timedelta(minutes=30)
            Holding.objects.create(gpu=gpu, agent=machine.agent, scheduler_id="7", source="scheduler", since=since)
        _, report = left.diagnosed()
        log = [item["text"] for item in report["evidence"] if item["cause"] == "gpu.thermal"]
        expected = f"GPU 1 of dgx-02 was at {temperature_c} °C; it slows down at 89 °C"
        assert log == ([expected] if is_hot(temperature_c, 89) else [])

    def test_memory_of_the_machine_that_was_full_explains_a_kill(self, left: Left) -> None:
        left.ends(1, r1=(None, 9, 0.5))
        machine = Machine(node="dgx-02")
        now = int(timezone.now().timestamp())
        host = {"memory_used_mib": 1019.0, "memory_total_mib": 1024.0}
        assert machine.post(machine.facts(now - 60)).status_code == 200
        assert machine.post(machine.batch(now - 30, host=host)).status_code == 200
        incident, report = left.diagnosed()
        assert (incident.cause, report["confidence"]) == ("memory.host_oom", 0.75)
        text = "memory of dgx-02 was 100% full in the last 2 minutes"
        assert text in texts(report, "root") + texts(report, "confirmation")
