"""Test finding jobs over REST: filters, search terms, orders, pages."""

import json
from base64 import urlsafe_b64encode
from urllib.parse import quote

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from tests import lab

pytestmark = pytest.mark.django_db
JOBS = "/api/v1/jobs"


def ids(answer) -> list[int]:
    assert answer.status_code == 200, answer.content
    return [job["id"] for job in answer.json()["items"]]


@pytest.fixture
def four(mira, project):
    tomas = lab.person("tomas", project)
    return [
        lab.a_job(mira, project, name="gpt-small", tags=("lora", "night")),
        lab.a_job(mira, project, name="gpt-large", state="running", attempt={"step": 50, "steps": 200}),
        lab.a_job(tomas, project, name="vision", state="failed", tags=("lora",)),
        lab.a_job(tomas, project, name="a_b", state="pending"),
    ]


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("", [3, 2, 1, 0]),
        ("sort=created", [0, 1, 2, 3]),
        ("sort=name", [3, 1, 0, 2]),
        ("sort=-name", [2, 0, 1, 3]),
        ("sort=state", [0, 2, 3, 1]),
        ("sort=owner", [0, 1, 2, 3]),
        ("sort=-project", [3, 2, 1, 0]),
        ("state=running", [1]),
        ("state=failed&state=pending", [3, 2]),
        ("state=alive", [3, 1]),
        ("state=bad", [2]),
        ("state=ended", [2, 0]),
        ("q=GPT", [1, 0]),
        ("q=gpt+small", [0]),
        ("q=lora", [2, 0]),
        ("q=tomas", [3, 2]),
        ("q=%25", []),
        ("q=_", [3]),
        ("q=a_b", [3]),
        ("tag=lora&tag=night", [0]),
        ("owner=tomas", [3, 2]),
        ("kind=script", []),
        ("project=default", [3, 2, 1, 0]),
        ("project=none", []),
        ("created_before=2000-01-01T00:00:00Z", []),
        ("created_after=2000-01-01T00:00:00Z", [3, 2, 1, 0]),
    ],
)
def test_filters_search_and_order(client, four, query, found):
    assert ids(client.get(f"{JOBS}?{query}")) == [four[i].pk for i in found]


def test_search_by_number(client, four):
    assert ids(client.get(f"{JOBS}?q={four[2].pk}")) == [four[2].pk]
    assert ids(client.get(JOBS, {"q": f"#{four[2].pk}"})) == [four[2].pk]


BEFORE_ALL_DAYS, AFTER_ALL_DAYS = "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00"


@pytest.mark.parametrize(
    "query",
    [
        "state=asleep",
        "sort=colour",
        "created_after=2020-01-01T00:00:00",
        f"created_after={quote(BEFORE_ALL_DAYS)}",
        f"created_before={AFTER_ALL_DAYS}",
        "limit=0",
    ],
)
def test_wrong_filters_list_what_there_is(client, query):
    answer = client.get(f"{JOBS}?{query}")
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == query.split("=")[0]


@pytest.mark.parametrize(
    "sort", ["-created", "created", "name", "-name", "state", "-ended", "started", "owner", "-project"]
)
def test_pages_hold_each_job_once_in_every_order(client, mira, project, sort):
    for i in range(11):
        state = ["pending", "running", "completed"][i % 3]
        lab.a_job(mira, project, name=f"same-{i % 2}", state=state)
    listed, cursor = [], ""
    while cursor is not None:
        answer = client.get(f"{JOBS}?sort={sort}&limit=3&cursor={cursor}")
        listed += ids(answer)
        cursor = answer.json()["next"]
    assert len(listed) == len(set(listed)) == 11
    assert listed == ids(client.get(f"{JOBS}?sort={sort}&limit=100"))


def test_a_new_job_shifts_no_page(client, mira, project):
    old = [lab.a_job(mira, project) for _ in range(4)]
    first = client.get(f"{JOBS}?limit=2").json()
    lab.a_job(mira, project)
    second = client.get(f"{JOBS}?limit=2&cursor={first['next']}").json()
    assert [job["id"] for job in second["items"]] == [old[1].pk, old[0].pk]


@pytest.mark.parametrize("cursor", ["x", "bm9uc2Vuc2U", "WyItY3JlYXRlZCIsbnVsbCwiYSJd", "W10", "é"])
def test_a_cursor_that_is_none_of_ours(client, four, cursor):
    assert client.get(JOBS, {"cursor": cursor}).status_code == 422


@pytest.mark.parametrize(
    ("sort", "place"),
    [
        ("started", ["started_or_never", {"time": BEFORE_ALL_DAYS}, 3]),
        ("started", ["started_or_never", {"time": 7}, 3]),
        ("name", ["name", "\ud800", 3]),
    ],
)
def test_a_cursor_of_a_place_that_cannot_be(client, four, sort, place):
    cursor = urlsafe_b64encode(json.dumps(place).encode()).decode()
    assert client.get(JOBS, {"sort": sort, "cursor": cursor}).status_code == 422


def test_a_cursor_belongs_to_its_order(client, four):
    cursor = client.get(f"{JOBS}?sort=name&limit=1").json()["next"]
    assert client.get(f"{JOBS}?sort=-name&limit=1&cursor={cursor}").status_code == 422


def test_lists_cost_the_same_number_of_queries_however_long(client, mira, project, django_assert_num_queries):
    client.get("/api/v1/me")
    lab.a_job(mira, project, tags=("a", "b"))
    with CaptureQueriesContext(connection) as queries:
        client.get(f"{JOBS}?limit=100")
    assert len(queries) < 10  # the token, what is visible, the page's keys by indexes alone, its jobs, their tags
    for _ in range(12):
        lab.a_job(mira, project, tags=("a", "b"))
    with django_assert_num_queries(len(queries)):
        client.get(f"{JOBS}?limit=100")
