"""Checkpoints of a run: written beside training, committed by one rename, pruned, read back (PROTOCOLS §4).

A save copies the state at a step boundary (see staging), and a thread of each rank writes the copy on a process group
of its own (on the default group it would mix with training's collectives and hang). Only one save is in flight.

    .step-400.3/          made exclusively by rank 0, written by all, fsynced, digests taken on the way
    .step-400.3/COMMITTED written by rank 0 once every rank has told what it wrote
    step-400/             renamed, unless a newer generation has taken over: now it is a checkpoint
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from training import manifest as manifests
from training.attempt.lineage import Fenced, check_fence
from training.checkpoint import events
from training.checkpoint.cadence import Cadence
from training.checkpoint.committing import commit, mark_damaged, mark_verified
from training.checkpoint.pruning import Keep, delete, finish, pinned, prune, starts
from training.checkpoint.staging import Staging, State
from training.distributed import World, broadcast
from training.imports import without_collections
from training.manifest import CheckpointError, File, Manifest, Unreadable
from training.report import AnyReporter


class _Hurried(Exception):
    """This rank was asked to stop: it reads nothing back."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a manifest says beside what was written."""

    step: int
    consumed_samples: int
    layout: dict[str, Any]
    config_hash: str
    config: dict[str, Any]
    data: str
    state: dict[str, Any] = field(default_factory=dict)
    """Small plain values to go on from: see training.checkpoint.remembering."""
    versions: dict[str, str] = field(default_factory=dict)


@dataclass
class _Save:
    """One save in flight."""

    facts: Facts
    began: float
    """By the monotonic clock, before the copy."""
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
    ) -> None:
        """`is_hurried`: whether this rank was asked to stop, for which it has only so long. Asked on any thread."""
        self.folder = job_dir / "checkpoints"
        self._job_dir, self._attempt_dir, self._world = job_dir, attempt_dir, world
        self._generation, self._keep, self._cadence, self._reporter = generation, keep, cadence, reporter
        self._group: dist.ProcessGroup | None = dist.new_group(backend="gloo") if world.size > 1 else None
        self._is_hurried = is_hurried
        self.staging = Staging(self._group, say=lambda why: events.tell_unpinned(reporter, why))
        self._preparing: threading.Thread | None = None
        self._flight: _Save | None = None
        self._start: frozenset[tuple[int, int]] = frozenset()
        self._line: list[tuple[int, int]] = []
        self.latest: Manifest | None = None
        """What the next one descends from: the newest that this run committed or started from."""

    def start_from(self, start: Manifest | None) -> None:
        """Takes up the line of descent, and clears away what earlier generations left half done."""
        self.latest = start
        self._line = [*start.ancestors, start.identity] if start else []
        if self._world.leads:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._start = starts(self._attempt_dir, start)
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
            self._together(lambda: self._verify_share(start))
            if self._world.leads:
                self._mark_verified(start)
            wanted = self._together(look)
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
            self._preparing.join()
        copy = self.staging.copy(state)
        save = self._flight = _Save(facts, began, time.monotonic() - began)
        self._cadence.note_begun()
        save.thread = threading.Thread(target=self._run, args=(save, copy), name="checkpoint", daemon=True)
        save.thread.start()

    def wait(self) -> Manifest:
        """Waits for the save in flight; raises what went wrong with it, CheckpointError if it is damaged already."""
        save = self._flight
        if save is None or save.thread is None:
            raise RuntimeError("nothing is being saved")
        self.finish_flight()
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
        self._flight = None
        if save.committed is not None:
            if save.damage is None:
                self.latest = save.committed
            else:
                self._cadence.note_damaged()
            if self._world.leads and not save.waited:
                self._tell_cadence(save, save.committed)
        elif isinstance(save.error, Fenced):
            raise save.error
        elif self._world.leads and save.error is not None:
            events.tell_failed(self._reporter, save.facts.step, save.error)

    def skip(self, step: int) -> None:
        """Counts a due save that was left out because the one before is still being written."""
        self._cadence.note_skipped()
        if self._world.leads:
            events.tell_skipped(self._reporter, step, "the one before is still being written")

    # The thread's side. All ranks run through the same steps; an error of one becomes an error of all.

    def _run(self, save: _Save, state: State) -> None:
        try:
            self._use_own_gpu()
            save.committed = self._write(save, state)
        except BaseException as error:  # handed to the main thread, which knows what it means
            save.error = error
            if self._world.leads:
                delete(self._staging_of(save))  # where the disk is full, half a checkpoint would keep it so
            return
        save.damage = self._look_after(save.committed)

    def _write(self, save: _Save, state: State) -> Manifest:
        with without_collections():
            from training.checkpoint import storage
        staging = self._staging_of(save)
        self._together(lambda: self._make(staging) if self._world.leads else None)
        files = storage.write(state, staging, self._group)
        told = self._together(lambda: self._told(files))
        manifest = self._manifest(save, [file for part in told for file in part])
        self._together(lambda: self._commit(staging, manifest, save) if self._world.leads else None)
        return manifest

    def _staging_of(self, save: _Save) -> Path:
        return self.folder / f".step-{save.facts.step}.{self._generation}"

    def _told(self, files: list[File]) -> list[File]:
        """What this rank wrote; its metrics up to here are on disk, too."""
        self._reporter.flush(wait=events.REPORT_SECONDS)
        return files

    def _make(self, staging: Path) -> None:
        delete(staging)  # this very generation may have failed to write it, disk full
        staging.mkdir()  # not what is above it: where that is gone, the file system is, and this would be a local disk

    def _manifest(self, save: _Save, files: list[File]) -> Manifest:
        facts = save.facts
        return Manifest(
            name=f"step-{facts.step}",
            step=facts.step,
            generation=self._generation,
            parent=self.latest.identity if self.latest else None,
            ancestors=tuple(self._line),
            consumed_samples=facts.consumed_samples,
            world_size=self._world.size,
            layout=facts.layout,
            config_hash=facts.config_hash,
            config=facts.config,
            data=facts.data,
            state=facts.state,
            files=tuple(sorted(files, key=lambda file: file.file)),
            created=time.time(),
            seconds=time.monotonic() - save.began,
            versions=facts.versions,
        )

    def _commit(self, staging: Path, manifest: Manifest, save: _Save) -> None:
        commit(staging, manifest, check_fence=self._check_fence)
        events.tell_committed(self._reporter, manifest, save.stall)

    def _look_after(self, manifest: Manifest) -> CheckpointError | None:
        """Reads the new checkpoint back, each rank a share, then removes what is no longer needed. Never fails it.

        What was wrong with it, known to all ranks alike.
        """
        try:
            self._together(lambda: self._read_back(manifest))
        except _Hurried:
            self._line = [*self._line, manifest.identity]
            return None  # whoever resumes from it will read it, and the next save remove the others
        except (OSError, Unreadable, RuntimeError):
            pass  # nothing is known against it (a peer may have died): it only counts as not verified
        except CheckpointError as error:
            damage = CheckpointError(f"{manifest.name} was not read back as it was written: {error}")
            if self._world.leads:
                mark_damaged(self.folder / manifest.name, error)
                events.tell_damaged(self._reporter, manifest, error)
            return damage  # and what came before it stays, all of it
        else:
            if self._world.leads:
                self._mark_verified(manifest)
        self._line = [*self._line, manifest.identity]
        if self._world.leads:
            with suppress(OSError, Fenced):
                self._prune()
        return None

    def _read_back(self, manifest: Manifest) -> None:
        self._check_hurry()
        manifests.verify(self.folder / manifest.name, files=self._share(manifest), between=self._check_hurry)

    def _check_hurry(self) -> None:
        if self._is_hurried():
            raise _Hurried

    def _mark_verified(self, manifest: Manifest) -> None:
        with suppress(OSError):  # it only counts as not verified
            mark_verified(self.folder / manifest.name)

    def _use_own_gpu(self) -> None:
        """A new thread begins on GPU 0, where whatever it did with a GPU would take memory for a context."""
        if self._world.device.type == "cuda":
            torch.cuda.set_device(self._world.device)

    def _share(self, manifest: Manifest) -> tuple[File, ...]:
        return manifest.files[self._world.rank :: self._world.size]

    def _prune(self) -> None:
        """Removes from this run's own line what nobody wants: neither its rules, nor people, nor a restart."""
        own = [found for found in manifests.committed(self.folder) if found.identity in self._line]
        verified = [found for found in own if (self.folder / found.name / manifests.VERIFIED).exists()]
        kept = self._keep.of(own) | {found.identity for found in verified[-2:]} | self._start
        for found in own:
            if self._is_hurried():
                return
            if found.identity in kept or found.identity in pinned(self._job_dir):
                continue
            self._check_fence()
            if prune(found, self._job_dir, tell=lambda gone: events.tell_pruned(self._reporter, gone)):
                self._line.remove(found.identity)

    def _together(self, act: Callable[[], Any]) -> list[Any]:
        """Does something on every rank and gathers the answers; where one failed, all raise."""
        try:
            mine: tuple[Any, BaseException | None] = (act(), None)
        except Exception as error:
            mine = (None, error)
        answers: list[Any] = [mine] * self._world.size
        if self._group is not None:
            dist.all_gather_object(answers, mine, group=self._group)
        for _, failed in answers:
            if failed is not None:
                raise failed
        return [answer for answer, _ in answers]

    # On the main thread, at the start.

    def _clear(self) -> None:
        for staging, generation in manifests.staged(self.folder):
            if generation < self._generation:
                delete(staging)
        finish(self._job_dir, tell=lambda gone: events.tell_pruned(self._reporter, gone))

    def _verify_share(self, start: Manifest) -> None:
        folder = self.folder / start.name
        try:
            manifests.verify(folder, files=self._share(manifests.check(folder)))
        except Unreadable:
            raise
        except CheckpointError as error:
            mark_damaged(folder, error)
            events.tell_damaged(self._reporter, start, error)
            raise

    def _check_fence(self) -> None:
        check_fence(self._job_dir, self._generation)

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
