"""The loop of a run, whatever its steps are made of: starts from a checkpoint, goes on, saves, stops, ends.

Everything that decides the numbers is a function of the configuration and the step, or lies in the checkpoint; so a run
that was killed and resumed continues with the very same numbers (protocols.md §4).
"""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from typing import Any

import torch

from training.attempt.heartbeat import Heartbeat, NullHeartbeat
from training.attempt.lineage import check_fence
from training.attempt.stopping import StopReport, StopRequest
from training.attempt.workspace import Workspace
from training.checkpoint.cadence import Cadence, mtbf, node_count
from training.checkpoint.events import report_committed
from training.checkpoint.pruning import Retention
from training.checkpoint.saved_state import SavesState, recall, remember
from training.checkpoint.saving import Checkpoints, load_start
from training.checkpoint.staging import State
from training.checkpoint.writing import ManifestFields
from training.config.base import BaseRunConfig
from training.manifest import CheckpointError, Manifest
from training.reporting.reporter import AnyReporter
from training.runtime.distributed import Agreed, Agreement, World


class Loop:
    """One rank's run. A kind of it says how it is set up, what a step is, and what is due between two."""

    def __init__(
        self,
        asked: BaseRunConfig,
        place: Workspace,
        world: World,
        *,
        reporter: AnyReporter,
        heartbeat: Heartbeat | NullHeartbeat,
        stop: StopRequest,
        mtbf_hours: float | None = None,
    ) -> None:
        """`mtbf_hours`: between failures of this run's nodes, as the portal has seen them."""
        self.asked, self.place, self.world = asked, place, world
        self.reporter, self.heartbeat, self.stop = reporter, heartbeat, stop
        self.agreement = Agreement(world)
        self.step = 0
        """Finished so far."""
        self.consumed = 0
        """Samples, in all finished steps."""
        self.cadence = Cadence(
            asked.checkpoint_every,
            mtbf(asked.mtbf_hours, mtbf_hours, node_count()),
            keep_every=asked.keep_every,
        )
        self.remembers: dict[str, SavesState] = {"cadence": self.cadence}
        """What goes on from plain values in a checkpoint, by the name under which they lie there."""
        self.checkpoints = Checkpoints(
            place.job_dir,
            place.attempt_dir,
            world,
            generation=place.generation,
            retention=Retention(last=asked.keep_checkpoints, every=asked.keep_every, best=asked.keep_best),
            cadence=self.cadence,
            reporter=reporter,
            is_hurried=lambda: stop.is_requested,
            counts=asked.counts,
            forget=self._forget,
        )

    def run(self) -> bool:
        """Trains; True if to the end, False if it was asked to stop and left a checkpoint."""
        check_fence(self.place.job_dir, self.place.generation)
        self.heartbeat.beat("restore")  # to look through checkpoints, and to remove halves, may outlast "init"
        start = load_start(self.checkpoints, self.world, self.place.resume)
        self.checkpoints.start_from(start)
        self._prepare(start)
        # Once: what decides the numbers is told by files of choices, which an upgrade may replace under a run.
        self._config_hash, self._numerics = self.asked.hash(), self.asked.numerics()
        self._begin(start)
        stopping = self.agreement.now(stop=self.stop.is_requested).stop or self._make_up(start)
        while not stopping and self.step < self.asked.length:
            agreed = self._one_step()
            stopping = agreed.stop or self._between_steps(agreed)
        return self._finish(stopping)

    # What a kind of run says.

    def _prepare(self, start: Manifest | None) -> None:
        """Everything that a step needs, restored from `start`."""
        raise NotImplementedError

    def _tell_started(self, start: Manifest | None) -> None:
        """The event run.started, and a line for people. On rank 0."""
        raise NotImplementedError

    def _one_step(self) -> Agreed:
        """One step, and what the ranks agreed on beside it."""
        raise NotImplementedError

    def _between_steps(self, agreed: Agreed) -> bool:
        """What is due at this boundary; True if it was cut short because a rank was asked to stop."""
        raise NotImplementedError

    def _state(self) -> State:
        """The very tensors that a checkpoint holds."""
        raise NotImplementedError

    def _layout(self) -> dict[str, Any]:
        """How the ranks share the work."""
        raise NotImplementedError

    def _data_identity(self) -> str:
        raise NotImplementedError

    def _validation_loss(self) -> float | None:
        """At this step, if there was a validation."""
        return None

    def _make_up(self, start: Manifest | None) -> bool:
        """What was left undone at the step that it starts from; True if it was cut short by a stop."""
        return False

    def _forget(self, state: Mapping[str, Any]) -> None:
        """A save came to nothing; `state` is what it was to remember."""

    def _check_completed(self) -> None:
        """Raise where the run has come to its end and still does not count as completed; its checkpoint is saved."""

    def _look(self) -> None:
        """Looks at the metrics so far, before what they led to is relied on."""

    def _saved(self, seconds: float) -> None:
        """A save has begun, for which training stood still so long."""

    def _close(self) -> None:
        """No more steps: what reads ahead, or measures, ends."""

    # Its parts.

    def _begin(self, start: Manifest | None) -> None:
        if not self.world.leads:
            return
        if start is not None:
            report_committed(
                self.reporter, start
            )  # perhaps it died between commit and report; the portal takes it once
        self._tell_started(start)

    def _save(self) -> None:
        """Training stands still for it, and first for the one before, where that is still being written."""
        self._look()
        began = time.perf_counter()
        self._finish_flight()
        self.heartbeat.beat("save", self.step)
        facts = ManifestFields(
            step=self.step,
            consumed_samples=self.consumed,
            layout=self._layout(),
            config_hash=self._config_hash,
            config=self._numerics,
            data=self._data_identity(),
            state={"validation_loss": self._validation_loss(), **remember(self.remembers)},
            versions=versions(),
        )
        self.checkpoints.save(self._state(), facts)
        self._saved(time.perf_counter() - began)
        self.heartbeat.beat("step", self.step)

    def _save_if_due(self, agreed: Agreed, *, promised: bool) -> None:
        """`promised`: whatever the cadence says, for good."""
        if self.step == self.asked.length:
            return  # the last one is made at the end
        if promised:
            self._save()
        elif agreed.due:
            if agreed.saving:
                self.checkpoints.skip(self.step)
            else:
                self._save()

    def _is_kept(self) -> bool:
        """Whether this step's checkpoint is one of those that are kept for good."""
        every = self.asked.keep_every
        return bool(every) and self.step % every == 0

    def _recall(self, start: Manifest) -> None:
        self.step, self.consumed = start.step, start.consumed_samples
        recall(self.remembers, start)

    def _finish_flight(self) -> None:
        """Waits for a save that is being written, which may take longer than a step is allowed to."""
        self.heartbeat.beat("save", self.step)
        self.checkpoints.finish_save()
        self.heartbeat.beat("step", self.step)

    def _finish(self, stopping: bool) -> bool:
        """The last checkpoint, committed before anybody leaves."""
        self._close()
        reason = self.stop.reason()
        if stopping and self.world.leads and not self.place.launched:  # the launcher has told it
            self.reporter.event("stop.requested", reason=reason)
        self._phase("save")
        last = self._last_checkpoint()
        if not stopping:
            self._check_completed()
        if self.world.leads:
            if stopping:
                StopReport(last.step, last.name, last.generation, reason).write(self.place.attempt_dir)
                self.reporter.event("stop.saved", step=self.step)
            else:
                self.reporter.event("run.completed", step=self.step)
            how = "stopped" if stopping else "completed"
            self._say(f"{how} at {self.asked.counts} {self.step}, saved as {last.name}")
        self.heartbeat.beat("end", self.step)
        return not stopping

    def _last_checkpoint(self) -> Manifest:
        self.checkpoints.finish_save()
        latest = self.checkpoints.latest
        if latest is not None and latest.step == self.step:
            return latest
        self._save()
        try:
            return self.checkpoints.wait()
        except CheckpointError:  # the state is still at hand
            self._save()
            return self.checkpoints.wait()

    def _phase(self, phase: str) -> None:
        self.heartbeat.beat(phase, self.step)
        if self.world.leads:
            self.reporter.event("phase", phase=phase, step=self.step)

    def _say(self, text: str) -> None:
        if self.world.leads:
            print(text, flush=True)


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), "torch": torch.__version__}
