"""`vigil rounds` and `vigil clients`: a federation's rounds and clients. No Django here."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import click

from vigil_cli.params import as_json, job_id, limit_option, out
from vigil_cli.portal import CliError, Portal, find_portal, kind_of
from vigil_cli.tables.columns import table
from vigil_cli.terminal import echo_whole
from vigil_core import csv_text, formatting

MAX_PAGE_SIZE = 200
NAME = 32  # maximum length of a printed name
SORTS = ("worst", "number", "loss", "samples", "seconds", "trouble", "trained", "late", "dropped", "rejected", "broken")
ROUND_COLUMNS = (
    "number", "attempt", "trained", "late", "dropped", "rejected", "broken", "seconds", "bytes_up", "bytes_down",
    "loss", "accuracy", "worst", "worst_name", "worst_evaluation_samples",
)  # fmt: skip
CLIENT_COLUMNS = (
    "number", "name", "samples", "trained", "late", "dropped", "rejected", "broken", "seconds", "loss", "accuracy",
    "last_round", "evaluation_samples",
)  # fmt: skip
as_csv = click.option("--csv", "as_csv", is_flag=True, help="Print all of them as CSV.")
limit = limit_option(20)


@click.command()
@job_id
@click.option("--from", "first", type=click.IntRange(min=0), help="First round.")
@click.option("--to", "last", type=click.IntRange(min=0), help="Last round.")
@limit
@as_csv
@as_json
def rounds(job_id: int, first: int | None, last: int | None, limit: int, as_csv: bool, as_json: bool) -> None:
    """List a federation's rounds, newest first."""
    form = _OutputForm(limit, as_csv=as_csv, as_json=as_json)
    _print(job_id, _FederationTable("rounds", ROUND_COLUMNS, _round_lines), {"from": first, "to": last}, form)


@click.command()
@job_id
@click.option("--sort", default="worst", show_default=True, help=f"{', '.join(SORTS)}; - reverses.")
@limit
@as_csv
@as_json
def clients(job_id: int, sort: str, limit: int, as_csv: bool, as_json: bool) -> None:
    """List a federation's clients, worst served first."""
    form = _OutputForm(limit, as_csv=as_csv, as_json=as_json)
    _print(job_id, _FederationTable("clients", CLIENT_COLUMNS, _client_lines), {"sort": sort}, form)


@dataclass(frozen=True)
class _FederationTable:
    """A list that the portal has of a federated job."""

    name: str
    """The last part of its URL."""
    columns: tuple[str, ...]
    """The columns of its CSV."""
    lines: Callable[[dict[str, Any]], list[str]]
    """Returns the lines for a terminal."""


@dataclass(frozen=True)
class _OutputForm:
    """The format of the output, and the number of rows."""

    limit: int
    as_csv: bool
    as_json: bool

    def __post_init__(self) -> None:
        if self.as_csv and self.as_json:
            raise click.UsageError("Choose one of --csv and --json.")


def _print(job_id: int, listing: _FederationTable, filters: dict[str, Any], form: _OutputForm) -> None:
    portal, limit = find_portal(), form.limit
    page_limit = None if form.as_csv else limit + 1  # one more than printed, to know whether there are more
    at_once = MAX_PAGE_SIZE if page_limit is None else min(page_limit, MAX_PAGE_SIZE)
    items = iter(portal.items(f"jobs/{job_id}/{listing.name}", most=page_limit, limit=at_once, **filters))
    if form.as_csv:
        first = list(itertools.islice(items, 1))
        if not first:
            _require_federated(portal, job_id, listing.name)
        _write([listing.columns])
        for item in itertools.chain(first, items):
            _write([[item.get(name) for name in listing.columns]])
        return
    found = list(items)
    if not found:
        _require_federated(portal, job_id, listing.name)
    more = [f"There are more: --limit {limit * 10}, or --csv for all."] if len(found) > limit else []
    out({"items": found[:limit]}, lambda answer: [*listing.lines(answer), *more], form.as_json)


def _require_federated(portal: Portal, job_id: int, what: str) -> None:
    """Raise CliError if the job is not federated."""
    if (kind := kind_of(portal, job_id).name) != "federated":
        raise CliError(f"#{job_id} is a {kind} job: only federated jobs have {what}.")


def _write(rows: Iterable[Iterable[object]]) -> None:
    echo_whole(csv_text.write(rows), end="")


def _round_lines(answer: dict[str, Any]) -> list[str]:
    head = [
        "ROUND>",
        "TRAINED>",
        "LATE>",
        "DROPPED>",
        "REJECTED>",
        "LOSS>",
        "ACCURACY>",
        "WORST SERVED",
        "DURATION>",
        "SENT>",
    ]
    rows = [
        [
            *(formatting.count(row[name]) for name in ("number", "trained", "late", "dropped")),
            formatting.count(row["rejected"] + row["broken"]),
            *(formatting.loss(row[name]) for name in ("loss", "accuracy")),
            _worst(row),
            formatting.duration(row["seconds"]),
            formatting.disk(row["bytes_up"] + row["bytes_down"]),
        ]
        for row in answer["items"]
    ]
    return table(head, rows, "No rounds yet.")


def _worst(row: dict[str, Any]) -> str:
    """Return the client for whom the round's model was worst, in words: a bare number would read as a score."""
    if row["worst"] is None:
        return formatting.MISSING
    samples = row.get("worst_evaluation_samples")  # absent in an older portal
    on = f" on {formatting.plural(samples, 'sample')}" if samples is not None else ""
    return f"client {formatting.count(row['worst'])} {_short_name(row['worst_name'])}".rstrip() + on


def _client_lines(answer: dict[str, Any]) -> list[str]:
    has_names = any(client["name"] for client in answer["items"])
    is_timed = any(_round_time(client) != formatting.MISSING for client in answer["items"])
    head = [
        *(
            "CLIENT>",
            *(["NAME"] if has_names else []),
            "SAMPLES>",
            "ACCURACY>",
            "EVALUATED ON>",
            "LOSS>",
            "TRAINED>",
            "LATE>",
            "DROPPED>",
            "REJECTED>",
            *(["PER ROUND>"] if is_timed else []),
        ),
    ]
    rows = [
        [
            formatting.count(client["number"]),
            *([_short_name(client["name"])] if has_names else []),
            formatting.count(client["samples"]),
            formatting.loss(client["accuracy"]),
            formatting.count(client.get("evaluation_samples")),
            formatting.loss(client["loss"]),
            *(formatting.count(client[name]) for name in ("trained", "late", "dropped")),
            formatting.count(client["rejected"] + client["broken"]),
            *([_round_time(client)] if is_timed else []),
        ]
        for client in answer["items"]
    ]
    return table(head, rows, "No clients yet.")


def _round_time(client: dict[str, Any]) -> str:
    """Return a client's mean round time; a client that was never in time has none."""
    if client["seconds"] is None and not client["trained"] and client["late"]:
        return "always late"
    return formatting.duration(client["seconds"])


def _short_name(name: str) -> str:
    """Shorten a client's name to fit in a line."""
    return name if len(name) <= NAME else f"{name[: NAME - 1]}…"


ALL = (rounds, clients)
