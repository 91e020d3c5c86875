"""Test that Ctrl-C only stops following tests of nodes: the command prints that they continue, and where."""

# ruff: noqa: F811 (fixtures that are imported)
from __future__ import annotations

from typing import Any

import pytest

from tests.vigil_cli.commands import nowhere, portal, vigil  # noqa: F401

RECORD = {
    "id": 7, "state": "waiting", "detail": "", "problem": "", "progress": None, "result": "", "summary": "",
    "nodes": [], "clauses": [], "drills": [], "ended_at": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("command", "path", "title"),
    [
        (("burnin", "dgx-03"), "burnins", "Burn-in"), (("accept", "dgx-03"), "acceptances", "Acceptance"),
        (("gameday",), "gamedays", "Game day"),
    ],
)  # fmt: skip
def test_ctrl_c_explains_that_it_continues(portal: Any, command: tuple[str, ...], path: str, title: str) -> None:
    record = {**RECORD, "url": f"http://portal/{path}/7"}
    portal.answers = {("POST", path): record, ("GET", f"{path}/7"): KeyboardInterrupt()}
    result = vigil(*command, status=1)
    assert result.stderr.splitlines()[-1] == f"{title} 7 continues: http://portal/{path}/7"
    assert "Aborted" not in result.output
