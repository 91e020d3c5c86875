"""Generate reports of jobs that never ran: the same posts as from real ranks, through the same intake."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from console.demo.scenarios import DemoAttempt, DemoJob
from jobs.intake import reports, wire
from jobs.models import Attempt
from portal.series.codec import Floats

STEPS_PER_BATCH = 10
BATCHES_PER_POST = 20
# Only rank 0 reports these; every rank reports the others.
FIRST_RANK_ONLY = (
    "learning_rate", "tokens_per_second", "samples_per_second", "data_seconds", "forward_seconds", "backward_seconds",
    "optimizer_seconds", "mfu",
)  # fmt: skip
SILENT_S = 52.0  # between the last step of failing ranks and their end
SAMPLED = 60  # steps between two profiled ones
PEAK = 989.5e12  # of an H100, FLOP/s
TOKENS_PER_SAMPLE = 2048


@dataclass
class _RankStream:
    """The stream of one rank, which numbers its batches."""

    rank: int
    incarnation: int
    node: str
    restart_count: int = 0
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    seq: int = 0

    def part(self, times: list[float], *, end: bool) -> dict[str, Any]:
        first, self.seq = self.seq, self.seq + len(times)
        return {
            "id": self.id, "incarnation": self.incarnation, "rank": self.rank, "node": self.node, "boot_id": "demo",
            "restart_count": self.restart_count, "first": first, "times": times, "end": end,
        }  # fmt: skip


def post_reports(
    attempt: Attempt, story: DemoJob, demo_attempt: DemoAttempt, began: float, generation: int, kind: type[Incarnation]
) -> float:
    """Post everything that this attempt's ranks would have, and return the Unix time of the last report."""
    now = began + 20.0  # start-up
    for number, (first, last) in enumerate(demo_attempt.steps):
        run = kind(attempt, story, demo_attempt, number, first, last, generation + number)
        for post in run.posts(now):
            reports.ingest(attempt.pk, wire.parse(json.dumps(post).encode()), seconds=math.inf)
        now = run.now + 15.0
    return now - 15.0


@dataclass
class Incarnation:
    """Generates what the ranks of one start report."""

    attempt: Attempt
    story: DemoJob
    demo_attempt: DemoAttempt
    number: int
    first: int
    last: int
    generation: int
    now: float = 0.0

    def posts(self, now: float) -> Iterator[dict[str, Any]]:
        """Yield the whole incarnation in posts of some thousand points."""
        self.now, story = now, self.story
        world = story.world
        ranks = [_RankStream(rank, self.number, story.node_of(rank, self.demo_attempt)) for rank in range(world)]
        values = self.values(world)
        size = STEPS_PER_BATCH * BATCHES_PER_POST
        yield self._opening(ranks)
        for start in range(self.first, self.last, size):
            stop = min(start + size, self.last)
            yield self._post(ranks, values, start, stop)
        if self._fails:
            self.now += SILENT_S
        yield self._closing(ranks[0])

    def data_events(self) -> list[dict[str, Any]]:
        """Return events that come before the first step."""
        return []

    def step_events(self, low: int, high: int, batch: int, time: float) -> list[dict[str, Any]]:
        """Return events of the steps after `low`, up to `high`."""
        return []

    @property
    def _fails(self) -> bool:
        return self.last < self.story.steps and self.demo_attempt.cause not in {"stopped", "cancelled"}

    def _opening(self, ranks: list[_RankStream]) -> dict[str, Any]:
        story = self.story
        started: dict[str, Any] = {
            "recipe": story.recipe, "steps": story.steps, "start_step": self.first, "world_size": len(ranks),
            "device": "cuda", "parameters": story.parameters, "tokens_per_step": story.global_batch * TOKENS_PER_SAMPLE,
            "resumed_from": f"step-{self.first}" if self.first else None,
        }  # fmt: skip
        events = [
            self.event("run.started", **started),
            self.event("phase", phase="step", step=self.first),
            *self.data_events(),
        ]
        return {"version": 1, "streams": [ranks[0].part([self.now], end=False)], "series": {}, "events": events}

    def _closing(self, rank: _RankStream) -> dict[str, Any]:
        """Return the last report of rank 0, and the launcher's on why the ranks ended, if they did not finish."""
        streams, events = [rank.part([self.now], end=True)], []
        if self.last == self.story.steps:
            events.append(self.event("run.completed", step=self.last))
        elif self.demo_attempt.cause in {"stopped", "cancelled"}:
            events.append(
                self.event("stop.requested", reason="time_limit" if self.demo_attempt.cause == "stopped" else "cancel")
            )
            events.append(self.event("stop.saved", step=self.last))
        elif self.demo_attempt.cause != "node_fail":  # after a node failure no launcher is left to report
            launcher = _RankStream(-1, 0, self.demo_attempt.nodes[0])
            streams.append(launcher.part([self.now], end=True))
            failure = self.demo_attempt.failure or {
                "rank": 1,
                "exit_code": None,
                "signal": 9,
                "kind": "signal",
                "error": "",
            }
            restarting = self.number + 1 < len(self.demo_attempt.steps)
            ended = {**failure, "failure": failure["kind"], "incarnation": self.number, "restarting": restarting}
            events.append({"stream": 1, "batch": 0, **ended, "kind": "incarnation.ended", "time": self.now})
        return {"version": 1, "streams": streams, "series": {}, "events": events}

    def event(self, kind: str, *, batch: int = 0, time: float | None = None, **data: Any) -> dict[str, Any]:
        return {"stream": 0, "batch": batch, "kind": kind, "time": self.now if time is None else time, **data}

    def _post(self, ranks: list[_RankStream], values: dict[str, list[Floats]], start: int, stop: int) -> dict[str, Any]:
        cuts = [(at, min(at + STEPS_PER_BATCH, stop)) for at in range(start, stop, STEPS_PER_BATCH)]
        ends = self.now + self.story.step_s * (np.array([cut[1] for cut in cuts]) - start)
        times = [round(float(end), 3) for end in ends]
        series: dict[str, dict[str, list[Any]]] = {}
        for name, per_rank in values.items():
            columns = series[name] = {"runs": [], "step": [], "value": []}
            for rank, column in enumerate(per_rank):
                for batch, (low, high) in enumerate(cuts):
                    columns["runs"].append([rank, batch, high - low])
                    columns["step"] += range(low + 1, high + 1)
                    columns["value"] += [_plain(v) for v in column[low - self.first : high - self.first]]
        events = [
            event for batch, (low, high) in enumerate(cuts) for event in self._saves(low, high, batch, times[batch])
        ]
        self.validate(series, cuts)
        self.sample(series, cuts)
        for batch, (low, high) in enumerate(cuts):
            events += self.step_events(low, high, batch, times[batch])
        events += [self._verdict(stop, batch=len(cuts) - 1, time=times[-1])] if stop - self.first > SAMPLED else []
        streams = [rank.part(times, end=stop == self.last and rank.rank > 0) for rank in ranks]
        self.now = times[-1]
        return {"version": 1, "streams": streams, "series": series, "events": events}

    def validate(self, series: dict[str, dict[str, list[Any]]], cuts: list[tuple[int, int]]) -> None:
        runs, steps, losses = [], [], []
        training = series["loss"]["value"]
        for batch, (low, high) in enumerate(cuts):
            if high % 100 == 0:
                runs.append([0, batch, 1])
                steps.append(high)
                losses.append(_number(training[low - cuts[0][0]]) * 1.04)
        if not steps:
            return
        series_values = {"validation_loss": losses}
        if self.story.recipe == "vision":
            series_values["validation_accuracy"] = [math.exp(-loss) for loss in losses]
        for name, values in series_values.items():
            series[name] = {"runs": runs, "step": steps, "value": [_plain(value) for value in values]}

    def sample(self, series: dict[str, dict[str, list[Any]]], cuts: list[tuple[int, int]]) -> None:
        """Add the communication share of the sampled steps."""
        random = np.random.default_rng([self.attempt.pk, cuts[0][0]])
        found = [(batch, high) for batch, (_, high) in enumerate(cuts) if high % SAMPLED == 0]
        if not found:
            return
        usual = self.story.bound.shares["communication"]
        shares = [round(float(share), 4) for share in usual * random.normal(1, 0.06, len(found))]
        runs, steps = [[0, batch, 1] for batch, _ in found], [step for _, step in found]
        for name, factor in (("communication_share", 1.0), ("communication_seconds", self.story.step_s)):
            series[name] = {"runs": runs, "step": steps, "value": [round(share * factor, 5) for share in shares]}

    def _verdict(self, step: int, *, batch: int, time: float) -> dict[str, Any]:
        """Return the trainer's verdict on the steps since the previous one."""
        story, found = self.story, self.story.bound
        stall = 1.1 / story.checkpoint_every
        split = {part: share * story.step_s for part, share in found.shares.items()} | {"checkpoint": stall}
        return self.event(
            "run.verdict", batch=batch, time=time, bound=found.bound, because=found.because, remedy=found.remedy,
            steps=min(step - self.first - 5, STEPS_PER_BATCH * BATCHES_PER_POST), last_step=step,
            step_seconds=sum(split.values()), split=split, mfu=self._mfu(story.step_s), busy=found.busy,
            matmul=found.matmul, sampled_step=step // SAMPLED * SAMPLED,
        )  # fmt: skip

    def _mfu(self, step_s: float) -> float | None:
        """Return the MFU of a decoder with this number of parameters, ignoring attention; None for other recipes."""
        if self.story.recipe != "language":
            return None
        tokens = self.story.global_batch * TOKENS_PER_SAMPLE / step_s
        return 6 * self.story.parameters * tokens / (self.story.world * PEAK)

    def _saves(self, low: int, high: int, batch: int, time: float) -> Iterator[dict[str, Any]]:
        """Yield the checkpoints committed in this batch, and what was pruned for them."""
        every = self.story.checkpoint_every
        saved_last = high == self.last and self.demo_attempt.cause in {"completed", "stopped", "cancelled"}
        if high % every and not saved_last:
            return
        before = (high - 1) // every * every
        yield self.event(
            "checkpoint.committed", batch=batch, time=time, step=high, name=f"step-{high}", generation=self.generation,
            parent_step=before or None, parent_generation=self.generation if before > self.first else None,
            bytes=9_120_000_000 if self.story.parameters > 1e6 else 41_000_000, seconds=14.2, stall_seconds=1.1,
            consumed_samples=high * self.story.global_batch, world_size=self.story.world,
        )  # fmt: skip
        cost, interval, mtbf = 1.9, every * self.story.step_s, 432_000.0 / self.story.nodes
        yield self.event(
            "checkpoint.cadence", batch=batch, time=time, step=high, automatic=False, cost_seconds=cost,
            stall_seconds=1.1, write_seconds=14.2, mtbf_seconds=mtbf, source="portal", interval_seconds=interval,
            best_interval_seconds=math.sqrt(2 * cost * mtbf), overhead_fraction=cost / interval + interval / (2 * mtbf),
            best_overhead_fraction=math.sqrt(2 * cost / mtbf),
        )  # fmt: skip
        if (old := before - 2 * every) > self.first:
            yield self.event(
                "checkpoint.pruned", batch=batch, time=time, step=old, name=f"step-{old}", generation=self.generation
            )

    def values(self, world: int) -> dict[str, list[Floats]]:
        """Return every rank's values: one column per rank, over the steps (first, last]."""
        story = self.story
        random = np.random.default_rng([*story.name.encode(), self.attempt.number, self.number])
        step = np.arange(self.first + 1, self.last + 1, dtype=np.float64)
        trend = story.floor + (story.start - story.floor) * (1 + step / 90) ** -0.62
        if story.spike:
            at, factor = story.spike
            trend = trend * factor ** np.maximum(0, step - at)
        norm = 0.35 + 1.6 * (1 + step / 40) ** -0.8
        pace = np.full(world, 1.0)
        if story.straggler is not None:
            pace[story.straggler] = 1.06
        columns: dict[str, list[Floats]] = {
            name: [] for name in ("loss", "gradient_norm", "step_seconds", "memory_gib", *FIRST_RANK_ONLY)
        }
        for rank in range(world):
            seconds = story.step_s * pace[rank] * random.normal(1, 0.012, len(step))
            columns["loss"].append(trend * random.normal(1, 0.018, len(step)))
            columns["gradient_norm"].append(norm * random.lognormal(0, 0.16, len(step)))
            columns["step_seconds"].append(np.abs(seconds))
            columns["memory_gib"].append(np.full(len(step), 61.4 + 0.2 * rank))
        first = columns["step_seconds"][0]
        speed = "tokens_per_second" if story.recipe == "language" else "samples_per_second"
        samples = story.global_batch * (TOKENS_PER_SAMPLE if speed.startswith("tokens") else 1)
        columns[speed].append(samples / first)
        columns["learning_rate"].append(_learning_rate(step, story.steps))
        shares = story.bound.shares
        hidden = {"forward": 0.2, "backward": 0.8}  # communication is inside the part that waits for it
        for name in ("data", "forward", "backward", "optimizer"):
            share = shares[name] + hidden.get(name, 0.0) * shares["communication"]
            columns[f"{name}_seconds"].append(np.abs(first * share * random.normal(1, 0.02, len(step))))
        if (mfu := self._mfu(1.0)) is not None:
            columns["mfu"].append(mfu / first)
        if self.demo_attempt.failure.get("error", "").startswith("FloatingPointError"):
            columns["loss"][self.demo_attempt.failure["rank"]][-1] = math.nan
        return {name: columns[name] for name in columns if columns[name]}


def _learning_rate(step: Floats, steps: int) -> Floats:
    """Return the learning rate: 3e-4 after a warm-up of 200 steps, then a cosine decay."""
    cosine = 0.1 + 0.45 * (1 + np.cos(np.pi * np.minimum(1, step / steps)))
    result: Floats = 3e-4 * np.minimum(step / 200, cosine)
    return result


def _plain(value: float) -> float | str:
    if math.isfinite(value):
        return float(f"{value:.6g}")
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _number(value: float | str) -> float:
    return float(value) if isinstance(value, float) else math.nan
