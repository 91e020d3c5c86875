"""Print a comparison as a table for the terminal: a column per candidate, a line per figure."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import zip_longest

from training.compare.results import CandidateResult, Comparison

GAP = "   "


def table(comparison: Comparison) -> str:
    return "\n".join([_title(comparison), "", *_lines(comparison), *_failures(comparison)])


def _title(comparison: Comparison) -> str:
    parts = [
        comparison.name,
        f"{comparison.ranks} rank{'s' * (comparison.ranks > 1)}",
        f"{comparison.steps} steps",
        f"{comparison.rounds} round{'s' * (comparison.rounds > 1)}",
        f"seed {comparison.seed}",
    ]
    if comparison.ran:
        run = comparison.baseline.runs[0]
        parts[2] = f"{comparison.steps} steps of {run.units_per_step:,} {run.unit}"
        parts[1] += f" on {run.device}"
    return f"{', '.join(parts)}\n{comparison.machine}"


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


def _figures(comparison: Comparison) -> list[tuple[str, Callable[[CandidateResult], str]]]:
    unit = comparison.baseline.runs[0].unit
    on_gpu = comparison.baseline.runs[0].device == "cuda"
    memory = "peak memory per rank" if on_gpu else "peak memory per rank, beyond imports"
    last = max(comparison.baseline.losses)
    return [
        ("mesh", lambda result: _mesh(result.runs[0].mesh)),
        (f"{unit}/s per rank", lambda result: f"{result.rate:,.0f}"),
        (f"  relative to {comparison.baseline.name}, median", lambda result: _ratio(comparison, result)),
        ("  lowest to highest", lambda result: _spread(comparison, result)),
        ("step", lambda result: seconds(result.step_seconds)),
        (memory, lambda result: size(result.peak_bytes)),
        (f"loss at step {last}", lambda result: f"{result.losses.get(last, float('nan')):.6f}"),
        ("  largest difference", lambda result: _difference(comparison, result)),
        ("checkpoint, stall", lambda result: seconds(result.stall_seconds)),
        ("checkpoint, write time", lambda result: seconds(result.write_seconds)),
        ("checkpoint, size", lambda result: size(result.checkpoint_bytes)),
        (
            "sent per rank and step",
            lambda result: "unknown" if result.sent_mib is None else f"{result.sent_mib:.2f} MiB",
        ),
    ]


def _mesh(mesh: dict[str, int]) -> str:
    return " × ".join(f"{axis} {count}" for axis, count in mesh.items()) or "one rank"


def _ratio(comparison: Comparison, result: CandidateResult) -> str:
    ratios = comparison.ratios(result)
    if result is comparison.baseline or not ratios:
        return "–"
    return f"{statistics.median(ratios):.3f}×"


def _spread(comparison: Comparison, result: CandidateResult) -> str:
    ratios = comparison.ratios(result)
    if result is comparison.baseline or not ratios:
        return "–"
    return f"{min(ratios):.3f}–{max(ratios):.3f}"


def _difference(comparison: Comparison, result: CandidateResult) -> str:
    if result is comparison.baseline:
        return "–"
    difference, step = comparison.loss_difference(result)
    return f"{difference:.2g} at step {step}" if difference else "0"


def _failures(comparison: Comparison) -> list[str]:
    lines = [f"{result.name} failed: {result.failure}" for result in comparison.results if result.failure]
    return ["", *lines] if lines else []


def seconds(value: float) -> str:
    """Format a duration with three significant digits."""
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"


def size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:,.2f} GiB"
