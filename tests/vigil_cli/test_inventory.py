"""`vigil inventory` lists versions, those of which none is usual, and what needs attention."""

# ruff: noqa: F811 (fixtures that are imported)
from __future__ import annotations

from typing import Any

from tests.vigil_cli.commands import nowhere, portal, vigil  # noqa: F401


def version(text: str, count: int, **more: Any) -> dict[str, Any]:
    return {"version": text, "count": count, "nodes": ["dgx-01"], "odd": [], "minimum": None, "is_judged": True, **more}


def test_mixed_and_unjudged_values_are_reported(portal):
    versions = [version("570.195.03", 50), version("590.48.01", 50, is_judged=False)]
    counts = [{"version": item["version"], "count": item["count"]} for item in versions]
    portal.answers["GET", "inventory"] = {
        "nodes": 100, "findings": [], "more_findings": 0, "minimums": [], "problem": "",
        "items": [{"software": "driver", "part": "", "title": "NVIDIA driver", "versions": versions}],
        "mixed": [
            {"software": "driver", "part": "", "partition": "h100", "model": "NVIDIA H100", "versions": counts},
        ],
    }  # fmt: skip
    shown = vigil("inventory").stdout.replace("\N{NO-BREAK SPACE}", " ")
    assert "branch not judged" in shown
    assert "NVIDIA driver (h100, NVIDIA H100): 570.195.03 on 50 nodes and 590.48.01 on 50 nodes" in shown
