"""Report checkpoints as events, from which the portal maintains its table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from training.manifest import CheckpointError, Manifest, UnreadableManifest
from training.reporting.reporter import AnyReporter

REPORT_SECONDS = 5.0
"""How long a commit waits for earlier metrics to reach the disk: after a resume they would not be reported again."""


def report_committed(reporter: AnyReporter, manifest: Manifest, stall: float = 0.0) -> None:
    parent_step, parent_generation = manifest.parent or (None, None)
    reporter.event(
        "checkpoint.committed",
        **_identity(manifest),
        parent_step=parent_step,
        parent_generation=parent_generation,
        bytes=manifest.bytes,
        seconds=round(manifest.seconds, 3),
        stall_seconds=round(stall, 4),
        consumed_samples=manifest.consumed_samples,
        world_size=manifest.world_size,
    )


def report_pruned(reporter: AnyReporter, manifest: Manifest) -> None:
    """Report a pruned checkpoint; return once the event is on disk, or after a time limit."""
    reporter.event("checkpoint.pruned", **_identity(manifest))
    reporter.flush(wait=REPORT_SECONDS)


def report_damaged(reporter: AnyReporter, manifest: Manifest, error: Exception) -> None:
    reporter.event("checkpoint.damaged", **_identity(manifest), reason=str(error))


def report_ignored(reporter: AnyReporter, broken: Iterable[tuple[str, Manifest | None, CheckpointError]]) -> None:
    """Report why folders among the checkpoints do not count; faults that may be temporary only in the log."""
    for name, manifest, error in broken:
        print(f"{name} is ignored: {error}", flush=True)
        if manifest is not None and not isinstance(error, UnreadableManifest):
            report_damaged(reporter, manifest, error)


def report_skipped(reporter: AnyReporter, step: int, reason: object, *, failed: bool = False) -> None:
    reporter.event("checkpoint.skipped", step=step, reason=str(reason), failed=failed)


def report_failed(reporter: AnyReporter, step: int, error: BaseException, *, unit: str) -> None:
    """Report a failed save, in the log as well. `unit`: the run's unit of progress."""
    print(f"{unit} {step}  not saved: {error}", flush=True)
    report_skipped(reporter, step, error, failed=True)


def report_unpinned(reporter: AnyReporter, reason: str) -> None:
    print(reason, flush=True)
    reporter.event("checkpoint.unpinned", reason=reason)


def _identity(manifest: Manifest) -> dict[str, Any]:
    return {"step": manifest.step, "name": manifest.name, "generation": manifest.generation}
