"""Draw a comparison as a chart: bars with a dot for each round, and loss curves. Plain SVG, no library.

The colours are those of the portal (static/css/tokens.css), for the light and the dark theme.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from training.compare.results import CandidateResult, Comparison
from training.compare.table import seconds, size

WIDTH, MARGIN, GAP = 880, 24, 24
ROW_HEIGHT, BAR_HEIGHT = 30, 12
HEADER_HEIGHT = 64
CURVES_HEIGHT = 220
LETTER_WIDTH = 6.6  # average width of a letter in px

_LIGHT_COLOURS = ("#fdfdfb", "#181b1e", "#4f5358", "#e6e6e2")
_DARK_COLOURS = ("#0f1217", "#e4e8ee", "#a6adb7", "#232830")
SERIES_COLOURS = (
    ("#2a86e6", "#2f8dea"),
    ("#a54f00", "#e29226"),
    ("#047969", "#5dad92"),
    ("#db54b6", "#c94a9f"),
    ("#8a9430", "#7d8104"),
    ("#6845a5", "#c3a2ff"),
    ("#01445e", "#96e7ff"),
    ("#682a09", "#fec4aa"),
)


@dataclass(frozen=True)
class _BarPanel:
    title: str
    bars: list[float | None]
    dots: list[list[float]]
    format: Callable[[float], str]


def draw(comparison: Comparison) -> str:
    """Return the SVG file. At least one candidate must have run."""
    results = comparison.ran
    panels = _panels(comparison)
    panel_height = 26 + ROW_HEIGHT * len(results)
    rows = -(-len(panels) // 2)
    top = HEADER_HEIGHT + rows * (panel_height + GAP)
    height = top + CURVES_HEIGHT + MARGIN
    panel_width = (WIDTH - 2 * MARGIN - GAP) // 2
    parts = [svg_header(height), text(MARGIN, 30, _heading(comparison), "title"), text(MARGIN, 50, comparison.machine)]
    for number, panel in enumerate(panels):
        x, y = MARGIN + (number % 2) * (panel_width + GAP), HEADER_HEIGHT + (number // 2) * (panel_height + GAP)
        parts += _bars(panel, results, x, y, panel_width)
    parts += _curves(results, MARGIN, top, WIDTH - 2 * MARGIN, CURVES_HEIGHT)
    return "\n".join([*parts, "</svg>", ""])


def _heading(comparison: Comparison) -> str:
    names = " vs ".join(result.name for result in comparison.ran)
    device = comparison.baseline.runs[0].device
    return f"{names}: {comparison.name}, {comparison.ranks} ranks on {device}"


def _panels(comparison: Comparison) -> list[_BarPanel]:
    ran, unit = comparison.ran, comparison.baseline.runs[0].unit
    panels = [
        _BarPanel(
            f"{unit}/s per rank",
            [result.rate for result in ran],
            [result.rates for result in ran],
            lambda rate: f"{rate:,.0f}",
        ),
        _BarPanel(
            "peak memory per rank",
            [float(result.peak_bytes) for result in ran],
            [[float(max(run.peak_bytes)) for run in result.runs] for result in ran],
            size,
        ),
        _BarPanel(
            "training stalled by a checkpoint",
            [result.stall_seconds for result in ran],
            [[run.stall_seconds for run in result.runs] for result in ran],
            seconds,
        ),
    ]
    sent = [None if result.sent_mib is None else result.sent_mib * 2**20 for result in ran]
    return [*panels, _BarPanel("sent per rank and step", sent, [[] for _ in ran], size)]


def svg_header(height: int) -> str:
    def variables(theme: Sequence[str], theme_index: int) -> str:
        names = dict(zip(("bg", "ink", "muted", "line"), theme, strict=True))
        names |= {f"series-{number}": pair[theme_index] for number, pair in enumerate(SERIES_COLOURS, 1)}
        return "".join(f"--{name}:{colour};" for name, colour in names.items())

    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">\n'
        "<style>\n"
        f":root{{{variables(_LIGHT_COLOURS, 0)}}}\n"
        f"@media (prefers-color-scheme:dark){{:root{{{variables(_DARK_COLOURS, 1)}}}}}\n"
        "rect.ground{fill:var(--bg)} text{fill:var(--muted);font:12px Inter,system-ui,sans-serif;"
        "font-variant-numeric:tabular-nums} text.title{fill:var(--ink);font-size:15px;font-weight:600}"
        " text.head{fill:var(--ink);font-weight:600} text.value{fill:var(--ink)} text.end{text-anchor:end}"
        " line{stroke:var(--line)} polyline{fill:none;stroke-width:1.5} circle{fill:var(--bg);stroke:var(--ink)}\n"
        "</style>\n"
        f'<rect class="ground" width="{WIDTH}" height="{height}"/>'
    )


def _series_colour(index: int) -> str:
    return f"var(--series-{index % len(SERIES_COLOURS) + 1})"


def text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}"' + f' class="{kind}"' * bool(kind) + f">{escape(words)}</text>"


def _bars(panel: _BarPanel, results: list[CandidateResult], x: int, y: int, width: int) -> list[str]:
    """Draw a bar from 0 for each candidate; small circles are its rounds."""
    name_width = min(130.0, max(len(result.name) for result in results) * LETTER_WIDTH + 12)
    maximum = max([value for value in panel.bars if value], default=1.0)
    maximum = max([maximum, *(dot for dots in panel.dots for dot in dots)]) or 1.0
    value_width = 84
    available = width - name_width - value_width
    parts = [text(x, y + 12, panel.title, "head")]
    for index, (result, value, dots) in enumerate(zip(results, panel.bars, panel.dots, strict=True)):
        middle = y + 34 + index * ROW_HEIGHT
        parts.append(text(x, middle + 4, result.name))
        if value is None:
            parts.append(text(x + name_width, middle + 4, "unknown"))
            continue
        length = max(1.0, available * value / maximum)
        colour = _series_colour(index)
        parts.append(
            f'<rect x="{x + name_width:.1f}" y="{middle - BAR_HEIGHT / 2}" width="{length:.1f}" height="{BAR_HEIGHT}" '
            f'rx="2" style="fill:{colour}"/>'
        )
        if len(dots) > 1:
            parts += [
                f'<circle cx="{x + name_width + available * dot / maximum:.1f}" cy="{middle}" r="2.5"/>' for dot in dots
            ]
        parts.append(text(x + width, middle + 4, panel.format(value), "value end"))
    return parts


def _curves(results: list[CandidateResult], x: int, y: int, width: int, height: int) -> list[str]:
    """Draw losses by step on common axes."""
    points = [value for result in results for value in result.losses.values() if math.isfinite(value)]
    if not points:
        return []
    low, high = min(points), max(points)
    high = high if high > low else low + 1.0
    steps = [step for result in results for step in result.losses]
    first, last = min(steps), max(max(steps), min(steps) + 1)
    left, top, bottom = x + 56, y + 26, y + height - 22

    def point(step: int, loss: float) -> str:
        point_x = left + (x + width - left) * (step - first) / (last - first)
        return f"{point_x:.1f},{bottom - (bottom - top) * (loss - low) / (high - low):.1f}"

    parts = [text(x, y + 12, "loss", "head")]
    for share in (0.0, 0.5, 1.0):
        level = bottom - (bottom - top) * share
        parts.append(f'<line x1="{left}" x2="{x + width}" y1="{level:.1f}" y2="{level:.1f}"/>')
        parts.append(text(left - 8, level + 4, f"{low + (high - low) * share:.4g}", "end"))
    parts += [text(left, bottom + 18, f"step {first}"), text(x + width, bottom + 18, f"{last}", "end")]
    for index, result in enumerate(results):
        line = " ".join(point(step, loss) for step, loss in result.losses.items() if math.isfinite(loss))
        dashes = f' stroke-dasharray="{6} {6 * index}"' if index else ""  # so that identical lines are both visible
        parts.append(f'<polyline points="{line}"{dashes} style="stroke:{_series_colour(index)}"/>')
    return parts
