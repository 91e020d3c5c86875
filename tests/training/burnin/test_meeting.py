"""Two nodes meet through files: either both go on, or neither; and the files of a long burn-in are removed."""

from __future__ import annotations

from pathlib import Path

from training.burnin.meeting import Meeting


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
