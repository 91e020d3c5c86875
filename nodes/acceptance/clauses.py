"""Define the clauses of an acceptance and the verdict that follows from their outcomes."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

PASSED, FAILED, NOT_CHECKED, PENDING = "passed", "failed", "not checked", "pending"
NOT_APPLICABLE = "not applicable"
"""To nodes without GPUs, or to a single node. What could not be measured is not checked."""
OUTCOMES_BESIDES_FAILED = (PASSED, NOT_CHECKED, NOT_APPLICABLE, PENDING)
ACCEPTED, REJECTED, INCONCLUSIVE = "accepted", "rejected", "inconclusive"
BURN_IN, PAIRS = "burn_in", "pairs"
MAX_DETAILS = 20
MAX_CHARACTERS = 400


@dataclass(frozen=True)
class Requirement:
    """States what one clause requires, and its source. `is_essential`: nothing is accepted without its result."""

    key: str
    group: str
    title: str
    requirement: str
    source: str
    is_essential: bool = False


@dataclass(frozen=True)
class ClauseOutcome:
    """States what was measured for one clause. `details`: a sentence for each node or GPU that matters."""

    key: str
    outcome: str
    measured: str
    details: tuple[str, ...] = ()


@cache
def requirements() -> tuple[Requirement, ...]:
    """Return all clauses in the order of the report."""
    text = Path(__file__).with_name("requirements.toml").read_text(encoding="utf-8")
    return tuple(Requirement(**table) for table in tomllib.loads(text)["clause"])


def verdict_of(outcomes: Iterable[ClauseOutcome]) -> str:
    """Return what follows: one failed clause rejects; without a result of all essential ones nothing is accepted."""
    by_key = {outcome.key: outcome.outcome for outcome in outcomes}
    if FAILED in by_key.values():
        return REJECTED
    essential = [by_key.get(clause.key) for clause in requirements() if clause.is_essential]
    is_complete = by_key.get(BURN_IN) == PASSED and all(found in (PASSED, NOT_APPLICABLE) for found in essential)
    return ACCEPTED if is_complete else INCONCLUSIVE


def stored(outcomes: Sequence[ClauseOutcome]) -> list[dict[str, Any]]:
    """Return all clauses for the record, each with its requirement as of now; those without an outcome are pending."""
    found = {outcome.key: outcome for outcome in outcomes}
    return [_row(clause, found.get(clause.key)) for clause in requirements()]


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the outcome of stored clauses in a sentence, failed ones first."""
    failed = [row["title"] for row in rows if row["outcome"] == FAILED]
    count = {outcome: sum(row["outcome"] == outcome for row in rows) for outcome in OUTCOMES_BESIDES_FAILED}
    parts = [f"{len(failed)} failed ({', '.join(failed)})"] if failed else []
    parts += [f"{count[outcome]} {outcome}" for outcome in OUTCOMES_BESIDES_FAILED if count[outcome]]
    return f"Of {len(rows)} clauses {', '.join(parts)}."


def _row(clause: Requirement, outcome: ClauseOutcome | None) -> dict[str, Any]:
    details = outcome.details if outcome else ()
    shown = [text[:MAX_CHARACTERS] for text in details[:MAX_DETAILS]]
    if len(details) > MAX_DETAILS:
        shown.append(f"And {len(details) - MAX_DETAILS:,} more.")
    return {
        **vars(clause),
        "outcome": outcome.outcome if outcome else PENDING,
        "measured": outcome.measured[:MAX_CHARACTERS] if outcome else "",
        "details": shown,
    }
