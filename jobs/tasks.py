"""Celery's side of jobs: thin. What a lost message would have done, the next tick finds in the database."""

from __future__ import annotations

from celery import shared_task

from jobs.queueing import queue


@shared_task(name="jobs.tasks.submit", expires=60)
def submit(attempt_id: int) -> None:
    """Hand a new attempt to the scheduler at once, without waiting for the next tick."""
    from jobs.following.handover import hand_over

    hand_over(attempt_id)


@shared_task(name="jobs.tasks.follow", expires=2)
def follow() -> None:
    """One tick of the follower, if there is anything to do."""
    from jobs.following.follow import is_needed, tick
    from jobs.following.measured import measured

    if is_needed():
        measured(tick)


@shared_task(name="jobs.tasks.wake", expires=5)
def wake(echo: int = 0) -> None:
    """A tick because Slurm said that something happened, and some more right after it."""
    from jobs.following import wake as waking
    from jobs.following.follow import tick
    from jobs.following.measured import measured

    waking.begin()
    measured(tick)
    waking.echo(echo, wake)


@shared_task(name="jobs.tasks.tail", expires=2)
def tail() -> None:
    """Read what running attempts have spooled since, where their shippers do not post."""
    from jobs.intake.tail import tick

    tick()


@shared_task(name="jobs.tasks.diagnose", expires=60)
def diagnose(incident_id: int = 0) -> None:
    """Say why an attempt ended badly: this one, and whatever else is due, for a while; and tell people of it.

    Its process sends messages, too, and does so in between.
    """
    import time

    from jobs.postmortem import incidents, telling
    from portal.sending import due

    if incident_id:
        incidents.diagnose(incident_id)
    incidents.diagnose_due(time.monotonic() + 30.0, before_each=lambda: due.send_due(budget_s=1.0))
    telling.tell()
    incidents.get_ready()


@shared_task(name="jobs.tasks.replay", expires=60)
def replay(replay_id: int) -> None:
    """See what an entry would change of past verdicts: a piece, then whatever is due."""
    from jobs.postmortem.replay import go_on

    go_on(replay_id)


@shared_task(name="jobs.tasks.verify", expires=30)
def verify() -> None:
    """Look through the newest checkpoint that nobody has verified yet."""
    from jobs.intake.verify import verify_next

    verify_next()


@shared_task(name="jobs.tasks.compact", expires=15)
def compact() -> None:
    """Merge the chunks of series that have grown, for a few seconds at most."""
    from jobs.intake.reports import quiet
    from portal.series.compact import compact

    compact(budget_s=10.0, quiet=quiet)


@shared_task(name="jobs.tasks.apply_rounds", expires=30)
def apply_rounds() -> None:
    """Make rows of the rounds that an intake stored and had no time for, for a few seconds at most."""
    import time

    from jobs.intake.rounds import apply_left_over

    apply_left_over(time.monotonic() + 10.0)


@shared_task(name="jobs.tasks.remove_spools", expires=3600)
def remove_spools() -> None:
    """Remove from disk what has long been in the database."""
    from jobs.disk import retention

    retention.remove_spools()


@shared_task(name="jobs.tasks.remove_checkpoints", expires=3600)
def remove_checkpoints() -> None:
    """Remove the checkpoints that projects keep no longer, and then their bytes."""
    from jobs.disk import retention

    if retention.remove_checkpoints():
        queue(empty_trash)


@shared_task(name="jobs.tasks.empty_trash", expires=600)
def empty_trash() -> None:
    """Remove the run directories of deleted jobs, and uploads that no job came of."""
    from jobs.disk import trash, upload

    trash.empty()
    upload.forget_stale(awaited=upload.awaited())


@shared_task(name="jobs.tasks.waste", expires=60)
def waste() -> None:
    """Add up what held GPUs did, and tell whose are idle and where processes are on GPUs that nobody holds."""
    from jobs.waste import adding, telling

    adding.trim()
    adding.add()
    telling.tell()


@shared_task(name="jobs.tasks.reliability", expires=60)
def reliability() -> None:
    """Count failures and the time that nodes were held, for a few seconds at most."""
    from jobs.failures import counting

    counting.count()


@shared_task(name="jobs.tasks.measure", expires=60)
def measure() -> None:
    """Measure run directories that may have changed, for a few seconds at most."""
    from jobs.disk.usage import measure_due

    measure_due()
