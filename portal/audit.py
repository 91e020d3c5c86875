"""Prepare a change for the audit log: its values before and after, bounded and without secrets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date, time
from typing import Any

from vigil_core.masking import DOTS, masked
from vigil_core.untrusted import plain

MAX_CHARACTERS = 2_000  # of a value: enough to see what changed; a runbook may be twenty times as long
MAX_VALUES = 50  # of a change, and of a list in it
_SECRET = ("password", "secret", "token", "digest", "salt", "post_data", "get_data")
_MISSING = object()


@dataclass(frozen=True, kw_only=True)
class Change:
    """The values before and after a change, by name. A new record has none before, a deleted one none after."""

    before: Mapping[str, Any] = field(default_factory=dict)
    after: Mapping[str, Any] = field(default_factory=dict)

    def stored(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the values that differ, as JSON stores them; a secret's value is replaced by dots."""
        names = [
            name
            for name in dict.fromkeys([*self.before, *self.after])
            if self.before.get(name, _MISSING) != self.after.get(name, _MISSING)
        ][:MAX_VALUES]
        return (
            {name: _storable(name, self.before[name]) for name in names if name in self.before},
            {name: _storable(name, self.after[name]) for name in names if name in self.after},
        )


def sentence(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Return a stored change as text: "is_active: True → False; role: lead"."""
    names = dict.fromkeys([*before, *after])
    return "; ".join(f"{name}: {_arrow(name, before, after)}" for name in names)


def _arrow(name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    if name not in before:
        return _display(after[name])
    return f"{_display(before[name])} → {_display(after[name]) if name in after else 'gone'}"


def _display(value: Any) -> str:
    if value in ("", None, []):
        return "nothing"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _storable(name: str, value: object) -> Any:
    if any(word in name.lower() for word in _SECRET):
        return DOTS
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping):
        return [_text(item) for item in list(value)[:MAX_VALUES]]
    return _text(value)


def _text(value: object) -> str:
    """Return the value as text, masked before it is cut: half a secret would not be recognised."""
    text = masked(plain(str(value)))
    return text if len(text) <= MAX_CHARACTERS else f"{text[: MAX_CHARACTERS - 1]}…"
