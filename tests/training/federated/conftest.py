"""Shared fixtures: a process group of one rank, which checkpoints need, and a clean-up of what a run imports."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore


@pytest.fixture(scope="package", autouse=True)
def _world() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _paths_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the module search path: processes of later tests must not search a run's code folder."""
    monkeypatch.setattr(sys, "path", [*sys.path])
