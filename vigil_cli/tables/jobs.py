"""Print jobs, and what they leave: checkpoints, curves, profiles, environments, incidents. No Django here."""

from __future__ import annotations

import shlex
from datetime import datetime
from typing import Any

from vigil_cli import outline
from vigil_cli.tables.columns import current, local, table
from vigil_core import formatting, kinds


def jobs(answer: dict[str, Any]) -> list[str]:
    head = ["ID>", "STATE", "NAME", "PROJECT", "OWNER", "DONE>", "LOSS>", "CREATED"]
    rows = [
        [
            *(str(j["id"]), formatting.word(j["state"]), j["name"], j["project"], j["owner"]),
            *(steps(j["progress"]), loss(j), age(j)),
        ]
        for j in answer["items"]
    ]
    return table(head, rows, "No jobs. Submit one with `vigil submit SPEC.toml`.")


def job(answer: dict[str, Any]) -> list[str]:
    attempt, progress = answer["attempt"], answer["progress"]
    facts = {
        "state": formatting.word(answer["state"]) + (f" ({reason})" if (reason := _reason(answer)) else ""),
        "kind": answer["kind"],
        "project": f"{answer['project']}, submitted by {answer['owner']}",
        "attempt": f"{attempt['number']}" + (f" on {', '.join(attempt['nodes'])}" if attempt["nodes"] else ""),
        kinds.by_name(answer["kind"]).units: steps(progress) if progress["step"] is not None else "",
        "left": formatting.duration(progress["eta_seconds"]) if progress["eta_seconds"] is not None else "",
        "latest": ", ".join(
            f"{name} {formatting.series_value(name, value)}" for name, value in answer["latest"].items()
        ),
        "goodput": _goodput(answer.get("goodput"), kinds.by_name(answer["kind"]).units),
        "coverage": (answer.get("coverage") or {}).get("text", ""),
        "decision": attempt["decision"],
        "tags": ", ".join(answer["tags"]),
        "notes": answer["notes"],
        "created": local(answer["created_at"]),
        "started": local(answer["started_at"]),
        "ended": local(answer["ended_at"]),
        "parent": f"#{answer['parent']}" if answer["parent"] else "",
        "directory": answer["directory"],
        "page": answer["url"],
    }
    width = max(map(len, facts))
    return [f"#{answer['id']} {answer['name']}", *(f"  {k.ljust(width)}  {v}" for k, v in facts.items() if v)]


def _goodput(goodput: dict[str, Any] | None, units: str) -> str:
    if not goodput:
        return ""
    useful, wall = (formatting.duration(goodput[f"{name}_seconds"]) for name in ("useful", "wall"))
    return f"{formatting.percent(goodput['fraction'])}: {useful} of {units} in {wall}"


def profiles(answer: dict[str, Any]) -> list[str]:
    head = ["ATTEMPT>", "RANK>", "STEPS", "SIZE>", "NAME"]
    rows = []
    for profile in answer["items"]:
        steps = f"{profile['first_step']:,}-{profile['last_step']:,}" if profile["name"] else "–"
        name = profile["name"] or profile["problem"] or "requested, not written yet"
        size = formatting.disk(profile["bytes"]) if profile["name"] else ""
        rows.append([str(profile["attempt"]), str(profile["rank"]), steps, size, name])
    return table(head, rows, "No profiles. Record one of a running job with `vigil profile ID`.")


def incidents(answer: dict[str, Any]) -> list[str]:
    head = ["JOB>", "CAUSE", "CONFIDENCE>", "NODE", "WHAT HAPPENED", "WHEN"]
    rows = [
        [
            f"{incident['job']}.{incident['attempt']}",
            incident["cause"] or "pending",
            _confidence(incident),
            incident["node"],
            current(incident, "summary", "says")[:100],
            local(incident["at"]),
        ]
        for incident in answer["items"]
    ]
    return table(head, rows, "No incidents.")


def _confidence(incident: dict[str, Any]) -> str:
    if incident["is_overruled"]:
        return str(incident.get("overruled_by") or "a person")
    return "" if incident["confidence"] is None or incident["cause"] == "unknown" else f"{incident['confidence']:.0%}"


def counts(found: dict[str, int]) -> str:
    """Return counts by state as text: "12 completed, 4 running"."""
    return ", ".join(f"{number:,} {formatting.word(state)}" for state, number in sorted(found.items()))


def _reason(job: dict[str, Any]) -> str:
    """Return the meaning of the scheduler's reason; an older portal sends only the reason."""
    return str(job.get("explained") or job["reason"])


def why(answer: dict[str, Any]) -> list[str]:
    """Return the main reason, further obstacles, the expected start, and variants that would start now."""
    lines = [answer["text"]]
    if current(answer, "scheduler_reason", "said") and answer["meaning"] != answer["text"]:
        lines.append(f"  scheduler: {answer['meaning']}")
    lines += [f"  also: {block['text']}" for block in answer["blocks"] if block["text"] != answer["text"]]
    if answer["starts_at"]:
        lines.append(f"  starts: about {local(answer['starts_at'])}, estimated by the scheduler")
    coming = [window for window in answer.get("maintenance", []) if not window["is_blocking"]]
    lines += [f"  planned: {window['text']}" for window in coming]
    lines += [f"  avoids: {avoided['node']}: {avoided['reason']}" for avoided in answer.get("avoids", [])]
    if answer["state"] != "pending":
        return lines
    for starts_now, head in ((True, "Would start now:"), (False, "Would fit, but not start at once:")):
        found = [variant for variant in answer["variants"] if variant["starts_now"] is starts_now]
        lines += ["", head] if found else []
        for variant in found:
            options = " ".join(f"--set {shlex.quote(option)}" for option in variant["set"])
            lines += [f"  {variant['text']}. {variant['why']}", f"    {options}"]
    if answer["variants"]:
        job = answer["job"]
        lines += ["", f"vigil spec {job} > again.toml && vigil submit again.toml --set …, then vigil cancel {job}"]
    if answer["stale"]:
        lines += ["", f"As of {local(current(answer, 'reported_at', 'told_at')) or 'never'}: {answer['stale']}"]
    return lines


def checkpoints(answer: dict[str, Any], unit: str) -> list[str]:
    """Return a line per checkpoint; `unit` is the job's unit, "step" or "round"."""
    head = [f"{unit.upper()}>", "NAME", "STATE", "SIZE>", "DURATION>", "ATTEMPT>", "PARENT>", "WRITTEN"]
    rows = [
        [
            f"{c['step']:,}",
            c["name"],
            (f"{c['state']}, pinned" if c["pinned"] else c["state"]) + (f": {c['problem']}" if c["problem"] else ""),
            formatting.disk(c["bytes"]),
            formatting.duration(c["seconds"]),
            str(c["attempt"]),
            "" if c["parent_step"] is None else f"{c['parent_step']:,}",
            local(c["created_at"]),
        ]
        for c in answer["items"]
    ]
    return table(head, rows, "No checkpoints yet.")


def metrics(
    items: list[dict[str, Any]], newest: dict[tuple[Any, ...], Any], *, units: str, superseded: bool
) -> list[str]:
    """Return a line per curve. `newest` maps (curve, last step) to the value there; `units`: "steps" or "rounds"."""
    head = ["SERIES", "NEWEST>", f"{units.upper()}>", "POINTS>"]
    rows = []
    for item in items:
        value = formatting.series_value(item["name"], newest.get((*line_of(item), item["last_step"])))
        steps = f"{item['step'][0]:,}–{item['last_step']:,}"
        rows.append([item["name"], value, steps, f"{item['count']:,}"])
        if superseded:
            rows[-1] += [str(item["attempt"]), str(item["incarnation"])]
    return table([*head, *(["ATTEMPT>", "INCARNATION>"] if superseded else [])], rows, "No metrics yet.")


def line_of(item: dict[str, Any]) -> tuple[Any, ...]:
    """Return the key of a curve: with --all, each attempt and incarnation has its own."""
    return item["name"], item.get("attempt"), item.get("incarnation")


def environment(answer: dict[str, Any]) -> list[str]:
    """Return facts, what changed, and every package on its own line, as pip writes it."""
    gpus = [gpu["name"] for gpu in answer["gpus"]]
    facts = {
        "attempt": str(answer["attempt"]),
        "captured": local(answer["captured_at"]),
        "node": answer["node"],
        "cpu": f"{answer['cpus']} × {answer['cpu'] or answer['machine']}" if answer["cpus"] else answer["cpu"],
        "memory": f"{answer['memory_gib']:g} GiB" if answer["memory_gib"] else "",
        "gpus": ", ".join(f"{gpus.count(name)} × {name}" for name in dict.fromkeys(gpus)),
        "driver": answer["driver"] + (f", CUDA {answer['cuda']}" if answer["cuda"] else ""),
        "system": ", ".join(part for part in (answer["os"], answer["kernel"], answer["machine"]) if part),
        "python": " ".join(part for part in (answer["python"], answer["executable"]) if part),
        "torch": answer["torch"] + (f" for {answer['torch_for']}" if answer["torch_for"] else ""),
        "git": f"{answer['git']} {answer['ref']}".strip(),
        "commit": answer["commit"] + (" and uncommitted changes" if answer["dirty"] else ""),
        "digest": answer["digest"],
        "vigil": f"{answer['vigil']} {answer['vigil_commit']}".strip(),
        "config": answer["config_hash"],
        "variables": ", ".join(answer["variables"]),
    }
    width = max(map(len, facts))
    lines = [f"{name.ljust(width)}  {value}" for name, value in facts.items() if value]
    if answer["changes"]:
        lines += ["", f"Changed since attempt {answer['since']}:"]
        lines += [f"  {c['what']}  {c['before'] or 'none'} → {c['after'] or 'none'}" for c in answer["changes"]]
    packages = [f"{name}=={version}" for name, version in answer["packages"].items()]
    left_out = answer["packages_left_out"]
    return [*lines, *([""] if packages else []), *packages, *([f"and {left_out:,} more"] if left_out else [])]


def findings(answer: dict[str, Any]) -> list[str]:
    text_lines = [f"{finding['level']:5}  {finding['title']}  {finding['text']}" for finding in answer["findings"]]
    return [*text_lines, *(["", *outline.lines(answer["split"])] if answer.get("split") else [])]


def steps(progress: dict[str, Any]) -> str:
    done, of = progress["step"], progress["steps"]
    return formatting.count(done) + (f"/{formatting.count(of)}" if of and done is not None else "")


def loss(job: dict[str, Any]) -> str:
    return formatting.series_value("loss", job["latest"].get("loss"))


def age(job: dict[str, Any]) -> str:
    return formatting.ago(datetime.fromisoformat(job["created_at"]))
