"""A machine of the demonstration gets an agent of its own: what was made up of it ends, and nothing more is."""

from __future__ import annotations

from datetime import datetime

from django.db import transaction

from nodes.models import Agent, GpuPlace, Holding, NodeEvent


def end(agent_id: int, at: datetime) -> None:
    """End what was made up of this machine, as its own agent reports; a real one is left as it is.

    Its made-up GPUs are gone, with what they held and what was wrong with them. Their past stays, as of other GPUs that
    were taken out.
    """
    if not Agent.objects.filter(pk=agent_id, is_made_up=True).exists():
        return
    with transaction.atomic():
        if not Agent.objects.filter(pk=agent_id, is_made_up=True).update(is_made_up=False, facts={}, newest={}):
            return  # another post came first
        agent = Agent.objects.get(pk=agent_id)
        agent.gpus.filter(gone_at=None).update(gone_at=at)
        NodeEvent.objects.filter(agent=agent, is_open=True).update(is_open=False, last_at=at)
        GpuPlace.objects.filter(agent=agent, until=None).update(until=at)
        Holding.objects.filter(agent=agent, is_made_up=True, until=None).update(until=at)
