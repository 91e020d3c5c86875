"""REST: the cluster as the scheduler last described it, and what sysadmins have done to its nodes."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from django.db.models import Q
from ninja import Query, Router, Schema, Status
from pydantic import AfterValidator, Field, WithJsonSchema

from nodes.cluster import drain as orders
from nodes.cluster import sync
from nodes.models import Association, License, Node, NodeOrder, Partition, Qos, Reading, Reservation
from portal.http.api import ApiRequest, PageQuery, Text, shaped_page
from portal.http.openapi import deprecated, described, with_former_names
from portal.http.paging import SortOrder, page
from portal.http.problems import Problem
from portal.sysadmins import only_sysadmins

router = Router(tags=["nodes"])
cluster = Router(tags=["cluster"])
Part = Reading.Part
NO_NODE = {404: "No such node."}
NOT_ORDERED = NO_NODE | {
    403: "Only for sysadmins, with a token of scope admin.",
    409: "This is a demo node (`vigil up --demo`), somebody else drained it or has just ordered something.",
}


def _line(reason: str) -> str:
    """Return the reason stripped. Raises ValueError if it is empty, too long or has several lines."""
    reason = reason.strip()
    if not reason or len(reason) > orders.MAX_REASON:
        raise ValueError(
            f"Give a reason of at most {orders.MAX_REASON} characters; the scheduler shows it to everybody."
        )
    if any(letter < " " for letter in reason):
        raise ValueError("The reason must be one line. Remove line breaks and tabs.")
    return reason


Reason = Annotated[
    str, AfterValidator(_line), WithJsonSchema({"type": "string", "minLength": 1, "maxLength": orders.MAX_REASON})
]


class ReadingShape(Schema):
    """The age of the data: rows stay as they are while the scheduler does not respond."""

    read_at: datetime | None
    error: str = Field(description="Error of the last poll; empty: it succeeded.")
    failing_since: datetime | None
    unreadable: int = Field(
        description="Number of records in the last answer that could not be read and were left out."
    )
    unreadable_text: str = Field(description="The same in a sentence; empty if all records were read.")


class OrderShape(Schema):
    """An order to drain or undrain a node."""

    id: int
    node: str
    action: str
    reason: str
    state: str = Field(description="asked (pending), done, refused, or replaced by a later order.")
    outcome: str = Field(description="The scheduler's message: why it refused the order or has not answered yet.")
    requested_by: str | None
    rule: str = Field(description="The rule or plan that Vigil followed by itself; empty: a person's order.")
    requested_at: datetime
    ended_at: datetime | None
    asked_by: str | None = deprecated("requested_by")
    asked_at: datetime = deprecated("requested_at")


class GpuTypeShape(Schema):
    """The GPUs of one type on a node."""

    type: str = Field(description="Empty if the scheduler reports no type.")
    gpus: int
    used: int
    free: int


class NodeShape(Schema):
    name: str
    state: str
    takes_jobs: bool = Field(description="Whether new jobs may start on it now.")
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
    gpu_type: str = Field(description="The type of most of its GPUs.")
    gpu_types: list[GpuTypeShape] = Field(description="Each GPU type of the node, in the scheduler's order.")
    gpus_allocated: list[int] = Field(description="Indices of its allocated GPUs, if the scheduler reports them.")
    memory_mib: int
    memory_used_mib: int = Field(description="Memory allocated to jobs, not resident memory.")
    memory_free_mib: int
    load: float | None
    booted_at: datetime | None
    is_made_up: bool


class NodeDetail(NodeShape):
    order: OrderShape | None = Field(description="The latest drain or undrain order.")
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
    name: str = Field(description='"matlab"; "matlab@server" for a license that clusters share.')
    total: int
    used: int = Field(description="Includes use outside the scheduler, if it knows of it.")
    reserved: int = Field(description="Reserved for jobs in reservations.")
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
    fair_share: float | None = Field(description="From 0 to 1; 1: it has used the least of its share.")
    usage: float | None = Field(description="Its fraction of recent usage, from 0 to 1.")
    limits: LimitsShape


class Accounts(Schema):
    items: list[AccountShape]
    next: str | None
    reading: ReadingShape


class NodeQuery(Schema):
    partition: Text = ""
    state: Text = Field(
        "",
        description="The scheduler's state: idle, mixed, allocated, drained, down … A state with a flag, such as "
        "drained+not_responding, is found without it as well.",
    )


class OrderRequest(Schema):
    model_config = {"extra": "forbid"}
    replaces: str | None = Field(
        None,
        description="The node's reason that you have seen: somebody else's drain is replaced if it still has that.",
    )
    replace: bool = Field(False, description="Replace somebody else's drain whatever its reason is by now.")

    def replaced_reason(self, node: Node) -> str | None:
        """Return the reason that the order replaces, though it is somebody else's."""
        return self.replaces if self.replaces is not None or not self.replace else node.reason


class Drain(OrderRequest):
    reason: Reason = Field(description="The reason that the scheduler shows; your name is added.")


class Undrain(OrderRequest):
    reason: Reason | None = Field(None, description="Why; it is kept with the order and in the audit log.")


@router.get("", response=Nodes, summary="All nodes")
def nodes(request: ApiRequest, query: Query[NodeQuery]) -> dict[str, object]:
    """List the nodes as the scheduler last reported them; `reading` says when that was."""
    has_state = Q(state=query.state) | Q(state__startswith=f"{query.state}+")
    found = Node.objects.filter(has_state) if query.state else Node.objects.all()
    items = [node for node in found if not query.partition or query.partition in node.partitions]
    return {"items": items, "reading": sync.readings()[Part.NODES]}


@router.get(
    "/{str:name}",
    response=NodeDetail,
    summary="One node",
    openapi_extra=described(errors=NO_NODE),
)
def node(request: ApiRequest, name: str) -> NodeDetail:
    """Return everything known about a node, and its latest drain or undrain order."""
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
    summary="Drain and undrain orders of a node, newest first",
    openapi_extra=described(errors=NO_NODE),
)
def node_orders(request: ApiRequest, name: str, query: Query[PageQuery]) -> dict[str, object]:
    """List drain and undrain orders with requester, reason and the scheduler's response."""
    rows = NodeOrder.objects.filter(node=_node(name).name).select_related("asked_by")
    return shaped_page(rows, SortOrder("id", descending=True), query, order_shape)


@router.post(
    "/{str:name}/drain",
    response={202: OrderShape},
    summary="Drain a node: no new jobs start on it (sysadmins)",
    openapi_extra=described(errors=NOT_ORDERED),
)
def drain(request: ApiRequest, name: str, order_request: Drain) -> Status[dict[str, Any]]:
    """Keep new jobs off a node; running jobs continue. The response is an order, which is carried out within seconds.

    409 if somebody else has drained it already, with who and why, unless `replaces` is that reason. Also while another
    sysadmin's order waits, unless `replaces` or `replace` is set.
    """
    return _place_order(request, name, NodeOrder.Action.DRAIN, order_request, order_request.reason)


@router.post(
    "/{str:name}/undrain",
    response={202: OrderShape},
    summary="Undrain a node: jobs can start on it again (sysadmins)",
    openapi_extra=described(errors=NOT_ORDERED),
)
def undrain(request: ApiRequest, name: str, order_request: Undrain | None = None) -> Status[dict[str, Any]]:
    """Let jobs start on a node again. The response is an order, which is carried out within seconds.

    409 if somebody else has drained it, with who and why, unless `replaces` is that reason. Also while another
    sysadmin's order waits, unless `replaces` or `replace` is set.
    """
    reason = (order_request.reason if order_request is not None else None) or ""
    return _place_order(request, name, NodeOrder.Action.UNDRAIN, order_request, reason)


@cluster.get("/partitions", response=Partitions, summary="Partitions, the default one first")
def partitions(request: ApiRequest) -> dict[str, object]:
    """List partitions with their limits and who may use them, according to the scheduler's last answer."""
    return {"items": list(Partition.objects.all()), "reading": sync.readings()[Part.PARTITIONS]}


@cluster.get("/qos", response=QosList, summary="QOS with their limits")
def qos(request: ApiRequest) -> dict[str, object]:
    """List QOS with their limits. Empty if the scheduler has no accounting."""
    return {"items": list(Qos.objects.all()), "reading": sync.readings()[Part.ACCOUNTS]}


@cluster.get("/reservations", response=Reservations, summary="Reservations, the next one first")
def reservations(request: ApiRequest) -> dict[str, object]:
    """List current and future reservations; ended ones are left out, as by the scheduler."""
    return {"items": list(Reservation.objects.all()), "reading": sync.readings()[Part.RESERVATIONS]}


@cluster.get("/licenses", response=Licenses, summary="Licenses and how many are in use")
def licenses(request: ApiRequest) -> dict[str, object]:
    """List licenses and how many of each are in use, as last reported. Empty if the scheduler manages none."""
    return {"items": list(License.objects.all()), "reading": sync.readings()[Part.LICENSES]}


@cluster.get("/accounts", response=Accounts, summary="Your own accounts and shares; sysadmins see everybody's")
def accounts(request: ApiRequest, query: Query[PageQuery]) -> dict[str, object]:
    """List accounts with fair share and limits. Empty if the scheduler has no accounting."""
    rows = Association.objects.visible_to(request.auth)
    found = page(rows, SortOrder("id"), cursor=query.cursor, limit=query.limit)
    return {"items": found.items, "next": found.next, "reading": sync.readings()[Part.ACCOUNTS]}


def order_shape(order: NodeOrder) -> dict[str, Any]:
    names = ("id", "node", "action", "reason", "rule", "state", "outcome", "ended_at")
    shown = {name: getattr(order, name) for name in names} | {
        "requested_by": order.asked_by.username if order.asked_by else None,
        "requested_at": order.asked_at,
    }
    return with_former_names(shown, asked_by="requested_by", asked_at="requested_at")


def _node(name: str) -> Node:
    found = None if "\0" in name else Node.objects.filter(name=name).first()
    if found is None:
        raise Problem(404, f"There is no node {name!r}. GET /api/v1/nodes lists them.")
    return found


def _place_order(
    request: ApiRequest, name: str, action: NodeOrder.Action, body: OrderRequest | None, reason: str = ""
) -> Status[dict[str, Any]]:
    only_sysadmins(request, f"{action} nodes")
    node = _node(name)
    if node.is_made_up:
        raise Problem(409, f"{name} is a demo node (`vigil up --demo`): the scheduler does not know it.")
    try:
        replaces = body.replaced_reason(node) if body is not None else None
        order = orders.request_order(request.auth, node, action, reason, replaces=replaces)
    except orders.NeedsConfirmation as error:
        raise Problem(409, f"{error} Send `replace`: true to {action} it anyway.", kind="drained") from None
    except orders.NodeGone as error:
        raise Problem(404, str(error)) from None
    return Status(202, order_shape(order))
