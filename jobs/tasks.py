"""Celery tasks of jobs: each calls one function of a module below.

Other modules queue them by name (`jobs.queueing`). A lost message loses no work: the next tick finds it in the
database. Functions are imported where they are called, so that a worker loads only what its own queue needs.
"""

from __future__ import annotations

from celery import shared_task

from jobs.queueing import queue


@shared_task(name="jobs.tasks.submit")
def submit(attempt_id: int) -> None:
    """Hand a new attempt to the scheduler at once, without waiting for the next tick."""
    from jobs.following.submission.handover import hand_over

    hand_over(attempt_id)


@shared_task(name="jobs.tasks.follow")
def follow() -> None:
    """Run one tick of the follower, if there is anything to do."""
    from jobs.following.follow import is_needed, tick
    from jobs.following.tick_metrics import run_measured

    if is_needed():
        run_measured(tick)


@shared_task(name="jobs.tasks.wake")
def wake(echo: int = 0) -> None:
    """Run a tick because something happened, and queue a few more right after it: Slurm's states lag behind."""
    from jobs.following import wake as waking
    from jobs.following.follow import tick
    from jobs.following.tick_metrics import run_measured
    from portal.wakes import FOLLOWER

    FOLLOWER.begin()
    run_measured(tick)
    waking.echo(echo)


@shared_task(name="jobs.tasks.tail")
def tail() -> None:
    """Read new spool lines of running attempts whose shippers do not post."""
    from jobs.intake.tail import tick

    tick()


@shared_task(name="jobs.tasks.diagnose")
def diagnose(incident_id: int = 0) -> None:
    """Diagnose this incident and others that are due, for 30 seconds at most, and notify people of the results.

    The same worker process sends messages, so it sends some between two incidents.
    """
    import time

    from jobs.postmortem import incident_notices, incidents
    from portal.sending import due

    if incident_id:
        incidents.diagnose(incident_id)
    incidents.diagnose_due(time.monotonic() + 30.0, before_each=lambda: due.send_due(budget_s=1.0))
    incident_notices.notify_new()
    incidents.warm_up()


@shared_task(name="jobs.tasks.replay")
def replay(replay_id: int) -> None:
    """Continue a replay: find out which past verdicts a catalogue entry would change."""
    from jobs.postmortem.replay import run_slice

    run_slice(replay_id)


@shared_task(name="jobs.tasks.verify")
def verify() -> None:
    """Verify the newest checkpoint that has not been verified yet."""
    from jobs.intake.verify import verify_next

    verify_next()


@shared_task(name="jobs.tasks.compact")
def compact() -> None:
    """Merge the chunks of series that have grown, for a few seconds at most."""
    from jobs.intake.reports import quiet_owners
    from portal.series.compact import compact

    compact(budget_s=10.0, quiet=quiet_owners)


@shared_task(name="jobs.tasks.apply_rounds")
def apply_rounds() -> None:
    """Write the rows of rounds that an intake stored but had no time for, for ten seconds at most."""
    import time

    from jobs.intake.rounds import apply_left_over

    apply_left_over(time.monotonic() + 10.0)


@shared_task(name="jobs.tasks.remove_spools")
def remove_spools() -> None:
    """Remove spool files whose content has long been in the database."""
    from jobs.disk import retention

    retention.remove_spools()


@shared_task(name="jobs.tasks.remove_checkpoints")
def remove_checkpoints() -> None:
    """Prune checkpoints beyond their project's retention, then delete their files."""
    from jobs.disk import retention

    if retention.remove_checkpoints():
        queue("jobs.tasks.empty_trash")


@shared_task(name="jobs.tasks.empty_trash")
def empty_trash() -> None:
    """Delete the run directories of deleted jobs, and uploads that were never submitted."""
    from jobs.disk import trash, upload

    trash.empty()
    upload.delete_stale(pending=upload.pending_uploads())


@shared_task(name="jobs.tasks.waste")
def waste() -> None:
    """Add up the use of allocated GPUs, and notify owners of idle GPUs and of processes on unallocated ones."""
    from jobs.waste import aggregation, notices

    aggregation.end_allocations_with_jobs()
    aggregation.update_sums()
    notices.raise_notices()


@shared_task(name="jobs.tasks.reliability")
def reliability() -> None:
    """Count failures and the time that nodes were allocated, for a few seconds at most."""
    from jobs.failures import counting

    counting.count()


@shared_task(name="jobs.tasks.game_days", expires=10)
def game_days() -> None:
    """Advance game days, if any is not over."""
    from jobs.gameday.advance import advance

    advance()


@shared_task(name="jobs.tasks.assess", expires=120)
def assess() -> None:
    """Compute what jobs show about nodes and programs over days, for health rules."""
    from jobs.assessing.assess import assess

    assess()


@shared_task(name="jobs.tasks.measure")
def measure() -> None:
    """Measure run directories that may have changed, for a few seconds at most."""
    from jobs.disk.usage import measure_due

    measure_due()


@shared_task(name="jobs.tasks.advance_acceptances")
def advance_acceptances() -> None:
    """Observe the nodes of acceptances that are not over, and judge those whose tests have ended."""
    from jobs.acceptances.advance import advance_all

    advance_all()
