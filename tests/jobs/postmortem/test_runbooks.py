"""Test runbooks: one per cause, valid links; on pages, over REST and by `vigil`; a site's own take precedence."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from django.utils.html import escape

from console.pages import docs
from diagnosis import runbook
from diagnosis.causes import CAUSES
from portal.models import AuditEntry, SiteRunbook
from tests.jobs.pages.reading import text
from tests.lab import bearer, person, signed_in, sysadmin
from tests.vigil_cli.commands import nowhere, portal, problem, vigil  # noqa: F401

FILES = sorted(path.stem for path in runbook.FOLDER.glob("*.md"))


def test_every_cause_has_a_runbook_and_nothing_else_does() -> None:
    assert sorted(CAUSES) == FILES


@pytest.mark.parametrize("code", sorted(CAUSES))
def test_it_begins_with_its_code_and_its_links_lead_somewhere(code: str) -> None:
    message = runbook.shipped_runbook(code)
    assert message.startswith(f"# {code}: {CAUSES[code].title}\n")
    for target in re.findall(r"\]\(([^)]+)\)", message):
        is_guide = target.startswith("../") and docs.address(target, "runbooks")
        assert runbook.linked_cause(target) or is_guide or target.startswith("https://"), target
    assert runbook.linked_cause(f"{code}.md") == code


def test_a_spiked_loss_has_ten_things_to_check() -> None:
    message = runbook.shipped_runbook("numerics.divergence")
    assert "the ten things to check" in message
    assert len(re.findall(r"(?m)^\d+\. \*\*", message)) == 10


@pytest.mark.parametrize("code", ["", "gpu", "../README", "gpu.ecc.md", "gpu/ecc"])
def test_what_is_no_cause_has_none(code: str) -> None:
    assert runbook.shipped_runbook(code) == ""
    assert runbook.linked_cause(f"{code}.md") is None


@pytest.mark.django_db
class TestPages:
    def test_lists_all(self) -> None:
        html = text(signed_in(person("mira")).get("/runbooks"))
        assert all(f'href="/runbooks/{code}"' in html for code in CAUSES)

    @pytest.mark.parametrize("code", sorted(CAUSES))
    def test_shows_a_runbook(self, code: str) -> None:
        html = text(signed_in(person("mira")).get(f"/runbooks/{code}"))
        assert "<h2>" in html.partition('class="prose"')[2]
        assert '.md"' not in html, "links lead to pages, not to files"
        assert "<h1>" not in html.partition('class="prose"')[2], "the page has its own"
        assert "Write a site" not in html

    def test_links_lead_to_guides(self) -> None:
        html = text(signed_in(person("mira")).get("/runbooks/gpu.off_bus"))
        assert '<a href="/docs/how-to/repair-a-node">repair a node</a>' in html

    def test_what_is_none(self) -> None:
        assert signed_in(person("mira")).get("/runbooks/gpu.tired").status_code == 404
        assert signed_in(sysadmin()).get("/runbooks/gpu.tired/edit").status_code == 404

    def test_a_sysadmin_writes_the_sites_runbook_and_takes_it_back(self) -> None:
        client, mira = signed_in(sysadmin()), signed_in(person("mira"))
        assert (
            escape(runbook.shipped_runbook("gpu.ecc").strip()) in client.get("/runbooks/gpu.ecc/edit").content.decode()
        )
        evil = "## Here\r\n<script>alert(1)</script> ask **Jo**, [x](javascript:alert(1)) [y](gpu.off_bus.md)"
        assert client.post("/runbooks/gpu.ecc/edit", {"text": evil}).status_code == 302
        html = text(mira.get("/runbooks/gpu.ecc"))
        assert "&lt;script&gt;alert(1)&lt;/script&gt; ask <strong>Jo</strong>" in html
        assert 'href="javascript' not in html
        assert 'href="/runbooks/gpu.off_bus"' in html
        assert "Site runbook by sam" in html
        shipped = text(mira.get("/runbooks/gpu.ecc?own=1"))
        assert "Remapping Failure" in shipped
        assert "ask <strong>Jo" not in shipped
        assert client.post("/runbooks/gpu.ecc/own").status_code == 302
        assert not SiteRunbook.objects.exists()
        actions = list(AuditEntry.objects.order_by("pk").values_list("action", flat=True))
        assert actions == ["runbook.changed", "runbook.forgotten"]

    @pytest.mark.parametrize("written", ["", " \n ", "\0", "x" * 20_001])
    def test_what_cannot_be_saved(self, written: str) -> None:
        answer = signed_in(sysadmin()).post("/runbooks/gpu.ecc/edit", {"text": written})
        assert answer.status_code == 422
        assert not SiteRunbook.objects.exists()

    def test_others_change_nothing(self) -> None:
        client = signed_in(person("mira"))
        assert client.get("/runbooks/gpu.ecc/edit").status_code == 403
        assert client.post("/runbooks/gpu.ecc/edit", {"text": "x"}).status_code == 403
        assert client.post("/runbooks/gpu.ecc/own").status_code == 403

    def test_over_rest(self) -> None:
        client = bearer(person("mira"), "read")
        payload = client.get("/api/v1/runbooks/gpu.off_bus").json()
        assert (payload["owner"], payload["is_site"], payload["changed_by"]) == ("sysadmin", False, None)
        assert payload["markdown"] == runbook.shipped_runbook("gpu.off_bus")
        SiteRunbook.objects.create(code="gpu.off_bus", text="Ask Jo.\n", changed_by=sysadmin())
        payload = client.get("/api/v1/runbooks/gpu.off_bus").json()
        assert (payload["markdown"], payload["is_site"], payload["changed_by"]) == ("Ask Jo.\n", True, "sam")
        assert client.get("/api/v1/runbooks/nonsense").status_code == 404


class TestCommand:
    def test_prints_what_the_portal_shows(self, portal: Any) -> None:  # noqa: F811
        portal.answers["GET", "runbooks/gpu.ecc"] = {"code": "gpu.ecc", "markdown": "Ask Jo.\n"}
        assert vigil("runbook", "gpu.ecc").stdout == "Ask Jo.\n"
        assert vigil("runbook", "gpu.ecc", "--own").stdout.startswith("# gpu.ecc: ")
        assert json.loads(vigil("runbook", "gpu.ecc", "--json").stdout)["markdown"] == "Ask Jo.\n"
        portal.answers["GET", "runbooks/gpu.nvlink"] = problem(503, "Its database is busy.")
        report = vigil("runbook", "gpu.nvlink")
        assert report.stdout.startswith("# gpu.nvlink: ")
        assert "built-in runbook" in report.stderr

    def test_without_a_portal(self, nowhere: None) -> None:  # noqa: F811
        assert "numerics.divergence" in vigil("runbook").stdout
        assert vigil("runbook", "memory.shm").stdout.startswith("# memory.shm: ")
        assert "`vigil runbook` lists them" in vigil("runbook", "gpu", status=1).stderr
