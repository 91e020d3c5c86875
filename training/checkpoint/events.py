"""What is told of checkpoints: events that the portal keeps its own table by."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from training.manifest import CheckpointError, Manifest, Unreadable
from training.reporting.reporter import AnyReporter

REPORT_SECONDS = 5.0
"""How long a commit waits for the metrics before it to be on disk: after a resume nobody would report them again."""


def tell_committed(reporter: AnyReporter, manifest: Manifest, stall: float = 0.0) -> None:
    parent_step, parent_generation = manifest.parent or (None, None)
    reporter.event(
        "checkpoint.committed",
        **_named(manifest),
        parent_step=parent_step,
        parent_generation=parent_generation,
        bytes=manifest.bytes,
        seconds=round(manifest.seconds, 3),
        stall_seconds=round(stall, 4),
        consumed_samples=manifest.consumed_samples,
        world_size=manifest.world_size,
    )


def tell_pruned(reporter: AnyReporter, manifest: Manifest) -> None:
    """Returns once that is on disk, or will not be soon."""
    reporter.event("checkpoint.pruned", **_named(manifest))
    reporter.flush(wait=REPORT_SECONDS)


def tell_damaged(reporter: AnyReporter, manifest: Manifest, error: Exception) -> None:
    reporter.event("checkpoint.damaged", **_named(manifest), reason=str(error))


def tell_passed_over(reporter: AnyReporter, broken: Iterable[tuple[str, Manifest | None, CheckpointError]]) -> None:
    """What lies among the checkpoints and does not count, and why; of a fault that may pass the log alone."""
    for name, manifest, error in broken:
        print(f"{name} is passed over: {error}", flush=True)
        if manifest is not None and not isinstance(error, Unreadable):
            tell_damaged(reporter, manifest, error)


def tell_skipped(reporter: AnyReporter, step: int, reason: object, *, failed: bool = False) -> None:
    reporter.event("checkpoint.skipped", step=step, reason=str(reason), failed=failed)


def tell_failed(reporter: AnyReporter, step: int, error: BaseException, *, counts: str) -> None:
    """A save that came to nothing, in the log as well. `counts`: what the run counts."""
    print(f"{counts} {step}  not saved: {error}", flush=True)
    tell_skipped(reporter, step, error, failed=True)


def tell_unpinned(reporter: AnyReporter, why: str) -> None:
    print(why, flush=True)
    reporter.event("checkpoint.unpinned", reason=why)


def _named(manifest: Manifest) -> dict[str, Any]:
    return {"step": manifest.step, "name": manifest.name, "generation": manifest.generation}
