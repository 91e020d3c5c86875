"""REST: the cluster as the scheduler last described it, and what sysadmins have done to its nodes."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from ninja import Query, Router, Schema, Status
from pydantic import AfterValidator, Field, WithJsonSchema

from nodes.api.sysadmins import only_sysadmins
from nodes.cluster import drain as orders
from nodes.cluster import sync
from nodes.models import Association, License, Node, NodeOrder, Partition, Qos, Reading, Reservation
from portal.http.api import ApiRequest, Text, WantedPage
from portal.http.openapi import described
from portal.http.paging import SortOrder, page
from portal.http.problems import Problem

router = Router(tags=["nodes"])
cluster = Router(tags=["cluster"])
Part = Reading.Part
NO_NODE = {404: "There is no such node."}
NOT_ORDERED = NO_NODE | {
    403: "Only sysadmins may, with a token of scope admin.",
    409: "The node is made up by `vigil up --demo`.",
}


def _line(reason: str) -> str:
    """A line of text, or a ValueError that says what is wanted."""
    reason = reason.strip()
    if not reason or len(reason) > orders.MOST_REASON:
        raise ValueError(f"Say why, in at most {orders.MOST_REASON} characters: whoever asks the scheduler reads it.")
    if any(letter < " " for letter in reason):
        raise ValueError("Say it in one line: take line breaks and tabs out.")
    return reason


Why = Annotated[
    str, AfterValidator(_line), WithJsonSchema({"type": "string", "minLength": 1, "maxLength": orders.MOST_REASON})
]


class ReadingShape(Schema):
    """The age of the data: rows stay as they are while the scheduler does not respond."""

    read_at: datetime | None
    error: str = Field(description="Why the last asking failed; empty: it did not.")
    failing_since: datetime | None
    unreadable: int = Field(description="Records of the last answer that could not be read, and are left out.")
    unreadable_text: str = Field(description="The same in a sentence; empty where everything was read.")


class OrderShape(Schema):
    """Something that was asked to be done to a node."""

    id: int
    node: str
    action: str
    reason: str
    state: str = Field(description="asked, done, refused, or replaced by a later one.")
    outcome: str = Field(description="The scheduler's words: why it refused, or did not answer yet.")
    asked_by: str | None
    asked_at: datetime
    ended_at: datetime | None


class GpuTypeShape(Schema):
    """The GPUs of one type on a node."""

    type: str = Field(description="Empty where the scheduler gives its GPUs no type.")
    gpus: int
    used: int
    free: int


class NodeShape(Schema):
    name: str
    state: str
    takes_jobs: bool = Field(description="Whether something new may start on it now.")
    reason: str
    reason_by: str
    reason_at: datetime | None
    partitions: list[str]
    features: list[str]
    cpus: int
    cpus_used: int
    cpus_free: int
    gpus: int
    gpus_used: int
    gpus_free: int
    gpu_type: str = Field(description="Of most of its GPUs.")
    gpu_types: list[GpuTypeShape] = Field(description="Each type that the node has, in the scheduler's order.")
    gpus_allocated: list[int] = Field(description="Their indices, where the scheduler tells.")
    memory_mib: int
    memory_used_mib: int = Field(description="Allocated, not resident.")
    memory_free_mib: int
    load: float | None
    booted_at: datetime | None
    is_made_up: bool


class NodeDetail(NodeShape):
    order: OrderShape | None = Field(description="What was last asked to be done to it.")
    reading: ReadingShape


class Nodes(Schema):
    items: list[NodeShape]
    next: str | None = None
    reading: ReadingShape


class Orders(Schema):
    items: list[OrderShape]
    next: str | None


class PartitionShape(Schema):
    name: str
    state: str
    is_default: bool
    nodes: list[str]
    max_time_s: int | None
    default_time_s: int | None
    max_nodes: int | None
    min_nodes: int
    priority_tier: int
    preempt_mode: str
    qos: str
    allowed_accounts: list[str]
    denied_accounts: list[str]
    allowed_qos: list[str]
    denied_qos: list[str]


class Partitions(Schema):
    items: list[PartitionShape]
    next: str | None = None
    reading: ReadingShape


class LimitsShape(Schema):
    """TRES such as {"gres/gpu": 8}; memory in MiB. Null, or not in a map: no limit."""

    group: dict[str, int] = {}
    user: dict[str, int] = {}
    account: dict[str, int] = {}
    job: dict[str, int] = {}
    node: dict[str, int] = {}
    group_minutes: dict[str, int] = {}
    group_jobs: int | None = None
    user_jobs: int | None = None
    user_submitted: int | None = None
    max_time_s: int | None = None


class QosShape(Schema):
    name: str
    description: str
    priority: int
    preempts: list[str]
    flags: list[str]
    limits: LimitsShape


class QosList(Schema):
    items: list[QosShape]
    next: str | None = None
    reading: ReadingShape


class ReservationShape(Schema):
    name: str
    nodes: list[str]
    starts_at: datetime | None
    ends_at: datetime | None
    users: list[str]
    accounts: list[str]
    partition: str
    flags: list[str]


class Reservations(Schema):
    items: list[ReservationShape]
    next: str | None = None
    reading: ReadingShape


class LicenseShape(Schema):
    name: str = Field(description='"matlab"; "matlab@server" of one that the accounts share among clusters.')
    total: int
    used: int = Field(description="Also outside of the scheduler, where it knows.")
    reserved: int = Field(description="By reservations, for the jobs inside of them.")
    free: int
    is_made_up: bool


class Licenses(Schema):
    items: list[LicenseShape]
    next: str | None = None
    reading: ReadingShape


class AccountShape(Schema):
    """An account (`user` empty), or a person in it."""

    account: str
    user: str
    partition: str
    parent: str
    qos: list[str]
    default_qos: str
    is_default: bool
    shares: int | None
    fair_share: float | None = Field(description="0 … 1: 1 has used least of what is due to it.")
    usage: float | None = Field(description="Its part of everything used lately, 0 … 1.")
    limits: LimitsShape


class Accounts(Schema):
    items: list[AccountShape]
    next: str | None
    reading: ReadingShape


class WantedNodes(Schema):
    partition: Text = ""
    state: Text = Field("", description="The scheduler's word: idle, mixed, allocated, drained, down …")


class Drain(Schema):
    model_config = {"extra": "forbid"}
    reason: Why = Field(description="What the scheduler shows to who asks why; your name is added to it.")
    replace: bool = Field(False, description="Also where somebody else has drained it: replace their reason.")


class Undrain(Schema):
    model_config = {"extra": "forbid"}
    replace: bool = Field(False, description="Also where somebody else has drained it.")


@router.get("", response=Nodes, summary="All nodes")
def nodes(request: ApiRequest, wanted: Query[WantedNodes]) -> dict[str, object]:
    """Answers the nodes as the scheduler last described them: `reading` says when that was."""
    found = Node.objects.filter(state=wanted.state) if wanted.state else Node.objects.all()
    items = [node for node in found if not wanted.partition or wanted.partition in node.partitions]
    return {"items": items, "reading": sync.readings()[Part.NODES]}


@router.get(
    "/{str:name}",
    response=NodeDetail,
    summary="One node",
    openapi_extra=described(errors=NO_NODE),
)
def node(request: ApiRequest, name: str) -> NodeDetail:
    """Answers all that is known of a node, and what was last asked to be done to it."""
    found = _node(name)
    order = NodeOrder.objects.filter(node=found.name).select_related("asked_by").first()
    return NodeDetail(
        **NodeShape.from_orm(found).dict(),
        order=OrderShape(**order_shape(order)) if order else None,
        reading=ReadingShape.from_orm(sync.readings()[Part.NODES]),
    )


@router.get(
    "/{str:name}/orders",
    response=Orders,
    summary="What was asked to be done to a node, newest first",
    openapi_extra=described(errors=NO_NODE),
)
def node_orders(request: ApiRequest, name: str, wanted: Query[WantedPage]) -> dict[str, object]:
    """Drains and undrains, with who asked, why, and what the scheduler said."""
    rows = NodeOrder.objects.filter(node=_node(name).name).select_related("asked_by")
    found = page(rows, SortOrder("id", descending=True), cursor=wanted.cursor, limit=wanted.limit)
    return {"items": [order_shape(order) for order in found.items], "next": found.next}


@router.post(
    "/{str:name}/drain",
    response={202: OrderShape},
    summary="Let nothing new start on a node (sysadmins)",
    openapi_extra=described(errors=NOT_ORDERED),
)
def drain(request: ApiRequest, name: str, order_request: Drain) -> Status[dict[str, Any]]:
    """Keep new jobs off a node; running jobs continue. The response is an order, which is carried out within seconds.

    409 if somebody else has drained it already, with who and why, unless `replace` is set.
    """
    return _place_order(request, name, NodeOrder.Action.DRAIN, order_request.reason, replace=order_request.replace)


@router.post(
    "/{str:name}/undrain",
    response={202: OrderShape},
    summary="Let jobs start on it again (sysadmins)",
    openapi_extra=described(errors=NOT_ORDERED),
)
def undrain(request: ApiRequest, name: str, order_request: Undrain | None = None) -> Status[dict[str, Any]]:
    """The scheduler is asked within seconds; the answer is an order, whose state tells what the scheduler said.

    409 where somebody else has drained it, with who and why, unless you say `replace`.
    """
    return _place_order(
        request, name, NodeOrder.Action.UNDRAIN, replace=order_request is not None and order_request.replace
    )


@cluster.get("/partitions", response=Partitions, summary="Partitions, the default one first")
def partitions(request: ApiRequest) -> dict[str, object]:
    """Answers them with their limits and who may use them, as the scheduler last told."""
    return {"items": list(Partition.objects.all()), "reading": sync.readings()[Part.PARTITIONS]}


@cluster.get("/qos", response=QosList, summary="QOS with their limits")
def qos(request: ApiRequest) -> dict[str, object]:
    """Empty where the scheduler keeps no accounts."""
    return {"items": list(Qos.objects.all()), "reading": sync.readings()[Part.ACCOUNTS]}


@cluster.get("/reservations", response=Reservations, summary="Reservations, the next one first")
def reservations(request: ApiRequest) -> dict[str, object]:
    """Leaves out those that are over, as the scheduler does."""
    return {"items": list(Reservation.objects.all()), "reading": sync.readings()[Part.RESERVATIONS]}


@cluster.get("/licenses", response=Licenses, summary="Licences that jobs take while they run")
def licenses(request: ApiRequest) -> dict[str, object]:
    """Answers how many of each are in use, as the scheduler last told. Empty where it counts none."""
    return {"items": list(License.objects.all()), "reading": sync.readings()[Part.LICENSES]}


@cluster.get("/accounts", response=Accounts, summary="Your own accounts and shares; sysadmins see everybody's")
def accounts(request: ApiRequest, wanted: Query[WantedPage]) -> dict[str, object]:
    """Answers them with fair share and limits. Empty where the scheduler keeps no accounts."""
    rows = Association.objects.visible_to(request.auth)
    found = page(rows, SortOrder("id"), cursor=wanted.cursor, limit=wanted.limit)
    return {"items": found.items, "next": found.next, "reading": sync.readings()[Part.ACCOUNTS]}


def order_shape(order: NodeOrder) -> dict[str, Any]:
    names = ("id", "node", "action", "reason", "state", "outcome", "asked_at", "ended_at")
    return {name: getattr(order, name) for name in names} | {
        "asked_by": order.asked_by.username if order.asked_by else None
    }


def _node(name: str) -> Node:
    found = None if "\0" in name else Node.objects.filter(name=name).first()
    if found is None:
        raise Problem(404, f"There is no node {name!r}. GET /api/v1/nodes lists them.")
    return found


def _place_order(
    request: ApiRequest, name: str, action: NodeOrder.Action, reason: str = "", *, replace: bool
) -> Status[dict[str, Any]]:
    only_sysadmins(request, f"{action} nodes")
    node = _node(name)
    if node.is_made_up:
        raise Problem(409, f"{name} is made up by `vigil up --demo`: the scheduler knows nothing of it.")
    try:
        order = orders.request_order(request.auth, node, action, reason, replaces=node.reason if replace else None)
    except orders.DrainedByAnother as error:
        raise Problem(409, f"{error} Send `replace` as true to {action} it all the same.", kind="drained") from None
    return Status(202, order_shape(order))
