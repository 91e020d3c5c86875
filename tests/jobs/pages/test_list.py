"""Test the list of jobs: search by address, tabs, pages, number of queries."""

from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from jobs.models import Job
from portal.models import Project, User
from tests.jobs.pages.reading import text
from tests.lab import a_job, person

pytestmark = pytest.mark.django_db


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


def test_the_caption_says_how_it_is_sorted(client: Client, mira: User, project: Project) -> None:
    a_job(mira, project, state="running")
    for query, words in (
        ("", "newest first"), ("?sort=created", "oldest first"), ("?sort=-name", "sorted by name, descending"),
        ("?sort=project", "sorted by project"), ("?sort=-started", "sorted by started, descending"),
        ("?sort=ended", "sorted by ended"),
    ):  # fmt: skip
        assert f'<caption class="sr">Jobs, {words}</caption>' in text(client.get(f"/jobs{query}"))


def test_tabs_count_every_state_of_what_is_searched(client: Client, mira: User, project: Project) -> None:
    for state in ("running", "failed", "timeout", "completed"):
        a_job(mira, project, state=state, name=f"a-{state}")
    html = text(client.get("/jobs?state=bad&q=a-"))
    for state, count in (("", 4), ("running", 1), ("pending", 0), ("bad", 2), ("completed", 1)):
        assert f'data-tab="{state}">{count}</span>' in html
    assert 'name="state" value="bad"' in html, "the form keeps the tab"


@pytest.mark.parametrize(("hours", "reason"), [(2, "Scheduled to start at "), (-2, "BeginTime: it is scheduled")])
def test_a_job_that_begins_later_shows_when(
    hours: int, reason: str, client: Client, mira: User, project: Project
) -> None:
    """After a requeue Slurm gives the same reason for a pause of its own: the requested time is then past."""
    job = a_job(mira, project, state="pending", attempt={"reason": "BeginTime"})
    job.spec["resources"]["begin"] = (timezone.localtime() + timedelta(hours=hours)).isoformat()
    job.save(update_fields=["spec"])
    assert reason in text(client.get("/jobs"))
    assert reason in text(client.get("/"))
    assert reason in text(client.get(f"/jobs/{job.pk}"))


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


def test_a_row_names_the_address_that_shows_it_again(client: Client, mira: User, project: Project) -> None:
    job = a_job(mira, project, name="lora-a")
    address = client.get("/jobs").text.split(f'id="job-{job.pk}"')[1].split('data-url="')[1].split('"')[0]
    assert f'id="job-{job.pk}"' in client.get(address).text


def test_empty_lists_explain_what_to_do(client: Client, mira: User, project: Project) -> None:
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
    with CaptureQueriesContext(connection) as queries:
        client.get("/jobs")
    assert len(queries) < 20
    for number in range(20):
        a_job(mira, project, name=f"n{number}", tags=("a", "b"))
    with django_assert_num_queries(len(queries)):
        client.get("/jobs")


def test_names_and_reasons_are_escaped(client: Client, mira: User, project: Project) -> None:
    job = a_job(mira, project, state="failed", attempt={"reason": "<img src=x onerror=alert(1)>"})
    Job.objects.filter(pk=job.pk).update(name="<b>x</b>", notes="<script>1</script>")
    for path in ("/", "/jobs", f"/jobs/{job.pk}", f"/jobs/{job.pk}/attempts"):
        html = client.get(path).text
        assert "<b>x</b>" not in html
        assert "<img src=x" not in html
        assert "<script>1" not in html


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        ("Resources", "Resources: its resources are not free yet."),
        ("QOSMaxGRESPerUser", "QOSMaxGRESPerUser: its owner would exceed the QOS’s limit per person."),
        ("ReqNodeNotAvail, UnavailableNodes:dgx-03",
         "ReqNodeNotAvail (UnavailableNodes:dgx-03): a node that it needs is down, drained or reserved."),
        ("Waits for 2 CPUs; 0 of 2 are free.", "Waits for 2 CPUs; 0 of 2 are free."),
        ("SomethingNew", "SomethingNew"),
    ],
)  # fmt: skip
def test_why_a_job_waits_is_a_sentence(client: Client, mira: User, project: Project, reason: str, shown: str) -> None:
    job = a_job(mira, project, state="pending", attempt={"reason": reason})
    assert f'title="{shown}"' in text(client.get("/jobs"))
    assert f"{shown.removesuffix('.')}.</span>" in text(client.get(f"/jobs/{job.pk}"))


def test_phones_show_reason_loss_and_age(client: Client, mira: User, project: Project) -> None:
    a_job(mira, project, state="failed", attempt={"reason": "out of memory on rank 3", "latest": {"loss": 2.5}})
    row = text(client.get("/jobs")).split("<tbody>")[1].split("</tbody>")[0]
    for name in ("why", "latest", "age"):
        cell = next(part for part in row.split("<td ")[1:] if name in part.split(">")[0])
        assert "wide-only" not in cell.split(">")[0], name
