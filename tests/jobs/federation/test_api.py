"""Test rounds and clients over REST and on the command line."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from click.testing import CliRunner
from django.test import Client

from jobs.models import Job
from portal.models import Project, User
from tests.jobs.federation.federations import a_federation, everybody, ingest, names, split, table
from tests.jobs.reporting import Spooled
from tests.lab import a_job, a_project, bearer, person
from vigil_cli import rounds as commands
from vigil_cli.main import main

pytestmark = pytest.mark.django_db


@pytest.fixture
def client(mira: User) -> Client:
    return bearer(mira)


@pytest.fixture
def job(mira: User, project: Project) -> Job:
    """Seven rounds of five clients; client 3 is in trouble; client 4 reported little, not even its name."""
    job = a_federation(mira, project, state="running", run={"clients": 5})
    stream = Spooled().add_event("clients.split", **split([[4, 1], [1, 1], [0, 9], [2, 2], [3, 0]])[0])
    stream.add_event("clients.named", **names("ada", "bea", "cy", "=dora", "")[0])
    for number in range(1, 8):
        did = everybody(3)
        did += [(3, "dropped" if number % 2 else "late", 0.75, 0.25, 9.0), (4, "trained", math.nan, math.nan, math.nan)]
        stream.add_event("round.clients", **table({number: did}))
    ingest(job, stream)
    return job


def get(client: Client, job: Job, rest: str, **wanted: Any) -> dict[str, Any]:
    answer = client.get(f"/api/v1/jobs/{job.pk}/{rest}", wanted)
    assert answer.status_code == 200, answer.content
    return dict(answer.json())


def test_rounds_come_newest_first_and_page_by_page(client: Client, job: Job) -> None:
    found = get(client, job, "rounds", limit=3)
    assert [row["number"] for row in found["items"]] == [7, 6, 5]
    row = found["items"][0]
    assert (row["attempt"], row["trained"], row["dropped"], row["worst"], row["clients"]) == (1, 4, 1, 3, None)
    rest = get(client, job, "rounds", limit=3, cursor=found["next"])
    assert [row["number"] for row in rest["items"]] == [4, 3, 2]
    assert [row["number"] for row in get(client, job, "rounds", **{"from": 2, "to": 3})["items"]] == [3, 2]
    assert client.get(f"/api/v1/jobs/{job.pk}/rounds?from=3&to=2").status_code == 422


def test_a_round_shows_what_each_named_client_did(client: Client, job: Job) -> None:
    (row,) = get(client, job, "rounds", **{"from": 6, "to": 6, "clients": "true"})["items"]
    assert row["worst_name"] == "=dora"
    assert row["clients"][3] == {
        "client": 3,
        "name": "=dora",
        "state": "late",
        "loss": 0.75,
        "accuracy": 0.25,
        "seconds": 9.0,
    }
    assert row["clients"][4]["accuracy"] is None


def test_clients_come_worst_first_or_in_the_requested_order(client: Client, job: Job) -> None:
    found = get(client, job, "clients")
    assert found["labels"] == ["no", "yes"]
    assert [row["number"] for row in found["items"]] == [3, 0, 1, 2, 4], "of the last nothing is known"
    worst = found["items"][0]
    assert [row["name"] for row in found["items"]] == ["=dora", "ada", "bea", "cy", ""]
    assert (worst["samples"], worst["split"], worst["late"], worst["dropped"], worst["last_round"]) == (
        4,
        [2, 2],
        3,
        4,
        7,
    )
    assert worst["seconds"] == 9.0
    for sort, numbers in {
        "-worst": [2, 1, 0, 3, 4], "seconds": [3, 2, 1, 0, 4], "-number": [4, 3, 2, 1, 0], "samples": [1, 4, 3, 0, 2],
        "trouble": [3, 4, 2, 1, 0],
    }.items():  # fmt: skip
        selected: list[int] = []
        cursor = None
        while cursor is not None or not selected:  # two at a time
            page = get(client, job, "clients", sort=sort, limit=2, **({"cursor": cursor} if cursor else {}))
            selected += [row["number"] for row in page["items"]]
            cursor = page["next"]
        assert selected == numbers, sort
    assert client.get(f"/api/v1/jobs/{job.pk}/clients?sort=beauty").status_code == 422


def test_another_kind_of_job_has_none_and_a_strangers_is_not_there(
    client: Client, mira: User, project: Project
) -> None:
    plain = a_job(mira, project)
    assert get(client, plain, "rounds")["items"] == get(client, plain, "clients")["items"] == []
    elsewhere = a_project("elsewhere")
    hidden = a_federation(person("noor", elsewhere), elsewhere)
    for rest in ("rounds", "clients"):
        assert client.get(f"/api/v1/jobs/{hidden.pk}/{rest}").status_code == 404


class TestTheCommandLine:
    @pytest.fixture(autouse=True)
    def portal(self, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let the command's requests reach this portal."""

        class Portal:
            def items(self, path: str, *, most: int | None = None, **wanted: Any) -> list[dict[str, Any]]:
                wanted = {name: value for name, value in wanted.items() if value is not None}
                answer = client.get(f"/api/v1/{path}", wanted)
                return list(answer.json()["items"])[:most]

            def get(self, path: str) -> dict[str, Any]:
                return dict(client.get(f"/api/v1/{path}").json())

        monkeypatch.setattr(commands, "find_portal", Portal)

    def test_it_lists_rounds(self, job: Job) -> None:
        done = CliRunner().invoke(main, ["rounds", f"#{job.pk}", "-n", "2"])
        assert done.exit_code == 0, done.output
        head, newest, *_ = done.output.splitlines()
        assert head.split()[:4] == ["ROUND", "TRAINED", "LATE", "DROPPED"]
        assert newest.split()[:4] == ["7", "4", "0", "1"]
        assert "3 =dora" in newest

    def test_it_reports_that_there_are_more(self, job: Job) -> None:
        assert "client 3 =dora" in CliRunner().invoke(main, ["rounds", str(job.pk)]).output
        done = CliRunner().invoke(main, ["rounds", str(job.pk), "-n", "2"])
        assert "There are more: --limit 20, or --csv for all." in done.output
        assert "There are more" not in CliRunner().invoke(main, ["rounds", str(job.pk), "-n", "7"]).output

    def test_of_another_kind_it_lists_nothing_and_explains_it(self, mira: User, project: Project) -> None:
        other = a_job(mira, project)
        for command in ("rounds", "clients"):
            done = CliRunner().invoke(main, [command, str(other.pk)])
            assert done.exit_code == 1
            assert f"only federated jobs have {command}" in done.output

    def test_it_lists_clients_for_people_and_machines(self, job: Job) -> None:
        done = CliRunner().invoke(main, ["clients", str(job.pk)])
        assert done.output.splitlines()[1].split()[:4] == ["3", "=dora", "4", "0.250"]
        done = CliRunner().invoke(main, ["clients", str(job.pk), "--csv", "--sort", "number"])
        lines = done.output.splitlines()
        assert lines[0].startswith("number,name,samples,trained")
        assert lines[4] == "3,'=dora,4,0,3,4,0,0,9.0,0.75,0.25,7,", "no formula for a spreadsheet"
        assert lines[5] == "4,,3,7,0,0,0,0,,,,7,"
        done = CliRunner().invoke(main, ["rounds", str(job.pk), "--json"])
        assert len(json.loads(done.output)["items"]) == 7
        assert CliRunner().invoke(main, ["rounds", str(job.pk), "--json", "--csv"]).exit_code == 2
