"""Judge a drill whose job has ended: what Vigil noticed, decided and continued, and how long each took."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np

from jobs.disk import rundir
from jobs.gameday.faults import BASELINE, FAULTS, Fault
from jobs.intake.reports import owner_of
from jobs.models import Attempt, Drill, Incident, Job
from nodes.models import Agent
from portal.series import read
from vigil_core import untrusted

RECORD = "game-day.json"
"""What the program writes into an attempt's folder (training/gameday.py)."""
MAX_RECORD_BYTES = 4_096
MAX_POINTS = 10_000
SOFTWARE = ("driver", "slurm")
"""What an agent's facts call the versions that drills are compared by."""
Losses = tuple[list[int], list[float]]


def judge(drill: Drill) -> None:
    """Fill in the drill's results; the caller stores them."""
    assert drill.job is not None
    attempts = list(drill.job.attempts.order_by("number"))
    describe_node(drill, str(attempts[0].nodes[0]) if attempts[0].nodes else "")
    is_undisturbed = drill.fault == BASELINE
    problems = _baseline_problems(attempts) if is_undisturbed else _fault_problems(drill, FAULTS[drill.fault], attempts)
    drill.detail = " ".join(problems)
    drill.state = Drill.DrillState.FAILED if problems else Drill.DrillState.PASSED


def _baseline_problems(attempts: list[Attempt]) -> list[str]:
    if len(attempts) == 1 and attempts[0].state == Attempt.State.COMPLETED:
        return []
    return [f"The undisturbed run ended as {attempts[-1].state}: {attempts[-1].decision or attempts[-1].reason}"]


def _fault_problems(drill: Drill, fault: Fault, attempts: list[Attempt]) -> list[str]:
    first, second = attempts[0], attempts[1] if len(attempts) > 1 else None
    planted_at = _recorded(drill.job, first, "planted_at")
    if planted_at is None:
        return [f"The fault was not injected: its job ended as {first.state}."]
    drill.planted_at = datetime.fromtimestamp(planted_at, UTC)
    incident = Incident.objects.filter(attempt=first, incarnation=None).first()
    if incident is None:
        return ["Vigil noticed no failure."]
    drill.noticed_s = _seconds(planted_at, incident.opened_at)
    verdict = incident.diagnoses.order_by("version").first()
    if verdict is not None:
        drill.verdict_s, drill.cause = _seconds(planted_at, verdict.made_at), verdict.cause
    drill.is_cause_right = drill.cause in fault.causes
    drill.action = first.decision
    drill.is_action_right = (second is not None) == fault.resumes
    problems = []
    if not drill.is_cause_right:
        problems.append(f"The verdict was {drill.cause or 'missing'}, not {' or '.join(sorted(fault.causes))}.")
    if not drill.is_action_right:
        problems.append("It was not restarted." if fault.resumes else "It was restarted, though it would fail again.")
    if second is not None and fault.resumes:
        problems += _continuation_problems(drill, second, planted_at)
    return problems


def _continuation_problems(drill: Drill, second: Attempt, planted_at: float) -> list[str]:
    """Fill in how the job continued; return what is wrong with that."""
    training_at = _recorded(drill.job, second, "training_at")
    if training_at is None:
        return ["The next attempt made no step."]
    drill.training_again_s = round(training_at - planted_at, 3)
    baseline = drill.game_day.drills.get(fault=BASELINE)
    if baseline.job is None or baseline.state != Drill.DrillState.PASSED:
        return ["There is no undisturbed run to compare its losses to."]
    assert drill.job is not None
    steps, losses = _losses(drill.job)
    drill.are_losses_identical = bool(steps) and (steps, losses) == _losses(baseline.job)
    return [] if drill.are_losses_identical else ["Its losses differ from those of the undisturbed run."]


def _recorded(job: Job | None, attempt: Attempt, name: str) -> float | None:
    """Return a time that the program wrote into the attempt's folder, by the node's clock."""
    if job is None or not job.directory or not attempt.directory:
        return None
    relative = f"job/{attempt.directory}/{RECORD}"
    try:
        record = rundir.read_json_under(rundir.path_of(job.directory), relative, limit=MAX_RECORD_BYTES)
    except OSError:
        return None
    return untrusted.number((record or {}).get(name), untrusted.MAX_UNIX_TIME)


def _seconds(since: float, until: datetime) -> float:
    return round(max(0.0, until.timestamp() - since), 3)  # the node's clock may be ahead


def _losses(job: Job) -> Losses:
    """Return the steps and losses of rank 0 over all attempts; of a repeated step the later value counts."""
    owners = [owner_of(pk) for pk in job.attempts.order_by("number").values_list("pk", flat=True)]
    curve = read.curve(owners, "loss", rank=0, start=None, end=MAX_POINTS, points=None)
    values = np.asarray([] if curve.value is None else curve.value)
    return curve.step.tolist(), values.tolist()


def describe_node(drill: Drill, node: str) -> None:
    """Note the node and the versions that its agent reported; the caller stores them."""
    drill.node = node[:255]
    agent = Agent.objects.filter(node=drill.node).first() if drill.node else None
    drill.driver, drill.slurm = (untrusted.line(agent.facts.get(part), 64) if agent else "" for part in SOFTWARE)
