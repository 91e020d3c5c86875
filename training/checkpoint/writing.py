"""Do the thread's part of a save: all ranks write, rank 0 commits, then the files are verified and old ones removed.

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
from training.checkpoint.cadence import Cadence
from training.checkpoint.committing import commit, mark_damaged, mark_verified
from training.checkpoint.pruning import Retention, delete, pinned, prune
from training.checkpoint.staging import State
from training.manifest import CheckpointError, CheckpointFile, Manifest, UnreadableManifest
from training.reporting.reporter import AnyReporter
from training.runtime.distributed import World, run_on_all
from training.runtime.imports import garbage_collection_paused


class _StopRequested(Exception):
    """This rank was asked to stop and skips the verification."""


@dataclass(frozen=True, kw_only=True)
class ManifestFields:
    """The fields of a manifest other than those about the files."""

    step: int
    consumed_samples: int
    layout: dict[str, Any]
    config_hash: str
    config: dict[str, Any]
    data: str
    state: dict[str, Any] = field(default_factory=dict)
    """Small plain values to continue from: see training.checkpoint.saved_state."""
    versions: dict[str, str] = field(default_factory=dict)


@dataclass
class Lineage:
    """The checkpoints that a run descends from, including its own."""

    latest: Manifest | None = None
    """The parent of the next checkpoint: the newest that this run committed or started from."""
    identities: list[tuple[int, int]] = field(default_factory=list)
    """(step, generation), oldest first, without those that were pruned."""
    starts: frozenset[tuple[int, int]] = frozenset()
    """Checkpoints that the attempt and this incarnation began from, which are never pruned."""


@dataclass(frozen=True)
class SaveOptions:
    """Options of a run's saves: how often, and which checkpoints it keeps."""

    generation: int
    """The generation of the launch that saves: an older one must not commit."""
    retention: Retention
    cadence: Cadence
    unit: str = "step"
    """The run's unit of progress."""


class CheckpointWriter:
    """The work of one rank's thread; only one save is in flight, so all state belongs to one thread at a time."""

    def __init__(
        self,
        job_dir: Path,
        world: World,
        group: dist.ProcessGroup | None,
        lineage: Lineage,
        options: SaveOptions,
        *,
        reporter: AnyReporter,
        is_stop_requested: Callable[[], bool],
    ) -> None:
        """`group`: a process group of all ranks for this thread alone."""
        self.folder = job_dir / "checkpoints"
        self._job_dir, self._world, self._group, self._lineage = job_dir, world, group, lineage
        self._generation, self._retention, self._reporter = options.generation, options.retention, reporter
        self._is_stop_requested = is_stop_requested

    def write(self, state: State, fields: ManifestFields, *, began: float, stall: float) -> Manifest:
        """Write and commit durably; `began`: on the monotonic clock. Raises whatever prevented any rank from it."""
        with garbage_collection_paused():
            from training.checkpoint import storage
        staging = self._staging_path(fields)
        try:
            self._run_on_all_ranks(lambda: self._make(staging) if self._world.leads else None)
            files = storage.write(state, staging, self._group)
            reported = self._run_on_all_ranks(lambda: self._report_files(files))
            manifest = self.make_manifest(fields, [file for rank_files in reported for file in rank_files], began)
            self._run_on_all_ranks(lambda: self._commit(staging, manifest, stall) if self._world.leads else None)
        except BaseException:
            if self._world.leads:
                delete(staging)  # half a checkpoint would keep a full disk full
            raise
        return manifest

    def verify_and_prune(self, manifest: Manifest) -> CheckpointError | None:
        """Read the new checkpoint back, each rank a share, then remove checkpoints that are no longer needed.

        Returns the damage that was found, the same on all ranks. Never raises for a failure of its own.
        """
        try:
            self._run_on_all_ranks(lambda: self._read_back(manifest))
        except _StopRequested:
            self._lineage.identities.append(manifest.identity)
            return None  # a resume will verify it, and the next save will prune
        except (OSError, UnreadableManifest, RuntimeError):
            pass  # it may be intact (a peer may have died): it then counts as not verified
        except CheckpointError as error:
            damage = CheckpointError(f"{manifest.name} was not read back as it was written: {error}")
            if self._world.leads:
                mark_damaged(self.folder / manifest.name, error)
                events.report_damaged(self._reporter, manifest, error)
            return damage  # earlier checkpoints all stay
        else:
            if self._world.leads:
                with suppress(OSError):  # it then counts as not verified
                    mark_verified(self.folder / manifest.name)
        self._lineage.identities.append(manifest.identity)
        if self._world.leads:
            with suppress(OSError, Fenced):
                self._prune()
        return None

    def make_manifest(self, fields: ManifestFields, files: list[CheckpointFile], began: float) -> Manifest:
        latest = self._lineage.latest
        return Manifest(
            name=f"step-{fields.step}",
            step=fields.step,
            generation=self._generation,
            parent=latest.identity if latest else None,
            ancestors=tuple(self._lineage.identities),
            consumed_samples=fields.consumed_samples,
            world_size=self._world.size,
            layout=fields.layout,
            config_hash=fields.config_hash,
            config=fields.config,
            data=fields.data,
            state=fields.state,
            files=tuple(sorted(files, key=lambda file: file.file)),
            created=time.time(),
            seconds=time.monotonic() - began,
            versions=fields.versions,
        )

    # Steps of a save.

    def _staging_path(self, fields: ManifestFields) -> Path:
        return self.folder / f".step-{fields.step}.{self._generation}"

    def _make(self, staging: Path) -> None:
        delete(staging)  # left by a failed save of this generation, on a full disk
        # Not its parents: if these are missing the file system is gone, and this would be a local disk.
        staging.mkdir()

    def _report_files(self, files: list[CheckpointFile]) -> list[CheckpointFile]:
        """Return what this rank wrote, once its metrics up to here are on disk as well."""
        self._reporter.flush(wait=events.REPORT_SECONDS)
        return files

    def _commit(self, staging: Path, manifest: Manifest, stall: float) -> None:
        commit(staging, manifest, check_fence=self._check_fence)
        events.report_committed(self._reporter, manifest, stall)

    def _read_back(self, manifest: Manifest) -> None:
        self._check_stop_request()
        share = manifest.share(self._world.rank, self._world.size)
        manifests.verify(self.folder / manifest.name, files=share, between=self._check_stop_request)

    def _check_stop_request(self) -> None:
        if self._is_stop_requested():
            raise _StopRequested

    def _prune(self) -> None:
        """Remove checkpoints of this run's branch that nothing needs any more.

        Those that the retention rules, people or a restart need are kept.
        """
        branch = [found for found in manifests.committed(self.folder) if found.identity in self._lineage.identities]
        verified = [found for found in branch if (self.folder / found.name / manifests.VERIFIED).exists()]
        needed = self._retention.select(branch) | {found.identity for found in verified[-2:]} | self._lineage.starts
        for manifest in branch:
            if self._is_stop_requested():
                return
            if manifest.identity in needed or manifest.identity in pinned(self._job_dir):
                continue
            self._check_fence()
            if prune(manifest, self._job_dir, report=lambda gone: events.report_pruned(self._reporter, gone)):
                self._lineage.identities.remove(manifest.identity)

    def _check_fence(self) -> None:
        check_fence(self._job_dir, self._generation)

    def _run_on_all_ranks(self, act: Callable[[], Any]) -> list[Any]:
        return run_on_all(self._world, act, group=self._group)
