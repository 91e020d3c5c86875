"""REST: nodes, as the scheduler last described them."""

from ninja import Router, Schema

from nodes.models import Node
from portal.api import ApiRequest
from portal.problems import Problem

router = Router(tags=["nodes"])


class NodeShape(Schema):
    name: str
    state: str
    reason: str
    partitions: list[str]
    cpus: int
    cpus_used: int
    gpus: int
    gpus_used: int
    gpu_type: str
    memory_mib: int


class Nodes(Schema):
    items: list[NodeShape]
    next: str | None = None


@router.get("", response=Nodes, summary="All nodes")
def nodes(request: ApiRequest) -> dict[str, object]:
    return {"items": list(Node.objects.all())}


@router.get("/{str:name}", response=NodeShape, summary="One node")
def node(request: ApiRequest, name: str) -> Node:
    found = None if "\0" in name else Node.objects.filter(name=name).first()
    if found is None:
        raise Problem(404, f"There is no node {name!r}. GET /api/v1/nodes lists them.")
    return found
