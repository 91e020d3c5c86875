"""Two nodes meet through files: either both go on, or neither; and the files of a long burn-in are removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from training.burnin import partners
from training.burnin.meeting import Meeting
from training.burnin.partners import Partners


def test_both_come(tmp_path: Path) -> None:
    early, late = Meeting(tmp_path), Meeting(tmp_path)
    early.publish("a", "8")
    assert late.meet("a", me="b", text="4", until=0) == "8"
    assert early.meet("b", me="a", text="8", until=0) == "4"


def test_who_comes_after_the_other_has_left_finds_nobody(tmp_path: Path) -> None:
    assert Meeting(tmp_path).meet("b", me="a", text="8", until=0) is None
    assert Meeting(tmp_path).meet("a", me="b", text="8", until=0) is None


class ComesAtTheLastMoment(Meeting):
    """A node whose partner comes between its last look and its leaving, and has seen it."""

    def withdraw(self, *names: str) -> None:
        super().withdraw(*names)
        Meeting(self.folder).publish("b", "4")


def test_who_comes_at_the_last_moment_is_met(tmp_path: Path) -> None:
    meeting = ComesAtTheLastMoment(tmp_path)
    assert meeting.meet("b", me="a", text="8", until=0) == "4"
    assert meeting.wait("a", until=0) == "8", "the partner finds this node"


def test_the_last_to_leave_removes_the_folder(tmp_path: Path) -> None:
    turn = Meeting(tmp_path / "0.1")
    turn.publish("a", "8")
    turn.publish("b", "8")
    turn.withdraw("a", "a.store")
    assert turn.wait("b", until=0) == "8"
    turn.withdraw("b", "b.store")
    assert not turn.folder.exists()
    assert turn.wait("a", until=0) is None
    turn.publish("a", "8")
    assert turn.wait("a", until=0) == "8"


def test_all_nodes_wait_long_for_a_dead_partner_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, late = (Partners(tmp_path, name) for name in ("a", "b", "late"))
    monkeypatch.setattr(partners, "PARTNER_WAIT_S", 0)
    assert a.meet("late", a.turn(0, 0), "8") is None
    monkeypatch.setattr(partners, "PARTNER_WAIT_S", 1e6)
    monkeypatch.setattr(partners, "ABSENT_WAIT_S", 0)
    assert b.meet("late", b.turn(0, 1), "8") is None, "gives up at once"
    b.turn(0, 2).publish("b", "8")
    assert late.meet("b", late.turn(0, 2), "8") == "8"
    assert not b.absent.has("late"), "it is waited for again"


def test_the_files_of_a_turn_are_removed_in_the_next_cycle(tmp_path: Path) -> None:
    for cycle in range(3):
        for node in ("a", "b"):
            turn = Partners(tmp_path, node).turn(cycle, 0)
            turn.publish(node, "8")
            turn.publish(f"{node}.store", "[]")
    assert [folder.name for folder in (tmp_path / "turns").iterdir()] == ["2.0"]
