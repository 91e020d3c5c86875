"""Test the buttons of a job's page: cancel, resume, edit."""

from datetime import timedelta

import pytest
from django.test import Client
from django.utils import timezone

from jobs.models import Attempt, Checkpoint, Job
from portal.models import AuditEntry, Project, User
from tests.jobs.pages.reading import save, text
from tests.lab import a_job, person, signed_in, sysadmin

pytestmark = pytest.mark.django_db


def test_cancel_is_requested_and_confirmed(client: Client, mira: User, project: Project) -> None:
    job = a_job(mira, project, state="running", name="wren")
    html = text(client.post(f"/jobs/{job.pk}/cancel", follow=True))
    assert "Cancelling wren." in html
    attempt = Attempt.objects.get(job=job)
    assert attempt.cancel_asked_by == mira
    ended = a_job(mira, project, state="completed")
    assert "Not cancelled." in text(client.post(f"/jobs/{ended.pk}/cancel", follow=True))


def test_several_are_cancelled_at_once_but_only_jobs_of_the_user(client: Client, mira: User, project: Project) -> None:
    users_jobs = [a_job(mira, project, state="running", name=f"run-{i}") for i in range(2)]
    others = a_job(person("yuki", project), project, state="running")
    chosen = [str(job.pk) for job in (*users_jobs, others)] + ["nonsense"]
    html = text(client.post("/jobs/cancel", {"job": chosen, "back": "/jobs?state=running"}, follow=True))
    assert "Cancelling 2 jobs." in html
    assert "belongs to yuki" in html
    assert Attempt.objects.get(job=others).cancel_asked_at is None
    assert client.post("/jobs/cancel", {"back": "https://evil.example/"}).url == "/jobs"  # type: ignore[attr-defined]


def test_resume_starts_the_next_attempt_once(client: Client, mira: User, project: Project) -> None:
    job = a_job(mira, project, state="timeout", attempt={"step": 130, "steps": 200})
    chosen = save(job, 100)
    options = {"step": "100", "key": "resume-1"}
    assert "Attempt 2 is queued and starts from step 100." in text(
        client.post(f"/jobs/{job.pk}/resume", options, follow=True)
    )
    client.post(f"/jobs/{job.pk}/resume", options)
    assert [a.resume_from_id for a in job.attempts.order_by("number")] == [None, chosen.pk], (
        "a second click is the same"
    )
    assert "has not ended" in text(client.post(f"/jobs/{job.pk}/resume", {"step": "100"}, follow=True))


def test_the_job_resumes_from_the_checkpoint_of_the_button(client: Client, mira: User, project: Project) -> None:
    """A step may have two checkpoints: one of them from before the job went back."""
    job = a_job(mira, project, state="failed", attempt={"step": 130, "steps": 200})
    left, newer = save(job, 100, name="step-100.g1"), save(job, 100, generation=2)
    html = text(client.get(f"/jobs/{job.pk}/checkpoints"))
    for chosen in (left, newer):
        assert html.count(f'name="checkpoint" value="{chosen.pk}"') == 1
        assert f'<option value="{chosen.pk}"' in html
    client.post(f"/jobs/{job.pk}/resume", {"checkpoint": str(left.pk), "key": "resume-1"})
    assert job.attempts.get(number=2).resume_from == left
    others = save(a_job(mira, project, state="failed"), 100)
    assert client.post(f"/jobs/{job.pk}/resume", {"checkpoint": str(others.pk)}).status_code == 404


def test_resume_goes_on_along_the_line_and_not_from_the_highest_step(
    client: Client, mira: User, project: Project
) -> None:
    job = a_job(mira, project, state="failed", attempt={"step": 550, "steps": 900, "cause": "diverged"})
    before, diverged = save(job, 300), save(job, 500)
    job.latest = Attempt.objects.create(
        job=job, number=2, state="cancelled", cause="cancelled", step=340, steps=900, resume_from=before,
        ended_at=timezone.now(), decided_at=timezone.now(),
    )  # fmt: skip
    job.save()
    html = text(client.get(f"/jobs/{job.pk}"))
    assert "It can be resumed from step 300, 40 steps back." in html
    assert f'<option value="{before.pk}" selected>' in html
    Checkpoint.objects.filter(pk=before.pk).update(state="corrupt")
    html = text(client.get(f"/jobs/{job.pk}"))
    assert f'<option value="{diverged.pk}" selected>' in html, "nothing is left on the line: a person may still choose"


def test_where_every_step_is_done_no_button_starts_an_attempt_that_has_nothing_to_do(
    client: Client, mira: User, project: Project
) -> None:
    job = a_job(mira, project, state="completed", attempt={"step": 200, "steps": 200})
    half, last = save(job, 100), save(job, 200)
    html = text(client.get(f"/jobs/{job.pk}/checkpoints"))
    assert f'value="resume-{job.latest_id}-{half.pk}"' in html
    assert f'value="resume-{job.latest_id}-{last.pk}"' not in html
    assert "All its steps are done" in html


def test_a_checkpoint_is_pinned_without_a_new_page(client: Client, mira: User, project: Project) -> None:
    job = a_job(mira, project, state="running")
    stored = save(job, 100)
    address = f"/jobs/{job.pk}/checkpoints/{stored.pk}/pin"
    htmx = {"HX-Request": "true"}
    assert 'aria-pressed="false"' in text(client.get(f"/jobs/{job.pk}/checkpoints"))
    html = text(client.post(address, {"pinned": "1"}, headers=htmx))
    assert html.startswith("<form ")
    assert 'aria-pressed="true"' in html
    assert 'Pinned<span class="sr"> step 100</span>' in html
    stored.refresh_from_db()
    assert stored.pinned
    page = client.post(address, {"pinned": "0"}, follow=True)  # without script
    assert 'aria-pressed="false"' in text(page)
    stored.refresh_from_db()
    assert not stored.pinned


def test_pinning_a_pruned_checkpoint_shows_an_error(client: Client, mira: User, project: Project) -> None:
    job = a_job(mira, project, state="running")
    gone = save(job, 100, state="pruned")
    address = f"/jobs/{job.pk}/checkpoints/{gone.pk}/pin"
    html = text(client.post(address, {"pinned": "1"}, headers={"HX-Request": "true"}))
    assert html.startswith('<span class="muted">pruned</span> <div hx-swap-oob="beforeend:#toasts">')
    assert "has been pruned: there is nothing left to keep." in html
    assert "has been pruned" in text(client.post(address, {"pinned": "1"}, follow=True))
    other = a_job(mira, project, state="running")
    assert client.post(f"/jobs/{other.pk}/checkpoints/{gone.pk}/pin", {"pinned": "1"}).status_code == 404


def test_others_see_that_it_is_pinned_and_no_button(client: Client, mira: User, project: Project) -> None:
    job = a_job(mira, project, state="running")
    stored = save(job, 100, pinned=True)
    yuki = signed_in(person("yuki", project))
    html = text(yuki.get(f"/jobs/{job.pk}/checkpoints"))
    assert "pinned</span>" in html
    assert "aria-pressed" not in html
    address = f"/jobs/{job.pk}/checkpoints/{stored.pk}/pin"
    assert "belongs to mira" in text(yuki.post(address, {"pinned": "0"}, headers={"HX-Request": "true"}))
    assert signed_in(person("stan")).post(address, {"pinned": "0"}).status_code == 404
    stored.refresh_from_db()
    assert stored.pinned


def test_name_tags_and_notes_are_edited(client: Client, mira: User, project: Project) -> None:
    job = a_job(mira, project, tags=("old", "kept"))
    client.post(f"/jobs/{job.pk}/edit", {"name": "renamed", "tags": "kept, new", "notes": "why"})
    job.refresh_from_db()
    assert (job.name, job.notes) == ("renamed", "why")
    assert sorted(job.tags.values_list("name", flat=True)) == ["kept", "new"]
    html = text(client.post(f"/jobs/{job.pk}/edit", {"name": "no spaces!"}, follow=True))
    assert "Not changed." in html
    job.refresh_from_db()
    assert job.name == "renamed"


def test_others_jobs_are_not_edited(project: Project, mira: User) -> None:
    job = a_job(mira, project)
    response = signed_in(person("yuki", project)).post(f"/jobs/{job.pk}/edit", {"name": "taken"}, follow=True)
    assert "Ask them or a lead" in text(response)
    assert job.name == Job.objects.get(pk=job.pk).name


def test_what_a_sysadmin_changes_for_somebody_is_noted(project: Project, mira: User) -> None:
    job = a_job(mira, project)
    signed_in(sysadmin()).post(f"/jobs/{job.pk}/edit", {"name": "renamed"})
    assert AuditEntry.objects.filter(action="job.changed").exists()


def test_kill_now_is_offered_to_those_who_may_with_what_is_lost(client: Client, mira: User, project: Project) -> None:
    job = a_job(mira, project, state="running", name="wren")
    page = text(client.get(f"/jobs/{job.pk}"))
    assert "expect to lose all its work" in page
    save(job, 100)
    assert "Expect to lose the work since step 100" in text(client.get(f"/jobs/{job.pk}"))
    assert "Kill wren now?" not in text(signed_in(person("yuki", project)).get(f"/jobs/{job.pk}"))
    client.post(f"/jobs/{job.pk}/cancel")
    assert 'id="do-kill"' in text(client.get(f"/jobs/{job.pk}"))
    sam = sysadmin()
    html = text(signed_in(sam).post(f"/jobs/{job.pk}/kill", follow=True))
    assert "Killing wren. Its processes end without a last checkpoint." in html
    assert Attempt.objects.get(job=job).kill_requested_by == sam
    assert AuditEntry.objects.get().action == "job.killed"
    assert "Kill wren now?" not in html


def test_a_second_click_on_cancel_does_not_kill_but_a_later_one_does(
    client: Client, mira: User, project: Project
) -> None:
    job = a_job(mira, project, state="running", name="wren")
    for _ in range(2):
        client.post(f"/jobs/{job.pk}/cancel")
    assert Attempt.objects.get(job=job).kill_requested_at is None
    Attempt.objects.update(cancel_asked_at=timezone.now() - timedelta(seconds=11))
    client.post("/jobs/cancel", {"job": [str(job.pk)]})
    assert Attempt.objects.get(job=job).kill_requested_at is None, "of several at once none is killed"
    assert "Killing wren" in text(client.post(f"/jobs/{job.pk}/cancel", follow=True))
    assert Attempt.objects.get(job=job).kill_requested_by == mira
