"""A cluster with years of health behind it, for benches: findings, orders, burn-ins, and software on every node."""

from __future__ import annotations

import random
from datetime import datetime, timedelta
from typing import Any

from django.db import connection
from django.utils import timezone

A_BATCH = 5_000
DRAINED_EVERY = 5
"""One node in five is out of service: as many as the page of drains shows at most."""
OF_PEOPLE = 5_000
"""The newest orders are people's, so that those of rules are found among many others."""


def make(nodes: int, active: int, cleared: int, orders: int, burn_ins: int) -> Any:
    """Store all of it; return a sysadmin."""
    from bench import simulated_fleet
    from portal.models import User

    now, chance = timezone.now(), random.Random(7)
    names = simulated_fleet.make(nodes, now=now).nodes
    _store_software(chance)
    user = User.objects.create(username="sam", is_superuser=True)
    _store_orders(names, orders, user, now)
    _store_entries(names, active, cleared, chance, now)
    _store_burn_ins(names, burn_ins, user, now)
    if connection.vendor == "postgresql":  # where autovacuum does it; on SQLite nothing ever does
        with connection.cursor() as cursor:
            cursor.execute("ANALYZE")
    return user


def _store_software(chance: random.Random) -> None:
    """Give each agent its versions; three nodes in a hundred have another driver."""
    from nodes.models import Agent, Gpu

    agents = list(Agent.objects.only("pk"))
    for agent in agents:
        is_odd = chance.random() < 0.03
        agent.facts = {
            "driver": "550.54.15" if is_odd else "570.86.15", "cuda": "12.8", "kernel": "Linux 6.8.0-45-generic",
            "system": "Ubuntu 24.04", "slurm": "24.11.5", "nccl": "2.25.1", "fabric_manager": "570.86.15",
            "gpus": [{"name": "NVIDIA H100 80GB HBM3", "vbios": "96.00.89.00.01", "inforom": "G520.0200.00.05"}] * 8,
            "adapters": [{"board": "MT_0000000838", "firmware": "28.43.1014"}] * 8,
            "mounts": [{"mount": f"/data{number}", "source": f"nfs:/data{number}"} for number in range(3)],
        }  # fmt: skip
    Agent.objects.bulk_update(agents, ["facts"], batch_size=200)
    Gpu.objects.update(counters={"ecc_uncorrected": 0, "remapped_pending": 0, "pcie_width": 16, "nvlinks": [1] * 18})


def _store_orders(names: list[str], number: int, user: Any, now: datetime) -> None:
    """Store drains and undrains of all nodes, and let the last one of some be why they are out."""
    from nodes.models import Node, NodeOrder

    rows = []
    for place in range(number):
        is_by_rule = place < number - OF_PEOPLE and place % 2 == 0
        rows.append(
            NodeOrder(
                node=names[place // 2 % len(names)], action="undrain" if place % 2 else "drain", state="done",
                reason="[node] Xid 79 on GPU 0", rule="off-bus" if is_by_rule else "", ended_at=now,
                asked_by=None if is_by_rule else user,
            )
        )  # fmt: skip
    out = names[::DRAINED_EVERY]
    rows += [
        NodeOrder(
            node=name, action="drain", state="done", reason="[node] Xid 79 on GPU 0", rule="off-bus", ended_at=now
        )
        for name in out
    ]
    for start in range(0, len(rows), A_BATCH):
        NodeOrder.objects.bulk_create(rows[start : start + A_BATCH])
    newest = NodeOrder.objects.order_by("-pk").values_list("pk", flat=True)[len(out)]
    NodeOrder.objects.filter(pk__lte=newest).update(asked_at=now - timedelta(days=2))
    Node.objects.filter(name__in=out).update(
        state="drained", reason="[node] Xid 79 on GPU 0 (vigil: off-bus)", reason_by="vigil", reason_at=now
    )


def _store_entries(names: list[str], active: int, cleared: int, chance: random.Random, now: datetime) -> None:
    from nodes.health.rules.catalogue import shipped_rules
    from nodes.models import HealthEntry, NodeOrder

    rules = [rule for rule in shipped_rules().values() if rule.action != "ignore"]
    orders = dict(NodeOrder.objects.filter(rule="off-bus").order_by("pk").values_list("node", "pk"))
    rows = []
    # The newest rows are cleared ones: the active ones are found among many others.
    for place in range(active + cleared):
        rule, is_active = rules[place % len(rules)], cleared // 2 <= place < cleared // 2 + active
        seen = now - timedelta(seconds=chance.randrange(86_400 if is_active else 365 * 86_400))
        is_open = is_active and chance.random() < 0.7
        node = names[place // len(rules) % len(names)]
        rows.append(
            HealthEntry(
                node=node, item=str(place), rule=rule.name, title=rule.title, severity=rule.severity,
                action=rule.action, count=3, first_seen=seen, last_seen=seen, opened_at=seen,
                state="open" if is_open else "watching" if is_active else "cleared",
                cleared_at=None if is_active else seen, decision="proposed" if is_open and place % 2 else "",
                order_id=orders.get(node) if rule.name == "off-bus" else None,
                evidence=[[seen.timestamp(), "xid", {"code": 79, "text": "GPU has fallen off the bus."}, 1]] * 20,
            )
        )  # fmt: skip
        if len(rows) == A_BATCH:
            HealthEntry.objects.bulk_create(rows)
            rows = []
    HealthEntry.objects.bulk_create(rows)


def _store_burn_ins(names: list[str], number: int, user: Any, now: datetime) -> None:
    from nodes.models import BurnIn, BurnInNode, BurnInTest

    for start in range(0, number, A_BATCH):
        places = range(start, min(number, start + A_BATCH))
        burn_ins = BurnIn.objects.bulk_create(
            BurnIn(key=f"b{place}", state="ended", seconds=600, started_by=user, ended_at=now, log="passed\n" * 50)
            for place in places
        )
        nodes = BurnInNode.objects.bulk_create(
            BurnInNode(
                burn_in=burn_in, node=names[place % len(names)], is_active=False, gpus=8, verdict="passed",
                machine={"gpu_model": "NVIDIA H100", "gpus": 8, "driver": "570.86.15", "torch": "2.9.0"},
            )
            for place, burn_in in zip(places, burn_ins, strict=True)
        )  # fmt: skip
        BurnInTest.objects.bulk_create(
            BurnInTest(burn_in_node=node, test=test, item="gpu0", unit="GB/s", count=9, values=[400.0] * 9)
            for node in nodes
            for test in ("memory", "matmul", "copy")
        )
