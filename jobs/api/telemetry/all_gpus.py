"""REST: all GPUs that agents report, node by node, as each person may see them."""

from __future__ import annotations

import time
from typing import Any

from django.http import HttpResponse
from ninja import Query, Router, Schema

from jobs.api.telemetry.machines import MachineGpu, gpu_shape, holders_of
from jobs.listing.telemetry_access import access_of, earliest_report
from nodes.models import Agent, Gpu
from portal.http.api import ApiRequest, PageQuery, json_response
from portal.http.paging import SortOrder, page

router = Router(tags=["cluster"])


class ClusterGpu(MachineGpu):
    node: str


class ClusterGpus(Schema):
    items: list[ClusterGpu]
    next: str | None


@router.get("", response=ClusterGpus, summary="All GPUs, with their jobs and newest samples")
def gpus(request: ApiRequest, query: Query[PageQuery]) -> HttpResponse:
    """Return all GPUs of `limit` nodes per page, ordered by node name."""
    agents = Agent.objects.filter(gpus__gone_at=None).distinct().defer("facts")
    found = page(agents, SortOrder("node"), cursor=query.cursor, limit=query.limit)
    by_pk = {agent.pk: agent for agent in found.items}
    there = list(Gpu.objects.filter(agent__in=found.items, gone_at=None).defer("facts"))
    return json_response({"items": _shapes(request, by_pk, there), "next": found.next})


def _shapes(request: ApiRequest, agents: dict[int, Agent], gpus: list[Gpu]) -> list[dict[str, Any]]:
    now = time.time()
    access = access_of(request.auth, [gpu.pk for gpu in gpus], earliest_report(now, agents.values()), now)
    holders = holders_of(request.auth, gpus)
    shapes = []
    for gpu in sorted(gpus, key=lambda gpu: (agents[gpu.agent_id].node, gpu.index)):
        agent = agents[gpu.agent_id]
        is_hidden = access.hides_newest(gpu.pk, now, agent.sampled_at)
        shape = gpu_shape(agent, gpu, holders.get(gpu.pk, []), is_hidden=is_hidden)
        shapes.append({"node": agent.node, **shape})
    return shapes
