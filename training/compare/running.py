"""Run one candidate once: real ranks under the launcher in a run directory of their own, and read their results."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from training.attempt.files import read_json
from training.compare import rank
from training.compare.candidates import Candidate
from training.config import communication
from training.launch import environment
from training.launch.attempt import Attempt, take_attempt
from training.launch.launcher import Launcher
from training.launch.plan import read_plan
from training.launch.stop import Signals
from training.reporting.reporter import Reporter
from training.reporting.spool import read_spool
from training.weights import base

WARMUP_STEPS = 8
"""Steps that do not count for speed: they allocate memory and prepare the checkpoint."""
COMPARED_SERIES = frozenset({"loss", "communicated_mib", "checkpoint_seconds"})


class RunFailed(Exception):
    """A run that did not complete; the message is its error."""


class ComparisonStopped(Exception):
    """The comparison was asked to stop, by Ctrl-C or another signal."""


@dataclass(frozen=True, kw_only=True)
class ComparisonWork:
    """The work that all candidates do, and where."""

    ranks: int
    steps: int
    on_cpu: bool
    out: Path
    cache: Path


@dataclass(frozen=True, kw_only=True)
class CandidateRun:
    """The measurements of one run."""

    name: str
    round: int
    device: str
    mesh: dict[str, int]
    unit: str
    units_per_step: int
    step_seconds: list[float]
    """Seconds per steady step: of each step, or the mean of a block of steps (on a GPU, and with infrequent
    exchanges).
    """
    peak_bytes: list[int]
    """Peak memory by rank: allocated on a GPU; on a CPU, resident beyond the imports while steps were trained."""
    losses: dict[int, float]
    """Step → mean over the ranks."""
    stall_seconds: float
    """How long training was stalled by the checkpoint."""
    checkpoint_bytes: int
    write_seconds: float
    sent_mib: float | None
    """MiB that each rank sends per step; None if unknown."""

    @property
    def seconds(self) -> float:
        """Median seconds per step."""
        return statistics.median(self.step_seconds)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def run(
    candidate: Candidate, number: int, work: ComparisonWork, signals: Signals, watch: Callable[[Path], None]
) -> CandidateRun:
    """Run a candidate to its end. Raises RunFailed or ComparisonStopped.

    `watch` is called with the attempt's folder when the ranks start.
    """
    folder = work.out / f"{candidate.name}-{number}"
    _write_run_file(folder, candidate, work)
    plan = read_plan(folder, {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")})
    attempt = take_attempt(plan)
    command = environment.trainer(plan)
    command = replace(
        command,
        arguments=(sys.executable, "-P", "-m", rank.__name__, str(folder / "portal" / "run.toml")),
        environment={**command.environment, "VIGIL_CACHE": str(work.cache)},
    )
    watch(attempt.folder)
    reporter = Reporter(attempt.folder, rank=-1, incarnation=0, node=plan.node)
    with open(attempt.folder / "logs" / "launcher.0.log", "a", buffering=1) as log:
        code = Launcher(
            plan,
            attempt,
            command=command,
            signals=signals,
            reporter=reporter,
            log=lambda line: print(line, file=log),
        ).run()
    try:
        if signals.has_received():
            raise ComparisonStopped
        if code:
            raise RunFailed(_failure_text(attempt))
        return _read(attempt, candidate, number, work.ranks)
    finally:
        for large in ("checkpoints", base.FOLDER):
            shutil.rmtree(folder / "job" / large, ignore_errors=True)


def _write_run_file(folder: Path, candidate: Candidate, work: ComparisonWork) -> None:
    (folder / "portal").mkdir(parents=True)
    (folder / "job").mkdir()
    launch = {"ranks_per_node": work.ranks, "in_place": 0, "grace_seconds": 0, "drain_seconds": 0}
    if work.on_cpu:
        launch["gpus_per_node"] = 0
    document = {
        "name": candidate.name,
        "kind": "distributed",
        "launch": launch,
        "run": candidate.config.model_dump(),
    }
    (folder / "portal" / "run.toml").write_text(toml(document), encoding="utf-8")


def toml(table: Mapping[str, Any], name: str = "") -> str:
    """Return a table of plain values and tables as TOML."""
    tables = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    lines = [f"[{name}]"] if name else []
    # JSON values are TOML values, except for null, which does not occur, and one control character.
    plain = {key: json.dumps(value, ensure_ascii=False) for key, value in table.items() if key not in tables}
    lines += [f"{key} = {value}".replace("\x7f", "\\u007f") for key, value in plain.items()]
    return "\n".join(lines) + "\n" + "".join(toml(value, f"{name}.{key}".strip(".")) for key, value in tables.items())


def _failure_text(attempt: Attempt) -> str:
    result: dict[str, Any] = read_json(attempt.folder / "result.json") or {}
    first = result.get("first_failure") or {}
    who = f"rank {first['rank']}: " if first.get("rank") is not None else ""
    return f"{who}{result.get('error') or result.get('cause') or 'it ended without an error message'}"


def _read(attempt: Attempt, candidate: Candidate, number: int, ranks: int) -> CandidateRun:
    series, events = _reports(attempt.folder / "spool", ranks)
    started, committed = events.get("run.started"), events.get("checkpoint.committed")
    if started is None or committed is None or not series.get((0, "loss")):
        raise RunFailed("its reports are incomplete")
    measured = [json.loads((attempt.folder / rank.FOLDER / f"{number}.json").read_text()) for number in range(ranks)]
    period = max(1, communication.sync_interval(candidate.config))
    sent = list(series.get((0, "communicated_mib"), {}).values())
    by_rank = [series.get((rank_number, "loss"), {}) for rank_number in range(ranks)]
    common = set.intersection(*map(set, by_rank))
    if not common:
        raise RunFailed("its ranks reported no losses of the same steps")
    return CandidateRun(
        name=candidate.name,
        round=number,
        device=str(started["device"]),
        mesh=dict(started["mesh"]),
        unit=str(started["unit"]),
        units_per_step=int(started["tokens_per_step"]),
        step_seconds=max(
            (_steady_seconds(measurements["moments"], period) for measurements in measured), key=statistics.median
        ),
        peak_bytes=[int(measurements["peak_bytes"]) for measurements in measured],
        losses={step: statistics.fmean(losses[step] for losses in by_rank) for step in sorted(common)},
        stall_seconds=sum(series.get((0, "checkpoint_seconds"), {0: 0.0}).values()),
        checkpoint_bytes=int(committed["bytes"]),
        write_seconds=float(committed["seconds"]),
        sent_mib=statistics.fmean(sent[: len(sent) // period * period]) if sent else None,
    )


def _reports(spool: Path, ranks: int) -> tuple[dict[tuple[int, str], dict[int, float]], dict[str, dict[str, Any]]]:
    """Return (rank, series) → step → value, and the last event of each kind."""
    series: dict[tuple[int, str], dict[int, float]] = {}
    events: dict[str, dict[str, Any]] = {}
    for number in range(ranks):
        for path in spool.glob(f"0.{number}.*.jsonl"):
            for batch in read_spool(path)[1]:
                events.update({event["kind"]: event for event in batch.events})
                for name in COMPARED_SERIES & set(batch.series):
                    series.setdefault((number, name), {}).update(batch.series[name])
    return series, events


def _steady_seconds(moments: list[tuple[int, float]], period: int) -> list[float]:
    """Return seconds per step between readings that are whole periods apart.

    Each interval then has the same number of exchanges.
    """
    readings = [(step, seconds) for step, seconds in moments if step >= WARMUP_STEPS]
    if len(readings) < 2:
        raise RunFailed("it was too short to measure; write a larger --steps")
    aligned = [reading for reading in readings if (reading[0] - readings[0][0]) % period == 0]
    chosen = aligned if len(aligned) > 1 else [readings[0], readings[-1]]
    pairs = zip(chosen, chosen[1:], strict=False)
    return [(after - before) / (last - first) for (first, before), (last, after) in pairs]
