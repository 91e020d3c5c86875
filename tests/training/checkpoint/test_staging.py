"""Test that memory which the system will not pin is used unpinned: slower, logged once, no error elsewhere."""

from __future__ import annotations

import mmap
from typing import Any

import pytest
import torch

from training.checkpoint import pinning
from training.checkpoint.staging import Staging

LARGE = pinning.MIN_BYTES // 4
"""Elements of 4 bytes that are worth pinning."""
PAGE = mmap.PAGESIZE


class Cuda:
    """Provides the part of a GPU's runtime that pinning needs."""

    def __init__(self, *, grants: int) -> None:
        self.grants = grants
        self.asked: list[int] = []

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:  # noqa: N802
        self.asked.append(pointer)
        return 0 if len(self.asked) <= self.grants else 2

    def cudaGetErrorString(self, error: int) -> str:  # noqa: N802
        return "out of memory"


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Times at which CUDA's error was taken off; what lies in main memory counts as a GPU's."""
    found: list[str] = []
    monkeypatch.setattr(pinning, "is_on_gpu", lambda tensor: True)
    monkeypatch.setattr(pinning, "wait_for_copies", lambda: None)
    monkeypatch.setattr(pinning, "forget_error", lambda: found.append("forgotten"))
    return found


@pytest.mark.parametrize("ahead", [True, False])
def test_memory_that_is_not_pinned_is_used_as_it_is(
    ahead: bool, forgotten: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = Cuda(grants=1)
    monkeypatch.setattr(pinning, "runtime", lambda: cuda)
    texts: list[str] = []
    staging = Staging(None, warn=texts.append)
    state: dict[str, Any] = {"model": {name: torch.full((LARGE,), 7.0) for name in "abcd"}, "small": torch.ones(3)}
    if ahead:
        staging.reserve(state)
        staging.touch()
    copied = staging.copy(state)
    assert all(copied["model"][name].eq(7).all() for name in "abcd")
    assert copied["small"].eq(1).all()
    assert len(cuda.asked) == 2, "who was refused once does not ask again"
    (why,) = texts
    assert "out of memory" in why
    assert "memlock" in why
    assert forgotten == ["forgotten"], "else the next kernel would be blamed"
    state["model"]["a"].fill_(8.0)
    assert staging.copy(state)["model"]["a"].eq(8).all()
    assert len(texts) == 1


def test_no_warning_where_all_memory_is_pinned(forgotten: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(grants=4)
    monkeypatch.setattr(pinning, "runtime", lambda: cuda)
    staging = Staging(None, warn=lambda why: pytest.fail(why))
    staging.copy({"a": torch.ones(LARGE), "b": torch.ones(LARGE)})
    assert len(cuda.asked) == 2
    assert forgotten == []


def test_what_is_pinned_shares_no_page(forgotten: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA registers whole pages, and none of them twice."""
    monkeypatch.setattr(pinning, "runtime", lambda: Cuda(grants=100))
    staging = Staging(None)
    state: dict[str, Any] = {name: torch.arange(LARGE + odd).float() for odd, name in enumerate("abcdef")}
    state["turned"] = torch.arange(2.0 * LARGE).view(2, LARGE).t()
    copied = staging.copy(state)
    taken = [
        range(item.data_ptr() // PAGE, (item.data_ptr() + item.nbytes - 1) // PAGE + 1) for item in copied.values()
    ]
    pages = [page for pages in taken for page in pages]
    assert len(pages) == len(set(pages))
    assert all(torch.equal(copied[name], tensor) for name, tensor in state.items())
    assert copied["turned"].stride() == state["turned"].stride()
