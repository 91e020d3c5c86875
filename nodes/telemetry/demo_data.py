"""Stop the demo's invented data of a machine that gets a real agent."""

from __future__ import annotations

from datetime import datetime

from django.db import transaction

from nodes.models import Agent, GpuPlace, HealthEntry, Holding, NodeEvent


def end(agent_id: int, at: datetime) -> None:
    """End the invented data of this machine once its own agent reports; a real machine is left as it is.

    Its invented GPUs are marked as gone and their events and allocations are closed. Their history stays, like that of
    other GPUs that were removed; invented findings are deleted, since people would act on them.
    """
    if not Agent.objects.filter(pk=agent_id, is_made_up=True).exists():
        return
    with transaction.atomic():
        if not Agent.objects.filter(pk=agent_id, is_made_up=True).update(is_made_up=False, facts={}, newest={}):
            return  # another post came first
        agent = Agent.objects.get(pk=agent_id)
        agent.gpus.filter(gone_at=None).update(gone_at=at)
        HealthEntry.objects.filter(node=agent.node).delete()
        NodeEvent.objects.filter(agent=agent, is_open=True).update(is_open=False, last_at=at)
        GpuPlace.objects.filter(agent=agent, until=None).update(until=at)
        Holding.objects.filter(agent=agent, is_made_up=True, until=None).update(until=at)
