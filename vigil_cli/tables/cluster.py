"""Print the cluster for people on the command line: its nodes, its queue and its licenses."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from vigil_cli.tables.columns import current, local, table
from vigil_core import formatting


def nodes(answer: dict[str, Any]) -> list[str]:
    head = ["NAME", "STATE", "PARTITION", "CPUS>", "GPUS>", "GPU", "MEMORY GIB>", "REASON"]
    rows = [
        [
            n["name"],
            formatting.word(n["state"]),
            ",".join(n["partitions"]),
            f"{n['cpus_used']}/{n['cpus']}",
            f"{n['gpus_used']}/{n['gpus']}",
            _gpu_types(n),
            f"{n['memory_used_mib'] / 1024:,.0f}/{n['memory_mib'] / 1024:,.0f}",
            n["reason"] + (f" ({n['reason_by']})" if n["reason_by"] else ""),
        ]
        for n in answer["items"]
    ]
    return [*table(head, rows, "No nodes: the scheduler has not reported any yet."), as_of(answer["reading"])]


def _gpu_types(node: dict[str, Any]) -> str:
    """Return the type of its GPUs; "1 a100, 7 1g.10gb" where it has several."""
    types = node.get("gpu_types", [])
    return (
        ", ".join(f"{gpu_type['gpus']} {gpu_type['type']}" for gpu_type in types)
        if len(types) > 1
        else str(node["gpu_type"])
    )


def _gpus(node: dict[str, Any]) -> str:
    """Return "2 of 8 h100"; with several types "0 of 1 a100, 2 of 7 1g.10gb"."""
    if not node["gpus"]:
        return ""
    types = node.get("gpu_types", [])
    if len(types) > 1:
        return ", ".join(f"{gpu_type['used']} of {gpu_type['gpus']} {gpu_type['type']}".rstrip() for gpu_type in types)
    return f"{node['gpus_used']} of {node['gpus']} {node['gpu_type']}".rstrip()


def node(answer: dict[str, Any]) -> list[str]:
    order = answer["order"]
    facts = {
        "state": formatting.word(answer["state"]) + ("" if answer["takes_jobs"] else ", not schedulable"),
        "reason": answer["reason"],
        "set by": " ".join(part for part in (answer["reason_by"], local(answer["reason_at"])) if part),
        "partitions": ", ".join(answer["partitions"]),
        "features": ", ".join(answer["features"]),
        "gpus": _gpus(answer),
        "allocated": ", ".join(map(str, answer["gpus_allocated"])),
        "cpus": f"{answer['cpus_used']} of {answer['cpus']}",
        "memory": f"{answer['memory_used_mib'] / 1024:,.0f} of {answer['memory_mib'] / 1024:,.0f} GiB allocated",
        "load": formatting.measure(answer["load"]) if answer["load"] is not None else "",
        "booted": local(answer["booted_at"]),
        "updated": local(answer["reading"]["read_at"]),
        "order": _order(order) if order else "",
    }
    width = max(map(len, facts))
    return [answer["name"], *(f"  {name.ljust(width)}  {value}" for name, value in facts.items() if value)]


def _order(order: dict[str, Any]) -> str:
    return f"{order['action']} by {current(order, 'requested_by', 'asked_by')}: {order_text(order)}"


def order_text(order: dict[str, Any]) -> str:
    """Return the state and outcome of a drain order."""
    return f"{order['state']}: {order['outcome']}" if order["outcome"] else str(order["state"])


def queue(answer: dict[str, Any]) -> list[str]:
    head = ["ID>", "STATE", "NAME", "USER", "PARTITION", "NODES>", "GPUS>", "POSITION>", "STARTS/ENDS", "REASON/NODES"]
    rows = [
        [
            q["scheduler_id"],
            formatting.word(q["state"]),
            _queued(q),
            q["user"],
            q["partition"],
            str(q["node_count"]),
            str(q["gpus"]),
            f"{q['position']}/{q['waiting']}" if q["position"] else "",
            local(q["starts_at"] if q["state"] == "pending" else q["ends_at"])[:16],
            q["why"] if q["state"] == "pending" else ", ".join(q["nodes"]),
        ]
        for q in answer["items"]
    ]
    return [*table(head, rows, "The queue is empty."), *freshness(answer)]


def licenses(answer: dict[str, Any]) -> list[str]:
    head = ["LICENSE", "TOTAL>", "IN USE>", "RESERVED>", "FREE>"]
    numbers = ("total", "used", "reserved", "free")
    rows = [[item["name"], *(formatting.count(item[name]) for name in numbers)] for item in answer["items"]]
    return [*table(head, rows, "The scheduler manages no licenses."), as_of(answer["reading"])]


def freshness(answer: dict[str, Any]) -> list[str]:
    """Return how old a queue is, and which of the person's own jobs it cannot show yet (not from an older portal)."""
    missing = answer.get("unseen") or {"text": ""}
    return [as_of(answer["reading"]), *([missing["text"]] if missing["text"] else [])]


def as_of(reading: dict[str, Any]) -> str:
    """Return how old an answer is."""
    if reading["read_at"] is None:
        return "The scheduler has not been polled yet."
    then = datetime.fromisoformat(reading["read_at"]).astimezone()
    today = then.date() == datetime.now().astimezone().date()
    text = f"As of {then:%H:%M:%S}." if today else f"As of {then:%Y-%m-%d %H:%M:%S}."
    return f"{text} {reading.get('unreadable_text', '')}".rstrip()


def _queued(job: dict[str, Any]) -> str:
    """Return the job's name with its number in Vigil and how many jobs the line stands for."""
    number = f"#{job['job']}" if job["job"] else f"sweep {job['sweep']}" if job.get("sweep") else ""
    notes = [number] if number else []
    notes += [f"{job['tasks']:,} jobs"] if job.get("tasks", 1) > 1 else []
    notes += [f"component {job['component']}"] if job.get("component") else []
    return str(job["name"]) + (f" ({', '.join(notes)})" if notes else "")
