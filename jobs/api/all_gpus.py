"""REST of every GPU that agents tell of, machine by machine; as each person may see it."""

from __future__ import annotations

import time
from typing import Any

from django.http import HttpResponse
from ninja import Query, Router, Schema

from jobs.api.machines import MachineGpu, gpu_shape, holders_of
from jobs.listing.sight import earliest, sight
from nodes.models import Agent, Gpu
from portal.http.api import ApiRequest, WantedPage, answer
from portal.http.paging import Order, page

router = Router(tags=["cluster"])


class ClusterGpu(MachineGpu):
    node: str


class ClusterGpus(Schema):
    items: list[ClusterGpu]
    next: str | None


@router.get("", response=ClusterGpus, summary="Every GPU, with who holds it and what it does")
def gpus(request: ApiRequest, wanted: Query[WantedPage]) -> HttpResponse:
    """Answers all GPUs of `limit` machines a page, by the machines' names."""
    agents = Agent.objects.filter(gpus__gone_at=None).distinct().defer("facts")
    found = page(agents, Order("node"), cursor=wanted.cursor, limit=wanted.limit)
    by_pk = {agent.pk: agent for agent in found.items}
    there = list(Gpu.objects.filter(agent__in=found.items, gone_at=None).defer("facts"))
    return answer({"items": _shapes(request, by_pk, there), "next": found.next})


def _shapes(request: ApiRequest, agents: dict[int, Agent], there: list[Gpu]) -> list[dict[str, Any]]:
    now = time.time()
    seen = sight(request.auth, [gpu.pk for gpu in there], earliest(now, agents.values()), now)
    holders = holders_of(request.auth, there)
    shapes = []
    for gpu in sorted(there, key=lambda gpu: (agents[gpu.agent_id].node, gpu.index)):
        agent = agents[gpu.agent_id]
        is_hidden = seen.hides_newest(gpu.pk, now, agent.sampled_at)
        shape = gpu_shape(agent, gpu, holders.get(gpu.pk, []), is_hidden=is_hidden)
        shapes.append({"node": agent.node, **shape})
    return shapes
