"""Federated jobs for tests, and what their rank 0 reports."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from jobs.intake import reports
from jobs.models import Job
from jobs.spec import JobSpec, write_toml
from portal.models import Project, User
from tests.jobs.reporting import Spooled, post
from tests.lab import a_job
from training.federation.tables import CLIENT_COLUMNS, ROUND_COLUMNS, STATES, RoundTable, name_events, split_events

RUN = {"recipe": "tabular", "rounds": 30, "clients": 10, "split": "dirichlet", "dirichlet": {"alpha": 0.3}}
Did = tuple[int, str, float, float, float]
"""Client, state, loss, accuracy, seconds."""


def spec_of(**run: Any) -> JobSpec:
    """Return a spec; a field that is None is left out."""
    options = {name: value for name, value in (RUN | run).items() if value is not None}
    return JobSpec.parse({"name": "heron", "kind": "federated", "run": options})


def a_federation(owner: User, project: Project, *, run: dict[str, Any] | None = None, **fields: Any) -> Job:
    """Create a federated job with one attempt, like `a_job`."""
    spec = spec_of(**(run or {}))
    given = {"name": spec.name, "kind": spec.kind, "spec": spec.model_dump(mode="json"), "spec_toml": write_toml(spec)}
    fields["attempt"] = {"steps": spec.run.length if spec.run else None} | fields.pop("attempt", {})
    return a_job(owner, project, **{**given, **fields})


def everybody(clients: int, *, accuracy: float = 0.8) -> list[Did]:
    """Return clients that all trained; the higher the number, the higher the accuracy."""
    return [(number, "trained", 0.5, accuracy + number / 1000, 1.0) for number in range(clients)]


def table(rounds: dict[int, list[Did]], **columns: Any) -> dict[str, str]:
    """Return the fields of a `round.clients` event for these rounds; `columns` holds values common to all rounds."""
    report: dict[str, list[Any]] = {name: [] for name in ROUND_COLUMNS}
    each: dict[str, list[Any]] = {name: [] for name in CLIENT_COLUMNS}
    for number, did in rounds.items():
        counts = {state: sum(item[1] == state for item in did) for state in STATES}
        measured = [item for item in did if item[3] == item[3]]
        worst = min(measured, key=lambda item: item[3])[0] if measured else -1
        usual = {"seconds": 2.0, "bytes_up": 1000, "bytes_down": 2000, "loss": 0.5, "accuracy": 0.9, "worst": worst}
        for name, value in {**usual, **counts, "round": number, **columns}.items():
            report[name].append(value)
        for client, state, loss, accuracy, seconds in did:
            row = (number, client, STATES.index(state), loss, accuracy, seconds)
            for name, value in zip(CLIENT_COLUMNS, row, strict=True):
                each[name].append(value)
    arrays = {name: np.array(values) for name, values in report.items()}
    return RoundTable(arrays, {name: np.array(values) for name, values in each.items()}).pack()


def split(
    counts: list[list[int]], labels: tuple[str, ...] = ("no", "yes"), *, evaluated: list[int] | None = None
) -> list[dict[str, object]]:
    """Return the fields of `clients.split` events."""
    parts = split_events(np.array(counts), labels, None if evaluated is None else np.array(evaluated))
    return [part.pack() for part in parts]


def names(*called: str) -> list[dict[str, object]]:
    """Return the fields of `clients.named` events."""
    return [part.pack() for part in name_events(called)]


def ingest(job: Job, stream: Spooled) -> None:
    """Store a whole stream as reports of the latest attempt."""
    assert job.latest is not None
    reports.ingest(job.latest.pk, post(stream), seconds=math.inf)
