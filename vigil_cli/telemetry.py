"""What machines tell of themselves: `vigil agents`, `gpus` and `telemetry`. No Django here."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any
from urllib.parse import quote

import click

from vigil_cli.params import as_json, out
from vigil_cli.portal import find_portal
from vigil_cli.tables import Row, table
from vigil_cli.terminal import echo_whole, plain
from vigil_core import formatting

HOUR_S = 3600


@click.command()
@as_json
def agents(as_json: bool) -> None:
    """List what tells of each machine: silence, clocks, gaps."""
    found = find_portal().get("agents")
    out(found, _agents, as_json)


@click.command()
@click.argument("name", metavar="[NODE]", required=False)
@as_json
def gpus(name: str | None, as_json: bool) -> None:
    """List GPUs: who holds them, what they do.

    Of one node, or of all that have an agent.
    """
    portal = find_portal()
    path = f"nodes/{quote(name, safe='')}/gpus" if name else "gpus"
    items = [{"node": name, **gpu} for gpu in portal.items(path, **({} if name else {"limit": 50}))]
    out({"items": items}, _gpus, as_json)


@click.command()
@click.argument("name", metavar="NODE")
@click.option("--gpu", "gpu", multiple=True, metavar="I", help="Only this GPU, by index or UUID; may be repeated.")
@click.option("--field", "fields", multiple=True, metavar="F", help="Only this field, as watts or cpu_percent.")
@click.option("--csv", "as_csv", is_flag=True, help="Print the curves as CSV instead of the newest values.")
@click.option(
    "--hours", type=click.FloatRange(0.01, 2_160), default=1.0, show_default=True, help="With --csv: so many."
)
@as_json
def telemetry(
    name: str, gpu: tuple[str, ...], fields: tuple[str, ...], as_csv: bool, hours: float, as_json: bool
) -> None:
    """Show what a node and its GPUs do now.

    With --csv what they did: one value a second of the last two days, one a minute of 90 days.
    """
    if as_csv and as_json:
        raise click.UsageError("Say --csv or --json, not both.")
    path, portal = f"nodes/{quote(name, safe='')}", find_portal()
    if as_csv:
        start = int(time.time() - hours * HOUR_S)
        wanted = {"name": list(fields) or None, "gpu": list(gpu) or None, "from": start}
        for piece in portal.stream(f"{path}/series.csv", **wanted):
            echo_whole(piece, end="")
        return
    found = portal.get(f"{path}/telemetry")
    chosen = [one for one in found["gpus"] if not gpu or str(one["index"]) in gpu or one["uuid"] in gpu]
    if gpu and not chosen:
        there = ", ".join(str(one["index"]) for one in found["gpus"]) or "none"
        raise click.UsageError(plain(f"{name} has no such GPU. It has {there}."))
    out(_of_fields({**found, "gpus": chosen}, fields), _telemetry, as_json)


def _of_fields(found: dict[str, Any], fields: tuple[str, ...]) -> dict[str, Any]:
    """The answer with these fields alone, of the host and of GPUs."""
    if not fields:
        return found
    host = {name: value for name, value in found["host"].items() if name in fields}
    chosen = [{**gpu, "newest": _only(gpu["newest"], fields)} for gpu in found["gpus"]]
    return {**found, "host": host, "gpus": chosen}


def _only(values: dict[str, Any], fields: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in fields}


def _agents(answer: dict[str, Any]) -> list[str]:
    head = ["NODE", "STATE", "HEARD", "CLOCK>", "GPUS>", "GIVEN UP>", "VERSION", "ENROLLED BY"]
    rows = [
        [
            one["node"],
            "never heard" if one["heard_at"] is None else "silent" if one["is_silent"] else "well",
            _ago(one["heard_at"]),
            "" if one["clock_offset_s"] is None else f"{one['clock_offset_s']:+.1f} s",
            str(one["gpus"]),
            f"{one['given_up']:,}",
            one["version"],
            one["enrolled_by"],
        ]
        for one in sorted(answer["items"], key=_worst_first)
    ]
    return table(head, rows, "No machine has an agent. Enrol one with `vigil agent enroll NODE`.")


def _worst_first(one: dict[str, Any]) -> tuple[int, str, str]:
    if one["heard_at"] is None:
        return 1, "", one["node"]
    return (0, one["heard_at"], one["node"]) if one["is_silent"] else (2, "", one["node"])


def _gpus(answer: dict[str, Any]) -> list[str]:
    head = ["NODE", "GPU>", "MODEL", "USE>", "MEMORY MIB>", "TEMP>", "POWER>", "HELD BY"]
    return table(head, [_gpu(one) for one in answer["items"]], "No agent tells of a GPU there.")


def _gpu(one: dict[str, Any]) -> Row:
    newest = one["newest"]
    memory = _number(newest, "memory_mib")
    return [
        one["node"],
        str(one["index"]),
        one["model"],
        "lost" if one["is_lost"] else _number(newest, "gpu_percent", " %"),
        f"{memory}/{one['memory_mib']:,}" if memory and one["memory_mib"] else memory,
        _number(newest, "temperature_c", " °C"),
        _number(newest, "watts", " W"),
        ", ".join(_holder(holder) for holder in one["holders"]),
    ]


def _holder(holder: dict[str, Any]) -> str:
    job = f"#{holder['job']}" if holder["job"] else holder["scheduler_id"]
    return " ".join(part for part in (holder["user"], holder["name"], f"({job})") if part)


def _telemetry(answer: dict[str, Any]) -> list[str]:
    """The machine in a line, its own values, then a GPU a row with every field that one of them tells."""
    silent = " The agent is silent." if answer["is_silent"] else ""
    lines = [f"{answer['node']}: heard {_ago(answer['heard_at']) or 'never'}.{silent}"]
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


ALL = (agents, gpus, telemetry)
