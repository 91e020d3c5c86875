"""Print sweeps: the list, and one sweep with its jobs and the combinations without a job. No Django here."""

from __future__ import annotations

import json
from typing import Any

from vigil_cli.tables.columns import table
from vigil_cli.tables.jobs import age, counts, loss, steps
from vigil_core import formatting

MAX_REFUSED = 10
"""How many combinations without a job are printed."""


def sweeps(answer: dict[str, Any]) -> list[str]:
    head = ["ID>", "NAME", "PROJECT", "OWNER", "JOBS>", "STATES", "CREATED"]
    rows = [
        [str(s["id"]), s["name"], s["project"], s["owner"], str(s["jobs"]), counts(s["counts"]), age(s)]
        for s in answer["items"]
    ]
    return table(head, rows, "No sweeps. A specification with [sweep] creates one: `vigil submit SPEC.toml`.")


def sweep(answer: dict[str, Any]) -> list[str]:
    """Return a line about the sweep, then its jobs with their values."""
    at_once = f", {answer['at_once']} at once" if answer["at_once"] else ""
    lead = f"Sweep {answer['id']} {answer['name']}: {counts(answer['counts'])}{at_once}: {answer['url']}"
    paths = list(answer["values"])
    head = ["ID>", "STATE", *(path.removeprefix("run.").removeprefix("script.") for path in paths), "DONE>", "LOSS>"]
    rows = [
        [
            str(j["id"]),
            formatting.word(j["state"]),
            *(_value(j, path) for path in paths),
            steps(j["progress"]),
            loss(j),
        ]
        for j in answer["items"]
    ]
    compared = answer.get("standing") or {}  # absent in an older portal
    ahead = [compared["text"]] if compared.get("text") else []
    return [lead, *ahead, *_without_jobs(answer), *table(head, rows, "Its jobs were deleted.")]


def _without_jobs(answer: dict[str, Any]) -> list[str]:
    """Return the combinations that have no job: how many, why the first ones have none, and how to list the others."""
    refused = answer.get("refused", [])
    if not refused:
        return []
    lines = [
        f"  {', '.join(f'{path} = {value}' for path, value in combination['values'].items())}: {combination['message']}"
        for combination in refused[:MAX_REFUSED]
    ]
    more = len(refused) - len(lines)
    rest = [f"  and {more:,} more: vigil sweep {answer['id']} --json"] if more else []
    return [f"{formatting.plural(len(refused), 'combination')} without a job:", *lines, *rest]


def _value(job: dict[str, Any], path: str) -> str:
    value = (job["sweep"] or {"values": {}})["values"].get(path)
    return value if isinstance(value, str) else json.dumps(value)
