"""Test that only the owner of a program that fails on every node is notified, with the evidence."""

from __future__ import annotations

from typing import Any

import pytest

from jobs.tasks import assess
from nodes.models import HealthEntry
from nodes.remediation import inbox
from portal.models import Notice
from tests.jobs.assessing.test_offenders import fail_on, judge
from tests.jobs.reliability.lab import ran
from tests.lab import sysadmin
from tests.nodes.remediation.cluster import Lab

pytestmark = pytest.mark.django_db
ERROR = "KeyError: 'labels'"


@pytest.fixture
def failing() -> Lab:
    lab = Lab()
    for node in lab.names[:6]:
        fail_on(node, 1, "program.exception", fingerprint="0123456789abcdef", says=ERROR)
    judge()
    assess()
    return lab


def standing() -> list[Notice]:
    return list(Notice.objects.active().filter(kind="program.failing"))


def test_its_owner_gets_the_evidence_and_what_to_do(failing: Lab) -> None:
    (notice,) = standing()
    assert notice.user is not None
    assert (notice.audience, notice.user.username) == (Notice.Audience.PERSON, "of-default")
    title = notice.title.replace("\N{NO-BREAK SPACE}", " ")
    assert title.endswith("fails in the same way wherever it runs: 6 times on 6 nodes.")
    assert notice.detail.startswith(ERROR)
    assert "Correct the program first." in notice.detail
    assert notice.link.endswith("/postmortem")
    facts = dict(notice.facts)
    assert facts["Nodes"] == "dgx-01, dgx-02, dgx-03, dgx-04, dgx-05 and 1 more"
    assert facts["Your jobs"].count("#") == 5
    assess()
    assert len(standing()) == 1


def test_nobody_hears_of_other_peoples_programs(failing: Lab) -> None:
    for number, node in enumerate(failing.names):  # the same message, once or twice each
        ran(2.0, nodes=[node], cause="program.exception", fingerprint="0123456789abcdef", project=f"p{number % 8}")
    judge()
    assess()
    (notice,) = standing()
    assert "6 times on 6 nodes" in notice.title.replace("\N{NO-BREAK SPACE}", " ")


@pytest.mark.parametrize("decision", [inbox.clear, inbox.dismiss])
def test_it_is_withdrawn_once_a_sysadmin_has_ended_the_finding(failing: Lab, decision: Any) -> None:
    decision(sysadmin("ops"), HealthEntry.objects.get(rule="failing-program").pk, "a bug of the cluster's image")
    assess()
    assert not standing()
