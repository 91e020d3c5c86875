"""How a federation's data would lie, in letters: a bar a client, and what it has most of. No Django here."""

from __future__ import annotations

from typing import Any

from vigil_core import formatting

LINES = 20
BAR = 32
LETTERS = 24  # of a name


def lines(split: dict[str, Any]) -> list[str]:
    """Some clients one by one; of the others how many there are, and what all of them have."""
    labels, shown = split["labels"], split["items"][:LINES]
    most = max((one["samples"] for one in shown), default=0)
    rows = [_row(one, most, labels) for one in shown]
    names = ["CLIENT", "SAMPLES", "", "MOST OF" if len(labels) > 1 else ""]
    widths = [max(len(row[i]) for row in [names, *rows]) for i in range(3)]
    told = [
        f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:<{widths[2]}}  {row[3]}".rstrip()
        for row in [names, *rows]
    ]
    left_out = split["clients"] - len(shown)
    return told if left_out <= 0 else [*told, _rest(split, left_out)]


def _row(one: dict[str, Any], most: int, labels: list[str]) -> list[str]:
    commonest = max(one["split"], default=0)
    what = ""
    if len(labels) > 1 and one["samples"]:
        label = _cut(labels[one["split"].index(commonest)])
        what = f"{label} · {formatting.share(commonest / one['samples'])}"
    bar = "█" * round(BAR * one["samples"] / most) if most else ""
    name = f" {_cut(one['name'])}" if one["name"] else ""
    return [f"{formatting.count(one['number'])}{name}", formatting.count(one["samples"]), bar or "▏", what]


def _rest(split: dict[str, Any], left_out: int) -> str:
    of_all = split["spreads"]["samples"]
    least, middle, most = (formatting.count(round(of_all[name])) for name in ("min", "median", "max"))
    told = formatting.plural(left_out, "more client")
    in_data = min(split["clients"], len(split["items"]))
    return f"… and {told}. All together: {least} to {most} samples each, median {middle}; --json has {in_data:,}."


def _cut(text: str) -> str:
    return text if len(text) <= LETTERS else f"{text[: LETTERS - 1]}…"
