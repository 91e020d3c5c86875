"""The first tab of a federated job: rounds and clients, how good the model is for whom, and who is slow."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest

from jobs.coverage import sentence_of
from jobs.gathering import federation as gathered
from jobs.goodput import goodput
from jobs.models import Attempt
from jobs.presenting.header import Life
from jobs.presenting.sentence import Sentence
from training.federation import custom
from vigil_core.untrusted import whole


def shown(request: HttpRequest, life: Life, said: Sentence) -> dict[str, Any]:
    """What of the tab changes while the job lives, beside its charts. `said`: the sentence so far."""
    before = whole(request.GET.get("before"), 2**31)
    picture = gathered.picture(life, before=before)
    dropped, _ = gathered.dropped_out(life)
    return {
        "picture": picture,
        "fairness": gathered.fairness(life),
        "stragglers": gathered.stragglers(life),
        "dropped": dropped[:1],
        "how": _how(life),
        "goodput": goodput(life.attempts, life.now),
        "said": _with_coverage(life, _with_trouble(life, said, picture.misbehaves)),
        "life_query": f"&before={before}" if before is not None else "",
    }


def _with_trouble(life: Life, said: Sentence, misbehaves: str) -> Sentence:
    """Whoever misbehaves is told last while it trains."""
    if not misbehaves or life.latest.state != Attempt.State.RUNNING or life.cancelling:
        return said
    return Sentence(said.lead, f"{said.rest} {misbehaves}".strip(), said.move)


def _with_coverage(life: Life, said: Sentence) -> Sentence:
    """Add who never counted: an accuracy is of those that did."""
    return Sentence(said.lead, f"{said.rest} {sentence_of(life.attempts)}".strip(), said.move)


def _how(life: Life) -> str:
    """What was asked for, in a line beside the matrix."""
    run = dict(life.job.spec.get("run") or {})
    own = custom.chosen(run)
    run |= {part.field: f"own {part.field}" for part in own}
    parts = [str(run.get("algorithm", "")), f"{run.get('aggregation', '')} of updates"]
    if run.get("per_round"):
        parts.append(f"{run['per_round']:,} clients a round")
    if run.get("per_round") or custom.SELECTION in own:
        parts.append(str(run.get("selection", "")))
    split = str(run.get("split", ""))
    parts += [split if custom.SPLIT in own else f"split {split}", *(run.get("filters") or [])]
    return ", ".join(part for part in parts if part)
