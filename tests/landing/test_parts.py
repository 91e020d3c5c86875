"""A landing runs parts of the tests: each landing the next part, and all of them when none is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from tests.landing.parts import deferred, is_in_part


class Item:
    """A stand-in with the attributes of pytest items that `parts` reads."""

    def __init__(self, name: str, of: int, *, of_its_file: bool = False) -> None:
        self.nodeid, self.path, self.mark = f"tests/test_a.py::{name}", Path("tests/test_a.py"), pytest.mark.sampled(of)
        self.own_markers = [] if of_its_file else [self.mark.mark]

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self.mark.mark if self.mark.mark.args != (0,) else None


def taken(items: list[Item], turn: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("TEST_TURN", turn)
    waits = cast("set[Any]", deferred(cast("list[Any]", items)))
    return [item.nodeid.rpartition(":")[2] for item in items if item not in waits]


def test_the_cases_of_a_test_come_in_succession(monkeypatch: pytest.MonkeyPatch) -> None:
    items = [Item(f"test_b[{case}]", 3) for case in range(5)] + [Item("test_c", 0), Item("test_d[0]", 2)]
    assert taken(items, "", monkeypatch) == [item.nodeid.rpartition(":")[2] for item in items]
    assert taken(items, "3", monkeypatch) == ["test_b[0]", "test_b[3]", "test_c"]
    assert taken(items, "4", monkeypatch) == ["test_b[1]", "test_b[4]", "test_c", "test_d[0]"]
    assert taken(items, "5", monkeypatch) == ["test_b[2]", "test_c"]


def test_a_file_is_a_single_family(monkeypatch: pytest.MonkeyPatch) -> None:
    items = [Item(name, 2, of_its_file=True) for name in ("test_b[0]", "test_c", "test_d")]
    assert [taken(items, turn, monkeypatch) for turn in "01"] == [["test_b[0]", "test_d"], ["test_c"]]


def test_parts_of_everything_are_disjoint_and_together_all() -> None:
    names, found = {f"test_{number}" for number in range(100)}, list[str]()
    for part in range(4):
        found += [name for name in names if is_in_part(name, f"{part}/4")]
    assert sorted(found) == sorted(names)
    assert all(is_in_part(name, "") for name in names)
