"""How long what attempts leave on disk is kept: spools go some days after the attempt has closed.

By then every line of them is in the database. Logs, checkpoints and results stay for as long as the job does.
"""

from __future__ import annotations

import logging
import shutil
from datetime import timedelta

from django.conf import settings
from django.utils import timezone

from jobs import rundir
from jobs.models import Attempt

logger = logging.getLogger(__name__)

AT_ONCE = 1_000


def remove_spools() -> int:
    """Remove the spools of attempts that closed VIGIL_SPOOL_DAYS ago; answers how many attempts that were."""
    before = timezone.now() - timedelta(days=settings.VIGIL_SPOOL_DAYS)
    due = Attempt.objects.filter(closed_at__lt=before, spools_removed_at=None).select_related("job").order_by("pk")
    done = [attempt.pk for attempt in due[:AT_ONCE] if _remove(attempt)]
    Attempt.objects.filter(pk__in=done).update(spools_removed_at=timezone.now())
    return len(done)


def _remove(attempt: Attempt) -> bool:
    """Whether there is none any more. The folder was the job's to fill: no link in it is followed."""
    if not attempt.directory or not attempt.job.directory:
        return True
    try:
        with rundir.folder_under(rundir.path_of(attempt.job.directory), f"job/{attempt.directory}") as folder:
            shutil.rmtree("spool", dir_fd=folder)
    except FileNotFoundError:
        return True
    except OSError as error:
        logger.warning("attempt %s: its spools cannot be removed: %s", attempt.pk, error)
        return False
    return True
