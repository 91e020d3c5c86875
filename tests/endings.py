"""Read from a portal's database how its attempts ended: what was diagnosed and decided, and when.

python -m tests.endings      prints all of them as JSON, for a portal of another process (VIGIL_HOME)
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from typing import Any

from tests.stack import REPOSITORY, Stack


@dataclass(frozen=True)
class Verdict:
    version: int
    cause: str
    made_at: str
    seconds: float


@dataclass(frozen=True)
class Incident:
    """An incident with its verdicts, oldest first; cause, rank and node are those of the newest."""

    incarnation: int | None
    cause: str
    says: str
    rank: int | None
    node: str
    is_final: bool
    verdicts: tuple[Verdict, ...]


@dataclass(frozen=True)
class Ending:
    """The end of an attempt: what was diagnosed and decided."""

    job: int
    number: int
    state: str
    cause: str
    ended_at: str
    decided_at: str
    decision: str
    decided_version: int
    nodes: tuple[str, ...]
    incidents: tuple[Incident, ...]


Endings = dict[tuple[int, int], Ending]


def endings_of(stack: Stack) -> Endings:
    """Return endings by job and attempt number, read by a separate process with that portal's settings."""
    environment = {**stack.environment, "DJANGO_SETTINGS_MODULE": "portal.settings"}
    done = subprocess.run(
        stack.command("-m", "tests.endings"), cwd=REPOSITORY, env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = [_ending(load) for load in json.loads(done.stdout)]
    return {(item.job, item.number): item for item in found}


def _ending(payload: dict[str, Any]) -> Ending:
    incidents = tuple(
        Incident(**{**item, "verdicts": tuple(Verdict(**verdict) for verdict in item["verdicts"])})
        for item in payload.pop("incidents")
    )
    return Ending(**{**payload, "nodes": tuple(payload["nodes"])}, incidents=incidents)


def _print() -> None:
    import django

    django.setup()
    from jobs.models import Attempt

    rows = Attempt.objects.exclude(ended_at=None).prefetch_related("incidents__diagnoses").order_by("job_id", "number")
    print(json.dumps([_as_json(attempt) for attempt in rows]))


def _as_json(attempt: Any) -> dict[str, Any]:
    names = ("number", "state", "cause", "decision", "decided_version", "nodes")
    return {
        "job": attempt.job_id,
        **{name: getattr(attempt, name) for name in names},
        **{name: _stamp(getattr(attempt, name)) for name in ("ended_at", "decided_at")},
        "incidents": [_incident_as_json(incident) for incident in attempt.incidents.all()],
    }


def _incident_as_json(incident: Any) -> dict[str, Any]:
    verdicts = sorted(incident.diagnoses.all(), key=lambda verdict: verdict.version)
    return {
        **{name: getattr(incident, name) for name in ("incarnation", "cause", "says", "rank", "node", "is_final")},
        "verdicts": [
            {"version": row.version, "cause": row.cause, "made_at": _stamp(row.made_at), "seconds": row.seconds}
            for row in verdicts
        ],
    }


def _stamp(moment: Any) -> str:
    return moment.isoformat() if moment is not None else ""


if __name__ == "__main__":
    _print()
