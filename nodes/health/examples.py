"""Run a rule on its own examples: what must fire does, what must not does not."""

from __future__ import annotations

from nodes.health import engine
from nodes.health.progress import Observation, RuleProgress, Subject
from nodes.health.rules.rule import Example, Rule

_SUBJECT = Subject("example")


def fires(rule: Rule, example: Example) -> bool:
    """Return whether the rule opens a finding somewhere on the example's history."""
    progress, opened = RuleProgress(), False
    for at, signal, fields in sorted(example.steps, key=lambda step: step[0]):
        if progress.state == "cleared":
            progress = progress.successor()
        engine.observe(rule, progress, Observation(signal, _SUBJECT, at, fields))
        opened = opened or progress.opened_at is not None
    return opened


def broken_examples(rule: Rule) -> list[str]:
    """Return a sentence per example on which the rule does not do what it must."""
    found = []
    for number, example in enumerate(rule.examples, 1):
        if fires(rule, example) != example.fires:
            must = "must fire on it, and does not" if example.fires else "must not fire on it, and does"
            found.append(f"{rule.name}: example {number}: the rule {must}.")
    return found
