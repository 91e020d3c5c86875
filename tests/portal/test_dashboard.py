"""Test home: what happened since the last visit, what runs, what waits, what is free."""

from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from jobs.models import Attempt, Sweep
from nodes.models import Node
from portal.models import Project, User
from tests.lab import a_checkpoint, a_job, a_project, person, signed_in

pytestmark = pytest.mark.django_db


@pytest.fixture
def project() -> Project:
    return a_project()


@pytest.fixture
def mira(project: Project) -> User:
    return person("mira", project)


def home(user: User) -> str:
    response = signed_in(user).get("/")
    assert response.status_code == 200
    return " ".join(response.text.split())


def test_an_empty_home_explains_what_to_do(mira: User) -> None:
    html = home(mira)
    assert "No jobs yet." in html
    assert 'href="/submit"' in html
    assert "Since your last visit" not in html


def test_what_failed_is_the_persons_move(mira: User, project: Project) -> None:
    lost = a_job(mira, project, state="failed", name="siskin", attempt={"step": 57, "reason": "shapes differ"})
    stored = a_job(mira, project, state="timeout", name="dunlin", attempt={"step": 120})
    a_checkpoint(stored, 100, state="verified")
    html = home(mira)
    assert "and needs your attention." in html
    assert f'<a href="/jobs/{lost.pk}">siskin</a> failed at step 57.' in html
    assert "shapes differ.</span>" in html
    assert f'href="/submit?from={lost.pk}">clone it with the fix' in html
    assert f'<a href="/jobs/{stored.pk}">resume it from step 100</a>' in html


def test_what_is_not_handed_over_is_not_in_the_queue(mira: User, project: Project) -> None:
    a_job(mira, project, state="pending", name="wren")
    assert "Not submitted to the scheduler yet." in home(mira)
    Attempt.objects.update(scheduler_id="12")
    assert "In the queue; it starts as soon as resources are free." in home(mira)


def test_what_does_not_fit_is_counted(mira: User, project: Project) -> None:
    for number in range(12):
        a_job(mira, project, state="pending", name=f"wren-{number}")
    assert '?state=pending">2 more</a>' in home(mira)


def test_a_sweep_that_waits_is_one_line(mira: User, project: Project) -> None:
    sweep = Sweep.objects.create(name="rates", owner=mira, project=project)
    last = Sweep.objects.create(name="seeds", owner=mira, project=project)
    facts: dict[str, Any] = {"state": "pending", "attempt": {"reason": "Resources"}}
    for index in range(12):
        a_job(mira, project, name=f"rates-{index}", sweep=sweep, sweep_index=index, **facts)
    a_job(mira, project, name="rates-12", sweep=sweep, sweep_index=12, state="running")
    a_job(mira, project, name="seeds-7", sweep=last, sweep_index=7, **facts)
    a_job(mira, project, name="siskin", **facts)
    html = home(mira).replace("\N{NO-BREAK SPACE}", " ")
    assert f'12 jobs of sweep <a href="/sweeps/{sweep.pk}"><b>rates</b></a>' in html
    assert "<b>rates-" not in html
    assert html.count("Resources: its resources are not free yet.") == 3
    assert "<b>seeds-7</b>" in html, "what is left alone goes by its own name"
    assert "1 job running, 14 pending." in html
    assert "more</a>" not in html
    for number in range(10):
        a_job(mira, project, name=f"wren-{number}", **facts)
    assert '?state=pending">14 more</a>' in home(mira), "jobs are counted, not lines"


def test_ends_of_a_sweep_are_one_line_for_each_state(
    mira: User, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do not fill the page: what else ended before them stays on it."""
    a_job(mira, project, state="failed", name="wren")
    sweep = Sweep.objects.create(name="rates", owner=mira, project=project)
    for index in range(30):
        a_job(mira, project, state="completed" if index % 3 else "failed", name=f"rates-{index}", sweep=sweep)
    html = home(mira)
    assert "rates-27</a> and" in html
    assert f'href="/jobs?sweep={sweep.pk}&amp;state=failed">9 other jobs</a> of sweep rates failed.' in html
    assert f'href="/jobs?sweep={sweep.pk}&amp;state=completed">19 other jobs</a> of sweep rates completed.' in html
    assert html.count("of sweep rates") == 2
    assert ">wren</a> failed" in html
    assert "needs your attention. So did 10 others." in html.replace("\N{NO-BREAK SPACE}", " ")
    monkeypatch.setattr("console.pages.home.MAX_ENDED_JOBS", 5)
    assert ">9 other jobs</a> of sweep rates failed." in home(mira), "all are counted, however few are looked through"


def test_somebody_without_a_project_is_referred_to_a_sysadmin() -> None:
    yuki = person("yuki")
    advice = "You are not in any project: ask a sysadmin to add you to one"
    assert advice in home(yuki)
    assert "Submit your first job" not in home(yuki)
    assert advice in signed_in(yuki).get("/jobs").text
    assert advice not in home(person("finn", a_project()))


def test_what_recovered_needs_nobody(mira: User, project: Project) -> None:
    job = a_job(mira, project, state="failed", name="nightjar", attempt={"step": 120})
    saved = a_checkpoint(job, 100, state="verified")
    job.latest = Attempt.objects.create(
        job=job, number=2, state="running", resume_from=saved, started_at=timezone.now()
    )
    job.save(update_fields=["latest"])
    html = home(mira)
    assert "nightjar failed at" in html
    assert "was continued: resumed from step 100." in html
    assert "Resumed from step 100." in html
    assert "What to do" not in html
    assert "Not restarted" not in html


def test_what_took_several_attempts_counts_none_as_the_whole(mira: User, project: Project) -> None:
    job = a_job(mira, project, state="cancelled", name="nightjar", attempt={"step": 120})
    ends = {"started_at": timezone.now() - timedelta(seconds=19), "ended_at": timezone.now()}
    job.latest = Attempt.objects.create(job=job, number=2, state="completed", **ends)
    job.save(update_fields=["latest"])
    html = home(mira)
    assert "Attempt 2 of nightjar</a> completed in 19" in html
    assert "Attempt 1 of nightjar</a> was cancelled" in html
    assert "attempt 2: 19" in signed_in(mira).get("/jobs").text


def test_marking_ends_as_read_removes_them_from_the_list(mira: User, project: Project) -> None:
    a_job(mira, project, state="completed", name="wren")
    client = signed_in(mira)
    assert "Since your last visit" in client.get("/").text
    assert client.post("/seen", {"until": timezone.now().isoformat()}).status_code == 302
    assert "Since your last visit" not in client.get("/").text
    mira.refresh_from_db()
    before = mira.seen_at
    client.post("/seen", {"until": (timezone.now() - timedelta(days=3)).isoformat()})
    client.post("/seen", {"until": "0001-01-01T00:00:00+14:00"})
    client.post("/seen", {"until": "nonsense"})
    mira.refresh_from_db()
    assert before
    assert mira.seen_at
    assert mira.seen_at >= before, "it never goes back"
    assert client.get("/seen").status_code == 405


def test_jobs_of_the_user_come_first_and_those_of_strangers_never(mira: User, project: Project) -> None:
    yuki = person("yuki", project)
    elsewhere = a_project("elsewhere")
    a_job(mira, project, state="running", name="mine", attempt={"step": 50, "steps": 200, "latest": {"loss": 2.318}})
    a_job(yuki, project, state="running", name="ours")
    a_job(person("oskar", elsewhere), elsewhere, state="running", name="theirs")
    html = home(mira)
    assert html.index("mine") < html.index("ours")
    assert "by yuki" in html
    assert "theirs" not in html
    assert "2.318" in html
    assert '<progress value="0.25"' in html


def test_a_waiting_job_has_the_reason(mira: User, project: Project) -> None:
    a_job(mira, project, state="pending", name="longctx", attempt={"reason": "Needs 4 whole nodes."})
    html = home(mira)
    assert "Needs 4 whole nodes." in html
    assert "1 job pending." in html.replace("\N{NO-BREAK SPACE}", " ")


def test_free_slots_leave_out_drained_nodes(mira: User) -> None:
    Node.objects.create(name="dgx-07", state="mixed", gpus=8, gpus_used=6, cpus=128)
    Node.objects.create(name="dgx-08", state="mixed", gpus=8, gpus_used=5, cpus=128)
    Node.objects.create(name="dgx-03", state="drained", gpus=8, cpus=128)
    html = home(mira).replace("\N{NO-BREAK SPACE}", " ")
    assert "5 of 24 GPUs: 5 in pieces of 2 to 3." in html
    assert 'aria-label="dgx-03: drained"' in html
    assert 'aria-label="dgx-08: 3 of 8 GPUs free"' in html


def test_a_node_of_cpus_is_a_bar_and_no_row_of_gpus(mira: User) -> None:
    Node.objects.create(name="vm", state="mixed", cpus=12, cpus_used=3)
    html = home(mira).replace("\N{NO-BREAK SPACE}", " ")
    assert '<progress value="3" max="12" data-state="running" aria-label="CPUs in use on vm">' in html
    assert "9 CPUs free" in html
    assert "freebox" not in html, "neither in the drawing nor in its key"


def test_the_number_of_queries_does_not_grow(
    mira: User, project: Project, django_assert_max_num_queries: object
) -> None:
    for number in range(3):
        a_job(mira, project, state="running", name=f"run-{number}")
        a_job(mira, project, state="failed", name=f"lost-{number}")
    client = signed_in(mira)
    client.get("/")
    with django_assert_max_num_queries(30):  # type: ignore[operator]
        client.get("/")
