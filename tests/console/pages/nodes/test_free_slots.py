"""Test how free capacity reads, whole nodes and what is left in pieces."""

from __future__ import annotations

import pytest

from console.pages.nodes.free_slots import free_now
from nodes.models import Node


def node(used: int, *, state: str = "mixed", gpus: int = 8) -> Node:
    return Node(name=f"n{used}", state=state, cpus=64, gpus=gpus, gpus_used=used)


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        ([], ""),
        ([node(5)], "3 of 8\xa0GPUs."),
        ([node(0), node(0), node(8)], "16 of 24\xa0GPUs: 2\xa0nodes whole."),
        ([node(8), node(8)], "0 of 16\xa0GPUs."),
        ([node(0), node(7), node(4), node(8)], "13 of 32\xa0GPUs: 1\xa0node whole, 5 in pieces of 1 to 4."),
        ([node(6), node(6)], "4 of 16\xa0GPUs: 4 in pieces of 2."),
        ([node(6), node(8)], "2 of 16\xa0GPUs, on one node."),
        ([node(0, state="drained"), node(3)], "5 of 16\xa0GPUs, on one node."),
    ],
)
def test_shows_what_is_whole_and_what_is_in_pieces(nodes: list[Node], text: str) -> None:
    assert free_now(nodes) == text
