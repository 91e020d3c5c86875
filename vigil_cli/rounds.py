"""`vigil rounds` and `vigil clients`: what a federation did, and who in it. No Django here."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import click

from vigil_cli.params import JobId, as_json, out
from vigil_cli.portal import Portal, Trouble, find_portal, kind_of
from vigil_cli.tables import table
from vigil_cli.terminal import echo_whole
from vigil_core import csv_text, formatting

AT_ONCE = 200
NAME = 32  # letters of one that are printed
SORTS = ("worst", "number", "loss", "samples", "seconds", "trouble", "trained", "late", "dropped", "rejected", "broken")
ROUND_COLUMNS = (
    "number", "attempt", "trained", "late", "dropped", "rejected", "broken", "seconds", "bytes_up", "bytes_down",
    "loss", "accuracy", "worst", "worst_name", "worst_evaluation_samples",
)  # fmt: skip
CLIENT_COLUMNS = (
    "number", "name", "samples", "trained", "late", "dropped", "rejected", "broken", "seconds", "loss", "accuracy",
    "last_round", "evaluation_samples",
)  # fmt: skip
job_id = click.argument("job_id", metavar="ID", type=JobId())
as_csv = click.option("--csv", "as_csv", is_flag=True, help="All of them as CSV, for machines.")
limit = click.option("-n", "--limit", type=click.IntRange(min=1), default=20, show_default=True)


@click.command()
@job_id
@click.option("--from", "first", type=click.IntRange(min=0), help="First round.")
@click.option("--to", "last", type=click.IntRange(min=0), help="Last round.")
@limit
@as_csv
@as_json
def rounds(job_id: int, first: int | None, last: int | None, limit: int, as_csv: bool, as_json: bool) -> None:
    """List a federation's rounds, newest first."""
    _not_both(as_csv, as_json)
    _print(job_id, "rounds", {"from": first, "to": last}, limit, ROUND_COLUMNS, _round_lines, as_csv, as_json)


@click.command()
@job_id
@click.option("--sort", default="worst", show_default=True, help=f"{', '.join(SORTS)}; - reverses.")
@limit
@as_csv
@as_json
def clients(job_id: int, sort: str, limit: int, as_csv: bool, as_json: bool) -> None:
    """List a federation's clients, the worst served first."""
    _not_both(as_csv, as_json)
    _print(job_id, "clients", {"sort": sort}, limit, CLIENT_COLUMNS, _client_lines, as_csv, as_json)


def _not_both(as_csv: bool, as_json: bool) -> None:
    if as_csv and as_json:
        raise click.UsageError("Choose one of --csv and --json.")


def _print(
    job_id: int,
    what: str,
    wanted: dict[str, Any],
    limit: int,
    columns: tuple[str, ...],
    lines: Any,
    as_csv: bool,
    as_json: bool,
) -> None:
    portal = find_portal()
    one_more = None if as_csv else limit + 1  # tells whether that is all
    at_once = AT_ONCE if one_more is None else min(one_more, AT_ONCE)
    items = iter(portal.items(f"jobs/{job_id}/{what}", most=one_more, limit=at_once, **wanted))
    if as_csv:
        first = list(itertools.islice(items, 1))
        if not first:
            _is_a_federation(portal, job_id, what)
        _write([columns])
        for item in itertools.chain(first, items):
            _write([[item.get(name) for name in columns]])
        return
    found = list(items)
    if not found:
        _is_a_federation(portal, job_id, what)
    more = [f"There are more: --limit {limit * 10}, or --csv for all."] if len(found) > limit else []
    out({"items": found[:limit]}, lambda answer: [*lines(answer), *more], as_json)


def _is_a_federation(portal: Portal, job_id: int, what: str) -> None:
    """Raises Trouble where the job can have none of them."""
    if (kind := kind_of(portal, job_id).name) != "federated":
        raise Trouble(f"#{job_id} is {kind}: only a federated job has {what}.")


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
        "TOOK>",
        "SENT>",
    ]
    rows = [
        [
            *(formatting.count(one[name]) for name in ("number", "trained", "late", "dropped")),
            formatting.count(one["rejected"] + one["broken"]),
            *(formatting.loss(one[name]) for name in ("loss", "accuracy")),
            _worst(one),
            formatting.duration(one["seconds"]),
            formatting.disk(one["bytes_up"] + one["bytes_down"]),
        ]
        for one in answer["items"]
    ]
    return table(head, rows, "No rounds yet.")


def _worst(one: dict[str, Any]) -> str:
    """For whom the round's model was worst: by the number alone it would read as a score."""
    if one["worst"] is None:
        return formatting.MISSING
    samples = one.get("worst_evaluation_samples")  # absent: an older portal
    on = f" on {formatting.plural(samples, 'sample')}" if samples is not None else ""
    return f"client {formatting.count(one['worst'])} {_short(one['worst_name'])}".rstrip() + on


def _client_lines(answer: dict[str, Any]) -> list[str]:
    has_names = any(one["name"] for one in answer["items"])
    is_timed = any(_took(one) != formatting.MISSING for one in answer["items"])
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
            *(["A ROUND>"] if is_timed else []),
        ),
    ]
    rows = [
        [
            formatting.count(one["number"]),
            *([_short(one["name"])] if has_names else []),
            formatting.count(one["samples"]),
            formatting.loss(one["accuracy"]),
            formatting.count(one.get("evaluation_samples")),
            formatting.loss(one["loss"]),
            *(formatting.count(one[name]) for name in ("trained", "late", "dropped")),
            formatting.count(one["rejected"] + one["broken"]),
            *([_took(one)] if is_timed else []),
        ]
        for one in answer["items"]
    ]
    return table(head, rows, "No clients yet.")


def _took(one: dict[str, Any]) -> str:
    """A client's mean round; of one that was never in time no seconds are known."""
    if one["seconds"] is None and not one["trained"] and one["late"]:
        return "always late"
    return formatting.duration(one["seconds"])


def _short(name: str) -> str:
    """Of a client, so that a line stays one."""
    return name if len(name) <= NAME else f"{name[: NAME - 1]}…"


ALL = (rounds, clients)
