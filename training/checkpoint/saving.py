"""Checkpoints of a run: written beside training, committed by one rename, pruned, read back (protocols.md §4).

A save copies the state at a step boundary (see staging), and a thread of each rank writes the copy (see writing) on a
process group of its own: on the default group it would mix with training's collectives and hang. Only one save is in
flight.

    .step-400.3/          made exclusively by rank 0, written by all, fsynced, digests taken on the way
    .step-400.3/COMMITTED written by rank 0 once every rank has told what it wrote
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
from training.checkpoint.cadence import Cadence
from training.checkpoint.committing import mark_damaged, mark_verified
from training.checkpoint.pruning import Keep, delete, finish, starts
from training.checkpoint.staging import Staging, State, release
from training.checkpoint.writing import Facts, Lineage, Writer
from training.manifest import CheckpointError, Manifest, Unreadable
from training.reporting.reporter import AnyReporter
from training.runtime.distributed import World, broadcast, together
from training.runtime.imports import without_collections


@dataclass
class _Save:
    """One save in flight."""

    facts: Facts
    began: float
    """When it began, before the copy, by the monotonic clock."""
    stall: float
    """Seconds that training waited for the copy."""
    thread: threading.Thread | None = None
    committed: Manifest | None = None
    error: BaseException | None = None
    damage: CheckpointError | None = None
    """What was committed was not read back as it had been written."""
    waited: bool = False
    """Training stood still for the rest of it, so nothing can be told of what it costs to go on beside it."""


class Checkpoints:
    """The checkpoints of one run, as one rank sees them."""

    def __init__(
        self,
        job_dir: Path,
        attempt_dir: Path,
        world: World,
        *,
        generation: int,
        keep: Keep,
        cadence: Cadence,
        reporter: AnyReporter,
        is_hurried: Callable[[], bool] = lambda: False,
        forget: Callable[[Mapping[str, Any]], None] = lambda state: None,
        counts: str = "step",
    ) -> None:
        """`is_hurried`: whether this rank was asked to stop, for which it has only so long. Asked on any thread.
        `forget` is given the state of a save that came to nothing, or is no good. `counts`: what the run counts."""
        self.folder = job_dir / "checkpoints"
        self._job_dir, self._attempt_dir, self._world = job_dir, attempt_dir, world
        self._generation, self._cadence, self._reporter = generation, cadence, reporter
        self._forget, self._counts = forget, counts
        self._group: dist.ProcessGroup | None = dist.new_group(backend="gloo") if world.size > 1 else None
        self._line = Lineage()
        self._writer = Writer(
            job_dir,
            world,
            self._group,
            self._line,
            generation=generation,
            keep=keep,
            reporter=reporter,
            is_hurried=is_hurried,
        )
        self.staging = Staging(self._group, say=lambda why: events.tell_unpinned(reporter, why))
        self._preparing: threading.Thread | None = None
        self._flight: _Save | None = None

    @property
    def latest(self) -> Manifest | None:
        """What the next one descends from: the newest that this run committed or started from."""
        return self._line.latest

    def start_from(self, start: Manifest | None) -> None:
        """Takes up the line of descent, and clears away what earlier generations left half done."""
        self._line.latest = start
        self._line.identities = [*start.ancestors, start.identity] if start else []
        if self._world.leads:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._line.starts = starts(self._attempt_dir, start)
            self._clear()
            events.tell_passed_over(self._reporter, manifests.broken(self.folder))

    def find(self, name: str) -> Manifest:
        """A committed checkpoint by name; one that is not what was committed is told."""
        try:
            return manifests.check(self.folder / name)
        except Unreadable:
            raise
        except CheckpointError as error:
            with suppress(CheckpointError):
                events.tell_damaged(self._reporter, manifests.read(self.folder / name), error)
            raise

    def restore(self, state: State, start: Manifest) -> None:
        """Reads a checkpoint into the state's tensors, once every file has the digest it was written with."""
        with without_collections():
            from training.checkpoint import storage
        folder = self.folder / start.name
        found: State = {}

        def look() -> set[str]:
            found.update(storage.find(state, folder))
            return storage.names(state)

        try:
            together(self._world, lambda: self._verify_share(start), group=self._group)
            if self._world.leads:
                with suppress(OSError):  # it only counts as not verified
                    mark_verified(folder)
            wanted = together(self._world, look, group=self._group)
            storage.check_complete(folder, set().union(*wanted))
            storage.read(found, folder, self._group)
        except CheckpointError as error:
            raise CheckpointError(f"{start.name} can't be resumed from: {error}") from None

    def prepare(self, state: State) -> None:
        """Makes the first save as cheap as the others: its memory and torch's code for it, on a thread.

        All ranks call it at the same boundary, none of them busy. Without it the first save does that itself.
        """
        if self._preparing is None:
            self.staging.reserve(state)
            self._preparing = threading.Thread(target=self._prepare, name="checkpoint-memory", daemon=True)
            self._preparing.start()

    def _prepare(self) -> None:
        self._use_own_gpu()
        self.staging.touch()
        with without_collections():
            from training.checkpoint import storage  # noqa: F401

    @property
    def busy(self) -> bool:
        """Whether this rank is still writing."""
        return self._flight is not None and self._flight.thread is not None and self._flight.thread.is_alive()

    def save(self, state: State, facts: Facts) -> None:
        """Begins to save; call on all ranks at the same step boundary, none of them busy."""
        self.settle()
        began = time.monotonic()
        if self._preparing is not None:
            self._preparing.join()  # it writes zeros into the buffers, and would do so over the copy
        copy = self.staging.copy(state)
        save = self._flight = _Save(facts, began, time.monotonic() - began)
        self._cadence.note_begun()
        save.thread = threading.Thread(target=self._run, args=(save, copy), name="checkpoint", daemon=True)
        save.thread.start()

    def wait(self) -> Manifest:
        """Waits for the save in flight; raises what went wrong with it, CheckpointError if it can't be relied on."""
        save = self._flight
        if save is None or save.thread is None:
            raise RuntimeError("nothing is being saved")
        self.finish_flight()
        if isinstance(save.error, OSError):
            raise CheckpointError(f"{self._counts} {save.facts.step} could not be saved: {save.error}") from save.error
        if save.error is not None:
            raise save.error
        if save.damage is not None:
            raise save.damage
        assert save.committed is not None
        return save.committed

    def finish_flight(self) -> None:
        """Waits for a save that may be in flight. If it fails, training has the state still, and can save it again."""
        if self._flight is not None and self._flight.thread is not None:
            self._flight.waited = self.busy
            self._flight.thread.join()
        self.settle()

    def settle(self) -> None:
        """Takes note of a save that has ended. One that failed is told and training goes on; being fenced ends it."""
        save = self._flight
        if save is None or self.busy:
            return
        self._flight = None  # its thread has ended, so what it left is read without a lock
        if save.committed is None or save.damage is not None:
            # Else its loss would stay among the best, which no checkpoint has, and only a better one would be kept.
            self._forget(save.facts.state)
        if save.committed is not None:
            if save.damage is None:
                self._line.latest = save.committed
            else:
                self._cadence.note_damaged()
            if self._world.leads and not save.waited:
                self._tell_cadence(save, save.committed)
        elif isinstance(save.error, Fenced):
            raise save.error
        elif self._world.leads and save.error is not None:
            events.tell_failed(self._reporter, save.facts.step, save.error, counts=self._counts)

    def skip(self, step: int) -> None:
        """Counts a due save that was left out because the one before is still being written."""
        self._cadence.note_skipped()
        if self._world.leads:
            events.tell_skipped(self._reporter, step, "the one before is still being written")

    def _run(self, save: _Save, state: State) -> None:
        """The save's thread."""
        try:
            self._use_own_gpu()
            save.committed = self._writer.write(state, save.facts, began=save.began, stall=save.stall)
        except BaseException as error:  # handed to the main thread, which knows what it means
            save.error = error
        finally:
            release(state)
        if save.committed is not None:
            save.damage = self._writer.look_after(save.committed)

    def _use_own_gpu(self) -> None:
        """A new thread begins on GPU 0, where whatever it did with a GPU would take memory for a context."""
        if self._world.device.type == "cuda":
            torch.cuda.set_device(self._world.device)

    # At the start.

    def _clear(self) -> None:
        for staging, generation in manifests.staged(self.folder):
            if generation < self._generation:
                delete(staging)
        finish(self._job_dir, tell=lambda gone: events.tell_pruned(self._reporter, gone))

    def _verify_share(self, start: Manifest) -> None:
        folder = self.folder / start.name
        try:
            share = manifests.check(folder).share(self._world.rank, self._world.size)
            manifests.verify(folder, files=share)
        except Unreadable:
            raise  # nothing is known against it, and what is marked as damaged is so for good
        except CheckpointError as error:
            mark_damaged(folder, error)
            events.tell_damaged(self._reporter, start, error)
            raise

    def _tell_cadence(self, save: _Save, manifest: Manifest) -> None:
        about = self._cadence.note_written(stall=save.stall, write=manifest.seconds)
        if about is not None:
            self._reporter.event("checkpoint.cadence", step=manifest.step, **about)


def load_start(checkpoints: Checkpoints, world: World, name: str) -> Manifest | None:
    """The checkpoint to start from as rank 0 reads it, so that all ranks start from the same. "": none."""
    found: Manifest | CheckpointError | None = None
    if name and world.leads:
        try:
            found = checkpoints.find(name)
        except CheckpointError as error:
            found = error
    agreed: Manifest | CheckpointError | None = broadcast(world, found)
    if isinstance(agreed, CheckpointError):
        raise CheckpointError(f"{name} can't be resumed from: {agreed}")
    return agreed
