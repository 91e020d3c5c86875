"""Test the listing: maintained by the database alone, and read by indexes at a cost independent of history."""

from __future__ import annotations

import gc
import re
import weakref
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connection
from django.db.models import F
from django.test import Client
from django.test.utils import CaptureQueriesContext

from console.site import prepare
from jobs import tasks
from jobs.disk import usage
from jobs.following import follow
from jobs.listing import finder, triggers
from jobs.listing.jobs import JobSearch
from jobs.models import Attempt, Job, Listing
from portal.access import note
from portal.admin import HistoryAdmin
from portal.models import User
from tests import lab

pytestmark = pytest.mark.django_db
JOBS = "/api/v1/jobs"


def rows() -> list[tuple[Any, ...]]:
    return list(Listing.objects.order_by("pk").values_list("name", "state", "project_id", "attempt_id"))


def names(client: Client, query: str) -> list[str]:
    answer = client.get(f"{JOBS}?{query}")
    assert answer.status_code == 200, answer.content
    return [job["name"] for job in answer.json()["items"]]


@pytest.fixture
def signed_in(mira: User) -> Client:
    client = Client(headers={"host": "127.0.0.1"})
    client.force_login(mira, backend="allauth.account.auth_backends.AuthenticationBackend")
    return client


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A portal for which four jobs are many."""
    for bound in ("MAX_COUNTED", "MAX_SCANNED_ROWS", "ROWS_BEFORE_INDEX_LOOKUP"):
        monkeypatch.setattr(finder, bound, 3)


def test_a_line_follows_its_job_and_its_latest_attempt(mira, project):
    job = lab.a_job(mira, project, name="first", state="running")
    attempt = job.latest
    assert rows() == [("first", "running", project.pk, attempt.pk)]
    Attempt.objects.filter(pk=attempt.pk).update(state="node_fail", ended_at=F("started_at"))
    Job.objects.filter(pk=job.pk).update(name="renamed")
    assert rows() == [("renamed", "node_fail", project.pk, attempt.pk)]
    again = Attempt.objects.create(job=job, number=2)
    Job.objects.filter(pk=job.pk).update(latest=again)
    Attempt.objects.filter(pk=attempt.pk).update(state="failed")
    assert rows() == [("renamed", "pending", project.pk, again.pk)], "an earlier attempt is no longer its state"
    assert Listing.objects.get().started_at.year == 1970, "it has not started"
    job.delete()
    assert rows() == []


def test_counts_that_nobody_updated_meanwhile_are_brought_in_step(signed_in, mira, project):
    stored, gone = lab.a_job(mira, project, name="kept"), lab.a_job(mira, project, name="gone")
    triggers.drop_triggers(connection)
    assert not triggers.has_triggers(connection)
    Job.objects.filter(pk=stored.pk).update(name="heron")
    gone.delete()
    lab.a_job(mira, project, name="new")
    assert [line[0] for line in rows()] == ["kept", "gone"]
    call_command("migrate", verbosity=0)  # nothing to apply: triggers that are missing come back all the same
    assert triggers.has_triggers(connection)
    assert [line[0] for line in rows()] == ["heron", "new"]
    assert names(signed_in, "q=heron") == ["heron"]


def test_a_start_finishes_what_an_upgrade_that_was_killed_left_undone(signed_in, mira, project, monkeypatch):
    """The last migration was applied, and the triggers of the listing are not restored yet."""
    triggers.drop_triggers(connection)
    lab.a_job(mira, project, name="heron")
    monkeypatch.setattr(prepare, "_collect_static", lambda: None)
    prepare.prepare()
    assert triggers.has_triggers(connection)
    assert names(signed_in, "q=heron") == ["heron"]


@pytest.mark.parametrize("sort", ["-created", "name", "state", "-started", "owner"])
@pytest.mark.parametrize("query", ["", "q=lora", "state=completed&q=lora"])
def test_pages_are_whole_where_four_jobs_are_many(signed_in, mira, project, short, sort, query):
    """However few lines are read for a page: no job twice, none lost, each in its place."""
    for i in range(14):
        state = ("pending", "running", "completed", "failed")[i % 4]
        lab.a_job(mira, project, name=f"{('lora', 'gpt', 'lora')[i % 3]}-{i % 2}", state=state)
    listed: list[int] = []
    cursor = ""
    for _ in range(40):
        page = signed_in.get(f"{JOBS}?limit=2&sort={sort}&cursor={cursor}&{query}").json()
        listed += [job["id"] for job in page["items"]]
        cursor = page["next"]
        if len(listed) == 2:
            lab.a_job(mira, project, name="aaa", state="cancelled")  # comes in between, and shifts nothing
        if cursor is None:
            break
    assert cursor is None
    assert len(listed) == len(set(listed))
    wanted = {job.pk for job in Job.objects.exclude(name="aaa") if _matches(job, query)}
    assert wanted <= set(listed)


def _matches(job: Job, query: str) -> bool:
    assert job.latest is not None
    states = {"completed": {"completed"}, "bad": Attempt.ENDED_BADLY}
    state, word = (re.search(f"{name}=([a-z]+)", query) for name in ("state", "q"))
    return (not state or job.latest.state in states[state[1]]) and (not word or word[1] in job.name)


def test_what_is_many_is_counted_so_far_and_marked_so(signed_in, mira, project, short):
    for i in range(5):
        lab.a_job(mira, project, state="completed", name=f"lora-{i}")
    lab.a_job(mira, project, state="failed", name="gpt")
    html = signed_in.get("/jobs").text
    assert 'data-tab="completed">3+</span>' in html
    assert 'data-tab="bad">1</span>' in html, "few are counted exactly"
    assert 'data-tab="">4+</span>' in html
    assert str(finder.Count(9_871, more=True)) == "9,000+"
    assert str(finder.Count(10_000)) == "10,000"


def test_a_search_that_has_read_enough_offers_to_go_on(signed_in, mira, project, short):
    oldest = lab.a_job(mira, project, name="zz")
    for i in range(6):
        lab.a_job(mira, project, name=f"run-{i}")
    first = signed_in.get(f"{JOBS}?q=zz").json()
    assert (first["items"], first["next"] is None) == ([], False)
    assert "No match so far" in signed_in.get("/jobs?q=zz").text
    found, cursor = [], first["next"]
    while cursor:
        page = signed_in.get(f"{JOBS}?q=zz&cursor={cursor}").json()
        found, cursor = found + page["items"], page["next"]
    assert [job["id"] for job in found] == [oldest.pk]


@pytest.mark.parametrize("sort", ["owner", "-owner"])
def test_a_search_through_many_people_ends_after_as_many_lines(signed_in, mira, project, short, sort):
    """None of them has as many jobs as a page inspects, but all of them together have more."""
    for name in ("ada", "bo", "cy", "di"):
        person = lab.person(name, project)
        for number in range(2):
            lab.a_job(person, project, name=f"{'zz' if name in {'ada', 'di'} else 'gpt'}-{number}")
    found, short_ones, cursor = [], 0, ""
    while cursor is not None:
        page = signed_in.get(f"{JOBS}?q=zz&sort={sort}&cursor={cursor}").json()
        assert len(page["items"]) <= finder.MAX_SCANNED_ROWS
        short_ones += not page["items"]
        found, cursor = found + [job["id"] for job in page["items"]], page["next"]
    assert short_ones, "nobody of those in between has one"
    assert len(found) == len(set(found)) == 4


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("ra-b", ["lora-base"]),
        ("LORA", ["lora-base", "a_lora"]),
        ("a_l", ["a_lora"]),
        ('"', []),
        ("* OR a", []),
        ("a", ["lora-base", "a_lora"]),
    ],
)
def test_words_are_found_anywhere_in_a_name(signed_in, mira, project, short, word, found):
    for name in ("lora-base", "a_lora", "gpt", "gpt", "gpt", "gpt"):
        lab.a_job(mira, project, name=name)
    page, listed = signed_in.get(JOBS, {"q": word, "sort": "-name"}).json(), []
    while True:
        listed += [job["name"] for job in page["items"]]
        if page["next"] is None:
            break
        page = signed_in.get(JOBS, {"q": word, "sort": "-name", "cursor": page["next"]}).json()
    assert listed == found


def test_nobody_finds_what_is_not_theirs(signed_in, mira, project, short):
    other = lab.person("yuki", None)
    theirs = lab.a_job(other, type(project).objects.create(slug="owls"), name="secret")
    for query in ("", "q=secret", "project=owls", "owner=yuki", f"q={theirs.pk}", "sort=owner", "state=completed"):
        assert names(signed_in, query) == []
    assert "secret" not in signed_in.get("/jobs").text


BIG = "jobs_(job|attempt|listing|tag|checkpoint|event)|portal_(auditentry|series|chunk)"
ADDRESSES = (
    "/", "/jobs", "/jobs?state=bad", "/jobs?state=boot_fail", "/jobs?q=lora", "/jobs?q=zz", "/jobs?sort=name",
    "/jobs?sort=-started", "/jobs?sort=state", "/jobs?sort=owner", "/jobs?sort=project", "/jobs?since=30d&kind=script",
    "/jobs?owner=me&state=failed&sort=-ended", "/jobs?tag=a&q=lora&sort=-name", "/queue", "/nodes", f"{JOBS}?limit=200",
    f"{JOBS}?created_before=2030-01-01T00:00:00Z&sort=name", f"{JOBS}?q=lora+mira&project=default", "/sweeps",
    "/api/v1/sweeps", "/submit",
)  # fmt: skip
OF_SYSADMINS = (
    "/disk", "/admin/jobs/job/", "/admin/jobs/job/?q=lora", "/admin/jobs/job/?o=-2",
    "/admin/jobs/job/?project__id__exact=1",
    "/admin/jobs/attempt/", "/admin/jobs/attempt/?q=7", "/admin/jobs/attempt/?state__exact=failed",
    "/admin/jobs/checkpoint/", "/admin/jobs/checkpoint/?q=lora", "/admin/jobs/checkpoint/?state__exact=corrupt",
    "/admin/portal/auditentry/", "/admin/portal/auditentry/?q=sam",
)  # fmt: skip


@pytest.mark.skipif(connection.vendor != "sqlite", reason="SQLite tells its plan without any rows to go by")
@pytest.mark.parametrize("address", ADDRESSES)
def test_no_address_reads_through_all_jobs(signed_in, mira, project, address):
    lab.a_job(mira, project, name="lora", tags=("a",))
    with CaptureQueriesContext(connection) as queries:
        assert signed_in.get(address).status_code == 200
    assert _read_through(queries) == []


def test_a_page_leaves_nothing_to_the_collector(mira, project):
    """Rows that hold each other in rings made every tenth page three times as slow."""
    lab.a_job(mira, project, tags=("night", "paper"))
    was_on = gc.isenabled()
    gc.disable()
    try:
        page = JobSearch().page(mira)
        left = [weakref.ref(row) for job in page.items for row in (job, job.latest, job.project, job.owner)]
        assert [job.tag_names for job in page.items] == [["night", "paper"]]
        del page
        assert [ref() for ref in left] == [None] * 4
    finally:
        if was_on:
            gc.enable()


def test_a_clone_gets_its_name_without_reading_every_job_of_its_project(signed_in, mira, project):
    job = lab.a_job(mira, project, name="lora", spec_toml='name = "lora"\n')
    for number in range(2, 105):
        lab.a_job(mira, project, name=f"lora-{number}")
    with CaptureQueriesContext(connection) as queries:
        html = signed_in.get(f"/submit?from={job.pk}").text
    assert "lora-105" in html
    assert [query["sql"] for query in queries if "LIKE" in query["sql"]] == []


@pytest.mark.skipif(connection.vendor != "sqlite", reason="SQLite tells its plan without any rows to go by")
@pytest.mark.parametrize("address", OF_SYSADMINS)
def test_no_address_of_sysadmins_reads_through_all_of_them(mira, project, address, monkeypatch):
    monkeypatch.setattr(HistoryAdmin, "list_per_page", 1)  # a list that fits on one page is read without a bound
    sam = lab.sysadmin()
    for name in ("lora", "lora-2"):
        job = lab.a_job(mira, project, name=name, state="failed")
        lab.a_checkpoint(job, 3)
        note(sam, "job.cancel", job)
    browser = lab.signed_in(sam)
    with CaptureQueriesContext(connection) as queries:
        assert browser.get(address).status_code == 200
    assert _read_through(queries) == []


@pytest.mark.skipif(connection.vendor != "sqlite", reason="SQLite tells its plan without any rows to go by")
@pytest.mark.parametrize("tick", [follow.tick, tasks.verify, usage.measure_due, tasks.remove_spools, tasks.compact])
def test_no_tick_reads_through_all_attempts(mira, project, tick):
    lab.a_job(mira, project, name="lora", state="running")
    with CaptureQueriesContext(connection) as queries:
        tick()
    assert _read_through(queries) == []


def _read_through(queries: CaptureQueriesContext) -> list[str]:
    """Return statements that read every row of a big table: without an index, or along an index only to sort."""
    found = []
    for query in queries.captured_queries:
        text = query["sql"]
        if not text.startswith(("SELECT", "UPDATE", "DELETE")):
            continue
        with connection.cursor() as cursor:
            cursor.execute("EXPLAIN QUERY PLAN " + text.replace("%", "%%"), ())
            plan = [row[3] for row in cursor.fetchall()]
        aliases = dict(re.findall(r'"?(\w+)"? (?:AS )?"?([A-Z]\d+|[a-z])"?[ ,)]', text))
        tables = {short: table for table, short in aliases.items()}
        for step in plan:
            scanned = re.fullmatch(r"SCAN (\w+)(?: USING (?:COVERING )?INDEX (\w+))?", step)
            if scanned is None or not re.fullmatch(BIG, tables.get(scanned[1], scanned[1])):
                continue
            is_partial = scanned[2] in {"attempts_open", "unmerged_chunks", "attempts_with_spools"}  # of few rows
            is_in_order = (
                scanned[2] or tables.get(scanned[1]) is None or not any("TEMP B-TREE" in item for item in plan)
            )
            if not is_partial and not (" LIMIT " in text and is_in_order):
                found.append(f"{step}: {text[:200]}")
    return found
