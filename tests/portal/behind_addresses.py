"""A lab with a row behind every address of nodes and their health, for tests that go through the whole API."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from django.utils import timezone

from jobs.acceptances import start as acceptances
from jobs.gameday import start as game_days
from jobs.models import GameDay
from nodes.drains import maintenance, spares
from nodes.models import (
    Acceptance,
    BurnIn,
    GoldenRecord,
    HealthControl,
    HealthEntry,
    MaintenanceWindow,
    Node,
    SiteRule,
)
from portal.announcements import write
from portal.models import Announcement, Project, User
from tests.lab import sysadmin
from tests.nodes.remediation.cluster import Lab

RULE = """[[rule]]
name = "of-the-site"
title = "A rule of the site"
source = "a test"
severity = "warning"
action = "watch"
signal = "xid"
where = { code = 63 }
clears = "quiet"
clears_after = "1h"

[[rule.example]]
fires = true
steps = [{ code = 63 }]

[[rule.example]]
fires = false
steps = [{ code = 13 }]
"""


@dataclass
class AddressedLab:
    """The rows' sysadmin, and by parameter of an address what stands for it."""

    ops: User
    lab: Lab = field(default_factory=Lab)
    names: dict[str, Any] = field(default_factory=dict)

    def path(self, template: str, **others: Any) -> str:
        """Return an address with its parameters filled in."""
        values = {**self.parameters(template), **others}
        return re.sub(r"\{(\w+)\}", lambda found: str(values.get(found[1], 1)), template)

    def parameters(self, template: str) -> dict[str, Any]:
        """Return what the parameters of an address stand for: a name is not of the same thing everywhere."""
        if "/health/rules/" in template:
            return self.names | {"name": "of-the-site"}
        return self.names | ({"node": "dgx-05"} if "/burnins/" in template else {})

    def named(self, body: Any) -> Any:
        """Return a request's body about nodes that there are: a made-up name is refused before anything is done."""
        if not isinstance(body, dict) or not body.keys() & {"nodes", "node", "toml"}:
            return body
        free = {"nodes": ["dgx-03"] if isinstance(body.get("nodes"), list) else "dgx-[01-04]", "node": "dgx-08",
                "partition": "gpu", "toml": RULE}  # fmt: skip
        return {**body, **{name: value for name, value in free.items() if name in body}}


def fill(project: Project) -> AddressedLab:
    """Create findings, a spare, a window, an acceptance with its burn-in, a game day, a rule and a golden record."""
    found = AddressedLab(sysadmin("ops"))
    lab, ops, now = found.lab, found.ops, timezone.now()
    lab.xid(79)
    lab.step()
    spares.add(ops, Node.objects.get(name="dgx-12"), "gpu")
    maintenance.plan(ops, "dgx-11", "new switch", now + timedelta(hours=1), now + timedelta(hours=2))
    acceptances.start(ops, "dgx-[05-06]", 60)
    game_days.start(ops, project.slug, "gpu", ["none"])
    write.announce(ops, "The lab closes at 18:00.", "info")
    SiteRule.objects.create(name="of-the-site", toml=RULE, changed_by=ops)
    GoldenRecord.objects.create(model="NVIDIA H100", driver="570.1", test="copy", kind="host to GPU", values=[25.0])
    HealthControl.objects.filter(pk=HealthControl.ID).update(
        tripped_at=now, tripped_by="off-bus", tripped_detail="Many"
    )
    found.names = {
        "name": "dgx-01", "node": "dgx-12", "entry_id": HealthEntry.objects.latest("pk").pk,
        "window_id": MaintenanceWindow.objects.get().pk, "burn_in_id": BurnIn.objects.get().pk,
        "acceptance_id": Acceptance.objects.get().pk, "game_day_id": GameDay.objects.get().pk,
        "announcement_id": Announcement.objects.get().pk, "slug": project.slug,
    }  # fmt: skip
    return found
