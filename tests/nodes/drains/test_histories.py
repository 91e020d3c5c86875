"""Random histories of findings, people, maintenance and spares: a person's drain stays, nothing is drained twice."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from nodes.cluster import drain, sync
from nodes.drains import maintenance, spares
from nodes.models import HealthEntry, HotSpare, MaintenanceWindow, Node, NodeOrder, Reading
from nodes.remediation import inbox
from portal.models import User
from tests.lab import sysadmin
from tests.nodes.remediation.cluster import Lab

pytestmark = pytest.mark.django_db
PERSON = "a person's"


class History:
    """Plays one random history. `persons`: nodes that a person has drained with scontrol and not undrained since."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lab = Lab()
        self.ops: User = sysadmin("ops")
        self.persons: set[str] = set()
        self.minutes = 0.0

    def happen(self) -> None:
        node = self.random.choice(self.lab.names[:5])
        what = self.random.choice(
            (self.finding, self.clear, self.person_drains, self.person_returns, self.plan, self.cancel, self.spare)
        )
        what(node)
        self.minutes += self.random.choice((0, 0, 7))
        maintenance.advance(datetime.now(UTC) + timedelta(minutes=self.minutes))
        self.lab.step()
        if self.random.random() < 0.3:
            self.lab.step()

    def finding(self, node: str) -> None:
        self.lab.xid(79, node, text=f"at {self.minutes} {self.random.random()}")

    def clear(self, node: str) -> None:
        for entry in HealthEntry.objects.open().filter(node=node):
            inbox.clear(self.ops, entry.pk, "repaired")

    def person_drains(self, node: str) -> None:
        self.lab.scheduler.drain(node, PERSON)
        sync.read(self.lab.scheduler, Reading.Part.NODES)
        self.persons.add(node)

    def person_returns(self, node: str) -> None:
        row = Node.objects.get(name=node)
        if row.reason:
            drain.request_order(self.ops, row, NodeOrder.Action.UNDRAIN, replaces=row.reason)
            self.persons.discard(node)

    def plan(self, node: str) -> None:
        starts = datetime.now(UTC) + timedelta(minutes=self.minutes + self.random.choice((-1, 5)))
        maintenance.plan(self.ops, node, "work", starts, starts + timedelta(minutes=self.random.choice((8, 20))))

    def cancel(self, node: str) -> None:
        for window in MaintenanceWindow.objects.unfinished()[:1]:
            maintenance.cancel(self.ops, window)

    def spare(self, node: str) -> None:
        if not HotSpare.objects.filter(node=node).exists():
            spares.add(self.ops, Node.objects.get(name=node), "gpu")


@pytest.mark.parametrize("seed", range(8))
def test_a_persons_drain_stays_and_nothing_is_drained_twice(seed: int, settings: Any) -> None:
    settings.VIGIL_HEALTH = "act"
    history = History(seed)
    for _ in range(14):
        history.happen()
        standing = {node: history.lab.scheduler.drained.get(node) for node in history.persons}
        assert standing == dict.fromkeys(history.persons, PERSON)
    for node in history.lab.names[:5]:
        done = NodeOrder.objects.filter(node=node, state=NodeOrder.State.DONE, asked_by=None).order_by("ended_at")
        for earlier, later in zip(done, done[1:], strict=False):
            is_repeated = (earlier.action, earlier.rule, earlier.reason) == (later.action, later.rule, later.reason)
            touched = NodeOrder.objects.filter(node=node, pk__gt=earlier.pk, pk__lt=later.pk).exists()
            assert not is_repeated or touched or history.persons or later.replaces != earlier.reason_with_requester
