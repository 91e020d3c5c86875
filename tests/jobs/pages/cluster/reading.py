"""Read rows of a cluster, and its pages as one line of text."""

from __future__ import annotations

from html import unescape
from typing import Any

from nodes.schedulers.base import NodeStatus
from nodes.schedulers.cluster import QueuedJobInfo
from portal.models import User
from tests.jobs.pages.reading import on_one_line
from tests.lab import signed_in

HOUR_S = 3600


def node(name: str, state: str = "mixed", **facts: Any) -> NodeStatus:
    own: dict[str, Any] = {"name": name, "state": state, "partitions": ("gpu",), "gpus": 8, "cpus": 128}
    return NodeStatus(**own | facts)


def queued(number: int, **facts: Any) -> QueuedJobInfo:
    own: dict[str, Any] = {"scheduler_id": str(number), "name": f"slurm-{number}", "user": "other", "state": "pending"}
    return QueuedJobInfo(**own | {"partition": "gpu", "gpus": 8} | facts)


def text(user: User, address: str, **headers: str) -> str:
    answer = signed_in(user).get(address, headers=headers)
    assert answer.status_code == 200
    return on_one_line(unescape(answer.content.decode()))
