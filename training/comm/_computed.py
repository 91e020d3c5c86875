"""Compute how many bytes a rank sends in a step if torch itself does the sending, from the layout."""

from __future__ import annotations

from math import prod

from training.comm._exchange import Exchange, Peers, all_gather_bytes, all_reduce_bytes
from training.parallel import fsdp

FLOAT = 4
"""Bytes of a gradient's number, and of a weight's unless it is gathered in another type."""


class ComputedExchange(Exchange):
    """Known for ddp, zero1 and fsdp; what tensor, context and pipeline parallelism send depends on activations."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._sizes = [tuple(parameter.shape) for parameter in peers.parameters.values()]
        self._frozen = [tuple(parameter.shape) for parameter in peers.frozen.values()]

    def sent_bytes(self, micro_batches: int) -> float | None:
        peers, shape = self._peers, self._peers.shape
        if shape.world_size == 1:
            return 0.0
        if shape["pp"] * shape["tp"] * shape["cp"] > 1:
            return None
        whole = FLOAT * sum(prod(size) for size in self._sizes)
        if peers.parallelism == "ddp":
            return all_reduce_bytes(whole, peers.count)
        if peers.parallelism == "zero1":  # the owner of each parameter sends it after its step
            return all_reduce_bytes(whole, peers.count) + all_gather_bytes(whole / peers.count, peers.count)
        return self._sharded(micro_batches) if peers.parallelism == "fsdp" else None

    def _sharded(self, micro_batches: int) -> float:
        """Return the bytes that fsdp sends per step.

        Each pass gathers the parameters, including frozen ones, twice if they are freed in between.
        The last pass sends the gradients' parts, which replicas of shards then average.
        """
        shape, options = self._peers.shape, self._peers.options
        part, frozen = self._part(self._sizes), self._part(self._frozen)
        weight = FLOAT if options.get("dtype") in (None, "fp32") else 2
        passes = micro_batches * (
            2 if fsdp.reshards(options.get("reshard", "auto"), has_pipeline=shape["pp"] > 1) else 1
        )
        gathers = passes * all_gather_bytes(weight * (part + frozen), shape["shard"])
        return gathers + all_gather_bytes(FLOAT * part, shape["shard"]) + all_reduce_bytes(FLOAT * part, shape["dp"])

    def _part(self, sizes: list[tuple[int, ...]]) -> int:
        """Return how many numbers of these tensors a rank has: torch divides the first dim and pads the last part."""
        return sum(-(-size[0] // self._peers.shape["shard"]) * prod(size[1:]) for size in sizes if size)
