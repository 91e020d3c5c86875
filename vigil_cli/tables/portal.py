"""Print notifications, API tokens and backups of the portal."""

from __future__ import annotations

from typing import Any

from vigil_cli.tables.columns import local, table
from vigil_core import formatting


def notices(answer: dict[str, Any]) -> list[str]:
    """Return a line per notification."""
    lines = []
    for notice in answer["items"]:
        mark = " " if notice["read_at"] else "*"
        text = " ".join(part for part in (notice["title"], notice["detail"]) if part)
        where = f"  {notice['link']}" if notice["link"] else ""
        lines.append(f"{mark} {notice['id']:>5}  {local(notice['raised_at'])[:16]}  {text}{where}")
    return lines or ["No active notifications."]


def tokens(answer: dict[str, Any]) -> list[str]:
    head = ["ID>", "NAME", "PREFIX", "SCOPE", "EXPIRES", "LAST USED"]
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
    return table(head, rows, "No tokens. Create one on the portal's page /me/.")


def backup(made: dict[str, Any]) -> list[str]:
    unpacked = sum(member["bytes"] for member in made["members"])
    sizes = f"{formatting.disk(made['bytes'])}; unpacked {formatting.disk(unpacked)}"
    return [
        f"Backed up to {made['file']} ({sizes}) in {made['seconds']:.1f} s.",
        f"Run directories are not included: back up {made['runs']} with its file system.",
    ]


def restored(answer: dict[str, Any]) -> list[str]:
    lines = [f"Restored the backup of {local(answer['made_at'])} (Vigil {answer['vigil']}). Start the portal again."]
    return [*lines, *(f"The previous data was kept: {path}" for path in answer["previous_data"]), *answer["notes"]]
