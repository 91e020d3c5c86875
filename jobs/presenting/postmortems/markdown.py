"""Write a post-mortem as Markdown. Log text is fenced so that nothing in it can close the fence; HTML is escaped."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any

from jobs.presenting.postmortems.cost import Cost
from jobs.presenting.postmortems.evidence import EvidencePiece
from jobs.presenting.postmortems.headline import Headline
from jobs.presenting.postmortems.rank_steps import RankSteps
from vigil_core import formatting

_SPECIAL = re.compile(r"([\\`*_\[\]!|~$]|:(?=//))")
_FIRST = re.compile(r"^(?=[-+#>=:])|^(\d{1,9})(?=[.)])")  # characters that would start a list, heading or quotation
_WORDS = {"both": "researcher or sysadmin", "nobody": "nobody has to act"}


def plain(text: object) -> str:
    """Return one line of pure text: no markup, link or HTML."""
    words = " ".join(str(text).split())
    words = words.replace("&", "&amp;").replace("<", "&lt;")
    return _FIRST.sub(r"\1\\", _SPECIAL.sub(r"\\\1", words))


def quoted(text: str) -> str:
    """Return several lines as a quotation, each of them plain."""
    return "\n".join(f"> {plain(line)}" if line.strip() else ">" for line in text.splitlines())


def fenced(text: str) -> str:
    """Return a code block whose fence is longer than any in the text."""
    clean = "".join(letter for letter in text if letter.isprintable() or letter in "\n\t")
    longest = max((len(run) for run in re.findall(r"`+", clean)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{clean}\n{fence}"


def code(text: str) -> str:
    """Return inline code."""
    clean = " ".join(text.split())
    fence = "`" * (max((len(run) for run in re.findall(r"`+", clean)), default=0) + 1)
    edge = " " if clean.startswith("`") or clean.endswith("`") else ""
    return f"{fence}{edge}{clean}{edge}{fence}"


@dataclass(frozen=True, kw_only=True)
class ActionItem:
    """An action in people's part of a post-mortem."""

    text: str
    owner: str
    due: date | None
    is_done: bool


@dataclass(frozen=True, kw_only=True)
class PostMortemText:
    """Everything that the document says."""

    job: int
    job_name: str
    attempt: int
    nodes: Sequence[str]
    state: str
    at: datetime
    is_published: bool
    headline: Headline
    cause: str
    overruled: tuple[str, str, str] | None
    """The cause according to the evidence, who overruled it, and why."""
    confidence: float | None
    reported_by: str
    owner: str
    advice: str
    unit: str
    """Unit of progress: "step" or "round"."""
    cost: Cost
    evidence: Sequence[EvidencePiece]
    verdict: Mapping[str, Any]
    rank_steps: RankSteps | None
    across_restart: str
    vigil_actions: Sequence[tuple[datetime, str]]
    narrative: str
    factors: Sequence[str]
    actions: Sequence[ActionItem]


def write(document: PostMortemText) -> str:
    """Return the whole document, for a ticket or a repository."""
    return formatting.plain_spaces("\n\n".join(_parts(document))) + "\n"


def _parts(document: PostMortemText) -> Iterator[str]:
    head, unit = document.headline, document.unit
    yield f"# Post-mortem of {plain(document.job_name)}, attempt {document.attempt}"
    where = f" on {plain(', '.join(document.nodes[:8]))}" if document.nodes else ""
    status = "Published" if document.is_published else "Draft"
    when = formatting.exact(document.at)
    yield f"\\#{document.job}.{document.attempt}{where}, {when}: {plain(document.state)}. {status}."
    yield f"**{plain(head.lead)}** {plain(head.rest)}" + (f" **What to do:** {plain(head.move)}" if head.move else "")
    yield "\n".join(f"- {name}: {plain(value)}" for name, value in _facts(document))
    yield from _evidence(document)
    if document.rank_steps is not None:
        bands = "\n".join(
            f"- {f'{unit} {formatting.count(step)}: ' if step >= 0 else ''}{plain(who)}"
            for step, who in document.rank_steps.bands
        )
        yield f"## Last {unit} by rank\n\n{plain(document.rank_steps.finding)}\n\n{bands}"
    if document.across_restart:
        yield f"## Across the restart\n\n{plain(document.across_restart)}"
    acts = "\n".join(
        f"{i}. {formatting.exact(at)}: {plain(text)}" for i, (at, text) in enumerate(document.vigil_actions, 1)
    )
    yield f"## What Vigil did\n\n{acts}"
    owner = document.owner
    yield f"## What to do\n\n{_WORDS.get(owner, owner).capitalize()}: {plain(document.advice)}"
    yield from _people(document)


def _facts(document: PostMortemText) -> Iterator[tuple[str, str]]:
    cost = document.cost
    if document.overruled is not None:
        evidence_cause, person, why = document.overruled
        yield "Cause", f"{document.cause}, by {person}: {why}"
        yield "Before that", f"{evidence_cause}, by the evidence"
    else:
        is_named = document.confidence is not None and document.cause != "unknown"
        yield "Cause", f"{document.cause}{f', {formatting.share(document.confidence)} confidence' if is_named else ''}"
    if document.reported_by and document.overruled is None:
        yield "Reported by", document.reported_by
    yield "Owner", _WORDS.get(document.owner, document.owner)
    for name, seconds in (
        ("Detected after", cost.detect_seconds),
        ("Training resumed after", cost.resume_seconds),
        ("Caught up after", cost.catch_up_seconds),
    ):
        if seconds is not None:
            yield name, formatting.duration(seconds)
    if cost.steps is not None:
        yield f"{document.unit.capitalize()}s lost", formatting.count(cost.steps)
    if cost.gpu_hours is not None:
        money = f", {cost.money_text}" if cost.money_text else ""
        yield "Cost", f"{formatting.measure(cost.gpu_hours)} GPU-h{money}"
    else:
        yield "Time lost", formatting.duration(cost.lost_seconds)


def _evidence(document: PostMortemText) -> Iterator[str]:
    if document.evidence:
        yield "## Evidence"
    for piece in document.evidence:
        when = f", {formatting.exact(piece.at)}" if piece.at else ""
        many = f", {formatting.count(piece.count)} times" if piece.count > 1 else ""
        yield f"**{plain(piece.role)}**, {plain(piece.where)}{when}{many}\n\n{fenced(piece.text)}"
    if ruled_out := document.verdict.get("ruled_out"):
        yield "**Ruled out**\n\n" + "\n".join(f"- {code(item['cause'])}: {plain(item['why'])}" for item in ruled_out)
    if unexamined := document.verdict.get("not_seen"):
        yield "**Not examined**\n\n" + "\n".join(f"- {plain(item)}" for item in unexamined)


def _people(document: PostMortemText) -> Iterator[str]:
    if document.narrative:
        yield f"## Narrative\n\n{quoted(document.narrative)}"
    if document.factors:
        yield "## Contributing factors\n\n" + "\n".join(f"- {plain(factor)}" for factor in document.factors)
    if document.actions:
        yield "## Actions\n\n" + "\n".join(map(_action, document.actions))


def _action(action: ActionItem) -> str:
    about = [plain(action.owner) if action.owner else "", f"due {action.due.isoformat()}" if action.due else ""]
    details = ", ".join(filter(None, about))
    return f"- [{'x' if action.is_done else ' '}] {plain(action.text)}" + (f" ({details})" if details else "")
