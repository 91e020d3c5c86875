"""Test generated lines of test logs: a `[[filler]]` table always produces the same lines."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from diagnosis.evaluate import read_cases
from diagnosis.filler import Filler, complete_log
from diagnosis.logs.files import Unreadable

PROGRESS = (
    "⟦2026-06-01 23:59:58,500..2026-06-02 00:00:02,500⟧ step=⟦98..102⟧ loss=⟦2.20..2.10 ±0.02⟧ lr=⟦3.0e-04..1.0e-04⟧"
)


def filler(text: str, count: int, line: int = 1) -> Filler:
    return Filler.parse({"file": "a.log", "line": line, "count": count, "text": text})


def lines_of(text: str, count: int) -> list[str]:
    return [line.decode() for line in filler(text, count).lines()]


def test_times_and_numbers_run_from_the_first_to_the_last_value() -> None:
    lines = lines_of(PROGRESS, 5)
    assert lines[0] == "2026-06-01 23:59:58,500 step=98 loss=2.20 lr=3.0e-04"
    assert lines[2].startswith("2026-06-02 00:00:00,500 step=100 loss=2.1")
    assert lines[-1] == "2026-06-02 00:00:02,500 step=102 loss=2.10 lr=1.0e-04"


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("[⟦ 9..11⟧]", ["[ 9]", "[10]", "[11]"]),
        ("n⟦008..010⟧", ["n008", "n009", "n010"]),
        ("⟦10:00:00..10:00:02⟧", ["10:00:00", "10:00:01", "10:00:02"]),
        ("rank ⟦2|0|1⟧", ["rank 2", "rank 0", "rank 1"]),
        ("a\nb ⟦1..3⟧", ["a", "b 1", "a", "b 2", "a", "b 3"]),
    ],
)
def test_fields_keep_the_form_of_their_first_value(text: str, lines: list[str]) -> None:
    assert lines_of(text, 3) == lines


def test_a_varied_value_stays_within_its_bounds_and_is_the_same_again() -> None:
    text = "⟦2.000..1.000 ±0.1⟧"
    lines = lines_of(text, 101)
    assert all(abs(float(line) - (2 - i / 100)) <= 0.1005 for i, line in enumerate(lines))
    assert len(set(lines)) > 50
    assert hashlib.sha256("\n".join(lines).encode()).hexdigest().startswith("ada7af52")


def test_fillers_go_where_their_lines_are_in_the_complete_log() -> None:
    fillers = [filler("y ⟦1..2⟧", 2, line=5), filler("x ⟦1..2⟧", 2, line=2)]
    assert complete_log(b"a\nb\nc\n", fillers) == b"a\nx 1\nx 2\nb\ny 1\ny 2\nc\n"


@pytest.mark.parametrize("change", [{"count": 1}, {"line": 0}, {"text": "⟦1|2⟧"}, {"line": "first"}])
def test_a_wrong_table_is_an_error_that_names_its_file(change: dict[str, Any], tmp_path: Path) -> None:
    table = {"file": "a.log", "line": 1, "count": 3, "text": "x", **change}
    (tmp_path / "case").mkdir()
    values = "\n".join(f"{name} = {value!r}" for name, value in table.items())
    (tmp_path / "case" / "case.toml").write_text(f'cause = "none"\n[[filler]]\n{values}\n')
    with pytest.raises(Unreadable, match=r"case\.toml, filler: "):
        list(read_cases(tmp_path))
