"""A comparison as a table for the terminal: a column for each candidate, a line for each figure."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import zip_longest

from training.compare.results import Comparison, Result

GAP = "   "


def table(comparison: Comparison) -> str:
    return "\n".join([_title(comparison), "", *_lines(comparison), *_failures(comparison)])


def _title(comparison: Comparison) -> str:
    about = [
        comparison.name,
        f"{comparison.ranks} rank{'s' * (comparison.ranks > 1)}",
        f"{comparison.steps} steps",
        f"{comparison.rounds} round{'s' * (comparison.rounds > 1)}",
        f"seed {comparison.seed}",
    ]
    if comparison.ran:
        run = comparison.first.runs[0]
        about[2] = f"{comparison.steps} steps of {run.units_per_step:,} {run.unit}"
        about[1] += f" on {run.device}"
    return f"{', '.join(about)}\n{comparison.machine}"


def _lines(comparison: Comparison) -> list[str]:
    if not comparison.ran:
        return []
    rows = [["", *(result.name for result in comparison.ran)]]
    rows += [[label, *map(figure, comparison.ran)] for label, figure in _figures(comparison)]
    widths = [max(map(len, column)) for column in zip_longest(*rows, fillvalue="")]
    return [
        GAP.join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]


def _figures(comparison: Comparison) -> list[tuple[str, Callable[[Result], str]]]:
    unit = comparison.first.runs[0].unit
    memory = "peak memory a rank" if comparison.first.runs[0].device == "cuda" else "peak memory a rank, above imports"
    last = max(comparison.first.losses)
    return [
        ("mesh", lambda result: _mesh(result.runs[0].mesh)),
        (f"{unit}/s a rank", lambda result: f"{result.rate:,.0f}"),
        (f"  beside {comparison.first.name}, median", lambda result: _ratio(comparison, result)),
        ("  lowest to highest", lambda result: _spread(comparison, result)),
        ("step", lambda result: seconds(result.step_seconds)),
        (memory, lambda result: size(result.peak_bytes)),
        (f"loss at step {last}", lambda result: f"{result.losses.get(last, float('nan')):.6f}"),
        ("  largest difference", lambda result: _difference(comparison, result)),
        ("checkpoint, stands still", lambda result: seconds(result.stall_seconds)),
        ("checkpoint, written in", lambda result: seconds(result.write_seconds)),
        ("checkpoint, size", lambda result: size(result.checkpoint_bytes)),
        (
            "sent a step by a rank",
            lambda result: "not known" if result.sent_mib is None else f"{result.sent_mib:.2f} MiB",
        ),
    ]


def _mesh(mesh: dict[str, int]) -> str:
    return " × ".join(f"{axis} {count}" for axis, count in mesh.items()) or "one rank"


def _ratio(comparison: Comparison, result: Result) -> str:
    ratios = comparison.ratios(result)
    if result is comparison.first or not ratios:
        return "–"
    return f"{statistics.median(ratios):.3f}×"


def _spread(comparison: Comparison, result: Result) -> str:
    ratios = comparison.ratios(result)
    if result is comparison.first or not ratios:
        return "–"
    return f"{min(ratios):.3f}–{max(ratios):.3f}"


def _difference(comparison: Comparison, result: Result) -> str:
    if result is comparison.first:
        return "–"
    difference, step = comparison.loss_difference(result)
    return f"{difference:.2g} at step {step}" if difference else "0"


def _failures(comparison: Comparison) -> list[str]:
    lines = [f"{result.name} failed: {result.failure}" for result in comparison.results if result.failure]
    return ["", *lines] if lines else []


def seconds(value: float) -> str:
    """A duration with three figures that count."""
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"


def size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:,.2f} GiB"
