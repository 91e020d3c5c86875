"""Define the Celery tasks for nodes. What is due is in the database, so a lost message only delays it."""

from __future__ import annotations

from celery import shared_task


@shared_task(name="nodes.tasks.merge", expires=15)
def merge() -> None:
    """Merge machines' frames into chunks of series, for a few seconds at most."""
    from nodes.telemetry.merge import merge

    merge(budget_s=10.0)


@shared_task(name="nodes.tasks.alert", expires=15)
def alert() -> None:
    """Notify sysadmins of findings that need a repair or a decision."""
    from nodes.remediation.notices import notify_sysadmins

    notify_sysadmins()


@shared_task(name="nodes.tasks.health", expires=10)
def health() -> None:
    """Apply the health rules to what nodes report, act on what they find, and begin and end maintenance."""
    from nodes.drains import maintenance, spares
    from nodes.monitoring.evaluate import evaluate
    from nodes.remediation.decide import decide
    from nodes.remediation.return_to_service import return_recovered

    errors: list[Exception] = []
    for step in (maintenance.advance, evaluate, decide, return_recovered, spares.advance):
        try:
            step()
        except Exception as error:  # one bad record must not stop the others, tick after tick
            errors.append(error)
    if errors:
        raise ExceptionGroup("Some steps of health failed.", errors)


@shared_task(name="nodes.tasks.judge")
def judge() -> None:
    """Judge events that nodes have just reported and act on them; `health` judges all else, and these if this is late.

    It runs where orders are carried out, beside short tasks only: what it orders follows at once.
    """
    from nodes.monitoring.evaluate import evaluate_events
    from nodes.remediation.decide import decide
    from portal.wakes import HEALTH

    HEALTH.begin()
    if evaluate_events().opened:
        decide()


@shared_task(name="nodes.tasks.temperatures", expires=30)
def temperatures() -> None:
    """Estimate or read the inlet temperatures of nodes and racks."""
    from nodes.monitoring.temperatures import measure

    measure()


@shared_task(name="nodes.tasks.pull", expires=10)
def pull() -> None:
    """Poll the dcgm-exporters that the site configures for machines without agents."""
    from nodes.telemetry.dcgm import poll

    poll()


@shared_task(name="nodes.tasks.thin", expires=600)
def thin() -> None:
    """Downsample old samples."""
    from nodes.telemetry.thin import thin

    thin(budget_s=20.0)


@shared_task(name="nodes.tasks.forget", expires=24 * 3600)
def forget() -> None:
    """Delete data beyond retention."""
    from nodes.telemetry.thin import forget

    forget()
