"""Test the page of sweeps: owners, the state of their jobs, pages."""

from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from jobs.models import Sweep
from jobs.models.sweep import states_of
from portal.models import Project, User
from tests import lab

pytestmark = pytest.mark.django_db


def a_sweep(owner: User, project: Project, name: str, *states: str) -> Sweep:
    axes = [["run.learning_rate", [0.1, 0.2]], ["run.seed", [1, 2, 3]]]
    sweep = Sweep.objects.create(project=project, owner=owner, name=name, axes=axes, spec_toml="")
    for index, state in enumerate(states):
        lab.a_job(owner, project, state=state, name=f"{name}-{index}", sweep=sweep, sweep_index=index)
    return sweep


def test_each_sweep_shows_the_states_of_its_jobs(mira: User) -> None:
    sweep = a_sweep(mira, lab.a_project(), "rates", "running", "completed", "completed", "failed")
    html = lab.signed_in(mira).get("/sweeps").text
    assert f'<a class="name" href="/sweeps/{sweep.pk}">rates</a>' in html
    assert "learning_rate × 2, seed × 3" in html
    assert "3 of 4" in html
    assert f"/jobs?sweep={sweep.pk}&amp;state=failed" in html
    assert 'rates goes on: <span class="muted">1 of its jobs waits or runs.' in html


def test_others_see_nothing_of_it(mira: User) -> None:
    a_sweep(lab.person("oskar", lab.a_project("siskin")), lab.a_project("siskin"), "secret", "running")
    html = lab.signed_in(mira).get("/sweeps").text
    assert "secret" not in html
    assert "No sweeps yet" in html
    assert "secret" in lab.signed_in(lab.sysadmin()).get("/sweeps").text
    assert Client().get("/sweeps").status_code == 302


def test_pages_go_on_where_the_previous_one_ended(mira: User) -> None:
    project = lab.a_project()
    Sweep.objects.bulk_create(Sweep(project=project, owner=mira, name=f"s{n:02}", axes=[]) for n in range(30))
    browser = lab.signed_in(mira)
    first = browser.get("/sweeps").text
    assert "s29" in first
    assert "s04" not in first
    after = first.split('rel="next" href="', 1)[1].split('"', 1)[0]
    second = browser.get(f"/sweeps{after}").text
    assert "s04" in second
    assert "s05" not in second
    assert 'rel="next"' not in second
    assert "s29" in browser.get("/sweeps?after=nonsense").text


def test_the_number_of_queries_does_not_grow_with_sweeps(mira: User, django_assert_max_num_queries: Any) -> None:
    for name in ("one", "two", "three"):
        a_sweep(mira, lab.a_project(), name, "completed", "completed")
    browser = lab.signed_in(mira)
    with django_assert_max_num_queries(8):
        browser.get("/sweeps")


@pytest.mark.skipif(connection.vendor != "sqlite", reason="PostgreSQL reads a small table whole")
def test_jobs_of_other_sweeps_are_not_read(mira: User) -> None:
    with CaptureQueriesContext(connection) as queries:
        states_of([a_sweep(mira, lab.a_project(), "one", "completed")])
    with connection.cursor() as cursor:
        cursor.execute("EXPLAIN QUERY PLAN " + queries.captured_queries[-1]["sql"])
        assert not [row for row in cursor.fetchall() if "SCAN" in row[3]]
