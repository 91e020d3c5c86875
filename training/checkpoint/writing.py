"""The thread's side of a save: written by all ranks, committed by rank 0, read back, and what nobody needs removed.

All ranks run through the same steps; an error of one becomes an error of all.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from training import manifest as manifests
from training.attempt.lineage import Fenced, check_fence
from training.checkpoint import events
from training.checkpoint.committing import commit, mark_damaged, mark_verified
from training.checkpoint.pruning import Keep, delete, pinned, prune
from training.checkpoint.staging import State
from training.manifest import CheckpointError, File, Manifest, Unreadable
from training.reporting.reporter import AnyReporter
from training.runtime.distributed import World, together
from training.runtime.imports import without_collections


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
class Lineage:
    """The checkpoints that a run descends from, its own among them."""

    latest: Manifest | None = None
    """What the next one descends from: the newest that this run committed or started from."""
    identities: list[tuple[int, int]] = field(default_factory=list)
    """(step, generation), the oldest first; those that were pruned are not among them."""
    starts: frozenset[tuple[int, int]] = frozenset()
    """Those that the attempt and this incarnation of it began from, which stay."""


class Writer:
    """What one rank's thread does; only one save is in flight, so all of it is one thread's at a time."""

    def __init__(
        self,
        job_dir: Path,
        world: World,
        group: dist.ProcessGroup | None,
        line: Lineage,
        *,
        generation: int,
        keep: Keep,
        reporter: AnyReporter,
        is_hurried: Callable[[], bool],
    ) -> None:
        """`group`: of all ranks, this thread's own."""
        self.folder = job_dir / "checkpoints"
        self._job_dir, self._world, self._group, self._line = job_dir, world, group, line
        self._generation, self._keep, self._reporter = generation, keep, reporter
        self._is_hurried = is_hurried

    def write(self, state: State, facts: Facts, *, began: float, stall: float) -> Manifest:
        """Writes durably, by when it answers; `began`: by the monotonic clock. Raises what kept any rank from it."""
        with without_collections():
            from training.checkpoint import storage
        staging = self._staging_of(facts)
        try:
            self._together(lambda: self._make(staging) if self._world.leads else None)
            files = storage.write(state, staging, self._group)
            told = self._together(lambda: self._told(files))
            manifest = self.manifest_of(facts, [file for part in told for file in part], began)
            self._together(lambda: self._commit(staging, manifest, stall) if self._world.leads else None)
        except BaseException:
            if self._world.leads:
                delete(staging)  # where the disk is full, half a checkpoint would keep it so
            raise
        return manifest

    def look_after(self, manifest: Manifest) -> CheckpointError | None:
        """Reads the new checkpoint back, each rank a share, then removes what is no longer needed. Never fails it.

        What was wrong with it, known to all ranks alike.
        """
        try:
            self._together(lambda: self._read_back(manifest))
        except _Hurried:
            self._line.identities.append(manifest.identity)
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
                with suppress(OSError):  # it only counts as not verified
                    mark_verified(self.folder / manifest.name)
        self._line.identities.append(manifest.identity)
        if self._world.leads:
            with suppress(OSError, Fenced):
                self._prune()
        return None

    def manifest_of(self, facts: Facts, files: list[File], began: float) -> Manifest:
        latest = self._line.latest
        return Manifest(
            name=f"step-{facts.step}",
            step=facts.step,
            generation=self._generation,
            parent=latest.identity if latest else None,
            ancestors=tuple(self._line.identities),
            consumed_samples=facts.consumed_samples,
            world_size=self._world.size,
            layout=facts.layout,
            config_hash=facts.config_hash,
            config=facts.config,
            data=facts.data,
            state=facts.state,
            files=tuple(sorted(files, key=lambda file: file.file)),
            created=time.time(),
            seconds=time.monotonic() - began,
            versions=facts.versions,
        )

    # The parts of it.

    def _staging_of(self, facts: Facts) -> Path:
        return self.folder / f".step-{facts.step}.{self._generation}"

    def _make(self, staging: Path) -> None:
        delete(staging)  # this very generation may have failed to write it, disk full
        staging.mkdir()  # not what is above it: where that is gone, the file system is, and this would be a local disk

    def _told(self, files: list[File]) -> list[File]:
        """What this rank wrote; its metrics up to here are on disk, too."""
        self._reporter.flush(wait=events.REPORT_SECONDS)
        return files

    def _commit(self, staging: Path, manifest: Manifest, stall: float) -> None:
        commit(staging, manifest, check_fence=self._check_fence)
        events.tell_committed(self._reporter, manifest, stall)

    def _read_back(self, manifest: Manifest) -> None:
        self._check_hurry()
        share = manifest.share(self._world.rank, self._world.size)
        manifests.verify(self.folder / manifest.name, files=share, between=self._check_hurry)

    def _check_hurry(self) -> None:
        if self._is_hurried():
            raise _Hurried

    def _prune(self) -> None:
        """Removes from this run's own line what nobody wants: neither its rules, nor people, nor a restart."""
        own = [found for found in manifests.committed(self.folder) if found.identity in self._line.identities]
        verified = [found for found in own if (self.folder / found.name / manifests.VERIFIED).exists()]
        kept = self._keep.of(own) | {found.identity for found in verified[-2:]} | self._line.starts
        for found in own:
            if self._is_hurried():
                return
            if found.identity in kept or found.identity in pinned(self._job_dir):
                continue
            self._check_fence()
            if prune(found, self._job_dir, tell=lambda gone: events.tell_pruned(self._reporter, gone)):
                self._line.identities.remove(found.identity)

    def _check_fence(self) -> None:
        check_fence(self._job_dir, self._generation)

    def _together(self, act: Callable[[], Any]) -> list[Any]:
        return together(self._world, act, group=self._group)
