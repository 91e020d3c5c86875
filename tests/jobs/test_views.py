"""The pages of jobs, through their addresses: who sees what, what is found, what buttons do."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.core.files.uploadedfile import SimpleUploadedFile
from django.test import Client
from django.utils import timezone

from jobs.models import Attempt, Checkpoint, Job
from portal.models import Project, User
from tests.lab import a_job, a_project, person, signed_in

pytestmark = pytest.mark.django_db

SPEC = """\
name = "from-a-test"  # and a comment
kind = "distributed"
project = "default"

[resources]
ranks_per_node = 2

[run]
recipe = "language"
steps = 20
warmup_steps = 2
"""


@pytest.fixture
def project() -> Project:
    return a_project()


@pytest.fixture
def mira(project: Project) -> User:
    return person("mira", project)


@pytest.fixture
def client(mira: User) -> Client:
    return signed_in(mira)


def text(response: Any) -> str:
    """The page on one line, with plain spaces."""
    return " ".join(response.content.decode().replace("\N{NO-BREAK SPACE}", " ").split())


def save(job: Job, step: int, **fields: Any) -> Checkpoint:
    assert job.latest
    given = {"name": f"step-{step}", "generation": 1, "created_at": timezone.now(), "state": "verified", **fields}
    return Checkpoint.objects.create(job=job, attempt=job.latest, step=step, **given)


# The list


def test_the_list_is_filtered_by_its_address(client: Client, mira: User, project: Project) -> None:
    yuki = person("yuki", project)
    a_job(mira, project, state="running", name="lora-a", tags=("sweep",))
    a_job(yuki, project, state="failed", name="lora-b")
    a_job(mira, project, state="completed", name="base")

    def names(query: str) -> list[str]:
        html = text(client.get(f"/jobs{query}"))
        return [name for name in ("lora-a", "lora-b", "base") if f">{name}</a>" in html]

    assert names("") == ["lora-a", "lora-b", "base"]
    assert names("?q=lora") == ["lora-a", "lora-b"]
    assert names("?q=lora&state=bad") == ["lora-b"]
    assert names("?owner=me") == ["lora-a", "base"]
    assert names("?owner=yuki") == ["lora-b"]
    assert names("?tag=sweep") == ["lora-a"]
    assert names("?q=sweep") == ["lora-a"], "tags are searched too"
    assert names(f"?q=%23{Job.objects.get(name='base').pk}") == ["base"], "and numbers"
    assert names("?project=default&kind=script") == []
    assert names("?state=nonsense&sort=nonsense&after=nonsense&since=x") == ["lora-a", "lora-b", "base"]


def test_tabs_count_every_state_of_what_is_searched(client: Client, mira: User, project: Project) -> None:
    for state in ("running", "failed", "timeout", "completed"):
        a_job(mira, project, state=state, name=f"a-{state}")
    html = text(client.get("/jobs?state=bad&q=a-"))
    for state, count in (("", 4), ("running", 1), ("pending", 0), ("bad", 2), ("completed", 1)):
        assert f'data-tab="{state}">{count}</span>' in html
    assert 'name="state" value="bad"' in html, "the form keeps the tab"


def test_pages_follow_each_other_without_gap_or_overlap(client: Client, mira: User, project: Project) -> None:
    for number in range(60):
        a_job(mira, project, name=f"run-{number:02}")
    first = text(client.get("/jobs?sort=name"))
    address = first.split('rel="next" href="')[1].split('"')[0].replace("&amp;", "&")
    second = text(client.get(f"/jobs{address}"))
    on_first = {f"run-{n:02}" for n in range(60) if f">run-{n:02}<" in first}
    on_second = {f"run-{n:02}" for n in range(60) if f">run-{n:02}<" in second}
    assert len(on_first) == 50
    assert len(on_second) == 10
    assert not on_first & on_second
    assert "First page" in second


def test_htmx_gets_the_table_alone_and_caches_apart(client: Client, mira: User, project: Project) -> None:
    a_job(mira, project)
    response = client.get("/jobs", headers={"HX-Request": "true", "HX-Target": "results"})
    assert "<html" not in response.text
    assert 'id="where" hx-swap-oob="true"' in response.text
    assert "HX-Target" in response.headers["Vary"]


def test_lists_with_nothing_say_what_to_do(client: Client, mira: User, project: Project) -> None:
    assert "No jobs yet" in text(client.get("/jobs"))
    a_job(mira, project)
    html = text(client.get("/jobs?q=lora&since=7d"))
    assert "No job matches “lora” in this time" in html
    assert 'href="?q=lora">Search all time' in html


def test_the_list_takes_the_same_queries_for_any_number_of_jobs(
    client: Client, mira: User, project: Project, django_assert_num_queries: Any
) -> None:
    a_job(mira, project, tags=("a",))
    client.get("/jobs")
    with django_assert_num_queries(8):
        client.get("/jobs")
    for number in range(20):
        a_job(mira, project, name=f"n{number}", tags=("a", "b"))
    with django_assert_num_queries(8):
        client.get("/jobs")


def test_names_and_reasons_are_escaped(client: Client, mira: User, project: Project) -> None:
    job = a_job(mira, project, state="failed", attempt={"reason": "<img src=x onerror=alert(1)>"})
    Job.objects.filter(pk=job.pk).update(name="<b>x</b>", notes="<script>1</script>")
    for path in ("/", "/jobs", f"/jobs/{job.pk}", f"/jobs/{job.pk}/attempts"):
        html = client.get(path).text
        assert "<b>x</b>" not in html
        assert "<img src=x" not in html
        assert "<script>1" not in html


# A job


@pytest.mark.parametrize(
    "tab", ["", "/life", "/logs", "/logs/lines", "/checkpoints", "/attempts", "/spec", "/spec.toml"]
)
def test_a_strangers_job_is_not_there(client: Client, tab: str) -> None:
    elsewhere = a_project("elsewhere")
    job = a_job(person("oskar", elsewhere), elsewhere)
    assert client.get(f"/jobs/{job.pk}{tab}").status_code == 404
    assert client.get(f"/jobs/999999{tab}").status_code == 404


@pytest.mark.parametrize("action", ["cancel", "resume", "edit", "delete"])
def test_a_strangers_job_cannot_be_touched(client: Client, action: str) -> None:
    elsewhere = a_project("elsewhere")
    job = a_job(person("oskar", elsewhere), elsewhere, state="running")
    assert client.post(f"/jobs/{job.pk}/{action}", {"name": "mine"}).status_code == 404
    assert client.get(f"/jobs/{job.pk}/{action}").status_code == 405
    job.refresh_from_db()
    assert job.name == "wren"
    assert Attempt.objects.get(job=job).cancel_asked_at is None


def test_a_running_job_tells_its_life(client: Client, mira: User, project: Project) -> None:
    now = timezone.now()
    lost = {"number": 1, "step": 80, "steps": 200, "submitted_at": now - timedelta(hours=3), "reason": "shapes differ"}
    job = a_job(mira, project, state="failed", name="nightjar", attempt=lost)
    kept = save(job, 60)
    latest = {"loss": 2.318, "validation_loss": 2.351, "tokens_per_second": 290_123.0, "step_seconds": 2.0}
    job.latest = Attempt.objects.create(
        job=job, number=2, state="running", step=150, steps=200, resume_from=kept, latest=latest,
        started_at=now - timedelta(minutes=30), last_report_at=now, pace_seconds=60, pace_steps=30, nodes=["dgx-01"],
    )  # fmt: skip
    job.save(update_fields=["latest"])
    html = text(client.get(f"/jobs/{job.pk}"))
    assert "resumed from step 60." in html
    assert "It should finish" in html
    for fact in ("150", "of 200", "2.318", "val 2.351", "290 k", "on dgx-01", "20"):
        assert fact in html
    assert "2 attempts since" in html, "the ribbon in words"
    assert "failed · 20 steps lost" in html
    assert 'data-state="running" data-alive="1"' in html
    assert 'id="figures" type="application/json"' in html
    assert "Cancel nightjar?" in html
    assert "still running: cancel it first" in html, "no resume while it runs"


def test_a_researcher_sees_no_buttons_on_others_jobs(client: Client, project: Project) -> None:
    job = a_job(person("yuki", project), project, state="running")
    save(job, 10)
    html = text(client.get(f"/jobs/{job.pk}"))
    assert "Clone" in html
    for word in ("Cancel…", "Edit…", 'action="/jobs/'):
        assert word not in html


def test_every_tab_answers_for_every_state(client: Client, mira: User, project: Project) -> None:
    for state in Attempt.State.values:
        job = a_job(mira, project, state=state, name=f"is-{state.replace('_', '-')}")
        for tab in ("", "/logs", "/checkpoints", "/attempts", "/spec", "/life"):
            response = client.get(f"/jobs/{job.pk}{tab}")
            assert response.status_code == 200, (state, tab)


def test_checkpoints_say_their_state_and_resume(client: Client, mira: User, project: Project) -> None:
    job = a_job(mira, project, state="timeout", attempt={"step": 130, "steps": 200})
    save(job, 100, bytes=81_400_000_000, seconds=38.2, consumed_samples=3200, parent_step=50)
    save(job, 120, state="corrupt", problem="digest differs")
    save(job, 50, state="pruned")
    html = text(client.get(f"/jobs/{job.pk}/checkpoints"))
    assert "81.4 GB" in html
    assert "38 s" in html
    assert "digest differs" in html
    assert "1 older one pruned" in html
    assert html.count("Resume<span") == 1, "nothing resumes from a damaged one"


def test_attempts_tell_what_vigil_did(client: Client, mira: User, project: Project) -> None:
    fields = {
        "decision": "Stopped: the same cause twice.", "exit_code": 1,
        "failure": {"rank": 5, "error": "RuntimeError: shapes", "kind": "exception"},
    }  # fmt: skip
    job = a_job(mira, project, state="failed", attempt=fields)
    html = text(client.get(f"/jobs/{job.pk}/attempts"))
    assert "Rank 5: RuntimeError: shapes" in html
    assert "Stopped: the same cause twice." in html


def test_a_spec_shows_what_differs_from_its_parent(client: Client, mira: User, project: Project) -> None:
    parent = a_job(mira, project, name="parent", spec_toml='name = "parent"\nsteps = 1\n')
    job = a_job(mira, project, name="child", parent=parent, spec_toml='name = "child"\nsteps = 1\n')
    html = text(client.get(f"/jobs/{job.pk}/spec"))
    assert "<del>name = &quot;parent&quot;</del><ins>name = &quot;child&quot;</ins>" in html
    assert "validate_every = 100" in text(client.get(f"/jobs/{job.pk}/spec?show=all")), "defaults filled in"
    download = client.get(f"/jobs/{job.pk}/spec.toml")
    assert download.content == b'name = "child"\nsteps = 1\n'
    assert "attachment" in download.headers["Content-Disposition"]


# Buttons


def test_cancel_is_asked_for_and_said(client: Client, mira: User, project: Project) -> None:
    job = a_job(mira, project, state="running", name="wren")
    html = text(client.post(f"/jobs/{job.pk}/cancel", follow=True))
    assert "Cancelling wren." in html
    attempt = Attempt.objects.get(job=job)
    assert attempt.cancel_asked_by == mira
    ended = a_job(mira, project, state="completed")
    assert "Not cancelled." in text(client.post(f"/jobs/{ended.pk}/cancel", follow=True))


def test_several_are_cancelled_at_once_but_only_ones_own(client: Client, mira: User, project: Project) -> None:
    mine = [a_job(mira, project, state="running", name=f"run-{i}") for i in range(2)]
    others = a_job(person("yuki", project), project, state="running")
    chosen = [str(job.pk) for job in (*mine, others)] + ["nonsense"]
    html = text(client.post("/jobs/cancel", {"job": chosen, "back": "/jobs?state=running"}, follow=True))
    assert "Cancelling 2 jobs." in html
    assert "belongs to yuki" in html
    assert Attempt.objects.get(job=others).cancel_asked_at is None
    assert client.post("/jobs/cancel", {"back": "https://evil.example/"}).url == "/jobs"  # type: ignore[attr-defined]


def test_resume_starts_the_next_attempt_once(client: Client, mira: User, project: Project) -> None:
    job = a_job(mira, project, state="timeout", attempt={"step": 130, "steps": 200})
    chosen = save(job, 100)
    asked = {"step": "100", "key": "resume-1"}
    assert "Attempt 2 is queued and starts from step 100." in text(
        client.post(f"/jobs/{job.pk}/resume", asked, follow=True)
    )
    client.post(f"/jobs/{job.pk}/resume", asked)
    assert [a.resume_from_id for a in job.attempts.order_by("number")] == [None, chosen.pk], (
        "a second click is the same"
    )
    assert "has not ended" in text(client.post(f"/jobs/{job.pk}/resume", {"step": "100"}, follow=True))


def test_name_tags_and_notes_are_edited(client: Client, mira: User, project: Project) -> None:
    job = a_job(mira, project, tags=("old", "kept"))
    client.post(f"/jobs/{job.pk}/edit", {"name": "renamed", "tags": "kept, new", "notes": "why"})
    job.refresh_from_db()
    assert (job.name, job.notes) == ("renamed", "why")
    assert sorted(job.tags.values_list("name", flat=True)) == ["kept", "new"]  # type: ignore[attr-defined]
    html = text(client.post(f"/jobs/{job.pk}/edit", {"name": "no spaces!"}, follow=True))
    assert "Not changed." in html
    job.refresh_from_db()
    assert job.name == "renamed"


def test_others_jobs_are_not_edited(project: Project, mira: User) -> None:
    job = a_job(mira, project)
    response = signed_in(person("yuki", project)).post(f"/jobs/{job.pk}/edit", {"name": "taken"})
    assert response.status_code == 403
    assert "Ask them or a lead" in text(response)


# Submitting


def test_the_first_form_can_be_submitted_as_it_is(client: Client) -> None:
    html = text(client.get("/submit"))
    assert "Ready to submit." in html
    assert "my-first-run" in html
    assert "Specification." in html


def test_submitting_makes_a_job_once(client: Client, mira: User) -> None:
    asked = {"toml": SPEC, "side": "toml", "do": "submit", "key": "k1"}
    response = client.post("/submit", asked)
    job = Job.objects.get()
    assert response.url == f"/jobs/{job.pk}"  # type: ignore[attr-defined]
    assert (job.owner, job.name, job.spec_toml) == (mira, "from-a-test", SPEC)
    client.post("/submit", asked)
    assert Job.objects.count() == 1, "a second click is the same job"


def test_the_form_works_without_script(client: Client) -> None:
    """Fields win over the text, whose comments stay."""
    client.post("/submit", {"toml": SPEC, "do": "submit", "run.steps": "30", "name": "plain-post"})
    job = Job.objects.get()
    assert job.name == "plain-post"
    assert job.spec["run"]["steps"] == 30
    assert "# and a comment" in job.spec_toml


def test_an_uploaded_file_is_the_text(client: Client) -> None:
    file = SimpleUploadedFile("spec.toml", SPEC.encode())
    client.post("/submit", {"toml": "name =", "file": file, "do": "submit", "side": "toml"})
    assert Job.objects.get().name == "from-a-test"


def test_checking_changes_nothing(client: Client) -> None:
    html = text(client.post("/submit", {"toml": SPEC, "side": "toml", "do": "check"}))
    assert "Ready to submit." in html
    assert not Job.objects.exists()


@pytest.mark.parametrize(
    ("change", "field", "said"),
    [
        (("ranks_per_node = 2", "ranks_per_node = 3"), "f-run-global_batch-e", "32 does not divide over 3 ranks"),
        (("steps = 20", "steps = 0"), "f-run-steps-e", "0 is too small"),
        (('"from-a-test"', '"has spaces"'), "f-name-e", "cannot be a name"),
        (("steps = 20", "stepz = 20"), "findings", "Did you mean &quot;steps&quot;?"),
        (('project = "default"', 'project = "nobodys"'), "f-project-e", "is not a project of yours"),
        (('kind = "distributed"', 'kind = "federated"'), "f-kind-e", "federated jobs are not here yet"),
        (("[run]", "[run"), "say", "This is not TOML"),
    ],
)
def test_problems_stand_at_their_field_and_line(client: Client, change: tuple[str, str], field: str, said: str) -> None:
    response = client.post("/submit", {"toml": SPEC.replace(*change), "side": "toml", "do": "submit"})
    assert response.status_code == 422
    html = text(response)
    assert said in html.split(f'id="{field}"')[1]
    assert not Job.objects.exists()


def test_a_text_of_ten_megabytes_is_refused_at_the_door(client: Client) -> None:
    response = client.post("/submit", {"toml": "#" * 10_000_000, "side": "toml", "do": "submit"})
    assert response.status_code in {400, 413}
    response = client.post("/submit", {"toml": "#" * 100_000, "side": "toml", "do": "submit"})
    assert response.status_code == 422
    assert "larger than 64 KB" in text(response)


def test_each_side_answers_with_the_other(client: Client) -> None:
    form = text(client.post("/submit/sync", {"toml": SPEC, "side": "form", "run.steps": "30", "name": "from-a-test"}))
    assert "steps = 30" in form
    assert 'id="editor" hx-swap-oob="true"' in form
    typed = text(client.post("/submit/sync", {"toml": SPEC.replace("20", "40"), "side": "toml", "run.steps": "20"}))
    assert 'id="fields"' in typed
    assert 'name="run.steps" type="text" inputmode="numeric" value="40"' in typed
    assert 'id="editor"' not in typed, "never the box that is being typed into"


def test_another_kind_brings_its_own_fields(client: Client) -> None:
    html = text(client.post("/submit/sync", {"toml": SPEC, "side": "form", "kind": "script", "run.steps": "20"}))
    assert 'name="script.entry"' in html
    assert 'name="run.steps"' not in html
    assert "[script]" in html


def test_a_clone_begins_with_its_parents_text_and_remembers_it(client: Client, mira: User, project: Project) -> None:
    parent = a_job(mira, project, name="siskin", spec_toml=SPEC)
    html = text(client.get(f"/submit?from={parent.pk}"))
    assert f'<a href="/jobs/{parent.pk}">siskin #{parent.pk}</a>, 1 change' in html
    assert "siskin-2" in html
    assert "# and a comment" in html
    client.post("/submit", {"toml": SPEC, "side": "toml", "do": "submit", "from": parent.pk})
    assert Job.objects.order_by("-id")[0].parent == parent
    elsewhere = a_project("elsewhere")
    stranger = a_job(person("oskar", elsewhere), elsewhere)
    assert client.get(f"/submit?from={stranger.pk}").status_code == 404
    assert client.get("/submit?from=x").status_code == 404


# Logs


@pytest.fixture
def logged(mira: User, project: Project, settings: Any, tmp_path: Path) -> Job:
    """A running job with logs of two ranks in its run directory."""
    settings.VIGIL_RUNS = tmp_path
    job = a_job(mira, project, state="running", directory="default/1-abcdef", attempt={"directory": "attempt-1"})
    folder = tmp_path / "default/1-abcdef/job/attempt-1/logs"
    folder.mkdir(parents=True)
    (folder / "0.0.log").write_text("".join(f"step {i} loss {9 - i / 300:.3f}\n" for i in range(2500)))
    (folder / "0.1.log").write_text("\x1b[31mRuntimeError: <b>shapes</b>\x1b[0m\n")
    return job


def test_logs_show_the_newest_lines_of_rank_0(client: Client, logged: Job) -> None:
    html = text(client.get(f"/jobs/{logged.pk}/logs"))
    assert "step 2499 loss" in html
    assert html.count("<li id=") == 400, "older ones on scroll"
    assert "Older lines" in html
    assert '<option value="1">Rank 1</option>' in html


def test_logs_of_another_rank_are_escaped_and_coloured(client: Client, logged: Job) -> None:
    html = text(client.get(f"/jobs/{logged.pk}/logs?rank=1"))
    assert '<span class="a-red">RuntimeError: &lt;b&gt;shapes&lt;/b&gt;</span>' in html
    assert 'data-level="error"' in html


def test_logs_are_searched_on_the_server(client: Client, logged: Job) -> None:
    html = text(client.get(f"/jobs/{logged.pk}/logs?q=STEP 12"))
    assert "111 lines hold “STEP 12”" in html
    assert "<mark>step 12</mark>" in html


def test_lines_come_in_parts_with_cursors(client: Client, logged: Job) -> None:
    newest = client.get(f"/jobs/{logged.pk}/logs/lines?limit=10")
    start, end = newest.headers["X-Log-Start"], newest.headers["X-Log-End"]
    assert newest.text.count("<li") == 10
    older = client.get(f"/jobs/{logged.pk}/logs/lines?limit=10&before={start}")
    assert "step 2489 loss" in older.text
    assert older.headers["X-Log-End"] == start
    assert client.get(f"/jobs/{logged.pk}/logs/lines?after={end}").text.strip() == ""
    log = Path(settings.VIGIL_RUNS) / "default/1-abcdef/job/attempt-1/logs/0.0.log"
    with log.open("a") as file:
        file.write("one more\nhalf a li")
    following = client.get(f"/jobs/{logged.pk}/logs/lines?after={end}")
    assert "one more" in following.text
    assert "half a li" not in following.text, "a line that is still being written waits"


@pytest.mark.parametrize("query", ["rank=../../etc/passwd", "rank=1e9", "attempt=99", "rank=9999999999999"])
def test_log_requests_lead_nowhere_else(client: Client, logged: Job, query: str) -> None:
    assert client.get(f"/jobs/{logged.pk}/logs?{query}").status_code == 404


def test_a_rank_without_a_log_says_so(client: Client, logged: Job) -> None:
    assert "Rank 7 has written no log" in text(client.get(f"/jobs/{logged.pk}/logs?rank=7"))
    assert client.get(f"/jobs/{logged.pk}/logs/lines?rank=7").status_code == 204
    tail = text(client.get(f"/jobs/{logged.pk}/logs/lines?tail=3"))
    assert tail.count("<li") == 3
