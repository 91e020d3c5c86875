"""Two nodes exchange texts through files: either both succeed or neither; the files of a long burn-in are removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from training.burnin import partners
from training.burnin.partners import Partners
from training.burnin.rendezvous import FileRendezvous


def test_both_come(tmp_path: Path) -> None:
    early, late = FileRendezvous(tmp_path), FileRendezvous(tmp_path)
    early.publish("a", "8")
    assert late.exchange("a", me="b", text="4", until=0) == "8"
    assert early.exchange("b", me="a", text="8", until=0) == "4"


def test_who_comes_after_the_other_has_left_finds_nobody(tmp_path: Path) -> None:
    assert FileRendezvous(tmp_path).exchange("b", me="a", text="8", until=0) is None
    assert FileRendezvous(tmp_path).exchange("a", me="b", text="8", until=0) is None


class ComesAtTheLastMoment(FileRendezvous):
    """The partner of a node arrives between its last poll and its leaving, and has observed it."""

    def withdraw(self, *names: str) -> None:
        super().withdraw(*names)
        FileRendezvous(self.folder).publish("b", "4")


def test_who_comes_at_the_last_moment_is_met(tmp_path: Path) -> None:
    rendezvous = ComesAtTheLastMoment(tmp_path)
    assert rendezvous.exchange("b", me="a", text="8", until=0) == "4"
    assert rendezvous.wait("a", until=0) == "8", "the partner finds this node"


def test_the_last_to_leave_removes_the_folder(tmp_path: Path) -> None:
    folder = FileRendezvous(tmp_path / "0.1")
    folder.publish("a", "8")
    folder.publish("b", "8")
    folder.withdraw("a", "a.store")
    assert folder.wait("b", until=0) == "8"
    folder.withdraw("b", "b.store")
    assert not folder.folder.exists()
    assert folder.wait("a", until=0) is None
    folder.publish("a", "8")
    assert folder.wait("a", until=0) == "8"


def test_all_nodes_wait_long_for_a_dead_partner_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, late = (Partners(tmp_path, name) for name in ("a", "b", "late"))
    monkeypatch.setattr(partners, "PARTNER_WAIT_S", 0)
    assert a.exchange("late", a.enter_round(0, 0), "8") is None
    monkeypatch.setattr(partners, "PARTNER_WAIT_S", 1e6)
    monkeypatch.setattr(partners, "ABSENT_WAIT_S", 0)
    assert b.exchange("late", b.enter_round(0, 1), "8") is None, "gives up at once"
    b.enter_round(0, 2).publish("b", "8")
    assert late.exchange("b", late.enter_round(0, 2), "8") == "8"
    assert not b.absent.has("late"), "it is waited for again"


def test_the_files_of_a_round_are_removed_in_the_next_cycle(tmp_path: Path) -> None:
    for cycle in range(3):
        for node in ("a", "b"):
            rendezvous = Partners(tmp_path, node).enter_round(cycle, 0)
            rendezvous.publish(node, "8")
            rendezvous.publish(f"{node}.store", "[]")
    assert [folder.name for folder in (tmp_path / "turns").iterdir()] == ["2.0"]
