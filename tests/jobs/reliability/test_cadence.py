"""Test how often a job saves, and how often it should: on its page, over REST, and from its next attempt on."""

from __future__ import annotations

import math
import tomllib
from typing import Any

import pytest
from django.utils import timezone

from jobs.disk import rundir
from jobs.disk.prepare import prepare
from jobs.following.decisions.next_attempt import next_attempt
from jobs.models import Attempt, CadenceOrder, Event, Job
from jobs.reliability import mtbf
from portal.models import AuditEntry, Project, User
from tests.jobs.pages.reading import text
from tests.jobs.reliability.lab import count, ran
from tests.lab import a_job, a_project, bearer, person, send, signed_in, sysadmin

pytestmark = pytest.mark.django_db
CADENCE: dict[str, Any] = {
    "automatic": False, "cost_seconds": 20.0, "stall_seconds": 1.1, "write_seconds": 14.0, "mtbf_seconds": 1e5,
    "source": "portal", "interval_seconds": 120.0, "best_interval_seconds": 2000.0, "overhead_fraction": 0.17,
    "best_overhead_fraction": 0.02,
}  # fmt: skip


@pytest.fixture
def ada() -> User:
    return person("ada", a_project())


@pytest.fixture
def job(ada: User) -> Job:
    job = a_job(ada, a_project(), state="running")
    pace = {"pace_seconds": 200.0, "pace_steps": 100.0, "step": 50, "steps": 7250, "last_report_at": timezone.now()}
    job.attempts.update(nodes=["a", "b"], **pace)
    job.spec["resources"]["gpus_per_node"] = 8
    job.save(update_fields=["spec"])
    return job


def report_cadence(job: Job, **changes: Any) -> None:
    data = {**CADENCE, **changes}
    Event.objects.create(
        attempt=job.latest, time=timezone.now(), kind="checkpoint.cadence", rank=0, incarnation=0, data=data
    )


def get_json(user: User, job: Job) -> dict[str, Any]:
    answer = bearer(user, "read").get(f"/api/v1/jobs/{job.pk}/cadence")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def page(user: User, job: Job) -> str:
    return text(signed_in(user).get(f"/jobs/{job.pk}/checkpoints"))


class TestShown:
    def test_nothing_before_a_save_is_measured(self, ada: User, job: Job) -> None:
        assert bearer(ada, "read").get(f"/api/v1/jobs/{job.pk}/cadence").status_code == 404
        assert "Save interval" not in page(ada, job)

    def test_the_best_and_what_the_difference_costs(self, ada: User, job: Job, settings: Any) -> None:
        settings.VIGIL_GPU_HOUR_PRICE, settings.VIGIL_CURRENCY = 2.0, "€"
        report_cadence(job)
        found = get_json(ada, job)
        assert found["mtbf_source"] == "assumed"  # its nodes have no history yet
        assert found["best_interval_seconds"] == pytest.approx(math.sqrt(2 * 20 * 1e5), rel=0.01)
        assert found["best_every"] == round(found["best_interval_seconds"] / 2.0)
        assert found["gain"] == pytest.approx(20 / 120 - 20 / 2000, abs=0.012)
        assert found["gpu_hours_a_day"] == pytest.approx(24 * 16 * found["gain"])
        assert found["gpu_hours_left"] == pytest.approx(4 * 16 * found["gain"], rel=0.01)
        shown = page(ada, job)
        assert "Saving every 33 min" in shown
        assert "instead of every 2 min would leave" in shown
        assert "GPU-hours (" in shown
        assert f"Save every {found['best_every']:,} steps from attempt 2 on" in shown

    def test_by_what_is_observed_of_its_nodes(self, ada: User, job: Job) -> None:
        report_cadence(job)
        for cause in ("gpu.ecc", "gpu.off_bus", None):
            ran(20.0, nodes=["a", "b"], cause=cause, node="a")
        count()
        found = get_json(ada, job)
        assert found["mtbf_source"] == "seen"
        # Three runs of 20 hours on both, two of which "a" interrupted: its two and one more, over 120 node-hours and
        # those in which the rest, which is these same two, would have had one.
        rate = (2 + 1) / (120 + (120 + 24) / (2 + 1))
        assert found["mtbf_seconds"] == pytest.approx(3600 / rate / 2, rel=1e-2)
        report_cadence(job, source="config", mtbf_seconds=5e5)
        assert get_json(ada, job)["mtbf_seconds"] == 5e5

    def test_while_the_next_attempt_waits_its_nodes_are_those_it_had(self, ada: User, job: Job) -> None:
        report_cadence(job)
        ran(20.0, nodes=["a", "b"], cause="gpu.ecc", node="a")
        count()
        before = get_json(ada, job)
        next_attempt(job.attempts.get(), Attempt.Origin.RESTARTED)
        waiting = get_json(ada, job)
        assert waiting["gpu_hours_a_day"] == pytest.approx(24 * 16 * waiting["gain"])
        assert waiting["mtbf_seconds"] == pytest.approx(before["mtbf_seconds"], rel=1e-3)
        assert waiting["best_every"] == before["best_every"], "and a step takes what it took"

    def test_of_nodes_that_it_never_had_as_many_as_it_requests(self, ada: User, job: Job) -> None:
        report_cadence(job)
        ran(20.0, nodes=["a", "b"], cause="gpu.ecc", node="a")
        count()
        job.attempts.update(nodes=[])
        job.spec["resources"]["nodes"] = "2:64"
        job.save(update_fields=["spec"])
        of_all = mtbf.hours_between_failures(1)
        assert of_all is not None
        report = get_json(ada, job)
        assert report["mtbf_seconds"] == pytest.approx(of_all * 3600 / 64, rel=1e-3)
        assert report["gpu_hours_a_day"] == pytest.approx(24 * 8 * 64 * report["gain"])

    def test_a_step_takes_what_it_took_though_the_interval_was_somebodys_order(self, ada: User, job: Job) -> None:
        report_cadence(job, interval_seconds=12_000.0)
        job.spec["run"]["checkpoint_every"] = 50
        job.save(update_fields=["spec"])
        job.attempts.update(pace_seconds=1000.0, pace_steps=500.0)
        assert get_json(ada, job)["best_every"] == round(get_json(ada, job)["best_interval_seconds"] / 2.0)

    def test_auto_does_it_by_itself_and_reports_it(self, ada: User, job: Job) -> None:
        report_cadence(job, automatic=True, best_interval_seconds=4 * 3600.0)
        shown = page(ada, job)
        assert "The save interval is chosen automatically." in shown
        assert "It is approaching 4 h" in shown, "by what its trainer received"
        assert "from attempt" not in shown

    def test_as_good_as_the_best(self, ada: User, job: Job) -> None:
        report_cadence(job, interval_seconds=1900.0)
        assert "which is close to the best interval" in page(ada, job)
        assert "from attempt" not in page(ada, job)

    def test_never_more_often_than_a_write_takes(self, ada: User, job: Job) -> None:
        report_cadence(job, write_seconds=3000.0)
        assert get_json(ada, job)["best_interval_seconds"] == 6000

    @pytest.mark.parametrize("bad", [None, "x", -1, float("nan"), True, [], 1e300])
    def test_what_programs_may_report(self, ada: User, job: Job, bad: Any) -> None:
        bad = "NaN" if bad != bad else bad
        for name in CADENCE:
            report_cadence(job, **{name: bad})
            answer = bearer(ada, "read").get(f"/api/v1/jobs/{job.pk}/cadence")
            assert answer.status_code in {200, 404}
        report_cadence(job, **dict.fromkeys(CADENCE, bad))
        assert signed_in(ada).get(f"/jobs/{job.pk}/checkpoints").status_code == 200


class TestRequests:
    def test_the_button_and_the_way_back(self, ada: User, job: Job) -> None:
        report_cadence(job)
        client = signed_in(ada)
        assert client.post(f"/jobs/{job.pk}/cadence", {"every": "240"}).status_code == 302
        assert CadenceOrder.objects.get().every == 240
        assert "From attempt 2 on it saves every 240 steps (changed by ada" in page(ada, job)
        client.post(f"/jobs/{job.pk}/cadence", {"every": ""})
        assert not CadenceOrder.objects.exists()

    def test_an_attempt_that_the_scheduler_has_already_starts_as_it_was(self, ada: User, job: Job) -> None:
        """Its run file is written; an attempt that is still to be handed over gets a new one."""
        report_cadence(job)
        second = next_attempt(job.attempts.get(), Attempt.Origin.RESTARTED)
        assert "from attempt 2 on" in page(ada, job)
        Attempt.objects.filter(pk=second.pk).update(submitting_at=timezone.now())
        assert "from attempt 3 on" in page(ada, job)
        send(bearer(ada), "put", f"/api/v1/jobs/{job.pk}/cadence", {"every": 240})
        assert get_json(ada, job)["order"]["from_attempt"] == 3
        third = next_attempt(second, Attempt.Origin.REQUEUED)
        Attempt.objects.filter(pk=third.pk).update(submitting_at=timezone.now())
        assert get_json(ada, job)["order"]["from_attempt"] == 4, "the scheduler starts the same file again"
        fourth = next_attempt(third, Attempt.Origin.RESTARTED)
        Attempt.objects.filter(pk=fourth.pk).update(submitting_at=timezone.now())
        next_attempt(fourth, Attempt.Origin.RESTARTED)
        assert get_json(ada, job)["order"]["from_attempt"] == 4
        assert "From attempt 4 on it saves every 240 steps" in page(ada, job)

    def test_the_next_attempts_run_file_has_it(self, ada: User, job: Job) -> None:
        attempt = Attempt.objects.select_related("job__project", "job__owner").get(job=job)
        assert send(bearer(ada), "put", f"/api/v1/jobs/{job.pk}/cadence", {"every": 240}).status_code == 204
        root = prepare(attempt)
        assert tomllib.loads((root / "portal" / "run.toml").read_text())["run"]["checkpoint_every"] == 240
        assert send(bearer(ada), "put", f"/api/v1/jobs/{job.pk}/cadence", {"every": None}).status_code == 204
        prepare(attempt)
        again = tomllib.loads((root / "portal" / "run.toml").read_text())["run"]["checkpoint_every"]
        assert again == job.spec["run"]["checkpoint_every"]
        assert rundir.path_of(Job.objects.get(pk=job.pk).directory) == root

    def test_who_may(self, ada: User, job: Job) -> None:
        other = person("mira", Project.objects.get(slug="default"))
        stranger = person("oskar", a_project("elsewhere"))
        assert send(bearer(other), "put", f"/api/v1/jobs/{job.pk}/cadence", {"every": 5}).status_code == 403
        assert send(bearer(stranger), "put", f"/api/v1/jobs/{job.pk}/cadence", {"every": 5}).status_code == 404
        assert signed_in(stranger).post(f"/jobs/{job.pk}/cadence", {"every": "5"}).status_code == 404
        signed_in(other).post(f"/jobs/{job.pk}/cadence", {"every": "5"})
        assert not CadenceOrder.objects.exists()
        report_cadence(job)
        assert "from attempt" not in page(other, job)
        send(bearer(sysadmin()), "put", f"/api/v1/jobs/{job.pk}/cadence", {"every": 5})
        assert CadenceOrder.objects.get().asked_by.username == "sam"  # type: ignore[union-attr]
        assert AuditEntry.objects.filter(action="job.cadence").exists()

    @pytest.mark.parametrize("every", ["0", "-3", "x", "1e3", "99999999999"])
    def test_what_no_interval_is(self, ada: User, job: Job, every: str) -> None:
        signed_in(ada).post(f"/jobs/{job.pk}/cadence", {"every": every})
        assert not CadenceOrder.objects.exists()

    @pytest.mark.parametrize("body", [{"every": 0}, {"every": "5"}, {"every": 2.5}, {}, {"every": 5, "x": 1}])
    def test_bodies_that_are_not_taken(self, ada: User, job: Job, body: dict[str, Any]) -> None:
        assert send(bearer(ada), "put", f"/api/v1/jobs/{job.pk}/cadence", body).status_code == 422

    def test_a_custom_program_saves_when_it_likes(self, ada: User) -> None:
        job = a_job(ada, a_project(), state="running", kind="script")
        answer = send(bearer(ada), "put", f"/api/v1/jobs/{job.pk}/cadence", {"every": 5})
        assert answer.status_code == 409
