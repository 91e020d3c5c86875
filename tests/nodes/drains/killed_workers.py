"""Kill workers with SIGKILL just before and just after the scheduler takes an order. Run by test_killed_workers.py.

    python -m tests.nodes.drains.killed_workers

Django is imported once. Each worker is forked, with separate connections, does what a tick does, and kills itself at
the call that it was given. Prints one JSON object: by act, what the scheduler, the orders and the audit log have then.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import django

HOME = Path(os.environ["VIGIL_HOME"])
NAMES = tuple(f"dgx-{number:02}" for number in range(1, 41))


def main() -> None:
    django.setup()
    import_all()
    acts = {"local": on_this_machine, "cluster": on_a_cluster}
    json.dump({name: act() for name, act in acts.items()}, sys.stdout)


def import_all() -> None:
    """Import and parse once what every worker needs."""
    from nodes.drains import bulk, maintenance, spares  # noqa: F401
    from nodes.health.rules.catalogue import shipped_rules
    from nodes.monitoring import evaluate  # noqa: F401
    from nodes.remediation import decide, inbox, return_to_service  # noqa: F401

    shipped_rules(False)


def on_this_machine() -> dict[str, Any]:
    """Drain and undrain the machine of the real local scheduler."""
    from nodes.models import Node

    worker(lambda: None)  # reads the nodes
    in_a_child(lambda: order(Node.objects.get().name, "drain", "fan 3"))
    drained = three_workers("drain")
    in_a_child(lambda: order(Node.objects.get().name, "undrain"))
    return {"drain": drained, "undrain": three_workers("undrain")}


def on_a_cluster() -> dict[str, Any]:
    """Drain many nodes at once, exchange a spare, return a node that recovered."""
    os.environ["TEST_CLUSTER"] = "yes"
    found = {}
    worker(lambda: None)
    in_a_child(drain_many)
    found["bulk drain"] = three_workers("drain", number=2)
    in_a_child(name_spare)
    worker(lambda: None)
    in_a_child(break_node)
    worker(lambda: None)  # drains the broken node, and orders the exchange
    found["exchange"] = three_workers("undrain")
    in_a_child(clear_finding)
    found["return"] = three_workers("undrain")
    return found


def three_workers(call: str, number: int = 1) -> dict[str, Any]:
    """Let one worker die before its call and the next one after it; a third does what is left, a fourth nothing."""
    log = HOME / "calls.log"
    log.write_text("")
    ends = [worker(partial(kill_at, call, moment, number)) for moment in ("before", "after", "", "")]
    return {"signals": ends, "calls": log.read_text().splitlines(), **in_a_child(report)}


def worker(prepare: Callable[[], None]) -> int:
    """Do what the workers do in a tick; return the signal that ended the process."""

    def work() -> None:
        from datetime import UTC, datetime

        from nodes.cluster import drain, sync
        from nodes.models import NodeOrder, Reading
        from nodes.tasks import health

        prepare()
        NodeOrder.objects.open().update(tried_at=None)
        health()
        drain.carry_out(scheduler())
        sync.read(scheduler(), Reading.Part.NODES)
        sync.read(scheduler(), Reading.Part.PARTITIONS)
        Reading.objects.update(read_at=datetime.now(UTC))

    return in_a_child(work, signal_only=True)


def in_a_child(work: Callable[[], Any], *, signal_only: bool = False) -> Any:
    """Return what the function returns in a forked process; with `signal_only` the signal that killed it, or 0."""
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.write(writing, json.dumps(work()).encode())
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
    os.close(writing)
    with open(reading, "rb") as answer:
        written = answer.read()
    _, status = os.waitpid(pid, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise SystemExit("a worker failed")
    return os.WTERMSIG(status) if signal_only else json.loads(written)


def kill_at(call: str, moment: str, number: int) -> None:
    """Note each call of the scheduler, and die before or after the nth of this kind."""
    kind, done = type(scheduler()), 0
    for name in ("drain", "undrain"):
        original = getattr(kind, name)

        def noted(self: Any, node: str, *others: Any, name: str = name, original: Any = original) -> None:
            nonlocal done
            done += name == call
            if (name, moment, done) == (call, "before", number):
                os.kill(os.getpid(), signal.SIGKILL)
            original(self, node, *others)
            with open(HOME / "calls.log", "a") as log:
                log.write(f"{name} {node}\n")
            if (name, moment, done) == (call, "after", number):
                os.kill(os.getpid(), signal.SIGKILL)

        setattr(kind, name, noted)


def scheduler() -> Any:
    from nodes.schedulers.local.scheduler import LocalScheduler
    from tests.nodes.drains.cluster_on_disk import ClusterOnDisk

    if "TEST_CLUSTER" in os.environ:
        return ClusterOnDisk(HOME / "cluster.json", NAMES)
    return LocalScheduler(HOME / "local-scheduler", cpus=2, gpus=())


def ops() -> Any:
    from portal.models import User

    return User.objects.get_or_create(username="ops", is_superuser=True)[0]


def order(node: str, action: str, reason: str = "") -> None:
    from nodes.cluster import drain
    from nodes.models import Node, NodeOrder

    drain.request_order(ops(), Node.objects.get(name=node), NodeOrder.Action(action), reason)


def drain_many() -> None:
    from nodes.drains import bulk

    bulk.drain_all(ops(), "dgx-[01-03]", "new switch")


def name_spare() -> None:
    from nodes.drains import spares
    from nodes.models import Node

    spares.add(ops(), Node.objects.get(name="dgx-20"), "gpu")


def break_node() -> None:
    from django.utils import timezone

    from nodes.models import HealthEntry

    now = timezone.now()
    HealthEntry.objects.create(
        node="dgx-10", rule="off-bus", title="Xid 79", severity="fatal", action="replace", state="open",
        first_seen=now, last_seen=now, opened_at=now,
        progress={"state": "open", "first_seen": now.timestamp(), "last_seen": now.timestamp(), "count": 1},
    )  # fmt: skip


def clear_finding() -> None:
    from nodes.models import HealthEntry
    from nodes.remediation import inbox

    inbox.clear(ops(), HealthEntry.objects.get().pk, "repaired")


def report() -> dict[str, Any]:
    from nodes.models import NodeOrder
    from portal.models import AuditEntry

    return {
        "out": {node.name: node.reason for node in scheduler().nodes() if "drain" in node.state},
        "orders": [f"{row.action} {row.node} {row.state}" for row in NodeOrder.objects.order_by("pk")],
        "audit": [
            f"{row.action} {row.thing}"
            for row in AuditEntry.objects.filter(action__in=("drain", "undrain", "spare.in_service")).order_by("pk")
        ],
    }


if __name__ == "__main__":
    main()
