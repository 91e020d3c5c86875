"""What the command line prints for people: lines of plain text, in columns that fit their content."""

from __future__ import annotations

import shlex
from datetime import datetime
from typing import Any

from vigil_cli import outline
from vigil_core import formatting, kinds

Row = list[str]


def table(head: Row, rows: list[Row], empty: str) -> list[str]:
    """Left-aligned columns; a head that ends in ">" aligns its column right."""
    if not rows:
        return [empty]
    right = [name.endswith(">") for name in head]
    names = [name.rstrip(">") for name in head]
    widths = [max(len(row[i]) for row in [names, *rows]) for i in range(len(head))]
    lines = []
    for row in [names, *rows]:
        cells = [cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(row, widths, right, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines


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
        kinds.of(answer["kind"]).many: steps(progress) if progress["step"] is not None else "",
        "left": formatting.duration(progress["eta_seconds"]) if progress["eta_seconds"] is not None else "",
        "latest": ", ".join(f"{name} {formatting.measured(name, value)}" for name, value in answer["latest"].items()),
        "goodput": _goodput(answer.get("goodput"), kinds.of(answer["kind"]).many),
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


def _goodput(told: dict[str, Any] | None, counts: str) -> str:
    if not told:
        return ""
    useful, wall = (formatting.duration(told[f"{name}_seconds"]) for name in ("useful", "wall"))
    return f"{formatting.percent(told['fraction'])}: {useful} of {counts} in {wall}"


def profiles(answer: dict[str, Any]) -> list[str]:
    head = ["ATTEMPT>", "RANK>", "STEPS", "SIZE>", "NAME"]
    rows = []
    for told in answer["items"]:
        steps = f"{told['first_step']:,}-{told['last_step']:,}" if told["name"] else "–"
        name = told["name"] or told["problem"] or "asked for, not written yet"
        size = formatting.disk(told["bytes"]) if told["name"] else ""
        rows.append([str(told["attempt"]), str(told["rank"]), steps, size, name])
    return table(head, rows, "No profiles. Ask for one of a running job with `vigil profile ID`.")


def incidents(answer: dict[str, Any]) -> list[str]:
    head = ["JOB>", "CAUSE", "SURE>", "NODE", "WHAT HAPPENED", "WHEN"]
    rows = [
        [
            f"{one['job']}.{one['attempt']}",
            one["cause"] or "not yet",
            _sure(one),
            one["node"],
            one["says"][:100],
            local(one["at"]),
        ]
        for one in answer["items"]
    ]
    return table(head, rows, "Nothing that you can see went wrong.")


def _sure(one: dict[str, Any]) -> str:
    if one["is_overruled"]:
        return str(one.get("overruled_by") or "a person")
    return "" if one["confidence"] is None or one["cause"] == "unknown" else f"{one['confidence']:.0%}"


def counts(found: dict[str, int]) -> str:
    """ "12 completed, 4 running"."""
    return ", ".join(f"{number:,} {formatting.word(state)}" for state, number in sorted(found.items()))


def _reason(job: dict[str, Any]) -> str:
    """What the scheduler's word means; an older portal tells only the word."""
    return str(job.get("explained") or job["reason"])


def why(answer: dict[str, Any]) -> list[str]:
    """The sentence, what else is in the way, when it should start, and what would start now."""
    lines = [answer["text"]]
    if answer["said"] and answer["meaning"] != answer["text"]:
        lines.append(f"  scheduler: {answer['meaning']}")
    lines += [f"  also: {block['text']}" for block in answer["blocks"] if block["text"] != answer["text"]]
    if answer["starts_at"]:
        lines.append(f"  starts: about {local(answer['starts_at'])}, the scheduler estimates")
    if answer["state"] != "pending":
        return lines
    for starts_now, head in ((True, "Would start now:"), (False, "There would be room for:")):
        found = [variant for variant in answer["variants"] if variant["starts_now"] is starts_now]
        lines += ["", head] if found else []
        for variant in found:
            options = " ".join(f"--set {shlex.quote(option)}" for option in variant["set"])
            lines += [f"  {variant['text']}. {variant['why']}", f"    {options}"]
    if answer["variants"]:
        job = answer["job"]
        lines += ["", f"vigil spec {job} > again.toml && vigil submit again.toml --set …, then vigil cancel {job}"]
    if answer["stale"]:
        lines += ["", f"As of {local(answer['told_at']) or 'never'}: {answer['stale']}"]
    return lines


def checkpoints(answer: dict[str, Any], counts: str) -> list[str]:
    """`counts`: what the job counts."""
    head = [f"{counts.upper()}>", "NAME", "STATE", "SIZE>", "TOOK>", "ATTEMPT>", "PARENT>", "WRITTEN"]
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


def metrics(items: list[dict[str, Any]], newest: dict[tuple[Any, ...], Any], *, many: str, ghosts: bool) -> list[str]:
    """A line a curve; `newest` has the value at the last step of each, by its line and that step; `many`: what the job
    counts."""
    head = ["SERIES", "NEWEST>", f"{many.upper()}>", "POINTS>"]
    rows = []
    for item in items:
        value = formatting.measured(item["name"], newest.get((*line_of(item), item["last_step"])))
        steps = f"{item['step'][0]:,}–{item['last_step']:,}"
        rows.append([item["name"], value, steps, f"{item['count']:,}"])
        if ghosts:
            rows[-1] += [str(item["attempt"]), str(item["incarnation"])]
    return table([*head, *(["ATTEMPT>", "INCARNATION>"] if ghosts else [])], rows, "No metrics yet.")


def line_of(item: dict[str, Any]) -> tuple[Any, ...]:
    """Tells the lines of a series apart: with --all each attempt's and incarnation's is one."""
    return item["name"], item.get("attempt"), item.get("incarnation")


def environment(answer: dict[str, Any]) -> list[str]:
    """Facts, what changed, and every package on a line of its own, as pip writes it."""
    gpus = [gpu["name"] for gpu in answer["gpus"]]
    facts = {
        "attempt": str(answer["attempt"]),
        "captured": local(answer["captured_at"]),
        "node": answer["node"],
        "cpu": f"{answer['cpus']} × {answer['cpu'] or answer['machine']}" if answer["cpus"] else answer["cpu"],
        "memory": f"{answer['memory_gib']:g} GiB" if answer["memory_gib"] else "",
        "gpus": ", ".join(f"{gpus.count(name)} × {name}" for name in dict.fromkeys(gpus)),
        "driver": answer["driver"] + (f", speaks CUDA {answer['cuda']}" if answer["cuda"] else ""),
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


def notices(answer: dict[str, Any]) -> list[str]:
    """A line each, and what it leads to below."""
    lines = []
    for notice in answer["items"]:
        mark = " " if notice["read_at"] else "*"
        said = " ".join(part for part in (notice["title"], notice["detail"]) if part)
        where = f"  {notice['link']}" if notice["link"] else ""
        lines.append(f"{mark} {notice['id']:>5}  {local(notice['raised_at'])[:16]}  {said}{where}")
    return lines or ["Nothing: no notice stands."]


def tokens(answer: dict[str, Any]) -> list[str]:
    head = ["ID>", "NAME", "BEGINS", "SCOPE", "EXPIRES", "LAST USED"]
    rows = [
        [
            str(t["id"]),
            t["name"],
            f"{t['hint']}…",
            t["scope"],
            local(t["expires_at"]) + (" (expired)" if t["expired"] else ""),
            local(t["last_used_at"]) or "never",
        ]
        for t in answer["items"]
    ]
    return table(head, rows, "No tokens. Make one on the portal's page /me/.")


def findings(answer: dict[str, Any]) -> list[str]:
    told = [f"{finding['level']:5}  {finding['title']}  {finding['text']}" for finding in answer["findings"]]
    return [*told, *(["", *outline.lines(answer["split"])] if answer.get("split") else [])]


def backup(made: dict[str, Any]) -> list[str]:
    unpacked = sum(member["bytes"] for member in made["members"])
    sizes = f"{formatting.disk(made['bytes'])}; unpacked {formatting.disk(unpacked)}"
    return [
        f"Backed up to {made['file']} ({sizes}) in {made['seconds']:.1f} s.",
        f"Run directories are not in it: back {made['runs']} up with its file system.",
    ]


def restored(answer: dict[str, Any]) -> list[str]:
    lines = [f"Restored the backup of {local(answer['made_at'])} (Vigil {answer['vigil']}). Start the portal again."]
    return [*lines, *(f"What was here before is kept: {kept}" for kept in answer["kept"]), *answer["notes"]]


def steps(progress: dict[str, Any]) -> str:
    done, of = progress["step"], progress["steps"]
    return formatting.count(done) + (f"/{formatting.count(of)}" if of and done is not None else "")


def loss(job: dict[str, Any]) -> str:
    return formatting.measured("loss", job["latest"].get("loss"))


def local(time: str | None) -> str:
    return datetime.fromisoformat(time).astimezone().strftime("%Y-%m-%d %H:%M:%S") if time else ""


def age(job: dict[str, Any]) -> str:
    return formatting.ago(datetime.fromisoformat(job["created_at"]))
