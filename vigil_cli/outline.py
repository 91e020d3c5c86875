"""Preview how a federation's data is split: a text bar per client, and its most common label. No Django here."""

from __future__ import annotations

from typing import Any

from vigil_core import formatting

LINES = 20
BAR = 32
MAX_NAME = 24  # maximum length of a name


def lines(split: dict[str, Any]) -> list[str]:
    """Return a line per client for the first ones, then how many more there are and the spread over all."""
    labels, shown = split["labels"], split["items"][:LINES]
    most = max((client["samples"] for client in shown), default=0)
    rows = [_row(client, most, labels) for client in shown]
    names = ["CLIENT", "SAMPLES", "", "MOST OF" if len(labels) > 1 else ""]
    widths = [max(len(row[i]) for row in [names, *rows]) for i in range(3)]
    text_lines = [
        f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:<{widths[2]}}  {row[3]}".rstrip()
        for row in [names, *rows]
    ]
    left_out = split["clients"] - len(shown)
    return text_lines if left_out <= 0 else [*text_lines, _rest(split, left_out)]


def _row(client: dict[str, Any], most: int, labels: list[str]) -> list[str]:
    most_common = max(client["split"], default=0)
    what = ""
    if len(labels) > 1 and client["samples"]:
        label = _cut(labels[client["split"].index(most_common)])
        what = f"{label} · {formatting.share(most_common / client['samples'])}"
    bar = "█" * round(BAR * client["samples"] / most) if most else ""
    name = f" {_cut(client['name'])}" if client["name"] else ""
    return [f"{formatting.count(client['number'])}{name}", formatting.count(client["samples"]), bar or "▏", what]


def _rest(split: dict[str, Any], left_out: int) -> str:
    of_all = split["spreads"]["samples"]
    least, middle, most = (formatting.count(round(of_all[name])) for name in ("min", "median", "max"))
    more_clients = formatting.plural(left_out, "more client")
    in_data = min(split["clients"], len(split["items"]))
    return f"… and {more_clients}. All clients: {least}–{most} samples each, median {middle}; --json lists {in_data:,}."


def _cut(text: str) -> str:
    return text if len(text) <= MAX_NAME else f"{text[: MAX_NAME - 1]}…"
