"""Random histories against the limits: whatever happens, and wherever a worker is killed, automation stays within them.

The oracle counts for itself: orders, and what the scheduler has really drained. Between two decisions the nodes may not
be read, or the scheduler may not answer. `make test-all` tries 20 histories, a landing 3, TEST_HISTORIES=10000 that
many.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

import pytest
from django.db.models import F

from nodes.cluster import drain, sync
from nodes.drains import maintenance, spares
from nodes.models import (
    HealthControl,
    HealthEntry,
    HotSpare,
    MaintenanceWindow,
    Node,
    NodeOrder,
    Reading,
)
from nodes.monitoring.evaluate import evaluate
from nodes.remediation import inbox
from nodes.remediation.decide import decide
from nodes.remediation.return_to_service import return_recovered
from nodes.schedulers.base import SchedulerError
from nodes.schedulers.cluster import PartitionInfo
from tests.examples import EXHAUSTIVE
from tests.lab import sysadmin
from tests.nodes.remediation.cluster import Lab

pytestmark = pytest.mark.django_db
ENOUGH = 20
"""Histories in which everything that must be tried has happened."""
HISTORIES = int(os.environ.get("TEST_HISTORIES") or (ENOUGH if EXHAUSTIVE else 3))
EVENTS = 16
NAMES = tuple(f"dgx-{number:02}" for number in range(1, 41))
PARTITIONS = {"gpu": NAMES, "debug": NAMES[:10], "small": NAMES[2:7], "long": NAMES[5:25]}
"""They share nodes: of small one may be out, of debug two, of gpu eight."""
LIVELY = NAMES[:12]
PERSON = "a person's"


class Killed(BaseException):
    """Stands for SIGKILL between the scheduler's act and its record; no transaction is open there."""


class LimitedHistory:
    """One history. `persons`: nodes that a person has drained with scontrol, or by an order, and not returned since."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lab = Lab(names=NAMES)
        self.lab.scheduler.machines = [
            replace(node, partitions=tuple(name for name, members in PARTITIONS.items() if node.name in members))
            for node in self.lab.scheduler.machines
        ]
        self.lab.scheduler.divided = [PartitionInfo(name=name, nodes=nodes) for name, nodes in PARTITIONS.items()]
        sync.read(self.lab.scheduler)
        self.act_on_scheduler, self.lab.scheduler.drain = self.lab.scheduler.drain, self.drain  # type: ignore[method-assign]
        self.ops = sysadmin("ops")
        self.persons: set[str] = set()
        self.happened = Counter[str]()

    def happen(self) -> None:
        chances = {
            self.finding: 6, self.clear: 2, self.burn_in_passes: 2, self.person_drains: 2, self.person_orders: 1,
            self.person_returns: 1, self.plan: 1, self.cancel: 1, self.name_spare: 1, self.pass_time: 2,
            self.reset_breaker: 3,
        }  # fmt: skip
        (what,) = self.random.choices(list(chances), list(chances.values()))
        what(self.random.choice(LIVELY))
        self.tick()

    def finding(self, node: str) -> None:
        for other in {node, *self.random.choices(LIVELY, k=self.random.choice((0, 0, 0, 0, 0, 1, 4)))}:
            self.lab.xid(79, other, text=f"at {self.random.random()}")

    def clear(self, node: str) -> None:
        for entry in HealthEntry.objects.open()[: self.random.choice((1, 5))]:
            inbox.clear(self.ops, entry.pk, "repaired")

    def burn_in_passes(self, node: str) -> None:
        for entry in HealthEntry.objects.open()[:2]:
            inbox.clear(None, entry.pk, "Burn-in 1 passed.")

    def person_drains(self, node: str) -> None:
        self.lab.scheduler.drain(node, PERSON)
        self.read()
        self.persons.add(node)

    def person_orders(self, node: str) -> None:
        with suppress(drain.DrainedByAnother):
            drain.request_order(self.ops, Node.objects.get(name=node), NodeOrder.Action.DRAIN, PERSON)

    def person_returns(self, node: str) -> None:
        for row in Node.objects.exclude(reason="")[:1]:
            drain.request_order(self.ops, row, NodeOrder.Action.UNDRAIN, replaces=row.reason)
            self.persons.discard(row.name)

    def plan(self, node: str) -> None:
        starts = datetime.now(UTC) + timedelta(minutes=self.random.choice((-1, 30)))
        maintenance.plan(self.ops, node, "work", starts, starts + timedelta(minutes=50))

    def cancel(self, node: str) -> None:
        for window in MaintenanceWindow.objects.unfinished()[:1]:
            maintenance.cancel(self.ops, window)

    def name_spare(self, node: str) -> None:
        if not HotSpare.objects.filter(node=node).exists():
            spares.add(
                self.ops, Node.objects.get(name=node), self.random.choice(Node.objects.get(name=node).partitions)
            )

    def pass_time(self, node: str) -> None:
        """Let half an hour or more pass, by moving what is stored back."""
        by = timedelta(minutes=self.random.choice((35, 61)))
        NodeOrder.objects.update(asked_at=F("asked_at") - by)
        NodeOrder.objects.exclude(ended_at=None).update(ended_at=F("ended_at") - by)
        HealthEntry.objects.exclude(opened_at=None).update(opened_at=F("opened_at") - by)
        MaintenanceWindow.objects.update(starts_at=F("starts_at") - by, ends_at=F("ends_at") - by)
        Reading.objects.update(read_at=F("read_at") - by)
        HealthControl.objects.update(tripped_at=F("tripped_at") - by, reset_at=F("reset_at") - by)

    def reset_breaker(self, node: str) -> None:
        with suppress(inbox.NotPossible):
            inbox.reset_breaker(self.ops, "it was the switch")

    def tick(self) -> None:
        """Do what `nodes.tasks.health` and the follower do; a worker may be killed after any call of the scheduler."""
        maintenance.advance()
        evaluate()
        self.decide()
        before = NodeOrder.objects.filter(action="undrain").count()
        return_recovered()
        self.happened["returned"] += NodeOrder.objects.filter(action="undrain").count() - before
        spares.advance()
        self.happened["exchanged"] += HotSpare.objects.exclude(replaces="").count()
        with suppress(Killed):
            self.carry_out()
        if self.random.random() < 0.5:  # another worker decides before the nodes are read
            self.finding(self.random.choice(LIVELY))
            evaluate()
            self.decide()
        self.read()
        for node in self.persons:
            assert self.lab.scheduler.drained.get(node) == PERSON, f"automation touched a person's drain of {node}"

    def read(self) -> None:
        """Read the nodes, unless that fails or is not done before the next decision."""
        what = self.random.choices(("read", "unread", "failed"), (6, 2, 1))[0]
        self.happened[what] += 1
        if what == "failed":
            self.lab.scheduler.broken_parts["nodes"] = SchedulerError("slurmctld restarts")
        if what != "unread":
            sync.read(self.lab.scheduler, Reading.Part.NODES)
        self.lab.scheduler.broken_parts.clear()

    def drain(self, node: str, reason: str) -> None:
        """Drain a node in the scheduler. If a health rule ordered that, no partition has too few nodes then."""
        out = set(self.lab.scheduler.drained)
        self.act_on_scheduler(node, reason)
        if reason.endswith("(vigil: off-bus)") and node not in out:
            self.check_partitions({node}, out | {node})

    def decide(self) -> None:
        last = NodeOrder.objects.order_by("pk").values_list("pk", flat=True).last() or 0
        tripped = HealthControl.objects.exclude(tripped_at=None).exists()
        decide()
        new = list(NodeOrder.objects.filter(pk__gt=last))
        self.happened["drained"] += len(new)
        self.happened["held back"] += HealthEntry.objects.open().filter(held_back__contains="of at most").count()
        self.happened["partition full"] += HealthEntry.objects.open().filter(held_back__contains="20 %").count()
        assert not (tripped and new), "the breaker was tripped"
        self.check_limits({order.node for order in new}, last)

    def check_limits(self, drained: set[str], last: int) -> None:
        """Check both limits after a decision, for the nodes that it ordered to drain; `last`: the last order before it.

        A node that was drained within the hour may be drained again, though a spare that stands by since lowered the
        limit.
        """
        standby = set(HotSpare.objects.filter(state="standby").values_list("node", flat=True))
        serving = [node for node in Node.objects.all() if node.name not in standby]
        hour = NodeOrder.objects.filter(
            action="drain", asked_by=None, asked_at__gt=datetime.now(UTC) - timedelta(hours=1)
        )
        by_rules = {order.node for order in hour if order.rule == "off-bus"}
        again = {order.node for order in hour if order.rule == "off-bus" and order.pk <= last}
        assert drained <= again or len(by_rules) <= max(1, int(0.05 * len(serving))), sorted(by_rules)
        waiting = set(NodeOrder.objects.filter(state="asked", action="drain").values_list("node", flat=True))
        unread = {node.name for node in serving if "drain" not in node.state}
        out = {node for node, reason in self.lab.scheduler.drained.items() if reason != PERSON or node not in unread}
        self.check_partitions(drained - out, out | waiting)

    def check_partitions(self, drained: set[str], out: set[str]) -> None:
        """Check that the nodes just drained, or to be, leave enough of each of their partitions in service."""
        standby = set(HotSpare.objects.filter(state="standby").values_list("node", flat=True))
        for name in drained - standby:
            for partition, members in PARTITIONS.items():
                present = set(members) - standby
                if name in present:
                    assert len(out & present) <= int(0.2 * len(present)), (partition, sorted(out & present))

    def carry_out(self) -> None:
        kill = self.random.random() < 0.15
        scheduler, originals = self.lab.scheduler, (self.lab.scheduler.drain, self.lab.scheduler.undrain)

        def dying(act: Any) -> Any:
            def call(*arguments: str) -> None:
                act(*arguments)
                raise Killed

            return call

        if kill:
            scheduler.drain, scheduler.undrain = map(dying, originals)  # type: ignore[method-assign]
        try:
            drain.carry_out(scheduler)
        finally:
            scheduler.drain, scheduler.undrain = originals  # type: ignore[method-assign]


class TestLimits:
    """Each history is a test, so that many of them can be divided."""

    happened: ClassVar[Counter[str]] = Counter()

    @pytest.mark.parametrize("seed", range(HISTORIES))
    def test_no_history_exceeds_the_limits_or_undoes_a_persons_drain(self, seed: int, settings: Any) -> None:
        settings.VIGIL_HEALTH = "act"
        history = LimitedHistory(seed)
        for _ in range(EVENTS):
            history.happen()
        TestLimits.happened += history.happened + Counter(histories=1)

    def test_they_explored_what_they_must(self) -> None:
        if self.happened["histories"] < ENOUGH:
            pytest.skip(f"Fewer than {ENOUGH} histories ran here")
        assert all(
            self.happened[what]
            for what in ("drained", "returned", "exchanged", "held back", "partition full", "unread", "failed")
        )
