"""Verify checkpoints that trainers committed: every file, every digest.

Without torch, and without trusting the files.
"""

from __future__ import annotations

import logging
from datetime import timedelta

from django.utils import timezone

from jobs import checkpoints, live
from jobs.disk import rundir
from jobs.intake.wire import storable
from jobs.models import Checkpoint
from training import manifest

logger = logging.getLogger(__name__)

MAX_BYTES = 20 * 10**9  # larger ones are only verified by their trainer
FIRST_WAIT, MAX_WAIT = timedelta(seconds=30), timedelta(hours=1)  # before what could not be read is tried again
MISSED = 2  # times that its folder may be missing before it counts as lost: its pruning is reported later


class CheckpointGone(manifest.CheckpointError):
    """The checkpoint is missing while others of its job exist."""


def verify_next() -> Checkpoint | None:
    """Verify the newest checkpoint that is due. Return it."""
    checkpoint = checkpoints.due_for_verification()
    if checkpoint is not None:
        try:
            verify(checkpoint)
        except Exception as error:  # a job wrote it: whatever is wrong with it must not stop the verification of others
            logger.exception("checkpoint %s of #%s", checkpoint.step, checkpoint.job_id)
            _try_later(checkpoint, error)
    return checkpoint


def verify(checkpoint: Checkpoint) -> None:
    """Mark it verified or corrupt; one that was pruned or moved meanwhile, or is unreadable now, is left as it is."""
    committed = Checkpoint.objects.filter(pk=checkpoint.pk, state=Checkpoint.State.COMMITTED)
    try:
        verified, problem = _verify_folder(checkpoint)
    except (manifest.CheckpointError, rundir.UnsafePath) as error:
        if isinstance(error, manifest.UnreadableManifest) or (
            isinstance(error, CheckpointGone) and checkpoint.verify_tries < MISSED
        ):
            _try_later(checkpoint, error)
            return
        why = storable(str(error))[:2000]  # words from the manifest, which the job wrote
        changed = committed.update(state=Checkpoint.State.CORRUPT, problem=why)
        logger.warning("checkpoint %s of #%s: %s", checkpoint.step, checkpoint.job_id, why)
    except OSError as error:
        _try_later(checkpoint, error)
        return
    else:
        if verified.identity != (checkpoint.step, checkpoint.generation):
            which = f"{checkpoint.job.job_kind.unit} {verified.step} of generation {verified.generation}"
            committed.update(problem=f"The folder now holds {which}.")
            return
        state = Checkpoint.State.COMMITTED if problem else Checkpoint.State.VERIFIED
        changed = committed.update(state=state, problem=problem, bytes=verified.bytes)
    if changed:
        live.announce(checkpoint.attempt_id)


def _verify_folder(checkpoint: Checkpoint) -> tuple[manifest.Manifest, str]:
    """Return the folder's manifest, and why not all of it was read.

    Raise CheckpointError or UnsafePath if it is bad.
    """
    root = rundir.path_of(checkpoint.job.directory)
    with rundir.folder_under(root, "job/checkpoints"):
        pass  # if this folder is also missing, the file system is not mounted and the checkpoint's state is unknown
    try:
        with rundir.folder_under(root, f"job/checkpoints/{checkpoint.name}") as folder:
            try:
                return manifest.verify(folder, max_bytes=MAX_BYTES), ""
            except manifest.TooLarge:
                checked = manifest.check(folder)
                return (
                    checked,
                    f"Too large to be read here ({checked.bytes:,} bytes): only its sizes were checked.",
                )
    except FileNotFoundError:
        raise CheckpointGone("Its folder is gone.") from None


def _try_later(checkpoint: Checkpoint, error: Exception) -> None:
    """Postpone it, twice as long as the time before, so that others get their turn."""
    wait = min(FIRST_WAIT * 2 ** min(checkpoint.verify_tries, 10), MAX_WAIT)
    tries = min(checkpoint.verify_tries + 1, 1000)
    Checkpoint.objects.filter(pk=checkpoint.pk).update(verify_tries=tries, verify_after=timezone.now() + wait)
    level = logging.INFO if isinstance(error, CheckpointGone) else logging.WARNING
    logger.log(level, "checkpoint %s of #%s cannot be read now: %s", checkpoint.step, checkpoint.job_id, error)
