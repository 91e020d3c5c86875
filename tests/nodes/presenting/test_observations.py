"""Observations of a rule are shown in words with units, not as names of fields."""

from __future__ import annotations

import pytest

from nodes.presenting.observations import observed_text


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"margin_c": 2, "temperature_c": 85.5}, "margin 2 °C, temperature 85.5 °C"),
        ({"silent_s": 600}, "silent 10 min"),
        ({"clock_offset_s": -61.5}, "clock offset −61.5 s"),
        ({"root_free_share": 0.02, "root_free_mib": 12_000}, "2 % of / free, 11.7 GiB free on /"),
        ({"throttle": 0x48, "watts": 412.3}, "clocks lowered by heat (hardware) and hardware slowdown, 412 W"),
        ({"throttle": 0}, "clocks not lowered"),
        ({"remapped_pending": 1, "nvlinks_down": 2}, "1 memory row to be remapped, 2 NVLinks down"),
        ({"driver_differs": True, "is_up": False, "problem": "", "ratio": 1.25}, "1.25 × the step time of other nodes"),
        ({"problem": "timed out"}, "problem timed out"),
        ({"programs": 9, "programs_chance": 1e-6}, "9 programs, by chance 1 time in 1,000,000"),
        ({"programs_chance": 0.0}, "by chance 1 time in 1,000,000,000"),
        ({"failures": 7, "expected": 1.6}, "7 failures, 1.6 expected"),
        (
            {"pcie_width_to_peers": 0.5, "power_cap_to_peers": 0.7},
            "50 % of the PCIe lanes of its peers, 70 % of the power limit of its peers",
        ),
        ({"ecc_corrected_to_peers": 900}, "900 × the corrected memory errors of its peers"),
        ({"sram_threshold_exceeded": 0, "recovery_action": 0, "custom_field": 3}, "custom field 3"),
        ({}, ""),
    ],
)
def test_fields_in_words(fields: dict[str, object], text: str) -> None:
    assert observed_text(fields).replace("\N{NO-BREAK SPACE}", " ") == text


def test_only_the_fields_of_the_rule() -> None:
    assert observed_text({"margin_c": 2, "gpu_percent": 99}, {"margin_c"}).startswith("margin")
    assert "99" not in observed_text({"margin_c": 2, "gpu_percent": 99}, {"margin_c"})
