"""The first tab of a federated job: rounds and clients, fairness, and stragglers."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest

from jobs.coverage import sentence_of
from jobs.gathering import federation as gathered
from jobs.gathering.job_life import JobLife
from jobs.goodput import goodput
from jobs.models import Attempt
from jobs.presenting.job_page.sentence import Sentence
from training.federation import custom
from vigil_core.untrusted import whole


def rounds_context(request: HttpRequest, life: JobLife, sentence: Sentence) -> dict[str, Any]:
    """Return the parts of the tab that change while the job is alive, except its charts.

    `sentence` is the lead so far.
    """
    before = whole(request.GET.get("before"), 2**31)
    picture = gathered.round_matrix(life, before=before)
    dropped, _ = gathered.dropout_groups(life)
    return {
        "picture": picture,
        "fairness": gathered.fairness(life),
        "stragglers": gathered.stragglers(life),
        "dropped": dropped[:1],
        "how": _setup_text(life),
        "goodput": goodput(life.attempts, life.now),
        "headline": _with_coverage(life, _with_trouble(life, sentence, picture.trouble)),
        "life_query": f"&before={before}" if before is not None else "",
    }


def _with_trouble(life: JobLife, sentence: Sentence, trouble: str) -> Sentence:
    """Append the client with most problems while the job is running."""
    if not trouble or life.latest.state != Attempt.State.RUNNING or life.cancelling:
        return sentence
    return Sentence(sentence.lead, f"{sentence.rest} {trouble}".strip(), sentence.move)


def _with_coverage(life: JobLife, sentence: Sentence) -> Sentence:
    """Append which clients never contributed: an accuracy only reflects those that did."""
    return Sentence(sentence.lead, f"{sentence.rest} {sentence_of(life.attempts)}".strip(), sentence.move)


def _setup_text(life: JobLife) -> str:
    """Return the federation's configuration in one line, shown above the matrix."""
    run = dict(life.job.spec.get("run") or {})
    custom_parts = custom.chosen(run)
    run |= {part.field: f"own {part.field}" for part in custom_parts}
    parts = [str(run.get("algorithm", "")), f"{run.get('aggregation', '')} of updates"]
    if run.get("per_round"):
        parts.append(f"{run['per_round']:,} clients a round")
    if run.get("per_round") or custom.SELECTION in custom_parts:
        parts.append(str(run.get("selection", "")))
    split = str(run.get("split", ""))
    parts += [split if custom.SPLIT in custom_parts else f"split {split}", *(run.get("filters") or [])]
    return ", ".join(part for part in parts if part)
