"""Return many nodes to service at once: which drains that would end, and the orders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from nodes.cluster import drain, sync
from nodes.drains import bulk, overview
from nodes.drains.bulk import BulkOutcome, ReplacedReasons
from nodes.drains.overview import DrainedNode
from nodes.models import Node, NodeOrder, Reading
from portal.models import User


@dataclass(frozen=True)
class ReturnPreview:
    """The nodes of an expression by what returning them would end, each group in the order of the expression."""

    yours: tuple[DrainedNode, ...]
    """Drained by this person, or down without a reason of anybody else."""
    by_others: tuple[DrainedNode, ...]
    """Drained by another person, a health rule, Slurm or anything else: left as they are unless requested."""
    in_service: tuple[Node, ...]

    @property
    def reasons(self) -> dict[str, str]:
        """Return by node the reasons of others that the return could end, as `return_all` takes them."""
        return {item.node.name: item.node.reason for item in self.by_others}


def preview(user: User, expression: str) -> ReturnPreview:
    """Return what would be ended. Raises BadHostExpression and UnknownNodes."""
    nodes = bulk.find_nodes(expression)
    drained = overview.described(node for node in nodes if not node.is_in_service)
    read_at = sync.last_read_at(Reading.Part.NODES)
    return ReturnPreview(
        yours=tuple(item for item in drained if not _is_by_another(item, user, read_at)),
        by_others=tuple(item for item in drained if _is_by_another(item, user, read_at)),
        in_service=tuple(node for node in nodes if node.is_in_service),
    )


def return_all(
    user: User, expression: str, reason: str, *, replace: bool = False, replaces: Mapping[str, str] | None = None
) -> list[BulkOutcome]:
    """Order to undrain every node of the expression that is out of service; `reason` is for the audit log.

    Drains of others stay, but for those whose reason `replaces` has by node, as a preview showed it. `replace` ends
    all of them. Raises BadHostExpression and UnknownNodes before any order.
    """
    chosen = ReplacedReasons(replace, replaces)
    return bulk.for_each(bulk.find_nodes(expression), lambda node: _undrain(user, node, reason, chosen))


def _undrain(user: User, node: Node, reason: str, replaced: ReplacedReasons) -> BulkOutcome:
    if node.is_in_service:
        return BulkOutcome(node.name, None, f"{node.name} is in service.", is_in_service=True)
    return bulk.request(user, node, NodeOrder.Action.UNDRAIN, reason, replaced)


def _is_by_another(drained: DrainedNode, user: User, read_at: datetime | None) -> bool:
    """Return whether an order of this person would end somebody else's drain, without a query for each node."""
    return drain.is_drained_by_another_given(drained.node, drained.last_order, user, read_at=read_at)
