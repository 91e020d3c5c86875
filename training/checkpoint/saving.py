"""Save, find and restore a run's checkpoints, written in parallel to training (protocols.md §4).

A save copies the state at a step boundary (see staging), and a thread of each rank writes the copy (see writing) on a
process group of its own: on the default group it would mix with training's collectives and hang. Only one save is in
flight. One rename commits it.

    .step-400.3/          created exclusively by rank 0, written by all ranks, fsynced, hashed while writing
    .step-400.3/COMMITTED written by rank 0 once every rank has reported what it wrote
    step-400/             renamed, unless a newer generation has taken over: now it is a checkpoint
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from training import manifest as manifests
from training.attempt.lineage import Fenced
from training.checkpoint import events
from training.checkpoint.committing import mark_damaged, mark_verified
from training.checkpoint.pruning import delete, finish, start_identities
from training.checkpoint.staging import Staging, State, release
from training.checkpoint.writing import CheckpointWriter, Lineage, ManifestFields, SaveOptions
from training.manifest import CheckpointError, Manifest, UnreadableManifest
from training.reporting.reporter import AnyReporter
from training.runtime.distributed import World, broadcast, run_on_all
from training.runtime.imports import garbage_collection_paused


@dataclass
class _Save:
    """One save in flight."""

    fields: ManifestFields
    began: float
    """When it began, before the copy, on the monotonic clock."""
    stall: float
    """Seconds that training waited for the copy."""
    thread: threading.Thread | None = None
    committed: Manifest | None = None
    error: BaseException | None = None
    damage: CheckpointError | None = None
    """The committed files did not read back as written."""
    waited: bool = False
    """Training stood still until it ended, so it shows nothing about the cost of a save in parallel to training."""


class Checkpoints:
    """The checkpoints of one run, as one rank handles them."""

    def __init__(
        self,
        job_dir: Path,
        attempt_dir: Path,
        world: World,
        options: SaveOptions,
        *,
        reporter: AnyReporter,
        is_stop_requested: Callable[[], bool] = lambda: False,
        forget: Callable[[Mapping[str, Any]], None] = lambda state: None,
    ) -> None:
        """`is_stop_requested` returns whether this rank was asked to stop and so has little time; called on any thread.

        `forget` gets the state of a save that failed or is damaged.
        """
        self.folder = job_dir / "checkpoints"
        self._job_dir, self._attempt_dir, self._world = job_dir, attempt_dir, world
        self._generation, self._cadence, self._unit = options.generation, options.cadence, options.unit
        self._reporter, self._forget = reporter, forget
        self._group: dist.ProcessGroup | None = dist.new_group(backend="gloo") if world.size > 1 else None
        self._lineage = Lineage()
        self._writer = CheckpointWriter(
            job_dir,
            world,
            self._group,
            self._lineage,
            options,
            reporter=reporter,
            is_stop_requested=is_stop_requested,
        )
        self.staging = Staging(self._group, warn=lambda why: events.report_unpinned(reporter, why))
        self._preparing: threading.Thread | None = None
        self._in_flight: _Save | None = None

    @property
    def latest(self) -> Manifest | None:
        """The parent of the next checkpoint: the newest that this run committed or started from."""
        return self._lineage.latest

    def start_from(self, start: Manifest | None) -> None:
        """Set the checkpoint that the run descends from, and clean up what earlier generations left incomplete."""
        self._lineage.latest = start
        self._lineage.identities = [*start.ancestors, start.identity] if start else []
        if self._world.leads:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lineage.starts = start_identities(self._attempt_dir, start)
            self._clear()
            events.report_ignored(self._reporter, manifests.broken(self.folder))

    def find(self, name: str) -> Manifest:
        """Return a committed checkpoint by name; report it if it is damaged. Raises CheckpointError."""
        try:
            return manifests.check(self.folder / name)
        except UnreadableManifest:
            raise
        except CheckpointError as error:
            with suppress(CheckpointError):
                events.report_damaged(self._reporter, manifests.read(self.folder / name), error)
            raise

    def restore(self, state: State, start: Manifest) -> None:
        """Verify every file's digest, then read a checkpoint into the state's tensors. Raises CheckpointError."""
        with garbage_collection_paused():
            from training.checkpoint import storage
        folder = self.folder / start.name
        available: State = {}

        def match() -> set[str]:
            available.update(storage.match_stored(state, folder))
            return storage.names(state)

        try:
            run_on_all(self._world, lambda: self._verify_share(start), group=self._group)
            if self._world.leads:
                with suppress(OSError):  # it then counts as not verified
                    mark_verified(folder)
            names = run_on_all(self._world, match, group=self._group)
            storage.check_complete(folder, set().union(*names))
            storage.read(available, folder, self._group)
        except CheckpointError as error:
            raise CheckpointError(f"{start.name} can't be resumed from: {error}") from None

    def prepare(self, state: State) -> None:
        """Prepare the first save on a thread, so that it is as fast as later ones: memory, and torch's code for it.

        All ranks call it at the same boundary, with none of them saving. Without it the first save does this itself.
        """
        if self._preparing is None:
            self.staging.reserve(state)
            self._preparing = threading.Thread(target=self._prepare, name="checkpoint-memory", daemon=True)
            self._preparing.start()

    def _prepare(self) -> None:
        self._select_gpu()
        self.staging.touch()
        with garbage_collection_paused():
            from training.checkpoint import storage  # noqa: F401

    @property
    def is_saving(self) -> bool:
        """Whether this rank is still writing."""
        return self._in_flight is not None and self._in_flight.thread is not None and self._in_flight.thread.is_alive()

    def save(self, state: State, fields: ManifestFields) -> None:
        """Begin a save; call on all ranks at the same step boundary, with none of them saving."""
        self.process_ended_save()
        began = time.monotonic()
        if self._preparing is not None:
            self._preparing.join()  # it zeroes the buffers, which would overwrite the copy
        copy = self.staging.copy(state)
        save = self._in_flight = _Save(fields, began, time.monotonic() - began)
        self._cadence.note_begun()
        save.thread = threading.Thread(target=self._run, args=(save, copy), name="checkpoint", daemon=True)
        save.thread.start()

    def wait(self) -> Manifest:
        """Wait for the save in flight. Raises what went wrong, CheckpointError if the checkpoint is unusable."""
        save = self._in_flight
        if save is None or save.thread is None:
            raise RuntimeError("nothing is being saved")
        self.finish_save()
        if isinstance(save.error, OSError):
            raise CheckpointError(f"{self._unit} {save.fields.step} could not be saved: {save.error}") from save.error
        if save.error is not None:
            raise save.error
        if save.damage is not None:
            raise save.damage
        assert save.committed is not None
        return save.committed

    def finish_save(self) -> None:
        """Wait for a save that may be in flight. If it fails, training still has the state and can save it again."""
        if self._in_flight is not None and self._in_flight.thread is not None:
            self._in_flight.waited = self.is_saving
            self._in_flight.thread.join()
        self.process_ended_save()

    def process_ended_save(self) -> None:
        """Process a save that has ended. A failure is reported and training continues, but Fenced is raised."""
        save = self._in_flight
        if save is None or self.is_saving:
            return
        self._in_flight = None  # its thread has ended, so its results are read without a lock
        if save.committed is None or save.damage is not None:
            # Otherwise its loss would remain among the best without a checkpoint, and block worse ones.
            self._forget(save.fields.state)
        if save.committed is not None:
            if save.damage is None:
                self._lineage.latest = save.committed
            else:
                self._cadence.note_damaged()
            if self._world.leads and not save.waited:
                self._report_cadence(save, save.committed)
        elif isinstance(save.error, Fenced):
            raise save.error
        elif self._world.leads and save.error is not None:
            events.report_failed(self._reporter, save.fields.step, save.error, unit=self._unit)

    def skip(self, step: int) -> None:
        """Record a due save that was left out because the previous one is still being written."""
        self._cadence.note_skipped()
        if self._world.leads:
            events.report_skipped(self._reporter, step, "the previous save is still being written")

    def _run(self, save: _Save, state: State) -> None:
        """The body of a save's thread."""
        try:
            self._select_gpu()
            save.committed = self._writer.write(state, save.fields, began=save.began, stall=save.stall)
        except BaseException as error:  # passed to the main thread, which handles it
            save.error = error
        finally:
            release(state)
        if save.committed is not None:
            save.damage = self._writer.verify_and_prune(save.committed)

    def _select_gpu(self) -> None:
        """Select this rank's GPU: a new thread begins on GPU 0, where using a GPU would allocate a context."""
        if self._world.device.type == "cuda":
            torch.cuda.set_device(self._world.device)

    # At the start.

    def _clear(self) -> None:
        for staging, generation in manifests.staged(self.folder):
            if generation < self._generation:
                delete(staging)
        finish(self._job_dir, report=lambda gone: events.report_pruned(self._reporter, gone))

    def _verify_share(self, start: Manifest) -> None:
        folder = self.folder / start.name
        try:
            share = manifests.check(folder).share(self._world.rank, self._world.size)
            manifests.verify(folder, files=share)
        except UnreadableManifest:
            raise  # it may be intact, and a mark of damage is permanent
        except CheckpointError as error:
            mark_damaged(folder, error)
            events.report_damaged(self._reporter, start, error)
            raise

    def _report_cadence(self, save: _Save, manifest: Manifest) -> None:
        report = self._cadence.note_written(stall=save.stall, write=manifest.seconds)
        if report is not None:
            self._reporter.event("checkpoint.cadence", step=manifest.step, **report)


def load_start(checkpoints: Checkpoints, world: World, name: str) -> Manifest | None:
    """Return the checkpoint to start from as rank 0 reads it, so that all ranks start from the same. "": None."""
    result: Manifest | CheckpointError | None = None
    if name and world.leads:
        try:
            result = checkpoints.find(name)
        except CheckpointError as error:
            result = error
    agreed: Manifest | CheckpointError | None = broadcast(world, result)
    if isinstance(agreed, CheckpointError):
        raise CheckpointError(f"{name} can't be resumed from: {agreed}")
    return agreed
