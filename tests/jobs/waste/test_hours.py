"""Test GPU-hours allocated, used and idle: counts, sums, visibility; on the page, by REST, CSV and `vigil`."""

from __future__ import annotations

import csv
import io
import json
from datetime import UTC, date, timedelta
from typing import Any

import pytest
from django.utils import timezone

from jobs import lease
from jobs.models import Attempt, GpuHours
from jobs.tasks import waste
from jobs.waste import aggregation
from nodes.models import GpuUse, Holding
from nodes.telemetry import merge
from nodes.telemetry.fields import WINDOW_S
from portal.models import Membership, Project, User
from tests.jobs.pages.reading import text
from tests.jobs.waste.idling import HOUR_S, allocated_job, ends, idle_for, machine, moment, vigils
from tests.lab import a_project, bearer, person, signed_in, sysadmin
from tests.nodes.telemetry.reporting import START, UUIDS, Machine
from tests.vigil_cli.commands import nowhere, portal, vigil  # noqa: F401

pytestmark = pytest.mark.django_db


@pytest.fixture
def clock_at_noon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the clock start at noon, whenever the test is run, because days are counted."""
    began, really = timezone.now(), timezone.now
    noon = began.replace(hour=12, minute=0)
    monkeypatch.setattr(timezone, "now", lambda: noon + (really() - began))


def today() -> date:
    return timezone.now().astimezone(UTC).date()


def use(scheduler_id: str, user: str, hours: tuple[float, float, float], *, days_ago: int = 0, **more: Any) -> GpuUse:
    """Store what a merge would have counted: hours allocated, used and idle."""
    allocated_s, used_s, idle_s = (HOUR_S * hour for hour in hours)
    payload = {"held_s": allocated_s, "used_s": used_s, "idle_s": idle_s, "is_added": False, **more}
    day = today() - timedelta(days=days_ago)
    return GpuUse.objects.update_or_create(day=day, scheduler_id=scheduler_id, defaults={"user": user, **payload})[0]


@pytest.fixture
def lab() -> dict[str, User]:
    """Create Mira's and Ann's projects with a job each, and a job that Ann started without Vigil."""
    mira = person("mira", a_project("siskin"), slurm_user="mira")
    ann = person("ann", a_project("wren"), slurm_user="ann")
    vigils(mira, "70", name="lora", project="siskin")
    began = {"started_at": timezone.now() - timedelta(days=25)}
    vigils(ann, "80", name="nightjar", project="wren", attempt=began)
    use("70", "mira", (100, 60, 10))
    use("80", "ann", (40, 4, 30), days_ago=0)
    use("80", "ann", (500, 250, 100), days_ago=20)
    use("90", "ann", (8, 0, 8))
    use("99", "stranger", (2, 1, 0.5))
    aggregation.update_sums()
    return {"mira": mira, "ann": ann, "sam": sysadmin()}


def get_json(user: User, query: str = "") -> dict[str, Any]:
    answer = bearer(user, "read").get(f"/api/v1/waste?{query}")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def hours(found: dict[str, Any]) -> dict[str, tuple[float, float, float]]:
    return {item["name"]: (item["allocated_hours"], item["used_hours"], item["idle_hours"]) for item in found["items"]}


@pytest.mark.usefixtures("clock_at_noon")
class TestCounting:
    def test_from_an_agents_samples_to_a_persons_hours(self) -> None:
        """Two GPUs over a window: one worked at half, one not at all; the machine was silent for a while between."""
        mira = person("mira", a_project("siskin"))
        start = START // WINDOW_S * WINDOW_S
        at = {"started_at": moment(start - 60), "ended_at": None}
        vigils(mira, "7", project="siskin", attempt=at)
        item = Machine(gpus=UUIDS[:2])
        item.post(item.facts(start))
        allocated_job("7", [0, 1], user="vigil")
        Holding.objects.update(since=moment(start))
        for second in (*range(start, start + 500, 10), *range(start + 600, start + WINDOW_S + 100, 10)):
            item.post(item.batch(second, gpu_percent=[[50] * 10, [0] * 10]))
        merge.merge(now=start + WINDOW_S + 110)
        aggregation.update_sums()
        (row,) = GpuHours.objects.all()
        sampled = WINDOW_S - 100
        assert (row.person, row.project) == (mira, Project.objects.get(slug="siskin"))
        assert (row.held_s, row.used_s, row.idle_s) == (2 * sampled, sampled / 2, sampled)

    def test_samples_that_come_each_ten_seconds_stand_for_ten(self) -> None:
        start = START // WINDOW_S * WINDOW_S
        item = Machine(gpus=UUIDS[:1])
        item.post(item.facts(start))
        allocated_job("7", [0])
        Holding.objects.update(since=moment(start))
        batches = [
            {**item.batch(at, n=1, gpu_percent=[[100]]), "period": 10}
            for at in range(start, start + WINDOW_S + 100, 10)
        ]
        for at in range(0, len(batches), 60):
            item.post(*batches[at : at + 60])
        merge.merge(now=start + WINDOW_S + 110)
        row = GpuUse.objects.get()
        assert abs(row.held_s - WINDOW_S) <= 10
        assert row.used_s == row.held_s

    def test_late_samples_of_a_day_long_past_count(self, lab: dict[str, User]) -> None:
        before = hours(get_json(lab["sam"], "by=project&days=90"))["wren"]
        use("80", "ann", (510, 250, 100), days_ago=20)
        waste()
        after = hours(get_json(lab["sam"], "by=project&days=90"))["wren"]
        assert (before[0], after[0]) == (540, 550)
        assert not GpuUse.objects.filter(is_added=False).exists()

    def test_one_process_adds_up_at_a_time(self, lab: dict[str, User]) -> None:
        use("70", "mira", (101, 60, 10))
        other = lease.take("waste")
        assert other is not None
        assert aggregation.update_sums() == 0
        other.release()
        assert aggregation.update_sums() == 1
        assert hours(get_json(lab["sam"], "by=project"))["siskin"][0] == 101

    def test_the_schedulers_number_used_again_is_another_job(self) -> None:
        mira, ann = person("mira", a_project("siskin")), person("ann", a_project("wren"))
        long_ago = timezone.now() - timedelta(days=60)
        old = {"started_at": long_ago, "ended_at": long_ago + timedelta(hours=2)}
        vigils(mira, "7", project="siskin", state="completed", attempt=old)
        vigils(ann, "7", project="wren")
        use("7", "vigil", (1, 1, 0), days_ago=60)
        use("7", "vigil", (2, 1, 0))
        aggregation.update_sums()
        found = hours(get_json(sysadmin(), "by=person&days=90"))
        assert {name: report[0] for name, report in found.items()} == {"mira": 1, "ann": 2}
        assert len(get_json(User.objects.get(username="sam"), "by=job&days=90")["items"]) == 2

    def test_a_holding_ends_when_its_job_did_and_not_when_the_queue_was_read(self) -> None:
        job = vigils(person("mira", a_project()), "7")
        machine(1)
        allocated_job("7", [0])
        end = timezone.now() - timedelta(seconds=12)
        Attempt.objects.filter(job=job).update(ended_at=end, state="completed")
        ends("7")
        waste()
        assert Holding.objects.get().until == end
        ends_before = Holding.objects.get().since - timedelta(hours=1)
        Attempt.objects.filter(job=job).update(ended_at=ends_before)
        waste()
        assert Holding.objects.get().until == end, "of another holding, by an attempt of the same number"

    def test_a_person_is_a_single_row_however_their_hours_were_counted(self) -> None:
        """Hours from before their Slurm user was set here have only the scheduler's name."""
        use("70", "mira-s", (10, 1, 5), days_ago=2)
        waste()
        person("mira", a_project("siskin"), slurm_user="mira-s")
        vigils(User.objects.get(username="mira"), "71", name="lora", project="siskin")
        use("71", "vigil", (20, 2, 5))
        use("72", "mira", (1, 0, 0))  # a Slurm user who is called as she is here, and is somebody else
        waste()
        client = bearer(sysadmin(), "read")
        items = client.get("/api/v1/waste?by=person&sort=-held").json()["items"]
        assert [(item["name"], item["allocated_hours"]) for item in items] == [("mira", 30), ("mira (Slurm user)", 1)]
        jobs = client.get("/api/v1/waste?by=job&sort=held").json()["items"]
        assert [item["person"] for item in jobs] == ["mira (Slurm user)", "mira", "mira"]

    def test_money_where_the_site_names_a_price(self, lab: dict[str, User], settings: Any) -> None:
        client = bearer(lab["sam"], "read")
        assert client.get("/api/v1/waste").json()["total"]["idle_cost"] is None
        settings.VIGIL_GPU_HOUR_PRICE, settings.VIGIL_CURRENCY = 2.5, "€"
        found = client.get("/api/v1/waste").json()
        idle = found["total"]["idle_hours"]
        assert (found["total"]["idle_cost"], found["total"]["currency"]) == (2.5 * idle, "€")
        assert f"(€{2.5 * idle:,.2f}) were idle" in found["text"]
        assert "€" in text(signed_in(lab["sam"]).get("/waste"))

    def test_a_jobs_attempts_are_a_single_job(self) -> None:
        ann = person("ann", a_project())
        job = vigils(ann, "7", name="lora", attempt={"started_at": timezone.now() - timedelta(days=9)})
        later = {"state": "running", "scheduler_id": "9", "submitted_at": timezone.now(), "started_at": timezone.now()}
        Attempt.objects.create(job=job, number=2, **later)
        use("7", "vigil", (50, 0, 50), days_ago=8)
        use("7", "vigil", (3, 0, 3), days_ago=2)
        use("9", "vigil", (2, 1, 1))
        aggregation.update_sums()
        (row,) = get_json(ann, "by=job&days=10")["items"]
        assert (row["name"], row["job"], row["allocated_hours"]) == ("lora", job.pk, 55)
        (row,) = get_json(ann, "by=job&days=7")["items"]
        assert row["allocated_hours"] == 5
        use("9", "vigil", (4, 1, 1))
        aggregation.update_sums()
        assert [item["allocated_hours"] for item in get_json(ann, "by=job&days=7")["items"]] == [7]

    def test_of_a_job_that_began_before_only_its_days_in_the_window_count(self) -> None:
        ann = person("ann", slurm_user="ann")
        for days_ago, number in ((9, 50), (8, 40), (3, 2), (0, 1)):
            use("7", "ann", (number, 0, number), days_ago=days_ago)
        use("8", "ann", (5, 0, 5))
        aggregation.update_sums()
        assert [item["idle_hours"] for item in get_json(ann, "by=job&days=7")["items"]] == [5, 3]
        assert [item["idle_hours"] for item in get_json(ann, "by=job&days=9")["items"]] == [43, 5]
        assert [item["idle_hours"] for item in get_json(ann, "by=job&days=10")["items"]] == [93, 5]
        assert get_json(ann, "by=job&days=3")["items"][1]["allocated_hours"] == 1


class TestWhoSees:
    def test_everybody_sees_all_where_the_queue_is_everybodys(self, lab: dict[str, User]) -> None:
        for who in lab.values():
            assert set(hours(get_json(who))) == {"siskin", "wren", "outside Vigil"}

    def test_others_are_hidden_where_the_site_hides_them(self, lab: dict[str, User], settings: Any) -> None:
        settings.VIGIL_QUEUE_VISIBLE = "own"
        mira, ann = lab["mira"], lab["ann"]
        assert hours(get_json(mira)) == {"siskin": (100, 60, 10)}
        assert hours(get_json(ann, "by=job")) == {"nightjar": (40, 4, 30), "job 90": (8, 0, 8)}
        assert hours(get_json(ann, "by=person")) == {"ann": (48, 4, 38)}
        assert set(hours(get_json(lab["sam"], "by=person"))) == {"mira", "ann", "stranger"}
        html = text(signed_in(mira).get("/waste?by=job"))
        assert "lora" in html
        assert "nightjar" not in html

    def test_a_number_that_is_used_again_names_nobody_elses_job(self, lab: dict[str, User], settings: Any) -> None:
        settings.VIGIL_QUEUE_VISIBLE = "own"
        machine(1)
        allocated_job("90", [0], user="mira", name="secret")
        assert set(hours(get_json(lab["ann"], "by=job"))) == {"nightjar", "job 90"}

    def test_a_project_is_all_of_its_members(self, lab: dict[str, User], settings: Any) -> None:
        settings.VIGIL_QUEUE_VISIBLE = "own"
        Membership.objects.create(user=lab["mira"], project=Project.objects.get(slug="wren"))
        assert set(hours(get_json(lab["mira"]))) == {"siskin", "wren"}

    def test_idle_now_is_shown_to_those_who_may_see_it(self, lab: dict[str, User], settings: Any) -> None:
        item = machine(2)
        allocated_job("70", [0], user="mira")
        allocated_job("91", [1], user="ann", name="jupyter")
        idle_for(item, 5)
        assert {job["name"] for job in get_json(lab["mira"])["idle_now"]} == {"lora", "jupyter"}
        settings.VIGIL_QUEUE_VISIBLE = "own"
        (job,) = get_json(lab["mira"])["idle_now"]
        assert (job["name"], job["gpus"], job["allocated_gpus"], job["nodes"]) == ("lora", 1, 1, ["dgx-01"])
        assert {job["name"] for job in get_json(lab["ann"])["idle_now"]} == {"jupyter"}

    def test_nobody_else(self) -> None:
        assert signed_in(person("ann")).get("/api/v1/waste").json()["items"] == []
        from django.test import Client

        assert Client().get("/waste").status_code == 302
        assert Client().get("/api/v1/waste").status_code == 401
        assert Client().get("/api/v1/waste.csv").status_code == 401


@pytest.mark.usefixtures("clock_at_noon")
class TestQueries:
    def test_days(self, lab: dict[str, User]) -> None:
        sam = lab["sam"]
        assert get_json(sam, "days=20")["total"]["allocated_hours"] == 150
        assert get_json(sam, "days=21")["total"]["allocated_hours"] == 650
        assert get_json(sam, "days=1")["since"] == today().isoformat()

    def test_a_sentence(self, lab: dict[str, User]) -> None:
        message = (
            "In the last 7 days, 150 GPU-hours were allocated and 43.3 % of them used; 48 were idle, most in wren (30)."
        )
        assert get_json(lab["sam"])["text"] == f"{message} No allocated GPU is idle now."
        assert message in text(signed_in(lab["sam"]).get("/waste"))
        assert get_json(lab["sam"], "by=job")["text"].startswith(message.replace("in wren (30)", "by ann (38)"))
        GpuUse.objects.all().delete()
        GpuHours.objects.all().delete()
        assert (
            get_json(lab["sam"], "days=1")["text"] == "Today no GPU-hours were counted. No allocated GPU is idle now."
        )
        assert "No GPU-hours" in text(signed_in(lab["sam"]).get("/waste"))

    @pytest.mark.parametrize(
        ("sort", "order"),
        [
            ("-idle", ["nightjar", "lora", "job 90", "job 99"]),
            ("-allocated", ["lora", "nightjar", "job 90", "job 99"]),
            ("-held", ["lora", "nightjar", "job 90", "job 99"]),
            ("held", ["job 99", "job 90", "nightjar", "lora"]),
            ("share", ["job 90", "nightjar", "job 99", "lora"]),
        ],
    )
    def test_orders(self, lab: dict[str, User], sort: str, order: list[str]) -> None:
        found = get_json(lab["sam"], f"by=job&sort={sort}")
        assert [item["name"] for item in found["items"]] == order
        html = text(signed_in(lab["sam"]).get(f"/waste?by=job&sort={sort}"))
        places = [html.index(f">{name}") for name in order]
        assert places == sorted(places)

    def test_names_in_order(self, lab: dict[str, User]) -> None:
        assert list(hours(get_json(lab["sam"], "sort=name"))) == ["outside Vigil", "siskin", "wren"]
        assert list(hours(get_json(lab["sam"], "sort=-name"))) == ["wren", "siskin", "outside Vigil"]

    def test_page_by_page(self, lab: dict[str, User]) -> None:
        for by, names in (
            ("job", {"nightjar", "lora", "job 90", "job 99"}),
            ("project", {"siskin", "wren", "outside Vigil"}),
        ):
            found, cursor = [], ""
            while cursor is not None:
                page = get_json(lab["sam"], f"by={by}&limit=1&cursor={cursor}" if cursor else f"by={by}&limit=1")
                found += [item["name"] for item in page["items"]]
                cursor = page["next"]
            assert set(found) == names
            assert len(found) == len(names)

    @pytest.mark.parametrize(
        "query", ["days=0", "days=91", "by=colour", "sort=colour", "cursor=x", "limit=201", "cursor=-1"]
    )
    def test_invalid_queries_are_refused_plainly(self, lab: dict[str, User], query: str) -> None:
        answer = bearer(lab["sam"], "read").get(f"/api/v1/waste?{query}")
        assert answer.status_code == 422
        assert answer.json()["errors"][0]["field"] == query.partition("=")[0]
        page = signed_in(lab["sam"]).get(f"/waste?{query.replace('cursor', 'after')}")
        assert page.status_code == 200, "a page leaves out what it does not understand"

    def test_links_lead_to_what_you_may_see(self, lab: dict[str, User]) -> None:
        html = text(signed_in(lab["mira"]).get("/waste?by=job"))
        assert 'href="/jobs/' in html
        assert ">nightjar</a>" not in html
        html = text(signed_in(lab["mira"]).get("/waste"))
        assert '<a href="/jobs?project=siskin">siskin</a>' in html
        assert "project=wren" not in html

    def test_csv(self, lab: dict[str, User]) -> None:
        machine(1, node="dgx-09")
        allocated_job("90", [0], node="dgx-09", user="ann", name='=HYPERLINK("x"), "y"')
        answer = signed_in(lab["sam"]).get("/api/v1/waste.csv?by=job&sort=-held")
        assert answer.headers["Content-Disposition"] == 'attachment; filename="waste-job-7d.csv"'
        rows = list(csv.DictReader(io.StringIO(b"".join(answer.streaming_content).decode())))
        assert [row["scheduler_id"] for row in rows] == ["70", "80", "90", "99"]
        assert rows[2]["name"] == """'=HYPERLINK("x"), "y\"""", "no spreadsheet takes it for a formula"
        assert (rows[0]["held_hours"], rows[0]["project"], rows[0]["person"]) == ("100.0000", "siskin", "mira")
        assert rows[3]["job"] == ""

    def test_hostile_names_are_escaped(self, lab: dict[str, User]) -> None:
        machine(1, node="dgx-09")
        allocated_job("90", [0], node="dgx-09", user="ann", name="<img src=x>")
        html = signed_in(lab["sam"]).get("/waste?by=job").text
        assert "<img src=x>" not in html
        assert "&lt;img src=x&gt;" in html


def test_the_command(portal: Any) -> None:  # noqa: F811
    since = (timezone.now() - timedelta(hours=14)).isoformat()
    row = {
        "name": "ann",
        "job": None,
        "allocated_hours": 48.0,
        "used_hours": 4.0,
        "idle_hours": 38.0,
        "used_share": 0.0833,
    }
    idle = {
        "name": "notebook",
        "job": 7,
        "scheduler_id": "70",
        "person": "ann",
        "gpus": 1,
        "allocated_gpus": 2,
        "since": since,
    }
    answer = {"text": "In 30 days …", "by": "person", "items": [row], "idle_now": [idle]}
    portal.answers["GET", "waste"] = answer
    lines = vigil("waste", "--days", "30").stdout.splitlines()
    assert lines[0] == "In 30 days …"
    assert lines[1].strip() == "notebook (#7) of ann: 1 of 2 idle for 14 h"
    assert lines[-1].split() == ["ann", "48.0", "4", "8.33", "%", "38.0"]
    assert portal.asked[0].url.params["days"] == "30"
    assert json.loads(vigil("waste", "--json").stdout) == answer
    vigil("waste", "--days", "91", status=2)
