"""Rules are read from TOML: an error in a rule is reported with its key, and every shipped rule passes its examples."""

from __future__ import annotations

import time
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes.health import engine
from nodes.health.examples import broken_examples
from nodes.health.progress import Observation, RuleProgress, Subject
from nodes.health.rules.catalogue import active_rules, shipped_rules, shipped_text
from nodes.health.rules.condition import BadCondition, parse_condition
from nodes.health.rules.rule import OUT_OF_SERVICE, BadRule, Rule, parse_rules

HOT = """
[[rule]]
name = "hot"
title = "GPU close to its slowdown temperature"
source = "a test"
severity = "warning"
action = "watch"
signal = "gpu_samples"
where = { margin_c = "<= 3" }
for = "5m"
clears = "recovered"
clears_after = "10m"
clears_where = { margin_c = "> 5" }
"""


def rule_of(text: str) -> Rule:
    (rule,) = parse_rules(text)
    return rule


@pytest.mark.parametrize("name", shipped_rules())
def test_every_shipped_rule_fires_on_what_it_must_and_on_nothing_else(name: str) -> None:
    rule = shipped_rules()[name]
    assert broken_examples(rule) == []
    assert {example.fires for example in rule.examples} == {True, False}


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('name = "hot"', 'name = "Hot!"', "needs a name"),
        ('severity = "warning"', 'severity = "bad"', "hot: severity: must be one of info, warning, critical, fatal"),
        ('action = "watch"', "", "hot: action: must be one of"),
        ("margin_c", "margin", "hot: where: margin is not a field of the signal gpu_samples. Did you mean margin_c?"),
        ('signal = "gpu_samples"', 'signal = "gpu_sample"', "Did you mean gpu_samples?"),
        ('"<= 3"', '["a", {}]', "hot: where.margin_c: {} is not a number"),
        ('for = "5m"', 'for = "5 min"', "hot: for: '5 min' is not a duration"),
        ('for = "5m"', "count = 3", "gpu_samples is a state: it has a duration (for), not a count"),
        ('clears = "recovered"', 'clears = "quiet"', 'a state is over when it has "recovered"'),
        ('title = "GPU close', 'titel = "GPU close', "titel: is not a key. Did you mean title?"),
        ('source = "a test"', "", "hot: source: is missing"),
        ('for = "5m"', 'for = "9999d"', "longer than a year"),
        ('for = "5m"', 'escalates = { count = 51, within = "30d" }', "a whole number from 2 to 50"),
    ],
)
def test_errors_in_a_rule_are_reported_with_their_key(before: str, after: str, message: str) -> None:
    assert before in HOT
    with pytest.raises(BadRule) as error:
        parse_rules(HOT.replace(before, after))
    assert message in str(error.value)


@pytest.mark.parametrize("action", ["exclude", "drain"])
def test_a_rule_about_a_rack_never_acts_on_a_node(action: str) -> None:
    rack = HOT.replace("gpu_samples", "rack_inlet").replace("margin_c", "above_neighbours_c")
    assert rule_of(rack).subject == "rack"
    for escalation in (f'count = 2, within = "1d", action = "{action}"', 'count = 2, within = "1d"'):
        text = rack if "action" in escalation else rack.replace('action = "watch"', f'action = "{action}"')
        with pytest.raises(BadRule, match="action: rack_inlet is not about one node: use ignore or watch"):
            parse_rules(text.replace('for = "5m"', f'for = "5m"\nescalates = {{ {escalation} }}'))


def test_a_rule_of_events_needs_a_period_for_its_count() -> None:
    text = HOT.replace("gpu_samples", "xid").replace("margin_c", "code").replace('for = "5m"', "count = 3")
    text = text.replace('clears_where = { code = "> 5" }', "").replace("recovered", "quiet")
    with pytest.raises(BadRule, match="hot: within: is missing"):
        parse_rules(text)
    assert rule_of(text + 'within = "24h"').triggers[0].count == 3


def test_rules_that_are_no_toml_or_too_deep_are_refused() -> None:
    with pytest.raises(tomllib.TOMLDecodeError):
        parse_rules("[[rule]")
    with pytest.raises(BadRule):
        parse_rules("rule = [1]")
    with pytest.raises(BadRule, match="deep|nested"):
        parse_rules("a = " + "[" * 50 + "]" * 50)


def test_a_site_replaces_shipped_rules_and_switches_them_off() -> None:
    name = next(iter(shipped_rules()))
    off = HOT.replace('name = "hot"', f'name = "{name}"\nenabled = false')
    assert name in active_rules()
    assert name not in active_rules(parse_rules(off, is_site=True))
    assert active_rules(parse_rules(HOT, is_site=True))["hot"].is_site


@pytest.mark.parametrize(
    ("written", "true", "false"),
    [
        (79, [79, 79.0], [78, True, "79", None]),
        ([48, 95], [48, 95], [79, None]),
        ("<= 3", [3, -1, 2.5], [3.1, None, "2", float("nan")]),
        ("!= 0", [1], [0, None]),
        ("<= 1e-3", [0.001, -1], [0.002]),
        ("> .5", [0.6], [0.5]),
        ("has 0x40", [0x40, 0xFF], [0x20, 0, None]),
        ("contains fatal", ["NVLink: Fatal error"], ["corrected", 5, None]),
        ("drain", ["drain", "Drain"], ["drained", True]),
        (True, [True], [False, 1, None]),
        (1, [1], [True]),
    ],
)
def test_conditions(written: object, true: list[object], false: list[object]) -> None:
    condition = parse_condition(written)
    assert all(condition.holds(value) for value in true)  # type: ignore[arg-type]
    assert not any(condition.holds(value) for value in false)  # type: ignore[arg-type]


@pytest.mark.parametrize("written", [{}, [], None, [[]], float("inf"), 10**400, "x" * 201, list(range(101)),
                                     "=> 3", "==3", " < three", "> 1e999"])  # fmt: skip
def test_conditions_that_cannot_be_read_are_refused(written: object) -> None:
    with pytest.raises(BadCondition):
        parse_condition(written)


@pytest.mark.parametrize("value", ["9" * 400, "nan", "inf"])
def test_a_number_of_an_example_that_nothing_can_have_is_refused(value: str) -> None:
    example = f"[[rule.example]]\nfires = true\nsteps = [{{ margin_c = {value} }}]"
    with pytest.raises(BadRule, match="margin_c must be a number"):
        parse_rules(f"{HOT}\n{example}")


HEAT = rule_of(HOT)
GPU = Subject("dgx-01", "GPU-1")


def heat(progress: RuleProgress, at: float, margin: float | None) -> str:
    engine.observe(HEAT, progress, Observation("gpu_samples", GPU, at, {"margin_c": margin}))
    return progress.state


def test_a_state_opens_after_its_time_and_clears_with_hysteresis() -> None:
    progress = RuleProgress()
    assert heat(progress, 0, 20) == "none"
    assert heat(progress, 10, 3) == "watching"
    assert heat(progress, 309, 2) == "watching"
    assert heat(progress, 320, 2) == "open"
    assert progress.opened_at == 310, "the moment at which the rule's time was over, not that of the reading"
    assert heat(progress, 400, 4) == "open"
    assert progress.good_since is None, "better, but not as good as the rule wants before it clears"
    assert heat(progress, 500, 6) == "open"
    assert heat(progress, 900, None) == "open"
    assert progress.good_since is None, "an unknown temperature is no recovery"
    assert heat(progress, 1000, 9) == "open"
    assert heat(progress, 1600, 9) == "cleared"


def test_a_state_that_ends_early_or_becomes_unknown_starts_again() -> None:
    for interruption in (10.0, None):
        progress = RuleProgress()
        heat(progress, 0, 1)
        heat(progress, 200, interruption)
        heat(progress, 210, 1)
        assert heat(progress, 400, 1) == "watching"
        assert heat(progress, 510, 1) == "open"


def test_a_state_that_nobody_reads_neither_opens_nor_clears() -> None:
    progress = RuleProgress()
    heat(progress, 0, 1)
    engine.advance_unread(HEAT, progress, 300)
    assert progress.state == "none", "one reading, then the agent was silent"
    heat(progress, 1000, 1)
    progress = RuleProgress.from_payload(progress.as_payload())
    assert not engine.is_unread(progress, 1090)
    assert engine.is_unread(progress, 1091)
    for at in (1080, 1160, 1240, 1305):
        assert heat(progress, at, 1) == ("watching" if at < 1300 else "open")
    heat(progress, 1310, 9)
    engine.advance_unread(HEAT, progress, 1310 + 600)
    assert (progress.state, progress.good_since) == ("open", None), "one good reading, then the agent was silent"


TWO_STATES = """
trigger = [
  { signal = "gpu_samples", where = { margin_c = "<= 3" } },
  { signal = "gpu_counters", where = { ecc_uncorrected = "> 0" } },
]
"""


def test_a_rule_on_two_states_clears_by_the_first_state() -> None:
    head, end = HOT[: HOT.index("signal = ")], HOT[HOT.index("clears = ") :]
    rule = rule_of(head + TWO_STATES + end)

    def both(at: float, margin: float, errors: int) -> str:
        engine.observe(rule, progress, Observation("gpu_samples", GPU, at, {"margin_c": margin}))
        engine.observe(rule, progress, Observation("gpu_counters", GPU, at, {"ecc_uncorrected": errors}))
        return progress.state

    progress = RuleProgress()
    assert [both(at, margin, 0) for at, margin in ((0, 1), (100, 9), (690, 9))] == ["open"] * 3
    assert both(700, 9, 0) == "cleared"
    progress = RuleProgress()
    assert [both(at, 9, errors) for at, errors in ((0, 1), (500, 1), (1_000, 0), (1_010, 0))] == ["open"] * 4
    assert both(1_610, 9, 0) == "cleared"


def test_progress_of_before_readings_were_noted_counts_until_its_last_evidence() -> None:
    progress = RuleProgress()
    heat(progress, 0, 1)
    heat(progress, 60, 1)
    stored = progress.as_payload()
    del stored["read_at"]
    assert RuleProgress.from_payload(stored) == progress


@given(st.lists(st.tuples(st.integers(1, 200), st.sampled_from([1, 4, 9, None])), max_size=60), st.integers(1, 5))
def test_how_often_time_advances_does_not_matter(steps: list[tuple[int, int | None]], pace: int) -> None:
    """A trial that sees only the readings finds the same as a live engine that looks every few seconds."""
    sparse, dense, at = RuleProgress(), RuleProgress(), 0
    for gap, margin in steps:
        for tick in range(at, at + gap, pace):
            engine.advance(HEAT, dense, tick)
        at += gap
        heat(sparse, at, margin)
        heat(dense, at, margin)
        assert sparse == dense


REPEATED = shipped_rules()["errors-follow-gpu"]


def xid(progress: RuleProgress, at: float, user: str, program: str, rule: Rule = REPEATED, code: int = 13) -> str:
    fields = {"code": code, "user": user, "program": program}
    engine.observe(rule, progress, Observation("xid", GPU, at, fields))
    return progress.state


@given(st.permutations(range(4)))
def test_events_count_in_whatever_order_they_arrive(order: list[int]) -> None:
    progress = RuleProgress()
    for number in order:
        xid(progress, 1000.0 * number, f"user{number % 2}", f"program{number}")
    assert progress.state == "open"


def test_events_count_only_within_their_time_and_if_they_differ() -> None:
    day = 86_400.0
    progress = RuleProgress()
    for number in range(5):
        assert xid(progress, number * 4 * day, f"user{number}", f"program{number}") == "watching"
    progress = RuleProgress()
    for number in range(50):
        assert xid(progress, float(number), "ada", f"program{number}") == "watching"
    progress = RuleProgress()
    for _ in range(3):
        xid(progress, 0.0, "", "")
    assert progress.state == "watching", "an unknown person is not a different one"


LOST = shipped_rules()["off-bus"]


def test_evidence_from_before_the_clear_never_reopens_and_newer_evidence_does() -> None:
    progress = RuleProgress()
    assert xid(progress, 100, "", "", LOST, 79) == "open"
    engine.clear(progress, 200)
    assert xid(progress, 150, "", "", LOST, 79) == "cleared"
    assert xid(progress, 200, "", "", LOST, 79) == "cleared"
    after = progress.successor()
    assert xid(after, 201, "", "", LOST, 79) == "open"
    assert engine.effective(LOST, after) == ("fatal", "replace"), "the second time within its period"
    assert engine.effective(LOST, progress) == ("fatal", "drain")


def test_a_repair_ends_a_finding_unless_it_happens_again_or_a_burn_in_must_pass() -> None:
    text = HOT.replace("gpu_samples", "xid").replace("margin_c", "code").replace('for = "5m"', "")
    rule = rule_of(
        text.replace('clears = "recovered"', 'clears = "reset"').replace('clears_where = { code = "> 5" }', "")
    )
    progress = RuleProgress()
    assert xid(progress, 0, "", "", rule, 2) == "open"
    engine.repair(rule, progress, "boot", 100)
    assert xid(progress, 300, "", "", rule, 2) == "open"
    engine.advance(rule, progress, 10_000)
    assert progress.cleared_at is None, "the repair did not help"
    engine.repair(rule, progress, "reset", 10_000)
    engine.advance(rule, progress, 10_599)
    assert progress.cleared_at is None
    engine.advance(rule, progress, 10_600)
    assert progress.cleared_at == 10_600

    progress = RuleProgress()
    xid(progress, 0, "", "", LOST, 79)
    engine.repair(LOST, progress, "boot", 100)
    engine.advance(LOST, progress, 1e9)
    assert progress.cleared_at is None, "it needs a burn-in"


@pytest.mark.parametrize("name", sorted({*shipped_rules(True).keys() - shipped_rules().keys(), "program-error"}))
def test_strict_rules_fire_on_what_they_must(name: str) -> None:
    rule = shipped_rules(True)[name]
    assert broken_examples(rule) == []
    assert {example.fires for example in rule.examples} == {True, False}


@pytest.mark.parametrize(("code", "is_strict", "drains"), [
    (13, False, False), (31, False, False), (79, False, True),
    (13, True, True), (31, True, True), (79, True, True), (43, True, False), (94, True, False),
])  # fmt: skip
def test_strict_treats_a_single_xid_13_31_or_79_as_a_reason_to_evict(code: int, is_strict: bool, drains: bool) -> None:
    actions = set()
    for rule in active_rules(is_strict=is_strict).values():
        progress = RuleProgress()
        fields = {"code": code, "is_listed": True, "is_fatal": False}
        engine.observe(rule, progress, Observation("xid", GPU, 0.0, fields))
        if progress.state == "open":
            actions.add(rule.action)
    assert bool(actions & OUT_OF_SERVICE) == drains


@pytest.mark.parametrize("name", shipped_rules(True))
def test_the_text_of_a_shipped_rule_is_that_rule(name: str) -> None:
    assert rule_of(shipped_text(name, True)) == shipped_rules(True)[name]


def test_there_is_no_text_of_an_unknown_rule() -> None:
    assert shipped_text("no-such-rule") == ""


FOLLOWS_GPU = shipped_rules()["errors-follow-gpu"]


def fault(at: float, user: str, program: str = "p") -> Observation:
    return Observation("xid", GPU, at, {"code": 31, "user": user, "program": program})


def test_a_thousand_xids_of_nobody_cost_little() -> None:
    """Each of them took a third of a second, while all other writers waited."""
    progress, before = RuleProgress(), time.process_time()
    for second in range(1_500):
        engine.observe(FOLLOWS_GPU, progress, fault(second, ""))
    assert progress.state == "watching"
    assert time.process_time() - before < 5
    for number, user in enumerate(("ada", "ben", "cleo")):
        engine.observe(FOLLOWS_GPU, progress, fault(1_500 + number, user, f"program {number}"))
    assert progress.state == "open"


@given(st.lists(st.tuples(st.integers(0, 200_000), st.sampled_from(["", "ada", "ben"]), st.sampled_from("pqr"))))
def test_events_count_together_whatever_their_order(events: list[tuple[int, str, str]]) -> None:
    """A finding opens if some period of the rule's length has enough events of enough users and programs."""
    progress = RuleProgress()
    for at, user, program in events:
        engine.observe(FOLLOWS_GPU, progress, fault(at, user, program))
    (trigger, *_) = FOLLOWS_GPU.triggers
    periods = [[event for event in events if 0 <= end[0] - event[0] <= trigger.within_s] for end in events]
    is_reached = any(
        len(period) >= trigger.count
        and len({user for _, user, _ in period} - {""}) >= trigger.distinct["user"]
        and len({program for _, _, program in period}) >= trigger.distinct["program"]
        for period in periods
    )
    if [at for at, _, _ in events] == sorted(at for at, _, _ in events):
        assert (progress.openings != []) is is_reached
    elif progress.openings:
        assert is_reached
