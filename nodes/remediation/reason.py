"""Write the reason that the scheduler shows for a drain by a health rule: `[node] Xid 79 on GPU 0`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nodes.models import HealthEntry

NODE = "[node]"
"""Begins reasons about the machine itself; `[user]` those about what a user's programs left behind."""
MOST_LETTERS = 150


def drain_reason(entry: HealthEntry) -> str:
    """Return what was observed and where, without the rule, which the requester names."""
    return f"{NODE} {_signal(entry)}{_where(entry)}"[:MOST_LETTERS]


def _signal(entry: HealthEntry) -> str:
    newest: Sequence[Any] = entry.evidence[-1] if entry.evidence else ()
    signal, fields = (newest[1], newest[2]) if len(newest) >= 3 and isinstance(newest[2], Mapping) else ("", {})
    if signal in ("xid", "sxid") and "code" in fields:
        return f"{'Xid' if signal == 'xid' else 'SXid'} {fields['code']}"
    return entry.title


def _where(entry: HealthEntry) -> str:
    if entry.gpu is not None:
        return f" on GPU {entry.gpu.index}"
    return f" ({entry.item})" if entry.item else ""
