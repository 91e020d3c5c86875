"""The loop of a run of any kind: start from a checkpoint, continue, save, stop, end.

Everything that affects the numbers is a function of the configuration and the step, or in the checkpoint; so a run that
was killed and resumed continues with exactly the same numbers (protocols.md §4).
"""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from training.attempt.heartbeat import Heartbeat, NullHeartbeat
from training.attempt.lineage import check_fence
from training.attempt.stopping import StopReport, StopRequest
from training.attempt.workspace import Workspace
from training.checkpoint.cadence import Cadence, mtbf, node_count
from training.checkpoint.events import report_committed
from training.checkpoint.pruning import Retention
from training.checkpoint.saved_state import Stateful, collect_state, restore_state
from training.checkpoint.saving import Checkpoints, load_start
from training.checkpoint.staging import State
from training.checkpoint.writing import ManifestFields, SaveOptions
from training.config.base import BaseRunConfig
from training.manifest import CheckpointError, Manifest
from training.reporting.reporter import AnyReporter
from training.runtime.distributed import Agreement, StepFlags, World


@dataclass(frozen=True)
class LoopServices:
    """Services of one rank's loop of any kind: its reports, heartbeat and stop signal, and its nodes' failure rate."""

    reporter: AnyReporter
    heartbeat: Heartbeat | NullHeartbeat
    stop: StopRequest
    mtbf_hours: float | None = None
    """Hours between failures of this run's nodes, as observed by the portal."""


class Loop:
    """One rank's run. Subclasses define how it is set up, what a step is, and what is due between two steps."""

    def __init__(self, config: BaseRunConfig, workspace: Workspace, world: World, services: LoopServices) -> None:
        self.base_config, self.workspace, self.world = config, workspace, world
        self.reporter, self.heartbeat, self.stop = services.reporter, services.heartbeat, services.stop
        self.agreement = Agreement(world)
        self.step = 0
        """Number of finished steps."""
        self.consumed = 0
        """Samples in all finished steps."""
        self.cadence = Cadence(
            config.checkpoint_every,
            mtbf(config.mtbf_hours, services.mtbf_hours, node_count()),
            keep_every=config.keep_every,
        )
        self.stateful_parts: dict[str, Stateful] = {"cadence": self.cadence}
        """Parts that continue from plain values in a checkpoint, by the name under which these are stored."""
        self.checkpoints = Checkpoints(
            workspace.job_dir,
            workspace.attempt_dir,
            world,
            SaveOptions(
                generation=workspace.generation,
                retention=Retention(last=config.keep_checkpoints, every=config.keep_every, best=config.keep_best),
                cadence=self.cadence,
                unit=config.unit,
            ),
            reporter=self.reporter,
            is_stop_requested=lambda: self.stop.is_requested,
            forget=self._forget,
        )

    def run(self) -> bool:
        """Train; return True if to the end, False if the run was asked to stop and left a checkpoint."""
        check_fence(self.workspace.job_dir, self.workspace.generation)
        self.heartbeat.beat(
            "restore"
        )  # checking checkpoints and removing incomplete ones may take longer than "init" allows
        start = load_start(self.checkpoints, self.world, self.workspace.resume)
        self.checkpoints.start_from(start)
        self._prepare(start)
        # Computed once: these read the files of choices, which an upgrade may replace during a run.
        self._config_hash, self._numerics = self.base_config.hash(), self.base_config.numerics()
        self._begin(start)
        stopping = self.agreement.now(stop=self.stop.is_requested).stop or self._catch_up(start)
        while not stopping and self.step < self.base_config.length:
            agreed = self._run_step()
            stopping = agreed.stop or self._between_steps(agreed)
        return self._finish(stopping)

    # What subclasses define.

    def _prepare(self, start: Manifest | None) -> None:
        """Set up everything that a step needs, restored from `start`."""
        raise NotImplementedError

    def _report_started(self, start: Manifest | None) -> None:
        """Report the event run.started, and a line for people. On rank 0."""
        raise NotImplementedError

    def _run_step(self) -> StepFlags:
        """Do one step; return the flags exchanged alongside it."""
        raise NotImplementedError

    def _between_steps(self, agreed: StepFlags) -> bool:
        """Do what is due at this boundary; return True if it was cut short because a rank was asked to stop."""
        raise NotImplementedError

    def _state(self) -> State:
        """Return the tensors that a checkpoint saves, not copies of them."""
        raise NotImplementedError

    def _layout(self) -> dict[str, Any]:
        """Return how the ranks share the work."""
        raise NotImplementedError

    def _data_identity(self) -> str:
        raise NotImplementedError

    def _validation_loss(self) -> float | None:
        """Return the validation loss at this step, if there was a validation."""
        return None

    def _catch_up(self, start: Manifest | None) -> bool:
        """Do what was left undone at the step that it starts from; return True if a stop cut it short."""
        return False

    def _forget(self, state: Mapping[str, Any]) -> None:
        """Handle a failed save; `state` is what it would have stored."""

    def _check_completed(self) -> None:
        """Raise if the run has reached its end but does not count as completed; its checkpoint is saved."""

    def _process_metrics(self) -> None:
        """Process the metrics so far, before relying on the state that they belong to."""

    def _on_save_begun(self, seconds: float) -> None:
        """Called when a save has begun, for which training was stalled this long."""

    def _close(self) -> None:
        """Stop whatever reads ahead or measures: there are no more steps."""

    # Parts of the loop.

    def _begin(self, start: Manifest | None) -> None:
        if not self.world.leads:
            return
        if start is not None:
            report_committed(
                self.reporter, start
            )  # it may have died between commit and report; the portal ignores repetitions
        self._report_started(start)

    def _save(self) -> None:
        """Save. Training is stalled for it, and first for the previous save if that is still being written."""
        self._process_metrics()
        began = time.perf_counter()
        self._finish_save()
        self.heartbeat.beat("save", self.step)
        fields = ManifestFields(
            step=self.step,
            consumed_samples=self.consumed,
            layout=self._layout(),
            config_hash=self._config_hash,
            config=self._numerics,
            data=self._data_identity(),
            state={"validation_loss": self._validation_loss(), **collect_state(self.stateful_parts)},
            versions=versions(),
        )
        self.checkpoints.save(self._state(), fields)
        self._on_save_begun(time.perf_counter() - began)
        self.heartbeat.beat("step", self.step)

    def _save_if_due(self, agreed: StepFlags, *, required: bool) -> None:
        """Save if due. `required`: save regardless of the cadence."""
        if self.step == self.base_config.length:
            return  # the last one is saved at the end
        if required:
            self._save()
        elif agreed.due:
            if agreed.saving:
                self.checkpoints.skip(self.step)
            else:
                self._save()

    def _is_permanent(self) -> bool:
        """Return whether this step's checkpoint is never deleted."""
        interval = self.base_config.keep_every
        return bool(interval) and self.step % interval == 0

    def _recall(self, start: Manifest) -> None:
        self.step, self.consumed = start.step, start.consumed_samples
        restore_state(self.stateful_parts, start)

    def _finish_save(self) -> None:
        """Wait for a save that is being written, which may take longer than a step is allowed to."""
        self.heartbeat.beat("save", self.step)
        self.checkpoints.finish_save()
        self.heartbeat.beat("step", self.step)

    def _finish(self, stopping: bool) -> bool:
        """Commit the last checkpoint before any rank leaves; return whether the run is completed."""
        self._close()
        reason = self.stop.reason()
        if stopping and self.world.leads and not self.workspace.launched:  # the launcher has reported it
            self.reporter.event("stop.requested", reason=reason)
        self._phase("save")
        last = self._last_checkpoint()
        if not stopping:
            self._check_completed()
        if self.world.leads:
            if stopping:
                StopReport(last.step, last.name, last.generation, reason).write(self.workspace.attempt_dir)
                self.reporter.event("stop.saved", step=self.step)
            else:
                self.reporter.event("run.completed", step=self.step)
            how = "stopped" if stopping else "completed"
            self._log(f"{how} at {self.base_config.unit} {self.step}, saved as {last.name}")
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
        except CheckpointError:  # the state is still in memory
            self._save()
            return self.checkpoints.wait()

    def _phase(self, phase: str) -> None:
        self.heartbeat.beat(phase, self.step)
        if self.world.leads:
            self.reporter.event("phase", phase=phase, step=self.step)

    def _log(self, text: str) -> None:
        if self.world.leads:
            print(text, flush=True)


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), "torch": torch.__version__}
