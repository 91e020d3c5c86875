"""Export incidents that people judged as cases that `vigil diagnose --evaluate` scores.

A case has, for each log that the verdict relies on, its head, the lines around the evidence and its tail; where the
logs are gone, the evidence that is stored with the verdict. Secrets are masked.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from diagnosis.logs import files
from diagnosis.logs.files import Log
from jobs.models import Diagnosis, Incident
from jobs.postmortem.evidence.ranks import open_logs
from vigil_core.masking import masked

MAX_CASES = 1_000  # the newest
HEAD_LINES, LINES_BEFORE, LINES_AFTER, TAIL_LINES = 20, 20, 30, 60  # lines
MAX_LINE = 1_000  # letters of one
MAX_LOG = 64_000  # of one log
SACCT = "sacct.txt"
MAX_BYTES = 64 << 20  # bytes of one log
_KERNEL = re.compile(r"kernel of ([\w.-]{1,255})\Z")


def examples(most: int = MAX_CASES) -> Iterator[dict[str, Any]]:
    """Yield cases, newest first:

    `id`, `label`, `said` (the diagnosed cause), `why`, and `log`, or `logs` by their names.
    """
    for incident in Incident.objects.judged().filter(version__gt=0).select_related("attempt__job")[:most]:
        if (found := example_of(incident)) is not None:
            yield found


def example_of(incident: Incident) -> dict[str, Any] | None:
    """Return one case; None if nothing is left of it."""
    last = incident.diagnoses.first()
    if last is None:
        return None
    logs = _excerpts(incident, last)
    logs |= {name: text for name, text in evidence_lines(incident, last).items() if name.endswith((".kern.log", SACCT))}
    logs = logs if set(logs) - {SACCT} else evidence_lines(incident, last)
    if not set(logs) - {SACCT} and incident.attempt.state == "failed":  # which says nothing by itself
        return None
    case = {
        "id": f"incident-{incident.pk}",
        "label": incident.overruled_cause,
        "said": last.cause,
        "why": masked(incident.overruled_why)[:1000],
    }
    return case | ({"log": next(iter(logs.values()))} if len(logs) == 1 else {"logs": logs})


def evidence_lines(incident: Incident, last: Diagnosis) -> dict[str, str]:
    """Return the lines stored with the verdict, by file.

    Files are logs of ranks, kernel logs, and the scheduler's record as sacct prints it.
    """
    lines_by_file: dict[str, list[tuple[int, str]]] = {}
    for item in last.verdict.get("evidence", ()):
        name, line, text = str(item.get("file", "")), int(item.get("line") or 0), str(item.get("text", ""))
        if line:
            lines_by_file.setdefault(name, []).append((line, text))
        elif match := _KERNEL.match(name):
            at = datetime.fromtimestamp(item.get("at") or incident.at.timestamp(), UTC)
            words = f"{at:%Y-%m-%dT%H:%M:%S.%f}+00:00 {match[1]} kernel: {text}"
            lines_by_file.setdefault(f"{match[1]}.kern.log", []).append((0, words))
    logs = {name: masked("\n".join(text for _, text in sorted(lines)) + "\n") for name, lines in lines_by_file.items()}
    return logs | _sacct_record(incident)


def _sacct_record(incident: Incident) -> dict[str, str]:
    attempt = incident.attempt
    if incident.incarnation is not None or not attempt.scheduler_id:
        return {}
    code, state = f"{attempt.exit_code or 0}:{attempt.signal or 0}", attempt.state.upper()
    return {SACCT: f"JobID|State|ExitCode\n{attempt.scheduler_id}|{state}|{code}\n"}


def _excerpts(incident: Incident, last: Diagnosis) -> dict[str, str]:
    """Return excerpts of the logs that the evidence names, or else of the first log."""
    wanted: dict[str, set[int]] = {}
    for item in last.verdict.get("evidence", ()):
        if item.get("line"):
            wanted.setdefault(str(item["file"]), set()).add(int(item["line"]))
    excerpts: dict[str, str] = {}
    for log in open_logs(incident):
        with log:
            if log.name.endswith(".log") and (log.name in wanted or (not wanted and not excerpts)):
                excerpts[log.name] = masked(_excerpt(log, wanted.get(log.name, set())))
    return excerpts


def _excerpt(log: Log, wanted: set[int]) -> str:
    near = {number for line in wanted for number in range(line - LINES_BEFORE, line + LINES_AFTER + 1)}
    excerpt: list[str] = []
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    number = read = size = 0
    for block in files.read_blocks(log):
        read += len(block)
        for raw in block.split(b"\n")[: -1 if block.endswith(b"\n") else None]:
            number += 1
            text = raw[: MAX_LINE * 4].decode(errors="replace")[:MAX_LINE]
            if (number <= HEAD_LINES or number in near) and size < MAX_LOG:
                tail.clear()  # what lies between two places is left out
                excerpt.append(text)
                size += len(text)
            else:
                tail.append(text)
        if read > MAX_BYTES:
            break
    return "\n".join([*excerpt, *tail, ""]).replace("\0", "")
