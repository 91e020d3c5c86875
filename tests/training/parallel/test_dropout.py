"""Test which ranks share a dropout mask: those that hold the same activations, and no others."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.training.parallel import pool
from tests.training.ranks import TINY, Run

LAYOUTS: dict[str, dict[str, Any]] = {
    "cp": {"parallelism": "ddp", "mesh": {"cp": 2}},
    "tp with the sequence in parts": {"parallelism": "fsdp", "mesh": {"tp": 2}},
    "tp with copies": {"parallelism": "fsdp", "mesh": {"tp": 2}, "tensor": {"sequence_parallel": False}},
    "cp and tp": {"parallelism": "fsdp", "mesh": {"cp": 2, "tp": 2}},
    "cp and tp with copies": {
        "parallelism": "fsdp",
        "mesh": {"cp": 2, "tp": 2},
        "tensor": {"sequence_parallel": False},
    },
}
COPIES = [name for name in LAYOUTS if "copies" in name]


def write_masks() -> None:
    """Let each rank write its dropout mask, as lines of 0 and 1."""
    from torch import Tensor, nn

    forward = nn.Dropout.forward

    def forward_and_write(dropout: nn.Dropout, stream: Tensor) -> Tensor:
        found = forward(dropout, stream)
        assert type(found) is Tensor, "a part that this rank has, not one of many that knows of the others"
        with open(Path(os.environ["VIGIL_ATTEMPT_DIR"], f"masks.{os.environ['RANK']}"), "a") as file:
            print(*(found != 0)[0, 0].int().tolist(), sep="", file=file)  # of the first place that it has
        return found

    nn.Dropout.forward = forward_and_write  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def masks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Return each rank's masks, by layout."""
    folder = tmp_path_factory.mktemp("masks")
    language = {**TINY["language"], "dropout": 0.5}
    common = {**TINY, "steps": 2, "warmup_steps": 0, "language": language}
    runs = [Run(folder / str(number), {**common, **item}) for number, item in enumerate(LAYOUTS.values())]
    attempts = pool.finish(runs, 4, folder / "ranks", spy=f"{__name__}:write_masks")
    return {
        name: [(attempt / f"masks.{rank}").read_text() for rank in range(4)]
        for name, attempt in zip(LAYOUTS, attempts, strict=True)
    }


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_with_different_tokens_have_different_masks(layout: str, masks: dict[str, list[str]]) -> None:
    """tp is innermost: ranks 0 and 1, and 2 and 3, are its peers."""
    found = masks[layout]
    assert all(item.count("0") > 10 for item in found)
    if layout in COPIES:
        assert found[0] == found[1] != found[2] == found[3]
    else:
        assert len(set(found)) == 4
