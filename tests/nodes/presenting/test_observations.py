"""What a rule observed is shown in words with units, not as names of fields."""

from __future__ import annotations

import pytest

from nodes.presenting.observations import observed_text


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"margin_c": 2, "temperature_c": 85.5}, "margin 2 °C, temperature 85.5 °C"),
        ({"silent_s": 600}, "silent 10 min"),
        ({"clock_offset_s": -61.5}, "clock offset −61.5 s"),
        ({"root_free_share": 0.02, "root_free_mib": 900}, "root free 2 %, root free 900 MiB"),
        ({"throttle": 0x48, "watts": 412.3}, "clocks lowered by heat (hardware) and hardware slowdown, 412 W"),
        ({"throttle": 0}, "clocks not lowered"),
        ({"remapped_pending": 1, "nvlinks_down": 2}, "remapped pending 1, nvlinks down 2"),
        ({"driver_differs": True, "is_up": False, "problem": "", "ratio": 1.25}, "ratio 1.25"),
        ({"problem": "timed out"}, "problem timed out"),
        ({"programs": 9, "programs_chance": 1e-6}, "programs 9, by chance 1 time in 1,000,000"),
        ({"programs_chance": 0.0}, "by chance 1 time in 1,000,000,000"),
        ({}, ""),
    ],
)
def test_fields_in_words(fields: dict[str, object], text: str) -> None:
    assert observed_text(fields).replace("\N{NO-BREAK SPACE}", " ") == text


def test_only_what_the_rule_asks_for() -> None:
    assert observed_text({"margin_c": 2, "gpu_percent": 99}, {"margin_c"}).startswith("margin")
    assert "99" not in observed_text({"margin_c": 2, "gpu_percent": 99}, {"margin_c"})
