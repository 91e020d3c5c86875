"""Parse VIGIL_DCGM_EXPORTERS, the list of dcgm-exporters to poll."""

from __future__ import annotations

import re
from pathlib import Path

from nodes.telemetry.enrolment import NAME

MAX_NODES = 2_000


def exporters(setting: str) -> dict[str, str]:
    """Return URLs by node, from `node=http://host:9400/metrics` separated by commas or, in @FILE, one per line.

    Raises ValueError for anything else.
    """
    entries = setting.split(",")
    if setting.startswith("@"):
        try:
            lines = Path(setting[1:]).read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{setting[1:]} cannot be read: {error}") from None
        entries = [line.partition("#")[0] for line in lines]
    found: dict[str, str] = {}
    for entry in filter(None, map(str.strip, entries)):
        node, _, url = entry.partition("=")
        if not NAME.fullmatch(node) or not re.fullmatch(r"https?://[^\s/]+\S*", url):
            raise ValueError(f"{entry[:100]!r} is not NODE=http://HOST:9400/metrics.")
        if node in found or len(found) >= MAX_NODES:
            raise ValueError(f"{node} is listed twice, or there are more than {MAX_NODES:,} nodes.")
        found[node] = url
    return found
