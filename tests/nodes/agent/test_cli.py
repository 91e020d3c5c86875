"""Test `vigil agent`, with a portal that gives scripted answers."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.vigil_cli.commands import nowhere, portal, problem, vigil  # noqa: F401


def test_a_token_is_printed_with_the_lines_for_its_node(portal: SimpleNamespace) -> None:  # noqa: F811
    portal.answers["POST", "nodes/dgx-01/token"] = {"node": "dgx-01", "token": "vga_abc"}
    lines = vigil("agent", "enroll", "dgx-01").stdout.splitlines()
    assert "The token of dgx-01, shown only once" in lines[0]
    assert "(umask 077 && echo vga_abc > /etc/vigil-agent/token)" in lines
    assert "echo VIGIL_AGENT_NODE=dgx-01 >> /etc/vigil-agent/environment" in lines
    payload = json.loads(vigil("agent", "enroll", "dgx-01", "--json").stdout)
    assert (payload["node"], payload["token"]) == ("dgx-01", "vga_abc")


def test_a_secret_for_many(portal: SimpleNamespace) -> None:  # noqa: F811
    portal.answers["POST", "agents/secret"] = {"secret": "vge_abc", "expires_at": "2026-02-01T00:00:00Z"}
    output = vigil("agent", "enroll", "--many").stdout
    assert "echo vge_abc > /etc/vigil-agent/token" in output
    assert "VIGIL_AGENT_NODE" not in output


@pytest.mark.parametrize("words", [(), ("dgx-01", "--many")])
def test_either_a_node_or_all_nodes(words: tuple[str, ...], portal: SimpleNamespace) -> None:  # noqa: F811
    assert "Name a NODE" in vigil("agent", "enroll", *words, status=2).stderr
    assert portal.asked == []


def test_only_sysadmins_may_enroll(portal: SimpleNamespace) -> None:  # noqa: F811
    portal.answers["POST", "nodes/dgx-01/token"] = problem(403, "Only sysadmins may.")
    assert "Only sysadmins may." in vigil("agent", "enroll", "dgx-01", status=1).stderr


def test_a_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    payload = json.loads(vigil("agent", "bundle", "--json").stdout)
    assert payload["file"] == "vigil-agent.pyz"
    assert payload["bytes"] == (tmp_path / "vigil-agent.pyz").stat().st_size
    assert "nodes/agent/loop.py" in zipfile.ZipFile("vigil-agent.pyz").namelist()
    assert "KiB" in vigil("agent", "bundle", "other.pyz").stdout


def test_a_bundle_without_a_place(tmp_path: Path) -> None:
    assert "cannot be written" in vigil("agent", "bundle", str(tmp_path / "none" / "a.pyz"), status=1).stderr
