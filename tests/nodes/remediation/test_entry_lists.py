"""Test the lists of /health: the most urgent entries first, true counts, and the rest on the page of all entries."""

from __future__ import annotations

import itertools
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from django.db import connection
from django.utils import timezone

from nodes.models import HealthEntry
from portal.models import User
from tests.lab import a_project, bearer, person, signed_in
from tests.nodes.remediation.cluster import Lab

pytestmark = pytest.mark.django_db


@pytest.fixture
def mira() -> User:
    return person("mira", a_project())


def entries(number: int, node: str = "n", **values: Any) -> None:
    now = timezone.now()
    fields = {
        "rule": "off-bus", "title": "GPU fell off the bus", "severity": "fatal", "action": "drain", "state": "open",
        "decision": "proposed", "first_seen": now, "opened_at": now, **values,
    }  # fmt: skip
    HealthEntry.objects.bulk_create(
        HealthEntry(node=f"{node}{place:03}", last_seen=now - timedelta(minutes=place), **fields)
        for place in range(number)
    )


def test_counts_are_true_beyond_what_is_listed(mira: User) -> None:
    entries(120)
    entries(70, "w", severity="warning", action="watch", decision="")
    page = signed_in(mira).get("/health").content.decode()
    assert "120\xa0findings wait for a decision." in page
    assert page.count('class="card finding"') == 50
    assert '<a href="/health/entries?state=waiting">70\xa0more findings</a>' in page
    assert "n000" in page
    assert "n119" not in page, "the newest are shown"


def test_the_most_severe_are_listed_first(mira: User) -> None:
    entries(60, severity="critical", rule="gsp-timeout", title="GSP does not respond")
    entries(1, "old", first_seen=timezone.now() - timedelta(days=9))
    page = signed_in(mira).get("/health").content.decode()
    assert page.index("old000") < page.index("n000")


def test_all_entries_can_be_searched_page_by_page(mira: User) -> None:
    entries(60)
    entries(5, "c", state="cleared", decision="approved", cleared_at=timezone.now())
    client = signed_in(mira)
    page = client.get("/health/entries").content.decode()
    assert page.count("<tr id=") == 50
    following = page.split('rel="next" href="')[1].split('"')[0].replace("&amp;", "&")
    assert client.get(f"/health/entries{following}").content.decode().count("<tr id=") == 15
    assert client.get("/health/entries?state=cleared").content.decode().count("<tr id=") == 5
    assert client.get("/health/entries?node=n007&state=waiting").content.decode().count("<tr id=") == 1
    assert client.get("/health/entries?node=n007&state=open").content.decode().count("<tr id=") == 1
    assert "No matching findings" in client.get("/health/entries?node=n007&state=cleared").content.decode()
    assert client.get("/health/entries?after=nonsense&state=%00").status_code == 200


def test_no_list_sorts_or_scans_all_entries(mira: User) -> None:
    """A portal has few active entries and years of cleared ones: every filter has an index in the list's order."""
    if connection.vendor != "sqlite":
        pytest.skip("the plan of PostgreSQL depends on its statistics")
    client = bearer(mira, "read")
    for state, severity, rule in itertools.product(("", "open", "cleared"), ("", "fatal"), ("", "off-bus")):
        plan: list[str] = []
        with connection.execute_wrapper(partial(_explain, plan)):
            client.get("/api/v1/health", {"state": state, "severity": severity, "rule": rule})
        wanted = (state, severity, rule, plan)
        assert plan, wanted
        assert state == "open" or not any("TEMP B-TREE" in line for line in plan), wanted
        if state != "cleared":
            assert "INDEX health_active" in plan[0], wanted
        elif rule:
            assert "INDEX health_of_a_rule" in plan[0], wanted
        elif severity:
            assert "INDEX health_of_a_severity" in plan[0], wanted


def _explain(plan: list[str], execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
    """Add the plan of a query that lists entries, for the parameters with which it is executed."""
    if 'FROM "nodes_healthentry"' in sql:
        with connection.cursor() as cursor:
            cursor.cursor.execute(f"EXPLAIN QUERY PLAN {sql}", params)
            plan += [row[-1] for row in cursor.cursor.fetchall()]
    return execute(sql, params, many, context)


def test_the_limits_are_shown_where_vigil_acts(mira: User, settings: Any) -> None:
    lab = Lab()
    assert "Limits on automatic drains" not in signed_in(mira).get("/health").content.decode()
    settings.VIGIL_HEALTH = "act"
    lab.xid(79)
    lab.step()
    page = signed_in(mira).get("/health").content.decode()
    assert "1 of at most 1\xa0automatic drain in the last hour" in page
    assert "1 of 12\xa0nodes out of service" in page
