"""REST: the rounds and clients of a federation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any

import numpy as np
from django.http import HttpResponse
from ninja import Query, Router, Schema
from numpy.typing import NDArray
from pydantic import Field

from jobs import rounds as recorded
from jobs.api.request import job_of
from jobs.gathering.clients import SORTS, WORST, ordered
from jobs.models import Client, Round
from portal.http.api import ApiRequest, PageQuery, bad_field, json_response, one_of
from portal.http.openapi import deprecated
from portal.http.paging import SortOrder, page
from training.federation.tables import MIN_EVALUATED, STATES

router = Router(tags=["rounds"])
_WHOLE = "Exact, for any number of clients."
_EVALUATED = "Samples on which its accuracy is measured; null: a run of an older version."
_NAME = "Owner of its data; empty: unknown."


class RoundQuery(PageQuery):
    """A range of rounds, newest first."""

    start: int | None = Field(None, ge=0, lt=2**31, alias="from", description="First round.")
    end: int | None = Field(None, ge=0, lt=2**31, alias="to", description="Last round.")
    clients: bool = Field(False, description="Include what each listed client did.")


class ClientRoundShape(Schema):
    """A client's part in a round."""

    client: int
    name: str = Field(description=_NAME)
    state: str = Field(description=", ".join(STATES))
    loss: float | None
    accuracy: float | None = Field(description="Accuracy of the global model on the client's samples.")
    seconds: float | None = Field(description="Null: this pace does not measure time.")


class RoundShape(Schema):
    """A round as the newest attempt did it."""

    number: int
    attempt: int
    incarnation: int
    reported_at: datetime
    told_at: datetime = deprecated("reported_at")
    trained: int = Field(description=_WHOLE)
    late: int = Field(description="Clients whose updates arrived after their round, and were used.")
    dropped: int = Field(description="Clients that sent nothing, or too late.")
    rejected: int = Field(description="Clients whose updates the aggregation left out.")
    broken: int = Field(description="Clients whose updates were not finite.")
    seconds: float | None
    bytes_up: int
    bytes_down: int
    loss: float | None
    accuracy: float | None = Field(description="Accuracy of the global model; null: no validation.")
    worst: int | None = Field(
        description=f"Client with the lowest accuracy, of those evaluated on at least {MIN_EVALUATED} samples."
    )
    worst_name: str = Field(description=_NAME)
    worst_evaluation_samples: int | None = Field(description=_EVALUATED)
    clients: list[ClientRoundShape] | None = Field(
        None, description="The listed clients, if `clients` is set; with many clients, those with problems first."
    )


class RoundPage(Schema):
    items: list[RoundShape]
    next: str | None


class ClientQuery(PageQuery):
    sort: Annotated[str, one_of(SORTS, "an order")] = Field(
        WORST,
        description=f"One of {', '.join(SORTS)}. `worst`: the lowest accuracy first, with "
        f"clients with fewer than {MIN_EVALUATED} evaluation samples last; - reverses the order.",
        json_schema_extra={"enum": list(SORTS)},
    )


class ClientShape(Schema):
    """A client of a federation. Counts are of the rounds in which it was listed, including repeated ones."""

    number: int
    name: str = Field(description=_NAME)
    samples: int | None = Field(description="Training samples.")
    evaluation_samples: int | None = Field(description=_EVALUATED)
    split: list[int] | None = Field(description="Training samples by label, in the order of `labels`.")
    trained: int
    late: int
    dropped: int
    rejected: int
    broken: int
    loss: float | None = Field(description="Loss when it last trained.")
    accuracy: float | None = Field(description="Accuracy on its samples when it last took part.")
    seconds: float | None = Field(description="Mean time of its rounds; null: this pace does not measure time.")
    last_round: int | None


class Clients(Schema):
    labels: list[str] = Field(description="Labels of the data; empty if not reported.")
    items: list[ClientShape]
    next: str | None


_ADDED = {"attempt", "clients", "worst_name", "worst_evaluation_samples", "reported_at"}
_ROUND = [name for name in RoundShape.model_fields if name not in _ADDED]
_CLIENT = [name for name in ClientShape.model_fields if name not in {"split", "last_round"}]


@router.get("/{int:job_id}/rounds", response=RoundPage, summary="A federation's rounds, newest first")
def rounds(request: ApiRequest, job_id: int, query: Query[RoundQuery]) -> HttpResponse:
    """Return rounds, each as the newest attempt did it. Jobs of other kinds have none."""
    job = job_of(request, job_id)
    if query.start is not None and query.end is not None and query.start > query.end:
        raise bad_field("from", f"{query.start} is after to = {query.end}. Swap them.")
    attempts = list(job.attempts.select_related("job").order_by("number"))
    rows = recorded.of_record(recorded.spans(attempts))
    if query.start is not None:
        rows = rows.filter(number__gte=query.start)
    if query.end is not None:
        rows = rows.filter(number__lte=query.end)
    part = page(rows, SortOrder("number", descending=True), cursor=query.cursor, limit=query.limit)
    numbers = {attempt.pk: attempt.number for attempt in attempts}
    did = {row.number: recorded.unpack(row.named) for row in part.items} if query.clients else {}
    clients_named = {row.worst for row in part.items if row.worst is not None}.union(
        *(client_rounds["client"].tolist() for client_rounds in did.values())
    )
    names = recorded.names(job, clients_named)
    evaluated = recorded.evaluation_samples(job, {row.worst for row in part.items if row.worst is not None})
    items = [
        _round(row, numbers[row.attempt_id], did.get(row.number), names)
        | {"worst_evaluation_samples": evaluated.get(-1 if row.worst is None else row.worst)}
        for row in part.items
    ]
    return json_response({"items": items, "next": part.next})


@router.get("/{int:job_id}/clients", response=Clients, summary="A federation's clients, worst first")
def clients(request: ApiRequest, job_id: int, query: Query[ClientQuery]) -> HttpResponse:
    """Return each client's data, participation, and the model's quality for it. Jobs of other kinds have none."""
    job = job_of(request, job_id)
    rows, order = ordered(job, query.sort)
    part = page(rows, order, cursor=query.cursor, limit=query.limit)
    labels, split = recorded.splits(job, [row.number for row in part.items])
    return json_response({"labels": labels, "items": [_client(row, split) for row in part.items], "next": part.next})


def _round(row: Round, attempt: int, did: NDArray[np.void] | None, names: Mapping[int, str]) -> dict[str, Any]:
    shown = {name: getattr(row, name) for name in _ROUND}
    named = None if did is None else [_client_round(names.get(client[0], ""), *client) for client in did.tolist()]
    worst = "" if row.worst is None else names.get(row.worst, "")
    return {**shown, "reported_at": row.told_at, "attempt": attempt, "worst_name": worst, "clients": named}


def _client_round(name: str, client: int, state: int, loss: float, accuracy: float, seconds: float) -> dict[str, Any]:
    values = {"loss": loss, "accuracy": accuracy, "seconds": seconds}
    finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
    return {"client": client, "name": name, "state": STATES[state], **finite}


def _client(row: Client, split: dict[int, list[int]]) -> dict[str, Any]:
    shown = {name: getattr(row, name) for name in _CLIENT}
    return {**shown, "split": split.get(row.number), "last_round": row.last_round or None}
