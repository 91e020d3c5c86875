"""Test that a checkpoint saved on one layout loads on any other, bit for bit (protocols.md §4)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests.training import layouts
from tests.training.ranks import fork
from training import manifest
from training.__main__ import main

pytestmark = pytest.mark.slow
Reports = dict[tuple[str, str, str], list[dict[str, Any]]]
"""The report of every rank, by (act, layout, job)."""

STARTS: list[tuple[int, list[tuple[str, str, str]]]] = [
    (4, [("save", "fsdp-tp", "a"), ("load", "fsdp-tp", "a"), ("load", "hsdp", "a")]),
    (2, [("load", "shard", "a"), ("load", "tp", "a"), ("load", "pp", "a"), ("save", "dp", "b"), ("load", "tp", "b")]),
    (1, [("load", "one", "a"), ("load", "one", "b")]),
]
"""By number of ranks: few starts, for these take most of the time."""


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reports]:
    folder = tmp_path_factory.mktemp("layouts")
    found: Reports = {}
    for job in ("a", "b"):
        (folder / job / "attempt-1").mkdir(parents=True)
    for world, acts in STARTS:
        ranks = [fork(layouts.rank, folder, world, rank, acts) for rank in range(world)]
        for process in ranks:
            process.join(60)
        for item in acts:
            paths = [folder / f"{'.'.join(item)}.{rank}.json" for rank in range(world)]
            found[item] = [json.loads(path.read_text()) for path in paths]
    return folder, found


@pytest.mark.parametrize("loaded", [act for _, acts in STARTS for act in acts if act[0] == "load"], ids="-".join)
def test_every_layout_reads_what_another_wrote(loaded: tuple[str, str, str], reports: tuple[Path, Reports]) -> None:
    found = reports[1]
    wrote = next(ranks for (act, _, job), ranks in found.items() if (act, job) == ("save", loaded[2]))
    expected = _without_comm(wrote[0])
    union: dict[str, str] = {}
    for rank in found[loaded]:
        digests = _without_comm(rank)
        assert digests == {name: expected[name] for name in digests}
        union |= digests
    assert union == expected


@pytest.mark.parametrize(("world", "job", "layout"), [(4, "a", "fsdp-tp"), (2, "b", "dp")], ids=["fsdp-tp", "dp"])
def test_each_tensor_is_staged_and_written_once(
    world: int, job: str, layout: str, reports: tuple[Path, Reports]
) -> None:
    folder, found = reports
    for name in ("step-1", "step-2"):
        manifest.verify(folder / job / "checkpoints" / name)
    wrote = found["save", layout, job]
    elements = sum(int(shape[0] * (shape[1:] or (1,))[0]) for shape in layouts.SHAPES.values())
    whole = 4 * (2 * elements + 1 + world)
    assert sum(rank["bytes 1"] for rank in wrote) == whole
    assert max(rank["bytes 1"] for rank in wrote) < 1.5 * whole / world, "and each rank has its share"
    assert [rank["bytes 2"] for rank in wrote] == [rank["bytes 1"] for rank in wrote]


def _without_comm(rank: dict[str, Any]) -> dict[str, str]:
    assert "error" not in rank, rank["error"]
    return {name: value for name, value in rank["digest"].items() if not name.startswith("comm.")}


@pytest.mark.parametrize(("job", "layout"), [("a", "fsdp-tp"), ("b", "dp")], ids=["fsdp-tp", "dp"])
def test_the_whole_model_is_exported(job: str, layout: str, reports: tuple[Path, Reports], tmp_path: Path) -> None:
    folder, found = reports
    target = tmp_path / "model.safetensors"
    assert main(["export", str(folder / job / "checkpoints" / "step-2"), str(target)]) == 0
    content = target.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:begin])
    assert header.pop("__metadata__")["step"] == "2"
    digests = {}
    for name, entry in header.items():
        low, high = entry["data_offsets"]
        digests[f"model.{name}"] = hashlib.sha256(content[begin + low : begin + high]).hexdigest()
    expected = found["save", layout, job][0]["digest"]
    assert digests == {name: value for name, value in expected.items() if name.startswith("model.")}
