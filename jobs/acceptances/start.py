"""Start and cancel acceptances. Each rests on a burn-in, which keeps nodes from being tested twice at a time."""

from __future__ import annotations

import logging

from django.db import transaction

from jobs.acceptances.advance import advance
from jobs.burnins import start as burnins
from jobs.errors import Conflict
from nodes.burnin import plan
from nodes.models import Acceptance
from portal.access import note
from portal.audit import Change
from portal.models import User
from vigil_core import host_expression

logger = logging.getLogger(__name__)


def start(user: User, expression: str, seconds: int, *, may_undrain: bool = False) -> Acceptance:
    """Store an acceptance of the nodes that a host expression names, with its burn-in.

    Raises BadHostExpression, CannotBurnIn, NeedsAgreement, or Conflict if a node is being tested already.
    """
    names = host_expression.expand(expression, plan.MAX_NODES)
    with transaction.atomic():
        burn_in = burnins.start(user, names, seconds, may_undrain=may_undrain, all_gpus=True)
        gpus = sum(burn_in.nodes.values_list("gpus", flat=True))
        acceptance = Acceptance.objects.create(
            burn_in=burn_in, expression=expression.strip(), node_count=len(names), gpu_count=gpus, started_by=user
        )
        note(user, "acceptance.started", acceptance, change=Change(after={"nodes": expression, "seconds": seconds}))
    try:
        advance(acceptance)
    except Exception:  # it has started, and the worker observes it in 20 s
        logger.exception("%s could not be observed yet", acceptance)
    return acceptance


def cancel(user: User, acceptance: Acceptance) -> None:
    """Cancel its burn-in. Raises Conflict if it is over.

    The acceptance then ends as inconclusive, or as rejected for what was found by then.
    """
    if not acceptance.is_active:
        raise Conflict(f"Not cancelled. Acceptance {acceptance.pk} has ended.")
    with transaction.atomic():
        burnins.cancel(user, acceptance.burn_in)
        note(user, "acceptance.cancelled", acceptance)
