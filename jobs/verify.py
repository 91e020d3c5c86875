"""Look through checkpoints that trainers committed: every file, every digest. No torch, no trust in what lies there."""

from __future__ import annotations

import logging

from jobs import checkpoints, live, rundir
from jobs.models import Checkpoint
from training import manifest

logger = logging.getLogger(__name__)

MOST_BYTES = 20 * 10**9  # beyond that, the trainer's own look must do


def verify_next() -> Checkpoint | None:
    """Verify the newest one that is due; which it was."""
    checkpoint = checkpoints.due_for_verification()
    if checkpoint is not None:
        verify(checkpoint)
    return checkpoint


def verify(checkpoint: Checkpoint) -> None:
    """Mark it verified or corrupt; one that was pruned or moved meanwhile is left as it is."""
    committed = Checkpoint.objects.filter(pk=checkpoint.pk, state=Checkpoint.State.COMMITTED)
    try:
        root = rundir.path_of(checkpoint.job.directory)
        with rundir.folder_under(root, f"job/checkpoints/{checkpoint.name}") as folder:
            found = manifest.verify(folder, most_bytes=MOST_BYTES)
    except (manifest.CheckpointError, OSError) as error:
        gone = isinstance(error, FileNotFoundError)
        problem = "Its folder is gone." if gone else str(error)
        changed = committed.update(state=Checkpoint.State.CORRUPT, problem=problem[:2000])
        logger.warning("checkpoint %s of #%s: %s", checkpoint.step, checkpoint.job_id, problem)
    else:
        if found.identity != (checkpoint.step, checkpoint.generation):
            committed.update(problem=f"The folder now holds step {found.step} of generation {found.generation}.")
            return
        changed = committed.update(state=Checkpoint.State.VERIFIED, bytes=found.bytes)
    if changed:
        live.announce(checkpoint.attempt_id)
