"""Compare all algorithms of training/federated/algorithms on one split, and Newton-type ones on convex models.

`python -m bench federated --gallery` writes federated-gallery.md, its .svg and federated-newton.svg in docs/reference/.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import stage
from bench.federated_ours import running
from training.compare.picture import GAP, LETTER_WIDTH, MARGIN, SERIES_COLOURS, WIDTH, svg_header, text

if TYPE_CHECKING:
    from training.federated.rounds import Rounds

CLIENTS, ROUNDS = 10, 30
ENOUGH = 0.9
COMMON: dict[str, Any] = {"recipe": "tabular", "clients": CLIENTS, "batch": 32, "validate_every": 0}
DIGITS = {**COMMON, "learning_rate": 0.3, "split": "dirichlet", "dirichlet": {"alpha": 0.3}}
NORMALISED = {**DIGITS, "tabular": {"batch_norm": True}}
OPTIONS: dict[str, dict[str, Any]] = {"diloco": {"learning_rate": 0.003}}
"""Options where the common learning rate makes no sense: AdamW's steps have another length."""
NOTES = Path(__file__).with_name("federated_gallery_notes.md")
"""Notes on q-FedAvg below its table: measured separately, because it needs more rounds than others."""
BASELINE = "fedavg"
"""The algorithm that each table has for comparison."""
CONVEX = {
    **COMMON, "ridge": 1e-3, "dtype": "fp64", "tabular": {"source": "breast_cancer", "model": "logistic"},
}  # fmt: skip
SKETCHES = (8, 15, 31)
BEST_ROUNDS = 60
"""Of FedNewton, for the least that there is."""
LEAST = 1e-12
"""What is below is the arithmetic's own noise."""
HEIGHT, LEGEND = 300, 18
DASHES = ("", "7 4", "2 3", "9 3 2 3")
"""More lines than colours: the next ones are broken."""
MB = 1e6


@dataclass
class Course:
    """The course of one algorithm, round by round, from before the first."""

    name: str
    clients_selected: int
    """Clients that are selected in a round."""
    accuracies: list[float] = field(default_factory=list)
    objectives: list[float] = field(default_factory=list)
    """The mean loss over all training samples, including the ridge."""
    up: list[int] = field(default_factory=list)
    down: list[int] = field(default_factory=list)
    """Bytes of all rounds so far."""
    seconds: float = 0.0
    worst: float = math.nan

    @property
    def enough(self) -> float | None:
        """Return the rounds until ENOUGH, in units in which each client is selected once on average."""
        reached = next((number for number, accuracy in enumerate(self.accuracies) if accuracy >= ENOUGH), None)
        return None if reached is None else reached * self.clients_selected / CLIENTS


def write(folder: Path, *, rounds: int = ROUNDS, only: Sequence[str] = ()) -> int:
    from training.config import choices

    there = [name for name, choice in choices.describe("federated.algorithms").items() if not choice.is_open]
    names = [name for name in there if not only or name in only]
    text = [f"# Federated algorithms compared\n\n`python -m bench federated --gallery`, {stage.machine()}."]
    drawn: list[tuple[str, list[Course]]] = []
    refused: dict[str, str] = dict.fromkeys(names, "")
    kinds = (
        (
            f"digits, {CLIENTS} clients, Dirichlet 0.3, a network with one hidden layer, rate 0.3 (DiLoCo: 0.003)",
            DIGITS,
        ),
        ("the same network, normalised over batches", NORMALISED),
        (f"breast_cancer, {CLIENTS} clients, divided evenly, logistic regression, ridge 0.001, fp64", CONVEX),
    )
    for title, table in kinds:
        courses, left = [], {}
        for name in refused if not drawn or not refused or BASELINE not in names else [BASELINE, *refused]:
            try:
                courses.append(_run(name, table, rounds))
                print(_row(courses[-1]), flush=True)
            except _InvalidCombination as error:
                left[name] = str(error)
            except Exception as error:  # the others can still be told of
                print(f"  {name} failed: {error}", flush=True)
                left[name] = f"failed: {' '.join(str(error).split())[:200]}"
        if not drawn or any(course.name != BASELINE for course in courses):
            text.append(f"## {title[0].upper()}{title[1:]}\n\n{_table(courses, rounds)}")
            if any(course.name == "qfedavg" for course in courses):
                text.append(NOTES.read_text().strip())
            drawn.append((title, courses))
        refused = left
    if refused:
        lines = "\n".join(f"- {name}: {why}" for name, why in refused.items())
        text.append(f"## Not on these\n\n{lines}")
    text.insert(1, "![Accuracy by rounds](federated-gallery.svg)")
    (folder / "federated-gallery.md").write_text("\n\n".join(text) + "\n")
    (folder / "federated-gallery.svg").write_text(_gallery(drawn))
    if not only or "flens" in only:
        (folder / "federated-newton.svg").write_text(_newton(rounds))
    print(f"written: {folder}/federated-gallery.md, federated-gallery.svg, federated-newton.svg")
    return 0


class _InvalidCombination(Exception):
    """Raised for an algorithm that does not support the setup."""


def _run(name: str, table: dict[str, Any], rounds: int, *, label: str = "", **more: Any) -> Course:
    """Run a federation from its first round to its last."""
    from training.config import choices
    from training.federation import config, config_checks

    options = {**table, "algorithm": name, "rounds": rounds, **OPTIONS.get(name, {}), **more}
    each = CLIENTS
    if "asynchronous" in (choices.get(config.FOLDERS["algorithm"], name).constants.get("PACES") or ()):  # type: ignore[operator]
        options |= {"pace": "asynchronous", "rounds": rounds * CLIENTS}
        each = 1
    settings = config.parse(options)
    if problems := list(config_checks.problems(settings, 1)):
        raise _InvalidCombination("; ".join(problem.message for problem in problems))
    course = Course(label or name, each)

    def began(rounds: Rounds) -> None:
        _note(course, rounds, 0, 0)

    def after(rounds: Rounds) -> None:
        report = rounds._report
        course.seconds += report.seconds
        _note(course, rounds, report.traffic.bytes_up, report.traffic.bytes_down)

    with running(options, began=began, after=after) as run, contextlib.redirect_stdout(io.StringIO()):
        run()
    return course


def _note(course: Course, rounds: Rounds, up: int, down: int) -> None:
    judged = rounds.evaluator.evaluate(rounds.server, should_continue=lambda: True)
    assert judged is not None
    import numpy as np

    course.accuracies.append(judged.means.get("accuracy", math.nan))
    course.worst = float(np.nanmin(judged.by_client["accuracy"]))
    course.objectives.append(_objective(rounds))
    course.up.append((course.up or [0])[-1] + up)
    course.down.append((course.down or [0])[-1] + down)


def _objective(rounds: Rounds) -> float:
    import numpy as np
    import torch
    from torch.func import functional_call

    model, weights = rounds.federation.model, rounds.server.weights
    batch = model.task.batch("train", np.arange(len(rounds.federation.divided.owners["train"])))
    tensors = {**model.weights.tensors(weights), **model.statistics.tensors(rounds.server.statistics.clone())}
    with torch.no_grad():
        loss = model.task.loss(lambda *inputs: functional_call(model.task.model, tensors, inputs), batch)
    return float(loss + rounds.config.ridge / 2 * weights.square().sum())


def _table(courses: Sequence[Course], rounds: int) -> str:
    head = (
        f"After {rounds} rounds, or as many updates of single clients at a pace that does not wait. There, the\n"
        f"arrival of one client counts as a {CLIENTS}th of a round.\n\n"
        f"| algorithm | accuracy | worst client | rounds to {ENOUGH} | MB up | MB down | seconds |\n"
        "| --- | --- | --- | --- | --- | --- | --- |\n"
    )
    return head + "\n".join(_row(course) for course in sorted(courses, key=lambda course: -course.accuracies[-1]))


def _row(course: Course) -> str:
    enough = "–" if course.enough is None else f"{course.enough:g}"
    sent = f"{course.up[-1] / MB:.2f} | {course.down[-1] / MB:.2f}"
    return (
        f"| {course.name} | {course.accuracies[-1]:.3f} | {course.worst:.3f} | {enough} | {sent} | "
        f"{course.seconds:.1f} |"
    )


@dataclass(frozen=True)
class Panel:
    """A drawing of lines by name over one measure."""

    title: str
    across: str
    lines: dict[str, list[tuple[float, float]]]
    is_log: bool = False


def _gallery(drawn: Sequence[tuple[str, Sequence[Course]]]) -> str:
    panels = []
    for title, courses in drawn:
        lines = {
            course.name: [
                (number * course.clients_selected / CLIENTS, value) for number, value in enumerate(course.accuracies)
            ]
            for course in courses
        }
        panels.append(Panel(f"accuracy: {title.split(',')[0]}", "rounds", lines))
    return draw("Federated algorithms on the same split", f"{CLIENTS} clients", panels)


def _newton(rounds: int) -> str:
    """Return f − f* of the Newton-type algorithms, by rounds and by bytes."""
    courses = [_run("fedavg", CONVEX, rounds, label="FedAvg"), _run("fednewton", CONVEX, rounds, label="FedNewton")]
    for name, label in (("fedns", "FedNS"), ("flens", "FLeNS")):
        for k in SKETCHES if name == "flens" else SKETCHES[1:2]:
            courses.append(_run(name, CONVEX, rounds, label=f"{label}, {k} rows", **{name: {"rows": k}}))
    best = _run("fednewton", CONVEX, BEST_ROUNDS)
    least = min(value for course in [*courses, best] for value in course.objectives)
    panels = []
    for across in ("rounds", "MB, both ways"):
        lines = {
            course.name: [
                (number if across == "rounds" else (up + down) / MB, max(value - least, LEAST))
                for number, (value, up, down) in enumerate(zip(course.objectives, course.up, course.down, strict=True))
            ]
            for course in courses
        }
        panels.append(Panel("f − f*", across, lines, is_log=True))
    for item in courses:
        reached = next((n for n, value in enumerate(item.objectives) if value - least < 1e-8), None)
        print(f"  {item.name}: f − f* < 1e-8 after {reached} rounds, at last {item.objectives[-1] - least:.1e}")
    return draw("Newton's kind on breast_cancer", f"{CLIENTS} clients, logistic regression, ridge 0.001, fp64", panels)


def draw(title: str, about: str, panels: Sequence[Panel]) -> str:
    """Return the whole file."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    each = (WIDTH - 2 * MARGIN) // 4
    legend = 64 + LEGEND * -(-len(names) // 4)
    height = legend + len(panels) * (HEIGHT + GAP) + MARGIN
    parts = [svg_header(height), text(MARGIN, 30, title, "title"), text(MARGIN, 50, about)]
    for index, name in enumerate(names):
        x, y = MARGIN + index % 4 * each, 74 + LEGEND * (index // 4)
        shown = name if len(name) * LETTER_WIDTH < each - 34 else name[: int((each - 34) / LETTER_WIDTH)] + "…"
        parts.append(f'<polyline points="{x},{y - 4} {x + 22},{y - 4}" {_style(index)}/>{text(x + 28, y, shown)}')
    for number, panel in enumerate(panels):
        parts += _lines(panel, names, MARGIN, legend + GAP // 2 + number * (HEIGHT + GAP), WIDTH - 2 * MARGIN)
    return "\n".join([*parts, "</svg>", ""])


def _style(index: int) -> str:
    dashes = DASHES[index // len(SERIES_COLOURS) % len(DASHES)]
    broken = f' stroke-dasharray="{dashes}"' * bool(dashes)
    return f'style="stroke:var(--series-{index % len(SERIES_COLOURS) + 1})"{broken}'


def _lines(panel: Panel, names: Sequence[str], x: int, y: int, width: int) -> Iterator[str]:
    def scaled(value: float) -> float:
        return math.log10(value) if panel.is_log else value

    points = [(a, scaled(b)) for line in panel.lines.values() for a, b in line if math.isfinite(b)]
    low, high = min(b for _, b in points), max(b for _, b in points)
    high = high if high > low else low + 1.0
    last = max(a for a, _ in points) or 1.0
    left, top, bottom = x + 56, y + 26, y + HEIGHT - 22
    yield text(x, y + 12, panel.title, "head")
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        level, value = bottom - (bottom - top) * share, low + (high - low) * share
        yield f'<line x1="{left}" x2="{x + width}" y1="{level:.1f}" y2="{level:.1f}"/>'
        yield text(left - 8, level + 4, f"{10**value:.0e}" if panel.is_log else f"{value:.2f}", "end")
    yield text(left, bottom + 18, f"0 {panel.across}")
    yield text(x + width, bottom + 18, f"{last:.4g}", "end")

    def at(across: float, value: float) -> str:
        down = bottom - (bottom - top) * (scaled(value) - low) / (high - low)
        return f"{left + (x + width - left) * across / last:.1f},{down:.1f}"

    for index, name in enumerate(names):
        line = " ".join(at(a, b) for a, b in panel.lines.get(name, ()) if math.isfinite(b))
        if line:
            yield f'<polyline points="{line}" {_style(index)}><title>{escape(name)}</title></polyline>'
