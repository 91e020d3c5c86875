"""Test how reliability is shown: on the page, over REST, as CSV and by `vigil`; and whose jobs a person sees."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from jobs.models import Job
from nodes.models import RackPlace
from portal.models import Membership, Project, User
from tests.jobs.pages.reading import text
from tests.jobs.reliability.lab import count, ran
from tests.lab import bearer, person, signed_in, sysadmin
from tests.portal.series import write
from tests.vigil_cli.commands import nowhere, portal, vigil  # noqa: F401

pytestmark = pytest.mark.django_db


def get_json(user: User, query: str = "") -> dict[str, Any]:
    answer = bearer(user, "read").get(f"/api/v1/reliability?{query}")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def failures(found: dict[str, Any]) -> dict[str, tuple[int, float]]:
    return {item["name"]: (item["failures"], round(item["node_days"], 3)) for item in found["items"]}


@pytest.fixture
def lab() -> dict[str, User]:
    """Two projects: siskin's job ran on a and b and failed on a; wren's on c, where it failed by itself."""
    RackPlace.objects.create(node="a", rack="R1")
    RackPlace.objects.create(node="b", rack="R1")
    ran(24.0, nodes=["a", "b"], ago=48, project="siskin", partition="batch", cause="gpu.ecc", node="a")
    ran(48.0, nodes=["c"], ago=96, project="wren", partition="debug", cause="program.exception")
    ran(12.0, nodes=["c"], ago=24, project="wren", partition="debug")
    count()
    mira = person("mira", Project.objects.get(slug="siskin"))
    return {"mira": mira, "sam": sysadmin()}


class TestNumbers:
    @pytest.mark.parametrize(
        ("by", "expected"),
        [
            ("cause", {"gpu.ecc": (1, 4.5), "program.exception": (1, 4.5)}),
            ("node", {"a": (1, 1.0), "b": (0, 1.0), "c": (1, 2.5)}),
            ("rack", {"R1": (1, 2.0), "in no rack": (1, 2.5)}),
            ("partition", {"batch": (1, 2.0), "debug": (1, 2.5)}),
            ("project", {"siskin": (1, 2.0), "wren": (1, 2.5)}),
        ],
    )
    def test_by_each(self, lab: dict[str, User], by: str, expected: dict[str, tuple[int, float]]) -> None:
        assert failures(get_json(lab["sam"], f"by={by}")) == expected

    def test_weeks_add_up(self, lab: dict[str, User]) -> None:
        found = failures(get_json(lab["sam"], "by=week&days=30"))
        assert 1 <= len(found) <= 3, "none before the first in which a node was allocated"
        assert sum(number for number, _ in found.values()) == 2
        assert sum(days for _, days in found.values()) == pytest.approx(4.5, abs=0.01)

    def test_the_total_with_its_interval_and_too_few(self, lab: dict[str, User]) -> None:
        found = get_json(lab["sam"])
        total = found["total"]
        assert total["per_1000_node_days"] == pytest.approx(2 / 4.5 * 1000)
        assert total["per_1000_interval"] == pytest.approx([0.242209 / 4.5 * 1000, 7.224688 / 4.5 * 1000], rel=1e-5)
        assert total["mttf_days"] is None
        assert "too few" in found["text"].lower()
        ran(1.0, cause="gpu.off_bus")
        count()
        assert get_json(lab["sam"])["total"]["mttf_days"] == pytest.approx((4.5 + 1 / 24) / 3, rel=1e-3)

    def test_of_machines_and_of_programs(self, lab: dict[str, User]) -> None:
        assert list(failures(get_json(lab["sam"], "kind=machines"))) == ["gpu.ecc"]
        assert list(failures(get_json(lab["sam"], "kind=programs"))) == ["program.exception"]

    def test_what_was_before_the_window_is_left_out(self, lab: dict[str, User]) -> None:
        ran(24.0, ago=24 * 60, nodes=["z"], cause="gpu.ecc")
        count()
        assert "z" not in failures(get_json(lab["sam"], "by=node&days=30"))
        assert failures(get_json(lab["sam"], "by=node&days=90"))["z"] == (1, 1.0)

    def test_effective_time(self, lab: dict[str, User]) -> None:
        attempt = ran(9.5, ago=20, project="siskin")
        reports = [(step, 342.0) for step in range(1, 101)]
        write("step_seconds", (0, reports), owner=("attempt", attempt.pk))
        Job.objects.get(pk=attempt.job_id).attempts.update(state="completed")
        count()
        assert get_json(lab["sam"])["effective_time"] == pytest.approx(0.95)

    def test_a_node_that_fails_under_all_programs_stands_out(self, lab: dict[str, User]) -> None:
        for number in range(30):
            ran(24.0, ago=100, nodes=[f"n{number:02}"])
        for _ in range(5):
            ran(1.0, ago=50, nodes=["bad"], cause="gpu.off_bus", fingerprint="same")
            ran(1.0, ago=50, nodes=["used"], cause="program.exception", fingerprint="one")
        count()
        found = get_json(lab["sam"])["offenders"]
        assert {item["node"]: item["blame"] for item in found} == {"bad": "node", "used": "program"}
        page = text(signed_in(lab["sam"]).get("/reliability"))
        assert "bad fails" in page
        assert "across different programs" in page

    def test_programs_of_a_few_nodes_are_found_by_their_index(self, lab: dict[str, User]) -> None:
        for _ in range(5):
            ran(0.5, ago=50, nodes=["bad"], cause="gpu.off_bus")
        count()
        with CaptureQueriesContext(connection) as queries:
            assert get_json(lab["sam"])["offenders"]
        (programs,) = [item["sql"] for item in queries if "DISTINCT" in item["sql"]]
        if connection.vendor == "sqlite":
            with connection.cursor() as cursor:
                cursor.execute(f"EXPLAIN QUERY PLAN {programs}")
                assert "failures_of_a_node" in str(cursor.fetchall())


class TestForecast:
    def test_by_what_was_observed_and_by_others_where_that_is_little(self, lab: dict[str, User]) -> None:
        client = bearer(lab["sam"], "read")
        few = client.get("/api/v1/reliability/forecast?nodes=64&days=14&save_seconds=20").json()
        assert few["is_assumed"]
        assert few["expected_failures_interval"] is few["chance_of_none_interval"] is None
        assert few["expected_failures"] == pytest.approx(6.5 * 64 * 14 / 1000)
        for _ in range(4):
            ran(24.0, cause="gpu.ecc")
        count()
        payload = client.get("/api/v1/reliability/forecast?nodes=64&days=14&save_seconds=20").json()
        assert not payload["is_assumed"]
        assert payload["expected_failures"] == pytest.approx(5 / 8.5 * 64 * 14)
        low, high = payload["expected_failures_interval"]
        assert low < payload["expected_failures"] < high
        assert max(item["effective_time"] for item in payload["curve"]) == pytest.approx(payload["effective_time"])

    @pytest.mark.parametrize(
        "query",
        ["", "nodes=0&days=1", "nodes=1&days=0", "nodes=1&days=nan", "nodes=1&days=1&save_seconds=-1",
         "nodes=1&days=1&restart_seconds=inf", "nodes=1e9&days=1"],
    )  # fmt: skip
    def test_what_it_does_not_take(self, query: str) -> None:
        answer = bearer(sysadmin(), "read").get(f"/api/v1/reliability/forecast?{query}")
        assert answer.status_code == 422

    @pytest.mark.parametrize(
        "query",
        ["nodes=100000&days=366&save_seconds=86400&restart_seconds=86400", "nodes=1&days=1e-300&save_seconds=1e-300"],
    )
    def test_the_ends_of_what_it_takes(self, query: str) -> None:
        found = bearer(sysadmin(), "read").get(f"/api/v1/reliability/forecast?{query}").json()
        assert 0 <= found["effective_time"] <= 1
        assert found["best_interval_seconds"] > 0


class TestPage:
    def test_a_new_site_shows_what_to_expect(self) -> None:
        page = text(signed_in(sysadmin()).get("/reliability"))
        assert "No node was allocated in the last 30 days." in page
        assert "published rate of" in page

    @pytest.mark.parametrize("by", ["cause", "node", "rack", "partition", "project", "week", "<script>"])
    @pytest.mark.parametrize("days", ["7", "365", "-1"])
    def test_every_window_and_grouping(self, lab: dict[str, User], by: str, days: str) -> None:
        answer = signed_in(lab["sam"]).get("/reliability", {"by": by, "days": days, "nodes": "x", "for": "1e400"})
        assert answer.status_code == 200
        assert b"<script>" not in answer.content

    def test_its_form(self, lab: dict[str, User]) -> None:
        page = text(signed_in(lab["sam"]).get("/reliability?nodes=1&for=3.5&save=12&restart=60"))
        assert "1 node for 3.5 days: expect 0.0227 failures" in page

    def test_with_a_project_it_names_that_and_shows_nothing_else(self, lab: dict[str, User]) -> None:
        client = signed_in(lab["sam"])
        answer = client.get("/reliability?project=siskin&days=7&by=node")
        page = text(answer)
        assert 'in <b>siskin</b> · <a href="?days=7&amp;by=node">All projects</a>' in page
        assert "reliability.csv?days=7&amp;by=node&amp;kind=all&amp;project=siskin" in page
        assert 'name="project" value="siskin"' in page
        assert "All projects" not in text(client.get("/reliability"))

    def test_money_where_the_site_names_a_price(self, lab: dict[str, User], settings: Any) -> None:
        settings.VIGIL_GPU_HOUR_PRICE, settings.VIGIL_CURRENCY = 2.5, "CHF"
        page = text(signed_in(lab["sam"]).get("/reliability"))
        # 24 hours of 16 GPUs, and 48 of 8.
        assert "<dd>768 <small>GPU-hours, 1,920.00 CHF</small></dd>" in page

    def test_odd_names_are_shown_and_break_nothing(self, lab: dict[str, User]) -> None:
        for number in range(9):
            ran(24.0, ago=200, nodes=[f"n{number}"])
        for _ in range(6):
            ran(0.1, nodes=["<b>/x"], cause="gpu.ecc", project="siskin")
        count()
        page = signed_in(lab["sam"]).get("/reliability?by=node").content.decode()
        assert "&lt;b&gt;/x" in page
        assert "<b>/x" not in page

    def test_csv(self, lab: dict[str, User]) -> None:
        answer = bearer(lab["sam"], "read").get("/api/v1/reliability.csv?by=node")
        rows = list(csv.DictReader(io.StringIO(b"".join(answer).decode())))
        assert {row["name"]: row["failures"] for row in rows} == {"a": "1", "b": "0", "c": "1"}
        assert rows[0]["mttf_days"] == ""

    def test_vigil(self, lab: dict[str, User], portal: Any) -> None:  # noqa: F811
        sam = lab["sam"]
        portal.answers["GET", "reliability"] = get_json(sam, "by=node")
        lines = vigil("reliability", "--by", "node").stdout.splitlines()
        assert lines[0].startswith("2 failures in the last 30 days, over 4.5 node-days: 444 per 1,000 node-days")
        assert lines[-1].split() == ["b", "0", "1", "0", "0–3,689", "too", "few", "0.0"]
        assert portal.asked[0].url.params["by"] == "node"
        assert json.loads(vigil("reliability", "--json").stdout)["by"] == "node"
        vigil("reliability", "--by", "weather", status=2)
        answer = bearer(sam, "read").get("/api/v1/reliability/forecast?nodes=8&days=3").json()
        portal.answers["GET", "reliability/forecast"] = answer
        assert vigil("forecast", "--nodes", "8", "--days", "3").stdout.startswith("8 nodes for 3 days: expect 0.156")


class TestWhoSeesWhat:
    def test_where_everybody_sees_the_queue_everybody_sees_numbers(self, lab: dict[str, User]) -> None:
        assert set(failures(get_json(lab["mira"], "by=project"))) == {"siskin", "wren"}
        page = signed_in(lab["mira"]).get("/reliability?by=project").content.decode()
        assert "project=siskin" in page
        assert "project=wren" not in page

    def test_elsewhere_of_your_projects_alone(self, lab: dict[str, User], settings: Any) -> None:
        settings.VIGIL_QUEUE_VISIBLE = "own"
        mira = lab["mira"]
        assert failures(get_json(mira, "by=project")) == {"siskin": (1, 2.0)}
        assert failures(get_json(mira, "by=node")) == {"a": (1, 1.0), "b": (0, 1.0)}
        assert failures(get_json(mira, "by=cause")) == {"gpu.ecc": (1, 2.0)}
        assert failures(get_json(mira, "by=project&project=wren")) == {}
        for by in ("cause", "node", "rack", "partition", "project", "week"):
            for address in (
                f"/reliability?by={by}",
                f"/api/v1/reliability?by={by}",
                f"/api/v1/reliability.csv?by={by}",
            ):
                answer = signed_in(mira).get(address)
                body = b"".join(answer) if answer.streaming else answer.content
                assert b"wren" not in body
                assert b"debug" not in body
        assert set(failures(get_json(lab["sam"], "by=project"))) == {"siskin", "wren"}
        nobodys = person("nobody")
        assert get_json(nobodys, "by=node")["total"]["node_days"] == 0
        assert signed_in(nobodys).get("/reliability").status_code == 200
        Membership.objects.create(user=mira, project=Project.objects.get(slug="wren"))
        assert set(failures(get_json(mira, "by=project"))) == {"siskin", "wren"}

    def test_nobody_without_a_session(self) -> None:
        from django.test import Client

        assert Client().get("/reliability").status_code == 302
        assert Client().get("/api/v1/reliability").status_code == 401
