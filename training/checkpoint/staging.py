"""Copy the state to the CPU between two steps, to be written while training continues.

Where several ranks store the same tensor (all of them under data parallelism, replicas of shards), one of them stages
and writes it. The memory is kept from save to save, pinned where there is a GPU: on fresh pages the same copy took
50 times as long (measured on a CPU), and a GPU copies into pageable memory at a fraction of its bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from training.checkpoint import pinning
from training.checkpoint.rows import FrozenRows, Rows

State = dict[str, Any]
"""A tree of dicts whose leaves are tensors: plain ones, or DTensors with a part each. A save also takes Rows."""
KeyPath = tuple[str, ...]
"""The keys that lead from the root of a tree to a leaf."""
Piece = tuple[str, tuple[int, ...], int]
"""A tensor's dotted name, the offset of a rank's part, and that part's size in bytes."""


class Staging:
    """The buffers of one rank. All ranks of the group call `copy` at the same step boundary."""

    def __init__(self, group: dist.ProcessGroup | None, *, warn: Callable[[str], None] = print) -> None:
        """`warn` is called once, from any thread, if memory cannot be pinned."""
        self._group, self._warn = group, warn
        self._can_pin = True
        self._buffers: dict[KeyPath, Tensor] = {}
        self._touched: set[KeyPath] = set()
        self._from_gpu: set[KeyPath] = set()
        self._shape: list[object] = []
        self._owned_names: frozenset[str] = frozenset()

    @property
    def bytes(self) -> int:
        """Total size of the buffers."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def reserve(self, state: State) -> None:
        """Reserve the memory that `copy` will need; `touch` allocates it. All ranks call it."""
        for path, leaf in self._owned(state).items():
            if isinstance(leaf, Rows):
                if pinning.is_on_gpu(leaf.tensor):
                    self._buffer(path, leaf.tensor)
                continue
            for part_path, part in _parts(path, leaf):
                self._buffer(part_path, part)

    def touch(self) -> None:
        """Allocate the reserved memory and pin it; may run on a thread before the first `copy`."""
        for path, buffer in self._buffers.items():
            if path not in self._touched:
                self._touched.add(path)
                if path not in self._from_gpu or not self._pin(buffer):
                    buffer.zero_()

    def copy(self, state: State) -> State:
        """Return a copy of this rank's part of the state on the CPU, valid until the next call.

        Rows in main memory are not copied: they are frozen until `release`.
        """
        copied = {
            path: self._stage_rows(path, leaf) if isinstance(leaf, Rows) else self._stage(path, leaf)
            for path, leaf in self._owned(state).items()
        }
        if self._from_gpu:
            pinning.wait_for_copies()
        return tree(copied)

    def _owned(self, state: State) -> dict[KeyPath, Tensor | Rows]:
        leaves = {path: leaf if isinstance(leaf, Rows) else leaf.detach() for path, leaf in walk(state)}
        self._assign(leaves)
        return {path: leaf for path, leaf in leaves.items() if ".".join(path) in self._owned_names}

    def _assign(self, leaves: Mapping[KeyPath, Tensor | Rows]) -> None:
        """Decide who writes what; the ranks communicate only if some rank's state has a different shape than before."""
        shape: list[object] = [_shape(path, leaf) for path, leaf in leaves.items()]
        if not _any(shape != self._shape, self._group):
            return
        pieces = [_piece(path, leaf) for path, leaf in leaves.items()]
        all_pieces: list[list[Piece]] = [pieces]
        if self._group is not None:
            all_pieces *= dist.get_world_size(self._group)
            dist.all_gather_object(all_pieces, pieces, group=self._group)
        rank = dist.get_rank(self._group) if self._group is not None else 0
        self._shape, self._owned_names = shape, frozenset(assign_writers(all_pieces)[rank])
        for buffer in self._buffers.values():
            pinning.unpin(buffer)
        self._buffers.clear()
        self._touched.clear()
        self._from_gpu.clear()

    def _stage_rows(self, path: KeyPath, rows: Rows) -> FrozenRows:
        """Copy rows on a GPU, as host memory is plentiful there and reads from a thread would queue; freeze others."""
        return rows.frozen_copy(self._stage(path, rows.tensor)) if pinning.is_on_gpu(rows.tensor) else rows.freeze()

    def _stage(self, path: KeyPath, tensor: Tensor) -> Tensor:
        if not _has_parts(tensor):
            buffer = self._buffer(path, tensor)
            if path not in self._touched:
                self._touched.add(path)
                if path in self._from_gpu:
                    self._pin(buffer)
            return buffer.copy_(tensor, non_blocking=True)
        names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        inner = {name: getattr(tensor, name) for name in names}  # includes the mesh of a DTensor
        inner |= {part_path[-1]: self._stage(part_path, part) for part_path, part in _parts(path, tensor, deeper=False)}
        rebuilt: Tensor = type(tensor).__tensor_unflatten__(  # type: ignore[attr-defined]
            inner, context, tensor.size(), tensor.stride()
        )
        return rebuilt

    def _buffer(self, path: KeyPath, tensor: Tensor) -> Tensor:
        if path not in self._buffers:
            if pinning.is_on_gpu(tensor):
                self._buffers[path] = pinning.allocate_for(tensor)
                self._from_gpu.add(path)
            else:
                self._buffers[path] = torch.empty_like(tensor, device="cpu")
        return self._buffers[path]

    def _pin(self, buffer: Tensor) -> bool:
        """Return whether the buffer is pinned. After one failure no further buffer is tried."""
        if not self._can_pin or buffer.nbytes < pinning.MIN_BYTES:
            return False
        if error := pinning.pin(buffer):
            self._can_pin = False
            self._warn(
                f"memory for checkpoints cannot be pinned, so saves stall longer: {error}. See ulimit -l (memlock)."
            )
        return self._can_pin


def _has_parts(tensor: Tensor) -> bool:
    """Return whether it is a DTensor or another wrapper of plain tensors."""
    return hasattr(type(tensor), "__tensor_flatten__")


def _parts(path: KeyPath, tensor: Tensor, *, deeper: bool = True) -> Iterator[tuple[KeyPath, Tensor]]:
    """Yield the plain tensors that a tensor consists of, itself if it is plain. Not `deeper`: only the direct parts."""
    if not _has_parts(tensor):
        yield path, tensor
        return
    for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        part = getattr(tensor, name)
        if isinstance(part, Tensor):
            yield from _parts((*path, name), part) if deeper else [((*path, name), part)]


def release(copied: State) -> None:
    """Unfreeze rows once a save has ended, so that training changes them without preserving anything."""
    for _, leaf in walk(copied):
        if isinstance(leaf, FrozenRows):
            leaf.release()


def walk(state: Mapping[str, Any], parent: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield every leaf of a tree with its path."""
    for name, value in state.items():
        if isinstance(value, Mapping):
            yield from walk(value, (*parent, name))
        else:
            yield (*parent, name), value


def assign_writers(pieces_by_rank: Sequence[Iterable[Piece]]) -> list[list[str]]:
    """Return the names that each rank writes: each piece once, by the rank storing it that has least to write.

    Depends on the argument alone, so that every rank gets the same result.
    """
    holders: dict[Piece, list[int]] = {}
    for rank, pieces in enumerate(pieces_by_rank):
        for piece in pieces:
            holders.setdefault(piece, []).append(rank)
    load = [0] * len(pieces_by_rank)
    names: list[list[str]] = [[] for _ in pieces_by_rank]
    for piece in sorted(holders, key=lambda piece: (len(holders[piece]) > 1, -piece[2], piece)):
        rank = min(holders[piece], key=lambda rank: load[rank])
        load[rank] += piece[2]
        names[rank].append(piece[0])
    return names


def _shape(path: KeyPath, leaf: Tensor | Rows) -> object:
    """Return everything that determines who writes a leaf, and into which memory it is copied."""
    if isinstance(leaf, Rows):
        return path, leaf.shape, leaf.tensor.dtype, leaf.first
    mesh, placements = getattr(leaf, "device_mesh", None), getattr(leaf, "placements", None)
    return path, leaf.shape, leaf.dtype, placements, id(mesh)


def _piece(path: KeyPath, tensor: Tensor | Rows) -> Piece:
    name = ".".join(path)
    if isinstance(tensor, Rows):
        return name, (tensor.first, *[0] * (len(tensor.shape) - 1)), tensor.nbytes
    if not hasattr(tensor, "device_mesh"):
        return name, (0,) * tensor.ndim, tensor.nbytes
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    layout: tuple[Any, Any] = (tensor.device_mesh, tensor.placements)  # type: ignore[attr-defined]
    shape, offsets = compute_local_shape_and_global_offset(tensor.shape, *layout)
    elements = 1
    for size in shape:
        elements *= size
    return name, tuple(offsets), elements * tensor.element_size()


def _any(flag_here: bool, group: dist.ProcessGroup | None) -> bool:
    if group is None:
        return flag_here
    flag = torch.tensor(int(flag_here), dtype=torch.int32)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
    return bool(flag)


def tree(leaves: Mapping[KeyPath, Any]) -> State:
    """Return the tree for which `walk` yields these leaves."""
    root: State = {}
    for path, tensor in leaves.items():
        node = root
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = tensor
    return root
