"""Write a post-mortem as Markdown. Log text is fenced so that nothing in it can close the fence; HTML is escaped."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from vigil_core import formatting

if TYPE_CHECKING:
    from jobs.gathering.postmortem import Document

_SPECIAL = re.compile(r"([\\`*_\[\]!|~$]|:(?=//))")
_FIRST = re.compile(r"^(?=[-+#>=:])|^(\d{1,9})(?=[.)])")  # what would make a line a list, a heading, a quotation
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


def write(document: Document) -> str:
    """Return the whole document, for a ticket or a repository."""
    return "\n\n".join(_parts(document)).replace(formatting.NBSP, " ") + "\n"


def _parts(document: Document) -> Iterator[str]:
    incident, attempt, job = document.incident, document.attempt, document.job
    head = document.headline
    yield f"# Post-mortem of {plain(job.name)}, attempt {attempt.number}"
    where = f" on {plain(', '.join(attempt.nodes[:8]))}" if attempt.nodes else ""
    state = "published" if incident.published_at else "draft"
    when = formatting.exact(incident.at)
    yield f"\\#{job.pk}.{attempt.number}{where}, {when}: {plain(attempt.state)}. {state.capitalize()}."
    yield f"**{plain(head.lead)}** {plain(head.rest)}" + (f" **Your move:** {plain(head.move)}" if head.move else "")
    yield "\n".join(f"- {name}: {plain(value)}" for name, value in _facts(document))
    yield from _evidence(document)
    if document.rank_steps is not None:
        counts = job.of_kind.counts
        bands = "\n".join(
            f"- {f'{counts} {formatting.count(step)}: ' if step >= 0 else ''}{plain(who)}"
            for step, who in document.rank_steps.bands
        )
        yield f"## Last {counts} by rank\n\n{plain(document.rank_steps.finding)}\n\n{bands}"
    if document.curve is not None:
        yield f"## Across the restart\n\n{plain(document.curve.words)}"
    acts = "\n".join(
        f"{i}. {formatting.exact(act.at)}: {plain(act.text)}{f', {plain(act.more)}' if act.more else ''}"
        for i, act in enumerate(document.acts, 1)
    )
    yield f"## What Vigil did\n\n{acts}"
    owner = document.cause.owner
    yield f"## What to do\n\n{_WORDS.get(owner, owner).capitalize()}: {plain(document.advice)}"
    yield from _people(document)


def _facts(document: Document) -> Iterator[tuple[str, str]]:
    incident, cost = document.incident, document.cost
    if incident.is_overruled:
        yield "Cause", f"{incident.cause}, by {incident.overruled_by or 'somebody'}: {incident.overruled_why}"
        yield "Before that", f"{document.machine_cause}, by the evidence"
    else:
        sure = f", {formatting.share(incident.confidence)} sure" if incident.confidence is not None else ""
        yield "Cause", f"{document.cause.code}{sure if document.cause.code != 'unknown' else ''}"
    if document.reported_by and not incident.is_overruled:
        yield "Reported by", document.reported_by
    yield "Owner", _WORDS.get(document.cause.owner, document.cause.owner)
    for name, seconds in (
        ("Noticed after", cost.detect_seconds),
        ("Trained again after", cost.again_seconds),
        ("Caught up after", cost.catch_up_seconds),
    ):
        if seconds is not None:
            yield name, formatting.duration(seconds)
    if cost.steps is not None:
        yield f"{document.job.of_kind.many.capitalize()} lost", formatting.count(cost.steps)
    if cost.gpu_hours is not None:
        money = f", {cost.money_text}" if cost.money_text else ""
        yield "Cost", f"{formatting.measure(cost.gpu_hours)} GPU-h{money}"
    else:
        yield "Time lost", formatting.duration(cost.lost_seconds)


def _evidence(document: Document) -> Iterator[str]:
    verdict = document.verdict
    if document.evidence:
        yield "## Evidence"
    for piece in document.evidence:
        when = f", {formatting.exact(piece.at)}" if piece.at else ""
        many = f", {formatting.count(piece.count)} times" if piece.count > 1 else ""
        yield f"**{plain(piece.role)}**, {plain(piece.where)}{when}{many}\n\n{fenced(piece.text)}"
    if ruled_out := verdict.get("ruled_out"):
        yield "**Ruled out**\n\n" + "\n".join(f"- {code(item['cause'])}: {plain(item['why'])}" for item in ruled_out)
    if unexamined := verdict.get("not_seen"):
        yield "**Not looked at**\n\n" + "\n".join(f"- {plain(item)}" for item in unexamined)


def _people(document: Document) -> Iterator[str]:
    written = document.written
    if written is not None and written.narrative:
        yield f"## Narrative\n\n{quoted(written.narrative)}"
    if written is not None and written.factors:
        yield "## What contributed to it\n\n" + "\n".join(f"- {plain(factor)}" for factor in written.factors)
    if document.follow_ups:
        rows = "\n".join(
            f"- [{'x' if follow_up.done_at else ' '}] {plain(follow_up.text)}"
            + (f" ({plain(follow_up.owner)}" if follow_up.owner else "")
            + (f"{', ' if follow_up.owner else ' ('}due {follow_up.due.isoformat()}" if follow_up.due else "")
            + (")" if follow_up.owner or follow_up.due else "")
            for follow_up in document.follow_ups
        )
        yield f"## Actions\n\n{rows}"
