"""Find the rules that an observation matches: thousands of GPUs report the same few values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from nodes.health.progress import Observation
from nodes.health.rules.rule import Rule

MAX_REMEMBERED = 50_000


class RuleMatcher:
    """Judges each combination of values once: only fields that conditions name distinguish observations."""

    def __init__(self, rules: Mapping[str, Rule]) -> None:
        found: defaultdict[str, list[Rule]] = defaultdict(list)
        names: defaultdict[str, dict[str, None]] = defaultdict(dict)
        for rule in rules.values():
            for trigger in rule.triggers:
                names[trigger.signal.name].update(dict.fromkeys(trigger.where))
            for signal in rule.signals:
                found[signal].append(rule)
        self.by_signal: Mapping[str, tuple[Rule, ...]] = {signal: tuple(some) for signal, some in found.items()}
        self._names = {signal: tuple(some) for signal, some in names.items()}
        self._matching: dict[tuple[object, ...], tuple[Rule, ...]] = {}

    def matching(self, observation: Observation) -> tuple[Rule, ...]:
        signal, fields = observation.signal, observation.fields
        rules = self.by_signal.get(signal)
        if rules is None:
            return ()
        key = (signal, *map(fields.get, self._names[signal]))
        found = self._matching.get(key)
        if found is None:
            found = tuple(rule for rule in rules if any(t.matches(signal, fields) for t in rule.triggers))
            if len(self._matching) < MAX_REMEMBERED:
                self._matching[key] = found
        return found
