"""Test the corruption checks: digests of raw bits, who is outvoted, and which state each layout replicates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from tests.training.ranks import fork
from training.guards import corruption
from training.guards.corruption import (
    Corruption,
    CorruptionChecks,
    compare,
    device_kind,
    minority,
    probe,
    shared_groups,
)
from training.guards.digests import CHUNK, digest, digests
from training.runtime.distributed import World

KINDS = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_every_single_bit_counts(dtype: torch.dtype) -> None:
    tensor = torch.zeros(7, dtype=dtype)
    before = digest(tensor).item()
    digests = {before}
    raw = tensor.view(torch.uint8)
    for place in range(raw.numel()):
        for bit in range(8 if dtype != torch.bool else 1):
            raw[place] ^= 1 << bit
            digests.add(digest(tensor).item())
            raw[place] ^= 1 << bit
    assert len(digests) == 1 + raw.numel() * (8 if dtype != torch.bool else 1)
    assert digest(tensor).item() == before


def test_places_count_too() -> None:
    tensor = torch.randn(5, 9)
    assert digest(tensor).item() != digest(tensor.flip(0)).item()
    assert digest(tensor).item() == digest(tensor.t().contiguous().t()).item()  # however it lies in memory
    assert digest(torch.zeros(3)).item() != digest(torch.zeros(4)).item()


def test_large_tensors_are_read_in_pieces() -> None:
    tensor = torch.zeros(CHUNK + 5, dtype=torch.int8)
    first = digest(tensor).item()
    for place in (0, CHUNK - 1, CHUNK, CHUNK + 4):
        tensor[place] = 1
        assert digest(tensor).item() != first
        tensor[place] = 0


def test_nan_and_minus_zero_are_the_bits_they_are() -> None:
    nan = torch.full((3,), float("nan"))
    assert digest(nan).item() == digest(nan.clone()).item()
    assert digests([torch.zeros(3)]) != digests([-torch.zeros(3)])
    assert digests([]) == []


@pytest.mark.parametrize(
    ("votes", "wrong"),
    [
        ({0: 7, 1: 7, 2: 9, 3: 7}, (2,)),
        ({0: 7, 1: 9}, ()),
        ({0: 7, 1: 7, 2: 9, 3: 9}, ()),
        ({0: 1, 1: 2, 2: 3}, ()),
        ({4: 7, 8: 7, 12: 9}, (12,)),
    ],
)
def test_the_minority_is_named_or_nobody(votes: dict[int, int], wrong: tuple[int, ...]) -> None:
    assert minority(votes) == (wrong, tuple(votes))


def test_its_sentence_names_the_rank_or_that_it_cannot_be_determined() -> None:
    assert str(Corruption("replica", (2,), (0, 1, 2), "model.head")) == (
        "the replica check finds rank 2 wrong (model.head)"
    )
    assert str(Corruption("replica", (), (0, 1))) == (
        "the replica check finds ranks 0, 1 to differ and cannot tell which is wrong"
    )


@pytest.mark.lengthy
def test_the_probe_gives_the_same_a_thousand_times() -> None:
    device = torch.device("cpu")
    before = torch.random.get_rng_state()
    assert len({probe(device) for _ in range(1000)}) == 1
    assert torch.equal(before, torch.random.get_rng_state())  # the run's own random numbers are left alone
    assert "torch" in device_kind(device)


def test_a_device_that_differs_from_itself_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(0, 1, torch.device("cpu"))
    checks = CorruptionChecks(cast(Any, None), world, cast(Any, None), cast(Any, None))
    assert checks.probe() is None
    right, given = probe(world.device), iter([])
    monkeypatch.setattr(corruption, "probe", lambda device: next(given, right))
    assert checks.probe() is None
    given = iter([right ^ 1])
    found = checks.probe()
    assert found is not None
    assert (found.check, found.ranks) == ("probe", (0,))
    assert checks.probe() is None, "it was there once, and is not any more"


def test_a_single_rank_has_nothing_to_compare_with() -> None:
    world = World(0, 1, torch.device("cpu"))
    assert compare(world, {"model": {"w": torch.ones(2)}, "optimizer": {}}) is None


EXPECTED: dict[str, dict[str, Any]] = {
    # (ranks named, ranks that took part) where a bit of the tensor is flipped on rank 2, of four
    "dp": {"ranks": [2], "among": [0, 1, 2, 3]},
    "hsdp": {"ranks": [], "among": [0, 2]},  # two replicas of each shard
    "shard": None,  # type: ignore[dict-item]  # nobody else has it
    "tp": None,  # type: ignore[dict-item]
    "tp norm": {"ranks": [2], "among": [0, 1, 2, 3]},
    "fsdp-tp norm": {"ranks": [], "among": [2, 3]},
    "pp": None,  # type: ignore[dict-item]
}


@pytest.mark.slow
def test_every_layout_compares_what_it_replicates(tmp_path: Path) -> None:
    processes = [fork(_rank, tmp_path, rank) for rank in range(4)]
    for process in processes:
        process.join(100)
    assert [process.exitcode for process in processes] == [0] * 4
    for rank in range(4):
        payload = json.loads((tmp_path / f"{rank}.json").read_text())
        assert payload.pop("clean alarms") == 0
        assert payload == {
            layout: found and {**found, "what": payload[layout]["what"]} for layout, found in EXPECTED.items()
        }
        assert payload["tp norm"]["what"] == "model.norm"
        assert payload["dp"]["what"] == "model.blocks.0.up"


def _rank(folder: Path, rank: int) -> None:
    import os

    import torch.distributed as dist

    from tests.training import layouts

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 4), rank=rank, world_size=4)
    world = World(rank, 4, torch.device("cpu"))
    alarms = 0
    payload: dict[str, Any] = {}
    for case in EXPECTED:
        layout, _, name = case.partition(" ")
        state = layouts.make(layout, 4, 1)
        alarms += sum(compare(world, state) is not None for _ in range(1000 // len(EXPECTED) + 1))
        if rank == 2:
            tensor = state["model"].get(name or "blocks.0.up", next(iter(state["model"].values())))
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            local.detach().view(torch.int32).reshape(-1)[0] ^= 1
        found = compare(world, state)
        payload[case] = found and {"ranks": list(found.ranks), "among": list(found.among), "what": found.what}
    (folder / f"{rank}.json").write_text(json.dumps({**payload, "clean alarms": alarms}))
    dist.destroy_process_group()


def test_parameters_are_compared_where_moments_are_divided() -> None:
    """ZeRO-1: each rank has means of a part of the parameters only, but all have the same model."""
    tensor = torch.arange(6.0)
    ranks = [
        {"model": {"a": tensor, "b": tensor}, "optimizer": {"steps": tensor[:1], "means": {name: tensor}}}
        for name in ("a", "b")
    ]
    keys = [{key for key, _ in shared_groups(state)} for state in ranks]
    assert len(keys[0] & keys[1]) == 2, "the model, and the count of steps"
    assert len(keys[0] - keys[1]) == 1
