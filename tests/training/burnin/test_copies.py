"""Copies are compared with what was sent, all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from training.burnin import copies


def test_a_single_wrong_copy_of_many_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    emitted: list[Mapping[str, Any]] = []
    monkeypatch.setattr(copies, "emit", emitted.append)
    monkeypatch.setattr(copies, "CPU_COPY_BYTES", 1 << 16)
    copy, calls = torch.Tensor.copy_, []

    def lose_the_third(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        calls.append(source)
        return target if len(calls) == 3 else copy(target, source, non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", lose_the_third)
    copies.test_copies([], seconds=0.05)
    assert len(calls) > 3
    assert (emitted[-1]["outcome"], emitted[-1]["detail"]) == ("failed", "8,192 words arrived differently")
