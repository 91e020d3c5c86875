"""Nodes' telemetry on the command line: `vigil agents`, `gpus` and `telemetry`. No Django here."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

import click

from vigil_cli.params import as_json, out
from vigil_cli.portal import CliError, find_portal, node_path
from vigil_cli.tables.columns import TableRow, current, table
from vigil_cli.terminal import echo_whole
from vigil_core import formatting

HOUR_S = 3600


@click.command()
@as_json
def agents(as_json: bool) -> None:
    """List the nodes' agents: state, clock offset, lost samples."""
    found = find_portal().get("agents")
    out(found, _agents, as_json)


@click.command()
@click.argument("name", metavar="[NODE]", required=False)
@as_json
def gpus(name: str | None, as_json: bool) -> None:
    """List GPUs: who uses them, and their current values.

    For one node, or for all nodes with an agent.
    """
    portal = find_portal()
    path = f"{node_path(name)}/gpus" if name else "gpus"
    items = [{"node": name, **gpu} for gpu in portal.items(path, **({} if name else {"limit": 50}))]
    out({"items": items}, _gpus, as_json)


@click.command()
@click.argument("name", metavar="NODE")
@click.option("--gpu", "gpu", multiple=True, metavar="I", help="Only this GPU, by index or UUID; may be repeated.")
@click.option("--field", "fields", multiple=True, metavar="F", help="Only this field, such as watts or cpu_percent.")
@click.option("--csv", "as_csv", is_flag=True, help="Print the curves as CSV instead of the newest values.")
@click.option(
    "--hours", type=click.FloatRange(0.01, 2_160), default=1.0, show_default=True, help="With --csv: how many hours."
)
@as_json
def telemetry(
    name: str, gpu: tuple[str, ...], fields: tuple[str, ...], as_csv: bool, hours: float, as_json: bool
) -> None:
    """Show current values of a node and its GPUs.

    With --csv, past values: one per second for the last two days, one per minute for 90 days.
    """
    if as_csv and as_json:
        raise click.UsageError("Choose one of --csv and --json.")
    path, portal = node_path(name), find_portal()
    if as_csv:
        start = int(time.time() - hours * HOUR_S)
        wanted = {"name": list(fields) or None, "gpu": list(gpu) or None, "from": start}
        for piece in portal.stream(f"{path}/series.csv", **wanted):
            echo_whole(piece, end="")
        return
    found = portal.get(f"{path}/telemetry")
    chosen = [item for item in found["gpus"] if not gpu or str(item["index"]) in gpu or item["uuid"] in gpu]
    if gpu and not chosen:
        there = ", ".join(str(item["index"]) for item in found["gpus"]) or "none"
        raise CliError(f"{name} has no such GPU. It has {there}.")
    out(_select_fields({**found, "gpus": chosen}, fields), _telemetry, as_json)


def _select_fields(found: dict[str, Any], fields: tuple[str, ...]) -> dict[str, Any]:
    """Return the response with only these fields of the host and GPUs."""
    if not fields:
        return found
    host = {name: value for name, value in found["host"].items() if name in fields}
    chosen = [{**gpu, "newest": _pick(gpu["newest"], fields)} for gpu in found["gpus"]]
    return {**found, "host": host, "gpus": chosen}


def _pick(values: dict[str, Any], fields: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in fields}


def _agents(answer: dict[str, Any]) -> list[str]:
    head = ["NODE", "STATE", "LAST REPORT", "CLOCK>", "GPUS>", "DROPPED>", "VERSION", "ENROLLED BY"]
    rows = [
        [
            item["node"],
            "never reported" if _last_report(item) is None else "silent" if item["is_silent"] else "reporting",
            _ago(_last_report(item)),
            "" if item["clock_offset_s"] is None else f"{item['clock_offset_s']:+.1f} s",
            str(item["gpus"]),
            f"{current(item, 'discarded_batches', 'given_up'):,}",
            item["version"],
            item["enrolled_by"],
        ]
        for item in sorted(answer["items"], key=_worst_first)
    ]
    return table(head, rows, "No node has an agent. Enrol one with `vigil agent enroll NODE`.")


def _worst_first(item: dict[str, Any]) -> tuple[int, str, str]:
    if (reported := _last_report(item)) is None:
        return 1, "", item["node"]
    return (0, reported, item["node"]) if item["is_silent"] else (2, "", item["node"])


def _gpus(answer: dict[str, Any]) -> list[str]:
    head = ["NODE", "GPU>", "MODEL", "USE>", "MEMORY MIB>", "TEMP>", "POWER>", "USED BY"]
    return table(head, [_gpu(item) for item in answer["items"]], "No agent reports a GPU there.")


def _gpu(item: dict[str, Any]) -> TableRow:
    values = item["newest"]
    memory = _number(values, "memory_mib")
    return [
        item["node"],
        str(item["index"]),
        item["model"],
        "lost" if item["is_lost"] else _number(values, "gpu_percent", " %"),
        f"{memory}/{item['memory_mib']:,}" if memory and item["memory_mib"] else memory,
        _number(values, "temperature_c", " °C"),
        _number(values, "watts", " W"),
        ", ".join(_gpu_user(holder) for holder in item["holders"]),
    ]


def _gpu_user(holder: dict[str, Any]) -> str:
    job = f"#{holder['job']}" if holder["job"] else holder["scheduler_id"]
    return " ".join(part for part in (holder["user"], holder["name"], f"({job})") if part)


def _telemetry(answer: dict[str, Any]) -> list[str]:
    """Return a line about the node, its host values, then a row per GPU with every reported field."""
    silent = " The agent is silent." if answer["is_silent"] else ""
    lines = [f"{answer['node']}: last report {_ago(_last_report(answer)) or 'never'}.{silent}"]
    width = max(map(len, answer["host"]), default=0)
    lines += [f"  {name.ljust(width)}  {formatting.measure(value)}" for name, value in sorted(answer["host"].items())]
    fields = list(dict.fromkeys(name for gpu in answer["gpus"] for name in gpu["newest"]))
    rows = [[str(gpu["index"]), *(_number(gpu["newest"], name) for name in fields)] for gpu in answer["gpus"]]
    if fields:
        lines += ["", *table(["GPU>", *(f"{name}>" for name in fields)], rows, "")]
    return lines


def _number(values: dict[str, Any], name: str, unit: str = "") -> str:
    value = values.get(name)
    return "" if value is None else f"{value:,}{unit}"


def _ago(time: str | None) -> str:
    return formatting.ago(datetime.fromisoformat(time)) if time else ""


def _last_report(item: dict[str, Any]) -> str | None:
    time: str | None = current(item, "last_report_at", "heard_at")
    return time


ALL = (agents, gpus, telemetry)
