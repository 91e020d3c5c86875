"""A game day plants faults in small jobs, one after the other, and judges what Vigil made of each."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.utils import timezone

from console.pages.cluster_tests import gameday
from jobs.errors import Conflict
from jobs.failures import counting
from jobs.gameday import start as game_days
from jobs.gameday.advance import MAX_JOB_DRILL_DURATION, advance
from jobs.gameday.faults import FAULTS
from jobs.models import Attempt, Diagnosis, Drill, Failure, GameDay, Incident, Job
from nodes.models import Partition
from portal.models import AuditEntry, Chunk, Membership, User
from tests.lab import a_project, bearer, person, signed_in
from tests.portal.series import write

pytestmark = pytest.mark.django_db
LOSSES = [(step, 1 / step) for step in range(1, 61)]


@pytest.fixture
def game_day(ops: User) -> GameDay:
    Partition.objects.create(name="canary")
    return game_days.start(ops, "canaries", "canary")


def drill(game_day: GameDay, fault: str) -> Drill:
    return game_day.drills.select_related("job").get(fault=fault)


def finish(job: Job, *, number: int = 1, state: str = "failed", decision: str = "", **record: float) -> Attempt:
    """Let an attempt of the job end as the follower and its program would have left it."""
    from jobs.disk import rundir

    if not job.directory:
        job.directory = rundir.make(job.project.slug, job.pk)
        Job.objects.filter(pk=job.pk).update(directory=job.directory)
    attempt, _ = Attempt.objects.get_or_create(job=job, number=number)
    folder = rundir.path_of(job.directory) / "job" / f"attempt-{number}"
    folder.mkdir(parents=True)
    (folder / "game-day.json").write_text(json.dumps(record))
    now = timezone.now()
    Attempt.objects.filter(pk=attempt.pk).update(
        state=state, nodes=["dgx-01"], directory=folder.name, ended_at=now, decided_at=now, closed_at=now,
        decision=decision, started_at=now,
    )  # fmt: skip
    Job.objects.filter(pk=job.pk).update(latest=attempt)
    return attempt


def failed(attempt: Attempt, cause: str, *, after_s: float, planted_at: float) -> None:
    at = datetime.fromtimestamp(planted_at + after_s, UTC)
    incident = Incident.objects.create(
        attempt=attempt, project=attempt.job.project, at=at, opened_at=at, cause=cause, version=1, is_final=True
    )
    made_at = at + timedelta(seconds=1)
    Diagnosis.objects.create(incident=incident, version=1, cause=cause, confidence=0.9, verdict={}, made_at=made_at)


def undisturbed(game_day: GameDay) -> None:
    """Submit and end the run that losses are compared to."""
    advance()
    job = drill(game_day, "none").job
    assert job is not None
    write("loss", (0, LOSSES), owner=("attempt", finish(job, state="completed").pk))
    advance()
    assert drill(game_day, "none").state == "passed"
    advance()


def killed(game_day: GameDay, losses: list[tuple[int, float]], *, cause: str = "unknown") -> Drill:
    """Let the drill of a killed rank fail and continue from step 30."""
    undisturbed(game_day)
    job, planted_at = drill(game_day, "kill").job, timezone.now().timestamp()
    assert job is not None
    first = finish(job, decision="Restarted from step 30 as attempt 2.", planted_at=planted_at)
    failed(first, cause, after_s=2.5, planted_at=planted_at)
    write("loss", (0, LOSSES[:34]), owner=("attempt", first.pk))
    second = finish(job, number=2, state="completed", training_at=planted_at + 9.0)
    write("loss", (0, losses), owner=("attempt", second.pk))
    advance()
    return drill(game_day, "kill")


def test_jobs_are_submitted_one_after_the_other_as_the_sysadmins(game_day: GameDay, ops: User) -> None:
    advance()
    advance()
    job = Job.objects.get()
    assert (job.owner, job.project.slug, job.spec["resources"]["partition"]) == (ops, "canaries", "canary")
    assert job.spec["script"]["args"] == ["none"]
    assert list(job.tags.values_list("name", flat=True)) == ["game-day"]
    undisturbed(game_day)
    assert Job.objects.latest("pk").spec["script"]["args"] == ["kill"]
    assert AuditEntry.objects.filter(action="gameday.started", user=ops).exists()


def test_a_killed_rank_that_continues_as_if_nothing_had_happened_passes(game_day: GameDay) -> None:
    found = killed(game_day, LOSSES[30:])
    assert (found.state, found.detail) == ("passed", "")
    assert (found.noticed_s, found.verdict_s, found.training_again_s) == (2.5, 3.5, 9.0)
    assert (found.is_cause_right, found.is_action_right, found.are_losses_identical) == (True, True, True)
    assert (found.node, found.action) == ("dgx-01", "Restarted from step 30 as attempt 2.")


def test_losses_that_differ_in_the_last_digit_fail(game_day: GameDay) -> None:
    found = killed(game_day, [(step, loss * (1 + 1e-12)) for step, loss in LOSSES[30:]])
    assert (found.state, found.are_losses_identical) == ("failed", False)
    assert found.detail == "Its losses differ from those of the undisturbed run."


def test_a_wrong_verdict_fails(game_day: GameDay) -> None:
    found = killed(game_day, LOSSES[30:], cause="data.missing")
    assert (found.state, found.is_cause_right) == ("failed", False)
    assert found.detail == "The verdict was data.missing, not unknown."


def test_planted_failures_do_not_count_against_nodes(game_day: GameDay) -> None:
    killed(game_day, LOSSES[30:])
    while counting.count():
        pass
    assert not Failure.objects.exists()


def test_a_job_that_never_ends_is_cancelled_and_the_rest_goes_on(game_day: GameDay) -> None:
    advance()
    Drill.objects.filter(fault="none").update(
        submitted_at=timezone.now() - MAX_JOB_DRILL_DURATION - timedelta(seconds=1)
    )
    advance()
    assert drill(game_day, "none").state == "failed"
    assert Attempt.objects.get().cancel_asked_at is not None
    advance()
    assert drill(game_day, "kill").state == "running"


def test_a_cancelled_game_day_cancels_its_job_and_ends(game_day: GameDay, ops: User) -> None:
    advance()
    game_days.cancel(ops, game_day)
    advance()
    advance()
    game_day.refresh_from_db()
    assert (game_day.is_active, game_day.problem) == (False, "Cancelled.")
    assert Attempt.objects.get().cancel_asked_at is not None
    assert not game_day.drills.filter(state__in=("waiting", "running")).exists()


def test_it_ends_though_the_person_who_started_it_was_deactivated(game_day: GameDay, ops: User) -> None:
    advance()
    User.objects.filter(pk=ops.pk).update(is_active=False)
    Drill.objects.filter(fault="none").update(
        submitted_at=timezone.now() - MAX_JOB_DRILL_DURATION - timedelta(seconds=1)
    )
    for _ in range(3):
        advance()
    game_day.refresh_from_db()
    assert (drill(game_day, "none").state, game_day.is_active) == ("failed", False)


def test_a_drill_that_cannot_be_judged_fails_and_the_rest_goes_on(game_day: GameDay) -> None:
    undisturbed(game_day)
    job, planted_at = drill(game_day, "kill").job, timezone.now().timestamp()
    assert job is not None
    failed(finish(job, planted_at=planted_at), "unknown", after_s=2.5, planted_at=planted_at)
    second = finish(job, number=2, state="completed", training_at=planted_at + 9.0)
    write("loss", (0, LOSSES), owner=("attempt", second.pk))
    Chunk.objects.update(data=b"\xff")
    advance()
    found = drill(game_day, "kill")
    assert (found.state, found.detail) == ("failed", "Its results cannot be read: see the worker's log.")
    advance()
    assert game_day.drills.get(state="running").position == found.position + 1


def test_its_job_is_cancelled_though_the_person_who_started_it_may_no_longer_do_that(
    game_day: GameDay, ops: User
) -> None:
    advance()
    GameDay.objects.update(started_by=None, cancel_requested_at=timezone.now())
    Membership.objects.filter(user=ops).delete()
    advance()
    assert Attempt.objects.get().cancel_asked_at is not None
    assert (drill(game_day, "none").state, drill(game_day, "none").detail) == ("not tried", "Cancelled.")


def test_the_default_partition_is_one_with_and_without_its_name(ops: User) -> None:
    Partition.objects.create(name="gpu", is_default=True)
    assert game_days.start(ops, "canaries", "").partition == "gpu"
    with pytest.raises(Conflict, match="a game day runs on gpu already"):
        game_days.start(ops, "canaries", "gpu")


def test_a_refused_job_ends_it_and_explains_why(game_day: GameDay, ops: User) -> None:
    Membership.objects.filter(user=ops).delete()
    User.objects.filter(pk=ops.pk).update(is_superuser=False)
    advance()
    game_day.refresh_from_db()
    assert game_day.problem.startswith("Its job was refused: ")


class TestDoors:
    def test_rest(self, ops: User) -> None:
        client = bearer(ops, "admin")
        response = client.post("/api/v1/gamedays", {"project": "canaries"}, content_type="application/json")
        assert response.status_code == 201
        body = response.json()
        assert [item["fault"] for item in body["drills"]] == list(FAULTS)
        again = client.post("/api/v1/gamedays", {"project": "canaries"}, content_type="application/json")
        assert again.status_code == 409
        listed = client.get("/api/v1/gamedays").json()["items"]
        assert [item["id"] for item in listed] == [body["id"]]
        assert client.post(f"/api/v1/gamedays/{body['id']}/cancel").status_code == 200
        assert client.get("/api/v1/gamedays/999999999999999999999").status_code == 404

    def test_unknown_names_are_refused_with_what_there_is(self, ops: User) -> None:
        Partition.objects.create(name="canary")
        answer = bearer(ops, "admin").post(
            "/api/v1/gamedays", {"project": "canaries", "partition": "gone"}, content_type="application/json"
        )
        assert (answer.status_code, answer.json()["detail"]) == (422, "There is no partition gone. There are: canary.")
        assert answer.json()["type"] == "urn:vigil:problem:invalid"

    def test_only_some_faults_and_none_that_do_not_exist(self, ops: User) -> None:
        game_day = game_days.start(ops, "canaries", "", ["kill"])
        assert list(game_day.drills.values_list("fault", flat=True)) == ["none", "kill"]
        Partition.objects.create(name="canary")
        of_node = game_days.start(ops, "canaries", "canary", ["xid"])
        assert list(of_node.drills.values_list("fault", flat=True)) == ["xid"], "no job is needed for it"
        with pytest.raises(game_days.InvalidGameDay, match="There is no fault fire. There are: none, kill"):
            game_days.start(ops, "canaries", "", ["kill", "fire"])

    def test_only_sysadmins(self, game_day: GameDay) -> None:
        mira = person("mira", a_project("canaries"))
        for method, path in (("get", "gamedays"), ("get", f"gamedays/{game_day.pk}"), ("post", "gamedays")):
            answer: Any = getattr(bearer(mira, "admin"), method)(f"/api/v1/{path}", content_type="application/json")
            assert answer.status_code in {403, 422}, path
        assert signed_in(mira).get("/gameday").status_code == 403

    def test_page(self, game_day: GameDay, ops: User) -> None:
        killed(game_day, LOSSES[30:])
        page = signed_in(ops).get("/gameday").content.decode()
        for text in ("A rank is killed", "identical", "unknown", "A mount is slow", "canary"):
            assert text in page

    def test_a_refused_form_is_shown_again(self, ops: User) -> None:
        Partition.objects.create(name="canary")
        Partition.objects.create(name="invented", is_made_up=True)
        refused = signed_in(ops).post("/gameday/start", {"project": "gone", "partition": "canary"})
        assert refused.status_code == 422
        assert 'id="game-e"' in refused.text
        assert "<option selected>canary</option>" in refused.text
        assert "invented" not in refused.text
        assert signed_in(ops).get("/gameday/start").headers["Location"] == "/gameday"

    def test_the_last_page_of_many_lists_its_game_day(self, ops: User, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gameday, "PER_PAGE", 2)
        project = a_project("canaries")
        rows = [GameDay.objects.create(project=project, version="1", partition=f"p{n}") for n in range(3)]
        first = signed_in(ops).get("/gameday").text
        cursor = re.search(r'\?after=([^"]+)"', first)
        assert cursor
        assert f'href="/gameday/{rows[0].pk}"' in signed_in(ops).get(f"/gameday?after={cursor[1]}").text

    def test_only_the_page_of_a_game_day_has_the_dialog_that_cancels_it(self, game_day: GameDay, ops: User) -> None:
        action, opens = f'action="/gameday/{game_day.pk}/cancel"', 'data-target="cancel"'
        page = signed_in(ops).get(f"/gameday/{game_day.pk}").text
        assert action in page
        assert opens in page
        newest = signed_in(ops).get("/gameday").text  # another one may be the newest when it is next refreshed
        assert action not in newest
        assert opens not in newest
        assert f'<a class="button" href="/gameday/{game_day.pk}">Open to cancel</a>' in newest

    def test_an_empty_page_explains_what_to_do(self, ops: User) -> None:
        assert "vigil gameday --partition canary" in signed_in(ops).get("/gameday").content.decode()
