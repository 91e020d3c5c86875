"""Test rows of rounds and clients: ingested once, from the attempt that trained them last, whoever reports."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from jobs import rounds
from jobs.intake import reports
from jobs.models import Attempt, Client, ClientSplit, Event, Job, Round
from jobs.submitting.submit import delete
from portal.models import Project, User
from tests.jobs.federation.federations import a_federation, everybody, ingest, names, split, table
from tests.jobs.reporting import Spooled, post
from tests.lab import a_checkpoint, a_job, bearer, signed_in
from training.federation import tables

pytestmark = pytest.mark.django_db


@pytest.fixture
def job(mira: User, project: Project) -> Job:
    return a_federation(mira, project, state="running")


def of_record(job: Job) -> dict[int, int]:
    """Return the number of the attempt that each round is shown for."""
    attempts = list(job.attempts.order_by("number"))
    return {row.number: row.attempt.number for row in rounds.newest(rounds.spans(attempts), 1000)}


def test_an_event_becomes_a_row_a_round(job: Job) -> None:
    did = [(0, "trained", 0.5, 0.25, 1.5), (7, "late", 0.75, math.nan, math.nan), (9, "rejected", 0.5, 0.5, 3.0)]
    ingest(job, Spooled().add_event("round.clients", step=2, **table({1: everybody(3), 2: did}, loss=0.625)))
    first, second = Round.objects.order_by("number")
    assert (first.trained, first.counted, first.requested) == (3, 3, 3)
    assert (second.trained, second.late, second.rejected, second.worst, second.loss) == (1, 1, 1, 0, 0.625)
    assert (second.bytes_up, second.bytes_down, second.seconds) == (1000, 2000, 2.0)
    named = rounds.unpack(second.named)
    assert named["client"].tolist() == [0, 7, 9]
    assert np.isnan(named["accuracy"][1])
    event = Event.objects.get(kind="round.clients")
    assert event.data == {"step": 2, "rounds": 2, "clients": 6}, "what is in rows is not stored twice"


def test_a_client_is_counted_whenever_it_is_named(job: Job) -> None:
    stream = Spooled()
    stream.add_event(
        "round.clients", **table({1: [(3, "trained", 0.5, 0.75, 2.0)], 2: [(3, "dropped", math.nan, math.nan, 4.0)]})
    )
    stream.add_event(
        "round.clients", **table({3: [(3, "late", 0.25, 0.875, math.nan), (4, "broken", math.nan, 0.5, 1.0)]})
    )
    ingest(job, stream)
    three, four = Client.objects.order_by("number")
    assert (three.trained, three.dropped, three.late, three.rejected) == (1, 1, 1, 0)
    assert (three.loss, three.accuracy, three.seconds, three.last_round) == (0.25, 0.875, 3.0, 3)
    assert (four.broken, four.loss, four.accuracy, four.requested) == (1, None, 0.5, 1)


def test_the_same_post_again_counts_nothing_twice(job: Job) -> None:
    stream = Spooled().add_event("round.clients", **table({1: everybody(2)}))
    ingest(job, stream)
    ingest(job, stream)
    assert Client.objects.get(number=1).trained == 1


def test_the_split_is_stored_by_client(job: Job) -> None:
    stream = Spooled()
    for part in split([[number, 2] for number in range(4000)]):
        stream.add_event("clients.split", **part)
    ingest(job, stream)
    assert ClientSplit.objects.count() == 2
    labels, found = rounds.splits(job, [0, 2999, 3000, 3999, 4000])
    assert labels == ["no", "yes"]
    assert found == {0: [0, 2], 2999: [2999, 2], 3000: [3000, 2], 3999: [3999, 2]}
    assert Client.objects.get(number=3999).samples == 4001
    ingest(job, Spooled(incarnation=1).add_event("clients.split", **split([[1, 1]])[0]))
    assert Client.objects.get(number=0).samples == 2


def test_names_are_stored_by_client_whichever_comes_first(job: Job) -> None:
    result = names(*(f"owner-{number}" for number in range(3000)))
    stream = Spooled().add_event("round.clients", **table({1: everybody(2)}))
    for part in result:
        stream.add_event("clients.named", **part)
    stream.add_event("clients.split", **split([[4, 1], [1, 1]])[0])
    ingest(job, stream)
    assert len(result) == 2
    first = Client.objects.get(number=1)
    assert (first.name, first.trained, first.samples) == ("owner-1", 1, 2)
    assert rounds.names(job, [0, 2999, 3000]) == {0: "owner-0", 2999: "owner-2999"}
    assert len(rounds.names(job, range(1000))) == 1000
    assert sum(event.data["names"] for event in Event.objects.filter(kind="clients.named")) == 3000
    ingest(job, Spooled(incarnation=1).add_event("clients.named", **names("ada", "")[0]))
    assert rounds.names(job, [0, 1]) == {0: "ada"}


def test_a_resumed_attempt_has_separate_rows(job: Job) -> None:
    first = job.latest
    ingest(
        job,
        Spooled()
        .add_event("run.started", start_step=0, steps=30)
        .add_event("round.clients", **table({n: everybody(2) for n in range(1, 9)})),
    )
    state = a_checkpoint(job, 5)
    job.latest = Attempt.objects.create(job=job, number=2, state="running", resume_from=state)
    job.save(update_fields=["latest"])
    assert len(of_record(job)) == 8, "until it has begun, all is as it was"
    ingest(
        job,
        Spooled(uid="ab" * 8)
        .add_event("run.started", start_step=5)
        .add_event("round.clients", **table({6: everybody(2)}, loss=0.125)),
    )
    assert of_record(job) == {1: 1, 2: 1, 3: 1, 4: 1, 5: 1, 6: 2}
    assert first is not None
    assert first.rounds.count() == 8
    spans = rounds.spans(list(job.attempts.order_by("number")))
    assert [row.number for row in rounds.of_record(spans).order_by("-number")[:2]] == [6, 5]
    assert [row.number for row in rounds.newest(spans, 2, before=5)] == [3, 4]


def test_ranks_that_start_again_in_place_do_their_rounds_again(job: Job) -> None:
    old = (
        Spooled()
        .add_event("run.started", start_step=0)
        .add_event("round.clients", **table({n: everybody(2) for n in (1, 2, 3)}))
    )
    ingest(job, old)
    new = (
        Spooled(incarnation=1)
        .add_event("run.started", start_step=2)
        .add_event("round.clients", **table({3: everybody(2)}, loss=0.125))
    )
    assert job.latest is not None
    reports.ingest(job.latest.pk, post((new, 0, 1)))
    assert of_record(job) == {1: 1, 2: 1}, "what it has not done again is not of record"
    reports.ingest(job.latest.pk, post((new, 1, 2)))
    old.add_event("round.clients", **table({4: everybody(2)}))
    reports.ingest(job.latest.pk, post((old, 2, 3)))
    assert of_record(job) == {1: 1, 2: 1, 3: 1}, "the lost ranks' last words come too late"
    assert Round.objects.get(number=3).loss == 0.125


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"rounds": 7, "clients": "no"},
        {"rounds": "no table", "clients": "c-jqG"},
        table({1_000_001: everybody(1)}),
        table({1: [(100_000, "trained", 0.5, 0.5, 1.0)]}),
        table({1: everybody(1)}, bytes_up=2**60),
        table({1: everybody(1)}, trained=2**31),
        {**table({1: everybody(1)}), "clients": table({2: everybody(1)})["clients"]},
    ],
)
def test_what_no_server_of_vigil_reports_is_only_an_event(job: Job, data: dict[str, str]) -> None:
    stream = Spooled().add_event("round.clients", **data).add_event("clients.split", first=-1, labels=[], counts="x")
    ingest(
        job,
        stream.add_event("clients.named", first=0, names="x").add_event(
            "clients.named", **names("a")[0] | {"first": 100_000}
        ),
    )
    assert not Round.objects.exists()
    assert not Client.objects.exists()
    assert Event.objects.filter(kind="round.clients").count() == 1


def test_only_the_server_is_believed_and_only_of_a_federation(job: Job, mira: User, project: Project) -> None:
    ingest(job, Spooled(rank=1).add_event("round.clients", **table({1: everybody(1)})))
    other = a_job(mira, project, state="running")
    ingest(other, Spooled().add_event("round.clients", **table({1: everybody(1)})))
    assert not Round.objects.exists()


def test_odd_numbers_are_no_numbers(job: Job) -> None:
    did = [(0, "trained", math.inf, math.nan, -1.0)]
    ingest(
        job,
        Spooled().add_event("round.clients", **table({1: did}, seconds=math.nan, loss=math.inf, accuracy=-math.inf)),
    )
    row, client = Round.objects.get(), Client.objects.get()
    assert (row.seconds, row.loss, row.accuracy, row.worst) == (None, None, None, None)
    assert (client.loss, client.accuracy, client.seconds) == (None, None, None)


def test_late_reports_of_another_attempt_do_not_change_the_latest_state(job: Job) -> None:
    before = job.latest
    job.latest = Attempt.objects.create(job=job, number=2, state="running")
    job.save(update_fields=["latest"])
    ingest(job, Spooled(uid="ab" * 8).add_event("round.clients", **table({3: [(0, "trained", 0.25, 0.5, 1.0)]})))
    job.latest = before
    ingest(job, Spooled().add_event("round.clients", **table({9: [(0, "trained", 0.75, 0.25, 1.0)]})))
    client = Client.objects.get()
    assert (client.trained, client.loss, client.accuracy, client.last_attempt, client.last_round) == (
        2,
        0.25,
        0.5,
        2,
        3,
    )


def test_deleting_a_job_deletes_its_rows(mira: User, project: Project) -> None:
    job = a_federation(mira, project, state="running")
    stream = (
        Spooled()
        .add_event("round.clients", **table({1: everybody(2)}))
        .add_event("clients.split", **split([[1, 2]])[0])
    )
    ingest(job, stream)
    now = job.created_at
    Attempt.objects.update(state="completed", ended_at=now, decided_at=now)
    delete(mira, job)
    assert not any(model.objects.exists() for model in (Job, Round, Client, ClientSplit))


def many(first: int, draw: np.random.Generator) -> dict[str, str]:
    """Return an event with the most rounds that an event may have, which name the most of 10,000 clients."""
    rounds: tables.Columns = {name: np.zeros(tables.ROUNDS) for name in tables.ROUND_COLUMNS}
    rounds |= {"round": np.arange(first, first + tables.ROUNDS), "trained": np.full(tables.ROUNDS, 10_000)}
    rounds |= {name: draw.random(tables.ROUNDS) for name in ("seconds", "loss", "accuracy")}
    clients: tables.Columns = {name: draw.random(tables.NAMED) for name in tables.CLIENT_COLUMNS}
    clients |= {"round": draw.choice(rounds["round"], tables.NAMED), "state": draw.integers(5, size=tables.NAMED)}
    return tables.RoundTable(rounds, {**clients, "client": draw.integers(10_000, size=tables.NAMED)}).pack()


@pytest.mark.parametrize("rounds", [2_000, pytest.param(50_000, marks=[pytest.mark.slow, pytest.mark.exhaustive])])
def test_fifty_thousand_rounds_of_many_clients_are_taken_and_shown_in_parts(
    rounds: int, job: Job, mira: User, django_assert_max_num_queries: Any
) -> None:
    """Whole posts at their largest, each as the server packs it. Pages and answers are as short as those of few."""
    draw, stream = np.random.default_rng(0), Spooled()
    for first in range(1, rounds + 1, tables.ROUNDS):
        stream.add_event("round.clients", step=first + tables.ROUNDS - 1, **many(first, draw))
    ingest(job, stream)
    assert Round.objects.count() == Round.objects.filter(trained=10_000).count() == rounds
    assert Client.objects.count() <= 10_000
    assert sum(Client.objects.values_list("trained", flat=True)) > rounds / tables.ROUNDS * 100
    assert Event.objects.filter(kind="round.clients").count() == rounds / tables.ROUNDS
    reader = signed_in(mira)
    for path in ("", "/clients", "?before=1000"):
        with django_assert_max_num_queries(60):
            page = reader.get(f"/jobs/{job.pk}{path}")
        assert page.status_code == 200
        assert len(page.content) < 300_000
    for rest in ("rounds?clients=true&limit=200", "clients?limit=200"):
        found = bearer(mira).get(f"/api/v1/jobs/{job.pk}/{rest}")
        assert len(found.json()["items"]) == 200
        assert len(found.content) < 300_000
    assert bearer(mira).get(f"/api/v1/jobs/{job.pk}/rounds?limit=100000").status_code == 422
