"""Versions are compared as numbers, by branch, and a site's minimum replaces a shipped one."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes.inventory import versions
from nodes.inventory.minimums import BadMinimum, MinimumVersions, parse_minimums, shipped_minimums, with_site
from nodes.inventory.software import Software

MINIMUM = 'software = "driver"\nversion = "550.90.07"\nwhy = "slow"\nsource = "us"\n'
numbers = st.lists(st.integers(0, 999), min_size=1, max_size=5).map(tuple)


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("550.54.15", "550.90.07"), ("24.11.4", "24.11.5"), ("1.17", "1.17.8"), ("9.1", "10.0"),
        ("Linux 6.8.0-52-generic", "Linux 6.8.0-101-generic"),
    ],
)  # fmt: skip
def test_older_versions(older: str, newer: str) -> None:
    assert versions.is_below(versions.version_numbers(older), versions.version_numbers(newer))
    assert not versions.is_below(versions.version_numbers(newer), versions.version_numbers(older))


@given(numbers, numbers, numbers)
def test_versions_have_a_consistent_order(a: versions.Numbers, b: versions.Numbers, c: versions.Numbers) -> None:
    assert not versions.is_below(a, a)
    assert not (versions.is_below(a, b) and versions.is_below(b, a))
    if versions.is_below(a, b) and versions.is_below(b, c):
        assert versions.is_below(a, c)


def test_an_unknown_version_and_a_shorter_equal_version_are_not_below() -> None:
    assert not versions.is_below(versions.version_numbers("unknown"), (550,))
    assert not versions.is_below((12, 8), (12, 8, 0))


def test_vbios_versions_are_hexadecimal() -> None:
    (minimum,) = parse_minimums(
        MINIMUM.join(["[[minimum]]\n", ""]).replace("driver", "vbios").replace("550.90", "96.A0")
    )
    found = MinimumVersions((minimum,))
    assert found.violated(Software("vbios", "NVIDIA H100"), "NVIDIA H100", "96.9F.00") == minimum
    assert found.violated(Software("vbios", "NVIDIA H100"), "NVIDIA H100", "96.B0.00") is None


def test_shipped_minimums_have_a_reason_and_a_source() -> None:
    found = shipped_minimums()
    assert {minimum.software for minimum in found} == {"driver", "slurm", "container_toolkit"}
    assert all(minimum.why and minimum.source for minimum in found)


@pytest.mark.parametrize(
    ("name", "version", "minimum"),
    [
        ("driver", "535.104.05", "535.274.02"),
        ("driver", "535.274.02", None),
        ("driver", "470.82.01", "535"),
        ("driver", "525.60.13", "535"),
        ("driver", "545.23.08", "570.195.03"),
        ("driver", "550.163.01", "570.195.03"),
        ("driver", "560.28.03", "570.195.03"),
        ("driver", "575.57.08", "580.95.05"),
        ("driver", "590.48.01", None),
        ("slurm", "21.08.8", "23.11"),
        ("slurm", "23.02.6", "23.11"),
        ("slurm", "23.11.4", "23.11.11"),
        ("slurm", "24.05.8", None),
    ],
)
def test_a_branch_has_a_separate_minimum_and_ended_branches_are_below_a_floor(
    name: str, version: str, minimum: str | None
) -> None:
    below = MinimumVersions(shipped_minimums()).violated(Software(name), "NVIDIA H100", version)
    assert (below.version if below else None) == minimum


def test_a_branch_without_a_minimum_is_not_judged() -> None:
    found = MinimumVersions(shipped_minimums())
    versions_judged = ("470.82.01", "535.274.02", "560.28.03", "590.48.01")
    assert [found.judges(Software("driver"), "NVIDIA H100", version) for version in versions_judged] == [
        True, True, True, False,
    ]  # fmt: skip
    assert found.judges(Software("container_toolkit"), "", "1.18"), "its minimum is about all branches"
    assert found.judges(Software("kernel"), "", "6.8.0"), "there are no minimums for kernels at all"


def test_a_site_replaces_and_adds_minimums() -> None:
    text = f'[[minimum]]\nbranch = "550"\n{MINIMUM}[[minimum]]\nmodels = ["B200"]\n{MINIMUM}'.replace(
        "550.90", "550.54"
    )
    found = with_site(parse_minimums(text, is_site=True))
    assert found.violated(Software("driver"), "NVIDIA H100", "550.90.07") is None
    below = found.violated(Software("driver"), "NVIDIA B200", "535.274.02")
    assert below is not None
    assert below.is_site


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[[minimum]]\n", "software is missing"),
        (f"[[minimum]]\n{MINIMUM}rank = 1\n", "unknown key 'rank'"),
        (f"[[minimum]]\n{MINIMUM}".replace('"driver"', '"torch"'), "software must be one of driver, cuda"),
        (f"[[minimum]]\n{MINIMUM}".replace('"driver"', '"inforom"'), "software must be one of driver, cuda"),
        (f"[[minimum]]\n{MINIMUM}".replace("550.90.07", "newest"), "has no number"),
        (f"[[minimum]]\n{MINIMUM}models = 'H100'\n", "models must be a list"),
        ("minimum = 3", "must be a table"),
        ("[[minimum]", "Expected"),
        ("a = 1", "unknown key 'a'"),
        (f"[[minimum]]\n{MINIMUM}" * 201, "more than 200"),
    ],
)
def test_a_bad_file_names_place_and_reason(text: str, why: str) -> None:
    with pytest.raises(BadMinimum, match=why):
        parse_minimums(text)


def test_a_huge_file_is_refused(tmp_path: Path) -> None:
    from nodes.inventory.minimums import read_site_file

    path = tmp_path / "minimums.toml"
    path.write_text("#" * 300_000)
    with pytest.raises(BadMinimum, match="larger than 256 KiB"):
        read_site_file(path)
