"""Test that a record which cannot be read is skipped and counted, and affects no others."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodes.cluster import sync
from nodes.models import Node, QueuedJob, Reading
from nodes.schedulers.base import UNKNOWN, Listing, SchedulerError
from nodes.schedulers.slurm import job_cache
from nodes.schedulers.slurm.accounting import PastJobs
from nodes.schedulers.slurm.scheduler import Slurm
from tests.examples import examples
from tests.nodes.slurm.simulated_rest import VERSIONS, SimulatedRest, body
from tests.nodes.slurm.test_properties import JSON

with_states = pytest.mark.parametrize("version", [version for version in VERSIONS if version >= "v0.0.40"])
NO_SUCH_PATH = httpx.Response(404, text="Invalid or unknown URL path", headers={"Content-Type": "text/plain"})
GARBAGE = JSON.filter(lambda value: not isinstance(value, dict)) | st.just({}) | st.just({"name": 7, "job_id": "x"})
Read = Callable[[Slurm], Listing[Any]]


def all_qos(slurm: Slurm) -> Listing[Any]:
    accounts = slurm.accounts()
    return Listing(accounts.qos, unreadable=accounts.unreadable)


def all_associations(slurm: Slurm) -> Listing[Any]:
    accounts = slurm.accounts()
    return Listing(accounts.associations, unreadable=accounts.unreadable)


# The list that is damaged: its file, where in the answer it is, and what is read of it.
LISTS: dict[str, tuple[str, tuple[str, ...], Read]] = {
    "nodes": ("slurm-nodes", ("nodes",), lambda slurm: slurm.nodes()),
    "partitions": ("slurm-partitions", ("partitions",), lambda slurm: slurm.rest.partitions()),
    "reservations": ("slurm-reservations", ("reservations",), lambda slurm: slurm.reservations()),
    "licenses": ("slurm-licenses", ("licenses",), lambda slurm: slurm.licenses()),
    "jobs": ("slurm-jobs", ("jobs",), lambda slurm: slurm.rest.jobs().records()),  # type: ignore[union-attr]
    "qos": ("slurmdb-qos", ("qos",), all_qos),
    "associations": ("slurmdb-associations", ("associations",), all_associations),
}


def damaged(version: str, name: str, place: int, garbage: object) -> tuple[SimulatedRest, int]:
    """Return a slurmrestd with garbage in place of a record, and which record that is."""
    file, path, _ = LISTS[name]
    answer = body(version, f"busy/{file}")
    path = path if path[0] in answer else (path[0].upper(),)
    rows = answer[path[0]]
    place %= len(rows)
    rows[place] = garbage
    played = SimulatedRest(version)
    played.answers[f"/{file.partition('-')[2]}"] = httpx.Response(200, content=json.dumps(answer).encode())
    return played, place


@lru_cache
def undamaged(name: str) -> Listing[Any]:
    return LISTS[name][2](SimulatedRest(VERSIONS[-1]).slurm)


@pytest.mark.parametrize("name", sorted(LISTS))
@settings(max_examples=examples(20), deadline=None)
@given(st.integers(0, 1000), GARBAGE)
def test_garbage_in_place_of_a_record_leaves_all_others(name: str, place: int, garbage: object) -> None:
    played, place = damaged(VERSIONS[-1], name, place, garbage)
    whole, found = undamaged(name), LISTS[name][2](played.slurm)
    assert (whole.unreadable, found.unreadable) == (0, 1)
    assert found == [*whole[:place], *whole[place + 1 :]]


@settings(max_examples=examples(20), deadline=None)
@given(st.integers(0, 1000), GARBAGE)
def test_garbage_in_the_short_list_leaves_all_others(place: int, garbage: object) -> None:
    version = VERSIONS[-1]
    answer = body(version, "busy/slurm-jobs-state")
    whole = SimulatedRest(version).rest.states()
    place %= len(answer["jobs"])
    gone = answer["jobs"][place]["job_id"]
    answer["jobs"][place] = garbage
    played = SimulatedRest(version)
    played.answers["/jobs/state"] = httpx.Response(200, content=json.dumps(answer).encode())
    found = played.rest.states()
    assert found.unreadable == 1
    assert found.words == {listed: words for listed, words in whole.words.items() if listed != gone}


def heterogeneous(version: str) -> SimulatedRest:
    """A busy Slurm with one more job, 85, of two components."""
    played = SimulatedRest(version)
    raws = body(version, "busy/slurm-jobs")["jobs"]
    rows = body(version, "busy/slurm-jobs-state")["jobs"]
    parts = [
        {**raws[0], "job_id": 85 + offset, "name": "two-kinds", "array_job_id": 0, "array_task_id": {"set": False},
         "het_job_id": {"set": True, "infinite": False, "number": 85},
         "het_job_offset": {"set": True, "infinite": False, "number": offset}}
        for offset in (0, 1)
    ]  # fmt: skip
    rows += [{"job_id": f"{85 + offset}+{offset}", "state": raws[0]["job_state"]} for offset in (0, 1)]
    played.answers["/jobs/state"] = httpx.Response(200, json={"jobs": rows})
    played.answers["/jobs"] = httpx.Response(200, json={"jobs": [*raws, *parts]})
    played.answers["/job/85"] = httpx.Response(200, json={"jobs": parts})
    played.answers["/job/86"] = httpx.Response(200, json={"jobs": parts[1:]})
    return played


@with_states
@pytest.mark.parametrize("at_once", [0, 10_000])
def test_a_heterogeneous_job_has_a_row_for_each_component(
    version: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = heterogeneous(version)
    played.slurm.queue()
    monkeypatch.setattr(job_cache, "MAX_SINGLE_REQUESTS", at_once)
    for raw in body(version, "busy/slurm-jobs")["jobs"]:
        played.answers.setdefault(f"/job/{raw['job_id']}", httpx.Response(200, json={"jobs": [raw]}))
    statuses = played.slurm.status(["85", "86"])
    assert {job_id: status.state == UNKNOWN for job_id, status in statuses.items()} == {"85": False, "86": False}
    queue = played.slurm.queue()
    assert queue.unreadable == 0
    components = {job.scheduler_id: job.component for job in queue if job.component.startswith("85+")}
    assert components == {"85": "85+0", "86": "85+1"}


@with_states
def test_a_job_with_an_unreadable_response_stops_no_other(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not taken for one that Slurm has forgotten, and asking about it again is bounded."""
    played = heterogeneous(version)
    played.slurm.status(["86"])
    monkeypatch.setattr(job_cache, "MAX_SINGLE_REQUESTS", 10_000)
    rows = json.loads(played.answers["/jobs/state"].content)["jobs"]  # type: ignore[union-attr]
    rows.append({"job_id": "4000", "state": ["RUNNING"]})
    played.answers["/jobs/state"] = httpx.Response(200, json={"jobs": rows})
    played.answers["/job/4000"] = NO_SUCH_PATH
    for _ in range(3):
        statuses = played.slurm.status(["86", "4000"])
        assert statuses["86"].state != UNKNOWN
        assert statuses["4000"].state == UNKNOWN
    assert played.slurm.queue().unreadable == 1
    assert len(played.requests_to("/openapi/v3")) <= 2
    assert len([request for request in played.requests_to("/job/4000") if "/slurm/" in request.url.path]) <= 2
    played.answers["/jobs/state"] = httpx.Response(200, json={"jobs": rows[:-1]})
    played.slurm.status(["86"])
    assert played.slurm.queue().unreadable == 0, "Slurm has forgotten it"


def test_an_old_slurm_with_an_unreadable_job_forgets_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the short list it is unknown which job's record could not be read."""
    version = VERSIONS[0]
    answer = body(version, "busy/slurm-jobs")
    gone = str(answer["jobs"][0]["job_id"])
    answer["jobs"][0] = "odd"
    played = SimulatedRest(version)
    played.answers["/jobs"] = httpx.Response(200, json=answer)
    assert played.slurm.status([gone])[gone].state == UNKNOWN
    assert played.slurm.queue().unreadable == 1


@pytest.mark.parametrize("version", VERSIONS)
def test_accounts_without_a_job_still_report_the_others(version: str) -> None:
    played = SimulatedRest(version)
    played.answers["/job/4000"] = NO_SUCH_PATH
    played.answers["/job/17"] = httpx.Response(200, json={"jobs": []})
    PastJobs(played.rest).statuses(["4000", "17"])
    assert [request.url.path.rpartition("/")[2] for request in played.requests_to() if "/job/" in request.url.path][
        -1
    ] == "17"


def test_slurmrestd_that_is_away_is_no_unreadable_job() -> None:
    played = heterogeneous(VERSIONS[-1])
    played.slurm.status(["86"])

    def away(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("Connection refused", request=request)

    played.answers = {"/jobs/state": away, **played.answers}
    played.answers["/jobs/state"] = away
    with pytest.raises(SchedulerError, match="cannot be reached"):
        played.slurm.status(["86"])


@pytest.mark.django_db
@pytest.mark.parametrize("huge", [2**31, 2**63, 2**64 - 7])
def test_a_number_that_no_column_holds_leaves_the_other_rows(huge: int) -> None:
    played, _ = damaged(VERSIONS[-1], "nodes", 0, "odd")
    jobs = body(VERSIONS[-1], "busy/slurm-jobs")
    waiting = next(job for job in jobs["jobs"] if job["name"] == "held")
    waiting["restart_cnt"] = waiting["priority"] = {"set": True, "infinite": False, "number": huge}
    played.answers["/jobs"] = httpx.Response(200, json=jobs)
    sync.read(played.slurm, Reading.Part.NODES, Reading.Part.QUEUE)
    nodes, queue = (sync.readings()[part] for part in (Reading.Part.NODES, Reading.Part.QUEUE))
    expected = "1 node could not be read and is left out, or shown as last reported."
    assert (nodes.error, nodes.unreadable_text) == ("", expected)
    assert (queue.error, queue.unreadable_text) == ("", "1 job could not be read and is left out.")
    assert Node.objects.count() == 7
    assert QueuedJob.objects.count() == len(SimulatedRest(VERSIONS[-1]).slurm.queue()) - 1
    assert not QueuedJob.objects.filter(name="held").exists()
