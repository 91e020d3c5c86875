"""Find the newest order of a node, or of each of many, however many orders they had before."""

from __future__ import annotations

from datetime import datetime

from django.db.models import OuterRef, Q, QuerySet, Subquery

from nodes.models import Node, NodeOrder
from nodes.models.orders import NodeOrderQuerySet


def newest_orders(nodes: QuerySet[Node], **conditions: object) -> NodeOrderQuerySet:
    """Select each node's newest order that fulfils the conditions, such as state="done".

    The index by node leads to it directly; grouping all orders by node would read every past one.
    """
    newest = NodeOrder.objects.filter(node=OuterRef("name"), **conditions).order_by("-pk").values("pk")[:1]
    return NodeOrder.objects.filter(pk__in=nodes.order_by().annotate(newest=Subquery(newest)).values("newest"))


def newest_order(node: str, ignore_refused_before: datetime) -> NodeOrder | None:
    """Return the node's newest order that counts. Replaced and refused orders are skipped.

    An order of Vigil's that was refused after `ignore_refused_before` still counts, so that it is not repeated at once.
    """
    is_refused = Q(state=NodeOrder.State.REFUSED) & (Q(rule="") | Q(ended_at__lt=ignore_refused_before))
    return NodeOrder.objects.filter(node=node).exclude(state=NodeOrder.State.REPLACED).exclude(is_refused).first()
