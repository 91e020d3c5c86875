"""A health rule: what is wrong with a GPU or node, how it shows, what to do, and when it is over.

Rules are data (nodes/health/catalogue/*.toml, and the site's own), written as docs/reference/health-rules.md describes.
"""

from __future__ import annotations

import difflib
import re
import tomllib
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from nodes.health.rules.condition import BadCondition, Condition, FieldValue, is_number, parse_condition
from nodes.health.rules.signal import SIGNALS, Signal
from vigil_core import bounded, duration
from vigil_core.bounded import Bounds

Severity = Literal["info", "warning", "critical", "fatal"]
Action = Literal["ignore", "watch", "exclude", "drain", "reset", "replace"]
Blamed = Literal["node", "user"]
Ending = Literal["quiet", "recovered", "reset", "boot", "burn-in", "person"]

SEVERITIES: tuple[Severity, ...] = get_args(Severity)
ACTIONS: tuple[Action, ...] = get_args(Action)
OUT_OF_SERVICE: frozenset[Action] = frozenset({"drain", "reset", "replace"})
"""Actions that drain the node: a reset waits until nothing runs there, a replacement until somebody comes."""

BOUNDS = Bounds(depth=6, items=20_000)  # of a file
MAX_COUNT = 1_000
MAX_ESCALATION = 50
"""Openings that a finding remembers (`progress.MAX_OPENINGS`)."""
MAX_TRIGGERS = 8
MAX_EXAMPLES = 8
MAX_STEPS = 200
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
_TEXTS = {"title": 120, "advice": 500, "source": 500}


class BadRule(ValueError):
    """Raised for an invalid rule; the message tells its author why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trigger:
    """Describes what a rule waits for.

    An event fires once `count` of it happened within `within_s` seconds, if their `distinct` fields had at least so
    many different values ({"user": 2}). A state fires once it has held for `for_s` seconds.
    """

    signal: Signal
    where: Mapping[str, Condition] = field(default_factory=dict)
    count: int = 1
    within_s: float = 0.0
    distinct: Mapping[str, int] = field(default_factory=dict)
    for_s: float = 0.0

    def matches(self, signal: str, fields: Mapping[str, FieldValue]) -> bool:
        """Return whether an observation of this signal fulfils every condition."""
        return signal == self.signal.name and all(
            condition.holds(fields.get(name)) for name, condition in self.where.items()
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Clearing:
    """Describes when a finding is over by itself.

    quiet: nothing more happened for `after_s`; recovered: the state has not held for `after_s` (`where`: it has been
    this good meanwhile); reset, boot: the GPU was reset or the node booted, and `after_s` passed without anything new;
    burn-in and person: not by itself.
    """

    ending: Ending
    after_s: float = 0.0
    where: Mapping[str, Condition] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Escalation:
    """Describes what happens if the rule opens `count` times within `within_s`: resets did not help."""

    count: int
    within_s: float
    action: Action
    severity: Severity


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A short history, and whether the rule must fire on it. Steps are (seconds, signal, fields)."""

    fires: bool
    steps: tuple[tuple[float, str, Mapping[str, FieldValue]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule as described in the module's docstring.

    `needs_burn_in`: only a passed burn-in or a person returns the node to service. `blames`: whose problem it is, which
    begins the drain's reason.
    """

    name: str
    title: str
    advice: str
    source: str
    severity: Severity
    action: Action
    triggers: tuple[Trigger, ...]
    clearing: Clearing
    needs_burn_in: bool = False
    blames: Blamed = "node"
    escalation: Escalation | None = None
    examples: tuple[Example, ...] = ()
    is_enabled: bool = True
    is_site: bool = False

    @property
    def subject(self) -> str:
        """Return what a finding is about: gpu, node, rack or cluster."""
        return self.triggers[0].signal.subject

    @property
    def signals(self) -> frozenset[str]:
        return frozenset(trigger.signal.name for trigger in self.triggers)


def parse_rules(text: str, *, is_site: bool = False) -> list[Rule]:
    """Return the rules of one file: tables `[[rule]]`, preceded by values that all of them share.

    Raises tomllib.TOMLDecodeError if it is not TOML, and BadRule for everything else that is wrong with it.
    """
    try:
        raw = bounded.toml(text, BOUNDS)
    except tomllib.TOMLDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        raise BadRule(str(error)) from None
    tables = raw.pop("rule", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise BadRule("a rule must be a table: [[rule]]")
    return [parse_rule({**raw, **table}, is_site=is_site) for table in tables]


def parse_rule(raw: Mapping[str, Any], *, is_site: bool = False) -> Rule:
    """Return a rule from its TOML table. Raises BadRule."""
    return _RuleTable(raw).rule(is_site=is_site)


_TRIGGER_KEYS = ("signal", "where", "count", "within", "distinct", "for")
_KEYS = (
    "at_once", "cause",  # rules of earlier versions may have them; they change nothing
    "name", "title", "advice", "source", "severity", "action", "blames", "burn_in", "enabled",
    "clears", "clears_after", "clears_where", "escalates", "trigger", "example", *_TRIGGER_KEYS,
)  # fmt: skip


class _RuleTable:
    """Reads one table; every error names the rule and the key."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw
        name = raw.get("name")
        self.name = name if isinstance(name, str) and _NAME.fullmatch(name) else ""

    def rule(self, *, is_site: bool) -> Rule:
        if not self.name:
            raise BadRule("a rule needs a name of up to 64 lower-case letters, digits, dots, hyphens and underscores")
        self._refuse_unknown(self.raw, _KEYS, "")
        triggers = self._triggers()
        action: Action = self._choice("action", ACTIONS)
        severity: Severity = self._choice("severity", SEVERITIES)
        escalation = self._escalation(action, severity)
        self._refuse_node_actions(triggers[0].signal, action, escalation)
        return Rule(
            name=self.name,
            title=self._text("title"),
            advice=self._text("advice", optional=True),
            source=self._text("source"),
            severity=severity,
            action=action,
            triggers=triggers,
            clearing=self._clearing(triggers),
            needs_burn_in=self._flag("burn_in"),
            blames=self._choice("blames", get_args(Blamed)) if "blames" in self.raw else "node",
            escalation=escalation,
            examples=self._examples(triggers),
            is_enabled=self._flag("enabled", default=True),
            is_site=is_site,
        )

    def _refuse_node_actions(self, signal: Signal, action: Action, escalation: Escalation | None) -> None:
        """Refuse actions on a node, also those of an escalation, for a rule about a rack or the cluster."""
        actions = {"action": action} | ({"escalates.action": escalation.action} if escalation is not None else {})
        for key, wanted in actions.items():
            if signal.subject in ("rack", "cluster") and wanted in OUT_OF_SERVICE | {"exclude"}:
                raise self._bad(key, f"{signal.name} is not about one node: use ignore or watch")

    def _triggers(self) -> tuple[Trigger, ...]:
        tables = self.raw.get("trigger")
        if tables is None:
            return (self._trigger(self.raw, ""),)
        if not isinstance(tables, list) or not 1 <= len(tables) <= MAX_TRIGGERS:
            raise self._bad("trigger", f"must be 1 to {MAX_TRIGGERS} tables")
        shared = {key: self.raw[key] for key in _TRIGGER_KEYS if key in self.raw}
        found = []
        for number, table in enumerate(tables, 1):
            place = f"trigger {number}: "
            if not isinstance(table, dict):
                raise self._bad("trigger", "must be a table")
            self._refuse_unknown(table, _TRIGGER_KEYS, place)
            found.append(self._trigger({**shared, **table}, place))
        if len({trigger.signal.subject for trigger in found}) > 1:
            raise self._bad("trigger", "all triggers of a rule must be about the same: GPUs, nodes or racks")
        return tuple(found)

    def _trigger(self, table: Mapping[str, Any], place: str) -> Trigger:
        name = table.get("signal")
        signal = SIGNALS.get(name) if isinstance(name, str) else None
        if signal is None:
            raise self._bad(f"{place}signal", f"{name!r:.60} is not a signal{_meant(str(name), SIGNALS)}")
        count, within_s = table.get("count", 1), self._seconds(table, "within", place)
        for_s = self._seconds(table, "for", place)
        if type(count) is not int or not 1 <= count <= MAX_COUNT:
            raise self._bad(f"{place}count", f"must be a whole number from 1 to {MAX_COUNT}")
        if signal.is_event and for_s:
            raise self._bad(f"{place}for", f"{signal.name} is an event: it has a count, not a duration")
        if not signal.is_event and (count > 1 or within_s or "distinct" in table):
            raise self._bad(f"{place}count", f"{signal.name} is a state: it has a duration (for), not a count")
        distinct = self._distinct(table, signal, count, place)
        if (count > 1 or distinct) and not within_s:
            raise self._bad(f"{place}within", 'is missing: how long do events count together? For example "24h"')
        where = self._conditions(table.get("where", {}), signal, f"{place}where")
        return Trigger(signal=signal, where=where, count=count, within_s=within_s, distinct=distinct, for_s=for_s)

    def _distinct(self, table: Mapping[str, Any], signal: Signal, count: int, place: str) -> dict[str, int]:
        found = table.get("distinct", {})
        if not isinstance(found, dict):
            raise self._bad(f"{place}distinct", "must be a table of fields with numbers")
        for name, number in found.items():
            self._require_field(name, signal, f"{place}distinct")
            if type(number) is not int or not 1 <= number <= count:
                raise self._bad(f"{place}distinct.{name}", "must be a whole number from 1 to count")
        return dict(found)

    def _conditions(self, table: object, signal: Signal, place: str) -> dict[str, Condition]:
        if not isinstance(table, dict):
            raise self._bad(place, "must be a table of fields with conditions")
        found = {}
        for name, value in table.items():
            self._require_field(name, signal, place)
            try:
                found[name] = parse_condition(value)
            except BadCondition as error:
                raise self._bad(f"{place}.{name}", str(error)) from None
        return found

    def _require_field(self, name: str, signal: Signal, place: str) -> None:
        if name not in signal.fields:
            meant = _meant(name, signal.fields)
            raise self._bad(place, f"{name:.60} is not a field of the signal {signal.name}{meant}")

    def _clearing(self, triggers: tuple[Trigger, ...]) -> Clearing:
        endings: tuple[Ending, ...] = get_args(Ending)
        ending: Ending = self._choice("clears", endings)
        after_s = self._seconds(self.raw, "clears_after", "")
        if ending == "quiet" and not after_s:
            raise self._bad("clears_after", "is missing: for how long must it be quiet?")
        if ending == "quiet" and not all(trigger.signal.is_event for trigger in triggers):
            raise self._bad("clears", 'a state is over when it has "recovered"')
        if ending == "recovered" and any(trigger.signal.is_event for trigger in triggers):
            raise self._bad("clears", 'an event does not recover: use "quiet", "reset", "boot", "burn-in" or "person"')
        where = self._conditions(self.raw.get("clears_where", {}), triggers[0].signal, "clears_where")
        if where and ending != "recovered":
            raise self._bad("clears_where", 'only goes with clears = "recovered"')
        return Clearing(ending=ending, after_s=after_s, where=where)

    def _escalation(self, action: Action, severity: Severity) -> Escalation | None:
        table = self.raw.get("escalates")
        if table is None:
            return None
        if not isinstance(table, dict):
            raise self._bad("escalates", "must be a table")
        self._refuse_unknown(table, ("count", "within", "action", "severity"), "escalates: ")
        count = table.get("count")
        if type(count) is not int or not 2 <= count <= MAX_ESCALATION:
            raise self._bad("escalates.count", f"must be a whole number from 2 to {MAX_ESCALATION}")
        within_s = self._seconds(table, "within", "escalates.")
        if not within_s:
            raise self._bad("escalates.within", 'is missing: for example "30d"')
        worse: Action = table.get("action", action)
        more: Severity = table.get("severity", severity)
        if worse not in ACTIONS or ACTIONS.index(worse) < ACTIONS.index(action):
            raise self._bad("escalates.action", f"must be one of {', '.join(ACTIONS)}, and no milder than {action}")
        if more not in SEVERITIES or SEVERITIES.index(more) < SEVERITIES.index(severity):
            raise self._bad("escalates.severity", f"must be one of {', '.join(SEVERITIES)}, no milder than {severity}")
        return Escalation(count=count, within_s=within_s, action=worse, severity=more)

    def _examples(self, triggers: tuple[Trigger, ...]) -> tuple[Example, ...]:
        tables = self.raw.get("example", [])
        if not isinstance(tables, list) or len(tables) > MAX_EXAMPLES:
            raise self._bad("example", f"must be at most {MAX_EXAMPLES} tables")
        return tuple(self._example(table, triggers[0].signal) for table in tables)

    def _example(self, table: object, signal: Signal) -> Example:
        steps = table.get("steps") if isinstance(table, dict) else None
        if not isinstance(table, dict) or not isinstance(steps, list) or not 1 <= len(steps) <= MAX_STEPS:
            raise self._bad("example", f"needs 1 to {MAX_STEPS} steps")
        self._refuse_unknown(table, ("fires", "steps"), "example: ")
        if not isinstance(table.get("fires"), bool):
            raise self._bad("example", "fires must be true or false")
        return Example(fires=table["fires"], steps=tuple(self._step(step, signal) for step in steps))

    def _step(self, step: object, default: Signal) -> tuple[float, str, Mapping[str, FieldValue]]:
        if not isinstance(step, dict):
            raise self._bad("example", "a step must be a table")
        named = step.get("signal", default.name)
        signal = SIGNALS.get(named) if isinstance(named, str) else None
        if signal is None:
            raise self._bad("example", f"{step.get('signal')!r:.60} is not a signal")
        fields = {name: value for name, value in step.items() if name not in {"at", "signal"}}
        for name, value in fields.items():
            self._require_field(name, signal, "example")
            if not (isinstance(value, str) or is_number(value)):
                raise self._bad("example", f"{name} must be a number, a text, or true or false")
        return self._seconds(step, "at", "example: ", default="0s"), signal.name, fields

    def _text(self, key: str, *, optional: bool = False) -> str:
        value = self.raw.get(key, "" if optional else None)
        if not isinstance(value, str) or not (value or optional):
            raise self._bad(key, "must be a text" if self.raw.get(key) else "is missing")
        if len(value) > _TEXTS[key]:
            raise self._bad(key, f"must be at most {_TEXTS[key]} characters")
        if any(unicodedata.category(letter) in ("Cc", "Cs") for letter in value):
            raise self._bad(key, "must be one line without control characters")
        return value

    def _flag(self, key: str, *, default: bool = False) -> bool:
        value = self.raw.get(key, default)
        if not isinstance(value, bool):
            raise self._bad(key, "must be true or false")
        return value

    def _choice(self, key: str, choices: tuple[Any, ...]) -> Any:
        value = self.raw.get(key)
        if value not in choices:
            raise self._bad(key, f"must be one of {', '.join(choices)}, not {value!r:.40}")
        return value

    def _seconds(self, table: Mapping[str, Any], key: str, place: str, *, default: str | None = None) -> float:
        value = table.get(key, default)
        if value is None:
            return 0.0
        try:
            return float(duration.parse(value))
        except ValueError as error:
            raise self._bad(f"{place}{key}", str(error)) from None

    def _refuse_unknown(self, table: Mapping[str, Any], allowed: Iterable[str], place: str) -> None:
        allowed = tuple(allowed)
        for key in table:
            if key not in allowed:
                raise self._bad(f"{place}{key:.60}", f"is not a key{_meant(key, allowed)}")

    def _bad(self, key: str, why: str) -> BadRule:
        return BadRule(f"{self.name}: {key}: {why}")


def _meant(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), 1)
    return f". Did you mean {close[0]}?" if close else ""
