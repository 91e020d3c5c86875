"""Test numbers, times and states as pages write them."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.template import Context, Template
from django.test import RequestFactory
from django.utils import timezone

from vigil_core import formatting

NOW = datetime(2026, 11, 21, 9, 14, tzinfo=UTC)  # a Saturday
N = formatting.NBSP


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"), (float("nan"), "NaN"), (float("inf"), "∞"), (float("-inf"), "−∞"), (0, "0"), (0.43, "0.43"),
        (2.551, "2.55"), (41.12, "41.1"), (99.97, "100"), (305.4, "305"), (9412.3, "9,412"), (9999.6, f"10.0{N}k"),
        (290_123, f"290{N}k"), (1_240_000, f"1.24{N}M"), (81.4e9, f"81.4{N}G"), (-0.5, "−0.5"),
        (0.00012, "1.2e−4"),
        (3.25e-7, "3.25e−7"),
    ],
)  # fmt: skip
def test_measures_have_three_digits(value: float | None, text: str) -> None:
    assert formatting.measure(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(2.3181, "2.318"), (None, "–"), (float("nan"), "NaN"), (-0.5, "−0.500"), (1234.5, "1,234.500")]
)
def test_losses_have_three_decimals(value: float | None, text: str) -> None:
    assert formatting.loss(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"), (-3, f"0{N}s"), (8.67e-5, f"0.0867{N}ms"), (0.00618, f"6.18{N}ms"), (0.01, f"0.01{N}s"),
        (0.431, f"0.431{N}s"), (2.55, f"2.55{N}s"), (38.4, f"38{N}s"), (59.6, f"1{N}min"),
        (262, f"4{N}min 22{N}s"), (305, f"5{N}min 05{N}s"), (600, f"10{N}min"), (3599.7, f"1{N}h"),
        (65_040, f"18{N}h 04{N}min"), (86_400, f"1{N}d"), (183_600, f"2{N}d 3{N}h"),
    ],
)  # fmt: skip
def test_durations_have_two_units(seconds: float | None, text: str) -> None:
    assert formatting.duration(seconds) == text


@pytest.mark.parametrize(
    ("passed", "text"),
    [
        (timedelta(0), "now"), (timedelta(seconds=12), f"12{N}s ago"), (timedelta(minutes=38), f"38{N}min ago"),
        (timedelta(hours=14), f"14{N}h ago"), (timedelta(hours=30), "yesterday"), (timedelta(days=2), f"2{N}d ago"),
        (timedelta(days=50), f"2{N}Oct"), (timedelta(days=400), f"17{N}Oct{N}2025"),
    ],
)  # fmt: skip
def test_how_long_ago(passed: timedelta, text: str) -> None:
    assert formatting.ago(NOW - passed, NOW) == text


def test_clock_names_the_day_when_it_is_another() -> None:
    assert formatting.clock(NOW + timedelta(hours=2), NOW) == "11:14"
    assert formatting.clock(NOW + timedelta(hours=16), NOW) == f"Sun{N}01:14"
    assert formatting.clock(NOW + timedelta(days=20), NOW) == f"11{N}Dec{N}09:14"
    assert formatting.until(NOW + timedelta(hours=16), NOW) == f"in 16{N}h"


def test_times_are_the_labs_and_name_their_zone(settings: Any) -> None:
    settings.TIME_ZONE = "Europe/Berlin"
    assert formatting.exact(NOW + timedelta(milliseconds=412)) == "2026-11-21 10:14:00.412 CET"
    assert formatting.machine_time(NOW) == "2026-11-21T09:14:00.000Z"


@pytest.mark.parametrize(
    ("size", "disk", "memory"),
    [
        (999, f"999{N}B", f"999{N}B"),
        (81_400_000_000, f"81.4{N}GB", f"75.8{N}GiB"),
        (1_048_576, f"1.05{N}MB", f"1{N}MiB"),
        (None, "–", "–"),
    ],
)
def test_disk_counts_in_tens_and_memory_in_twos(size: float | None, disk: str, memory: str) -> None:
    assert (formatting.disk(size), formatting.memory(size)) == (disk, memory)


def test_shares_are_done_only_at_the_end() -> None:
    assert [formatting.share(f) for f in (0.0, 0.689, 0.999, 1.0)] == [f"{n}{N}%" for n in (0, 69, 99, 100)]
    assert formatting.percent(0.4112) == f"41.1{N}%"


def test_plurals_and_lists() -> None:
    assert formatting.plural(1, "job") == f"1{N}job"
    assert formatting.plural(1284, "job") == f"1,284{N}jobs"
    assert formatting.listed(["a"]) == "a"
    assert formatting.listed(["a", "b", "c"]) == "a, b and c"
    assert formatting.listed(["a", "b", "c"], 3) == "a, b and c"
    assert formatting.listed(("a", "b", "c", "d"), 2) == "a, b and 2 more"


def render(source: str, **context: object) -> str:
    request = RequestFactory().get("/jobs?state=failed&q=lora&after=x")
    return Template(source).render(Context({"request": request, **context}))


def test_a_state_is_a_glyph_and_a_word() -> None:
    html = render('{% state "out_of_memory" %}')
    assert "#s-out_of_memory" in html
    assert "out of memory</span>" in html
    assert "#s-node_fail" in render('{% state "boot_fail" %}'), "rarer states borrow a glyph"
    assert "boot fail" in render('{% state "boot_fail" %}')
    assert 'class="sr">running' in render('{% state "running" quiet=True %}')


def test_times_are_elements_that_a_single_timer_updates() -> None:
    html = render("{{ then|ago }}", then=timezone.now() - timedelta(minutes=5))
    assert 'data-time="ago"' in html
    assert "title=" in html
    assert f">5{N}min ago</time>" in html
    assert render("{{ then|ago }}", then=None) == "–"


def test_query_keeps_what_was_chosen() -> None:
    assert render("{% query after=None state=None %}") == "?q=lora"
    assert render('{% query sort="name" after=None %}') == "?state=failed&amp;q=lora&amp;sort=name"
    assert render("{% query q=None state=None after=None %}") == "/jobs"


def test_commands_in_a_sentence_are_code() -> None:
    assert render("{{ say|code }}", say="Ask `vigil <x>`.") == "Ask <code>vigil &lt;x&gt;</code>."
    assert render("{{ say|code }}", say="One ` left, <b>") == "One ` left, &lt;b&gt;"


def test_what_people_write_is_escaped() -> None:
    assert "<script>" not in render("{% state name %}", name="<script>")


def test_remedies_show_commands_and_link_the_documentation() -> None:
    text = "Run `vigil backup <FILE>` (docs/how-to/install.md)."
    link = '<a href="/docs/how-to/install">docs/how-to/install.md</a>'
    shown = Template("{{ text|remedy }}").render(Context({"text": text}))
    assert shown == f"Run <code>vigil backup &lt;FILE&gt;</code> ({link})."
