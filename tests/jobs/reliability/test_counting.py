"""Test counting: allocated time once, however late; failures with a person's judgement first; and their cost."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from importlib import import_module
from typing import Any

import pytest
from django.apps import apps
from django.db import DataError, connection
from django.db.models import F, Sum
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from jobs import lease
from jobs.failures import counting, sums
from jobs.models import Attempt, Failure, Incident, Job, JobTime, NodeHeld, ProjectHeld, ProjectNodeHeld
from jobs.reliability.node_time import WEEK, AttemptAllocation, monday, rows_since
from nodes.models import Partition
from portal.models import Lease
from tests.jobs.reliability.lab import count, failed, ran
from tests.lab import a_project
from tests.portal.series import write

pytestmark = pytest.mark.django_db


def node_hours(model: type[NodeHeld] | type[ProjectNodeHeld] | type[ProjectHeld]) -> float:
    """Return the node-hours, which have to be the same by day and by week."""
    hours = {
        days: float(model.objects.filter(days=days).aggregate(s=Sum("node_s"))["s"] or 0.0) / 3600 for days in (1, WEEK)
    }
    assert hours[1] == pytest.approx(hours[WEEK])
    return hours[1]


def steps(attempt: Attempt, first: int, last: int, seconds: float) -> None:
    """Write rank 0's report of its step times."""
    reports = [(step, seconds) for step in range(first, last + 1)]
    write("step_seconds", (0, reports), owner=("attempt", attempt.pk))


class TestAllocatedTime:
    def test_each_node_and_day_gets_its_hours(self) -> None:
        attempt = ran(30.0, nodes=["a", "b"], gpus=4)
        began = datetime(2026, 3, 1, 20, tzinfo=UTC)
        Attempt.objects.filter(pk=attempt.pk).update(started_at=began, ended_at=began + timedelta(hours=30))
        count()
        hours = {
            (row.node, row.day.day): (row.node_s / 3600, row.gpu_s / 3600)
            for row in NodeHeld.objects.filter(node="a", days=1)
        }
        assert hours == {("a", 1): (4, 16), ("a", 2): (24, 96), ("a", 3): (2, 8)}
        assert node_hours(NodeHeld) == node_hours(ProjectNodeHeld) == node_hours(ProjectHeld) == 60

    @pytest.mark.parametrize("back", [0, 1, 3, 6, 7, 29, 89, 364])
    def test_days_and_weeks_make_up_any_window(self, back: int) -> None:
        """A second of each day: what is read has so many seconds as days."""
        today = timezone.now().date()
        begins = [datetime(*(today - timedelta(days=n)).timetuple()[:3], tzinfo=UTC) for n in range(400)]
        found = [AttemptAllocation(0, 0, a_project().pk, "", ["a"], 1, at, at + timedelta(seconds=1)) for at in begins]
        sums.prepare(found, []).write()
        first = today - timedelta(days=back)
        rows = NodeHeld.objects.filter(rows_since(first))
        assert rows.aggregate(s=Sum("node_s"))["s"] == back + 1
        assert rows.count() <= 6 + back // 7 + 1
        assert all(row.day == monday(row.day) for row in rows if row.days == WEEK)

    def test_once_however_often_it_is_counted(self) -> None:
        ran(5.0)
        for _ in range(3):
            counting.count()
        ran(2.0)
        count()
        assert node_hours(NodeHeld) == node_hours(ProjectHeld) == 7

    def test_an_attempt_that_has_not_closed_is_not_counted_yet(self) -> None:
        attempt = ran(5.0)
        Attempt.objects.filter(pk=attempt.pk).update(closed_at=None)
        count()
        assert node_hours(NodeHeld) == 0

    def test_an_attempt_that_never_ran_and_a_job_that_is_only_claimed(self) -> None:
        never, strange = ran(5.0), ran(5.0, cause="gpu.ecc")
        Attempt.objects.filter(pk=never.pk).update(started_at=None)
        Job.objects.filter(pk=strange.job_id).update(kind=Job.ATTACHED)
        Attempt.objects.filter(pk=strange.pk).update(submitted_at=None)
        count()
        assert node_hours(NodeHeld) == 0
        assert not Failure.objects.exists()
        assert not Attempt.objects.filter(is_counted=False).exists()
        assert not Incident.objects.filter(is_counted=False).exists()

    def test_one_process_counts_at_a_time(self) -> None:
        ran(5.0)
        other = lease.take("reliability")
        assert other is not None
        assert counting.count() == 0
        other.release()
        assert counting.count() == 1

    def test_a_process_that_lost_its_lease_writes_nothing_and_the_next_does(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ran(5.0, cause="gpu.ecc")

        def stopped_meanwhile(*arguments: object) -> dict[str, object]:
            Lease.objects.filter(name="reliability").update(fence=F("fence") + 1)
            return {}

        with monkeypatch.context() as patched:
            patched.setattr(counting, "fields_of", stopped_meanwhile)
            with pytest.raises(lease.LeaseLost):
                counting.count()
        assert not Failure.objects.exists()
        Lease.objects.all().delete()
        count()
        assert Failure.objects.count() == 1
        assert node_hours(NodeHeld) == 5

    def test_more_than_a_transaction_takes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(counting, "ROWS", 3)
        monkeypatch.setattr(sums, "ROWS_PER_STATEMENT", 2)
        for number in range(8):
            ran(1.0, nodes=[f"n{number}", "shared"])
        count()
        assert node_hours(NodeHeld) == 16
        assert NodeHeld.objects.filter(node="shared", days=1).aggregate(s=Sum("node_s"))["s"] == 8 * 3600

    def test_transactions_are_short_however_many_nodes_there_are(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nor does reading what there is take the database's lock: all of it is done before."""
        monkeypatch.setattr(counting, "NODE_DAYS", 8)
        for _ in range(5):
            ran(1.0, nodes=["a", "b", "c"])
        ran(1.0, nodes=[f"n{number}" for number in range(20)])
        with CaptureQueriesContext(connection) as queries:
            count()
        assert node_hours(NodeHeld) == 35
        transactions: list[list[str]] = []
        for query in queries.captured_queries:
            if query["sql"].startswith(("SAVEPOINT", "BEGIN")) or query["sql"].startswith(("RELEASE", "COMMIT")):
                transactions.append([])
            elif transactions:
                transactions[-1].append(query["sql"])
        wrote = [several for several in transactions if any('INTO "jobs_nodeheld"' in sql for sql in several)]
        assert len(wrote) == 4, "two attempts at a time, and the large one by itself"
        assert not [sql for several in wrote for sql in several if sql.startswith("SELECT")]

    def test_what_somebody_calls_a_partition_holds_up_nobody(self) -> None:
        """The spec of a run that was started outside Vigil is unchecked text."""
        ran(1.0, nodes=["a"], partition="x" * 300, cause="gpu.ecc")
        ran(1.0, nodes=["b"], cause="gpu.ecc")
        count()
        assert node_hours(NodeHeld) == 2
        assert set(ProjectHeld.objects.values_list("partition", flat=True)) == {"x" * 255, ""}
        assert set(Failure.objects.values_list("partition", flat=True)) == {"x" * 255, ""}

    def test_what_the_database_cannot_take_is_left_out_and_logged(
        self, monkeypatch: pytest.MonkeyPatch, caplog: Any
    ) -> None:
        bad, good = ran(1.0, nodes=["bad"], cause="gpu.ecc"), ran(1.0, nodes=["good"], cause="gpu.ecc")
        added, fields_of = sums.prepare, counting.fields_of

        def refusing(found: Any, jobs: Any) -> Any:
            if any(item.attempt == bad.pk for item in found):
                raise DataError("value too long")
            return added(found, jobs)

        def refusing_too(incident: Incident, *more: Any) -> Any:
            if incident.attempt_id == bad.pk:
                raise DataError("value too long")
            return fields_of(incident, *more)

        monkeypatch.setattr(sums, "prepare", refusing)
        monkeypatch.setattr(counting, "fields_of", refusing_too)
        count()
        assert set(NodeHeld.objects.filter(days=1).values_list("node", flat=True)) == {"good"}  # of two days, perhaps
        assert Failure.objects.get().incident == good.incidents.get()
        assert [record.message for record in caplog.records if "can't be counted" in record.message] != []
        assert not Attempt.objects.filter(is_counted=False).exists()

    def test_what_closed_before_incidents_were_recorded_is_left_out(self) -> None:
        """Otherwise an update would leave weeks of node-hours without a failure, and runs would save far too seldom."""
        ran(500.0, ago=600)
        import_module("jobs.migrations.0011_before_incidents").leave_out(apps, None)
        ran(5.0)
        running = ran(1.0)
        Attempt.objects.filter(pk=running.pk).update(closed_at=None)
        count()
        assert node_hours(NodeHeld) == 5

    def test_it_outlives_its_job(self) -> None:
        attempt = ran(5.0, cause="gpu.ecc")
        count()
        attempt.job.delete()
        assert node_hours(NodeHeld) == 5
        assert Failure.objects.get().incident is None
        assert counting.count() == 0

    def test_a_partition_that_nobody_named_is_the_default(self) -> None:
        Partition.objects.create(name="batch", is_default=True)
        ran(5.0, cause="gpu.ecc")
        ran(1.0, partition="debug")
        count()
        assert set(ProjectHeld.objects.values_list("partition", flat=True)) == {"batch", "debug"}
        assert Failure.objects.get().partition == "batch"


class TestFailures:
    def test_a_revision_and_a_persons_word_are_counted_instead(self) -> None:
        attempt = ran(5.0)
        incident = failed(attempt, "", version=0, is_final=False)
        count()
        assert Failure.objects.get().cause == ""
        Incident.objects.filter(pk=incident.pk).update(cause="program.exception", version=1, is_counted=False)
        count()
        assert Failure.objects.get().cause == "program.exception"
        Incident.objects.filter(pk=incident.pk).update(overruled_cause="gpu.ecc", is_counted=False)
        count()
        assert Failure.objects.get().cause == "gpu.ecc"
        assert not Failure.objects.get().is_interruption, "the machine does not report it"
        Incident.objects.filter(pk=incident.pk).update(confirmed_cause="gpu.ecc", cause="gpu.ecc", is_counted=False)
        count()
        assert Failure.objects.get().is_interruption
        Incident.objects.filter(pk=incident.pk).update(overruled_cause="none", is_counted=False)
        count()
        assert not Failure.objects.exists()

    @pytest.mark.parametrize("cause", ["none", "scheduler.preempted", "scheduler.cancelled"])
    def test_what_is_no_failure_is_none(self, cause: str) -> None:
        ran(5.0, cause=cause)
        count()
        assert not Failure.objects.exists()

    def test_programs_by_fingerprint_and_machines_by_the_job(self) -> None:
        for _ in range(2):
            ran(1.0, cause="program.exception", fingerprint="abc")
            ran(1.0, cause="gpu.off_bus", fingerprint="def")
        count()
        programs = list(Failure.objects.values_list("cause", "program"))
        assert len({name for cause, name in programs if cause == "program.exception"}) == 1
        assert len({name for cause, name in programs if cause == "gpu.off_bus"}) == 2


class TestTimeOfJobs:
    def test_what_is_stored_of_queued_and_allocated_time(self) -> None:
        attempt = ran(10.0, nodes=["a", "b"])
        Attempt.objects.filter(pk=attempt.pk).update(state="completed", cause="completed")
        steps(attempt, 1, 100, 288.0)
        count()
        found = JobTime.objects.get()
        assert (found.queued_node_s, found.held_node_s) == (3600, 20 * 3600)
        assert found.kept_node_s == pytest.approx(2 * 28_800)

    def test_a_job_that_goes_on_is_counted_again(self) -> None:
        attempt = ran(10.0)
        steps(attempt, 1, 10, 100.0)
        count()
        second = ran(1.0, ago=20, job=attempt.job)
        steps(second, 11, 20, 100.0)
        count()
        assert JobTime.objects.get().held_node_s == 11 * 3600
        for days in (1, WEEK):
            report = ProjectHeld.objects.filter(days=days).aggregate(s=Sum("jobs_held_s"))["s"]
            assert report == pytest.approx(11 * 3600)

    def test_nothing_is_claimed_without_steps_or_before_the_end(self) -> None:
        ran(1.0)
        alive = ran(1.0)
        steps(alive, 1, 10, 100.0)
        Attempt.objects.filter(pk=alive.pk).update(ended_at=None)
        count()
        assert not JobTime.objects.exists()
        steps(ran(1.0), 1, 10, 100.0)
        count()
        assert JobTime.objects.count() == 1
