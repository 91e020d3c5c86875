"""Test a federation's post-mortem: it names the failed clients and their errors, and clients that were left out."""

from __future__ import annotations

from typing import Any

import pytest
from django.utils import timezone

from jobs.models import Event, Job
from tests.jobs.postmortem.attempt_files import Left, texts
from tests.jobs.reporting import attempt_of

pytestmark = pytest.mark.django_db

TRACEBACK = """Traceback (most recent call last):
  File "/opt/vigil/training/federated/working.py", line 290, in _look_up
    found = self._model.task.batch("train", ids)
  File "/home/mira/recipes/wards.py", line 49, in batch
    raise LookupError(f"the disk of owner {owner} is gone")
LookupError: the disk of owner 5 is gone"""
QUORUM = (
    "round 7 was lost 3 times: 5 of the 6 updates that it takes; 8 clients were asked, 3 dropped out. Client 5 was the "
    "first to drop out: LookupError: the disk of owner 5 is gone."
)
ALL = f"in round 1 all 8 clients failed; client 5 failed with:\n{TRACEBACK}"


@pytest.fixture
def federated(left: Left) -> Left:
    job = left.attempt.job
    Job.objects.filter(pk=job.pk).update(spec={**job.spec, "kind": "federated"})
    left.attempt.refresh_from_db()
    left.failure = {"cause": "failed", "first_failure": {"rank": 0, "kind": "exception", "exit_code": 1, "error": "x"}}
    return left


def report_event(left: Left, kind: str, *, incarnation: int = 0, **data: Any) -> None:
    Event.objects.create(attempt=left.attempt, time=timezone.now(), kind=kind, incarnation=incarnation, data=data)


def raised(left: Left, name: str, message: str) -> None:
    """Write an exception to the logs of both ranks and to rank 0's report."""
    frame = '  File "/opt/vigil/training/rank.py", line 103, in _train\n    completed = _loop()'
    for rank in range(2):
        left.write(f"logs/0.{rank}.log", f"Traceback (most recent call last):\n{frame}\n{name}: {message}\n")
    report_event(left, "run.failed", exception=name.rpartition(".")[2], error=message)


class TestClients:
    def test_a_client_is_named_with_the_end_of_its_traceback(self, federated: Left) -> None:
        report_event(federated, "client.dropped", step=7, client=5, traceback=TRACEBACK)
        raised(federated, "training.federated.controller.QuorumLost", QUORUM)
        incident, verdict = federated.diagnosed()
        assert (incident.cause, incident.rank) == ("federated.quorum", None)
        assert incident.says.startswith("Too few clients responded: round 7 was lost 3 times: 5 of the 6")
        (text,) = texts(verdict, "context")
        assert text.startswith(
            "client 5 dropped out in round 7: LookupError: the disk of owner 5 is gone\n"
            '  File "/opt/vigil/training/federated/working.py"'
        )
        assert '  File "/home/mira/recipes/wards.py", line 49, in batch\n    raise LookupError(' in text

    def test_all_failed_by_the_first_ones_error(self, federated: Left) -> None:
        for client in range(5):
            report_event(federated, "client.dropped", step=1, client=client, traceback=TRACEBACK)
        raised(federated, "training.federated.client_failures.ClientsFailed", ALL)
        incident, verdict = federated.diagnosed()
        assert incident.cause == "federated.clients"
        assert incident.says == ("All clients failed: client 5: LookupError: the disk of owner 5 is gone.")
        assert verdict["frame"] == "/home/mira/recipes/wards.py:batch"
        assert len(texts(verdict, "context")) == 1, "they all died of the same"

    @pytest.mark.parametrize(
        ("exception", "error", "cause"),
        [
            ("ClientsFailed", ALL, "federated.clients"),
            ("QuorumLost", QUORUM, "federated.quorum"),
            ("QuorumLost", "round 1 was lost 3 times: none of the 8 updates was made of numbers", "numerics.nan"),
        ],
    )
    def test_where_logs_are_gone_its_report_counts(
        self, federated: Left, exception: str, error: str, cause: str
    ) -> None:
        for rank in range(2):
            (federated.folder / f"logs/0.{rank}.log").unlink()
        report_event(federated, "run.failed", exception=exception, error=error)
        assert federated.diagnosed()[0].cause == cause

    def test_who_was_left_out_and_since_which_round(self, federated: Left) -> None:
        """This holds for earlier attempts too."""
        attempt = federated.attempt
        report_event(federated, "client.quarantined", step=3, client=2, name="ada", updates=3)
        report_event(federated, "client.quarantined", step=3, client=2, name="ada", updates=3)
        Job.objects.filter(pk=attempt.job_id).update(latest=attempt)
        report_event(federated, "client.quarantined", step=9, client=6, updates=3)
        raised(federated, "training.federated.controller.QuorumLost", QUORUM)
        _, verdict = federated.diagnosed()
        assert texts(verdict, "context") == [
            "excluded because their updates were not finite: client 2 (ada) since round 3, client 6 since round 9"
        ]

    def test_what_no_trainer_of_vigil_reports_changes_nothing(self, federated: Left) -> None:
        report_event(federated, "client.dropped", step="x", client=5, traceback=TRACEBACK)
        report_event(federated, "client.dropped", step=1, client=5, traceback={"a": 1})
        report_event(federated, "client.dropped", step=2, client=-1, traceback=["\x1b" * 9])
        report_event(federated, "client.quarantined", step=None, client="x")
        report_event(federated, "run.failed", exception=["ClientsFailed"], error=None)
        _, verdict = federated.diagnosed()
        assert texts(verdict, "context") == []

    def test_another_kind_of_job_has_no_clients(self, left: Left) -> None:
        report_event(left, "client.dropped", step=7, client=5, traceback=TRACEBACK)
        assert texts(left.diagnosed()[1], "context") == []

    def test_what_another_incarnation_reported_does_not_count_here(self, federated: Left) -> None:
        report_event(federated, "client.dropped", incarnation=3, step=7, client=5, traceback=TRACEBACK)
        raised(federated, "training.federated.controller.QuorumLost", QUORUM)
        assert texts(federated.diagnosed()[1], "context") == []


def test_attempts_after_it_do_not_count(federated: Left) -> None:
    later = attempt_of(federated.attempt.job, number=2)
    Event.objects.create(
        attempt=later, time=timezone.now(), kind="client.quarantined", incarnation=0, data={"step": 3, "client": 2}
    )
    assert texts(federated.diagnosed()[1], "context") == []
