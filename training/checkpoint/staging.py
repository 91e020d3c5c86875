"""A copy of the state on the CPU, taken between two steps and written while training goes on.

Of what several ranks hold alike (all of it under data parallelism, replicas of shards) one rank stages each tensor: the
one that will write it. The memory is kept from save to save, pinned where there is a GPU: on fresh pages the same copy
took 50 times as long (measured on a CPU), and pageable memory takes a GPU's copies at a fraction of its bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from training.checkpoint import pinning
from training.checkpoint.rows import Frozen, Rows

State = dict[str, Any]
"""A tree of dicts whose leaves are tensors: plain ones, or DTensors that hold a part. A save also takes Rows."""
Path = tuple[str, ...]
Piece = tuple[str, tuple[int, ...], int]
"""A tensor's dotted name, where in it a rank's part begins, and that part's bytes."""


class Staging:
    """The buffers of one rank. All ranks of the group call `copy` at the same step boundary."""

    def __init__(self, group: dist.ProcessGroup | None, *, say: Callable[[str], None] = print) -> None:
        """`say` is told once, from whatever thread, where memory can't be pinned."""
        self._group, self._say = group, say
        self._pins = True
        self._buffers: dict[Path, Tensor] = {}
        self._touched: set[Path] = set()
        self._from_gpu: set[Path] = set()
        self._shape: list[object] = []
        self._mine: frozenset[str] = frozenset()

    @property
    def bytes(self) -> int:
        """What the buffers hold."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def reserve(self, state: State) -> None:
        """Takes the memory that `copy` will need, which is not there yet before `touch`. All ranks call it, too."""
        for path, leaf in self._mine_of(state).items():
            if isinstance(leaf, Rows):
                if pinning.is_on_gpu(leaf.tensor):
                    self._buffer(path, leaf.tensor)
                continue
            for where, part in _parts(path, leaf):
                self._buffer(where, part)

    def touch(self) -> None:
        """Makes the reserved memory real, and pins it; that may be done on a thread, before the first `copy`."""
        for path, buffer in self._buffers.items():
            if path not in self._touched:
                self._touched.add(path)
                if path not in self._from_gpu or not self._pin(buffer):
                    buffer.zero_()

    def copy(self, state: State) -> State:
        """This rank's part of the state, on the CPU and no longer training's own. Valid until the next call.

        Of Rows in main memory no copy is made: they are frozen until `release`.
        """
        copied = {
            path: self._stage_rows(path, leaf) if isinstance(leaf, Rows) else self._stage(path, leaf)
            for path, leaf in self._mine_of(state).items()
        }
        if self._from_gpu:
            pinning.wait_for_copies()
        return tree(copied)

    def _mine_of(self, state: State) -> dict[Path, Tensor | Rows]:
        leaves = {path: leaf if isinstance(leaf, Rows) else leaf.detach() for path, leaf in walk(state)}
        self._share_out(leaves)
        return {path: leaf for path, leaf in leaves.items() if ".".join(path) in self._mine}

    def _share_out(self, leaves: Mapping[Path, Tensor | Rows]) -> None:
        """Settles who writes what; asks the others again only when some rank's state has another shape than before."""
        shape: list[object] = [_shape(path, leaf) for path, leaf in leaves.items()]
        if not _any(shape != self._shape, self._group):
            return
        pieces = [_piece(path, leaf) for path, leaf in leaves.items()]
        everybody: list[list[Piece]] = [pieces]
        if self._group is not None:
            everybody *= dist.get_world_size(self._group)
            dist.all_gather_object(everybody, pieces, group=self._group)
        rank = dist.get_rank(self._group) if self._group is not None else 0
        self._shape, self._mine = shape, frozenset(owned(everybody)[rank])
        for buffer in self._buffers.values():
            pinning.unpin(buffer)
        self._buffers.clear()
        self._touched.clear()
        self._from_gpu.clear()

    def _stage_rows(self, path: Path, rows: Rows) -> Frozen:
        """Rows on a GPU are copied: memory is plentiful beside one, and reading it from a thread would queue there."""
        return rows.copied_to(self._stage(path, rows.tensor)) if pinning.is_on_gpu(rows.tensor) else rows.freeze()

    def _stage(self, path: Path, tensor: Tensor) -> Tensor:
        if not _has_parts(tensor):
            buffer = self._buffer(path, tensor)
            if path not in self._touched:
                self._touched.add(path)
                if path in self._from_gpu:
                    self._pin(buffer)
            return buffer.copy_(tensor, non_blocking=True)
        names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        inner = {name: getattr(tensor, name) for name in names}  # a mesh is among a DTensor's
        inner |= {where[-1]: self._stage(where, part) for where, part in _parts(path, tensor, deeper=False)}
        rebuilt: Tensor = type(tensor).__tensor_unflatten__(  # type: ignore[attr-defined]
            inner, context, tensor.size(), tensor.stride()
        )
        return rebuilt

    def _buffer(self, path: Path, tensor: Tensor) -> Tensor:
        if path not in self._buffers:
            if pinning.is_on_gpu(tensor):
                self._buffers[path] = pinning.room_for(tensor)
                self._from_gpu.add(path)
            else:
                self._buffers[path] = torch.empty_like(tensor, device="cpu")
        return self._buffers[path]

    def _pin(self, buffer: Tensor) -> bool:
        """Whether its pages are real and stay where they are. Who was refused once does not ask again."""
        if not self._pins or buffer.nbytes < pinning.LEAST_BYTES:
            return False
        if why := pinning.pin(buffer):
            self._pins = False
            self._say(f"memory for checkpoints can't be pinned, so saves stall longer: {why}. See ulimit -l (memlock).")
        return self._pins


def _has_parts(tensor: Tensor) -> bool:
    """Whether it is a DTensor, or another one that holds plain ones."""
    return hasattr(type(tensor), "__tensor_flatten__")


def _parts(path: Path, tensor: Tensor, *, deeper: bool = True) -> Iterator[tuple[Path, Tensor]]:
    """The plain tensors that one consists of, itself if it is plain; not `deeper`: those directly in it."""
    if not _has_parts(tensor):
        yield path, tensor
        return
    for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        part = getattr(tensor, name)
        if isinstance(part, Tensor):
            yield from _parts((*path, name), part) if deeper else [((*path, name), part)]


def release(copied: State) -> None:
    """Let training change what was frozen for a save that has ended, without setting anything aside."""
    for _, leaf in walk(copied):
        if isinstance(leaf, Frozen):
            leaf.release()


def walk(state: Mapping[str, Any], above: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every leaf of a tree with its path."""
    for name, value in state.items():
        if isinstance(value, Mapping):
            yield from walk(value, (*above, name))
        else:
            yield (*above, name), value


def owned(everybody: Sequence[Iterable[Piece]]) -> list[list[str]]:
    """The names of what each rank writes: each piece once, by whichever of its holders has the least to write.

    A function of the list alone, so that every rank comes to the same answer.
    """
    holders: dict[Piece, list[int]] = {}
    for rank, pieces in enumerate(everybody):
        for piece in pieces:
            holders.setdefault(piece, []).append(rank)
    load = [0] * len(everybody)
    found: list[list[str]] = [[] for _ in everybody]
    for piece in sorted(holders, key=lambda piece: (len(holders[piece]) > 1, -piece[2], piece)):
        rank = min(holders[piece], key=lambda rank: load[rank])
        load[rank] += piece[2]
        found[rank].append(piece[0])
    return found


def _shape(path: Path, leaf: Tensor | Rows) -> object:
    """Return what settles who writes a leaf, and which memory it is copied to."""
    if isinstance(leaf, Rows):
        return path, leaf.shape, leaf.tensor.dtype, leaf.first
    mesh, placements = getattr(leaf, "device_mesh", None), getattr(leaf, "placements", None)
    return path, leaf.shape, leaf.dtype, placements, id(mesh)


def _piece(path: Path, tensor: Tensor | Rows) -> Piece:
    name = ".".join(path)
    if isinstance(tensor, Rows):
        return name, (tensor.first, *[0] * (len(tensor.shape) - 1)), tensor.nbytes
    if not hasattr(tensor, "device_mesh"):
        return name, (0,) * tensor.ndim, tensor.nbytes
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    where: tuple[Any, Any] = (tensor.device_mesh, tensor.placements)  # type: ignore[attr-defined]
    shape, offsets = compute_local_shape_and_global_offset(tensor.shape, *where)
    elements = 1
    for size in shape:
        elements *= size
    return name, tuple(offsets), elements * tensor.element_size()


def _any(mine: bool, group: dist.ProcessGroup | None) -> bool:
    if group is None:
        return mine
    flag = torch.tensor(int(mine), dtype=torch.int32)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
    return bool(flag)


def tree(leaves: Mapping[Path, Any]) -> State:
    """The tree that `walk` gives these leaves of."""
    found: State = {}
    for path, tensor in leaves.items():
        node = found
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = tensor
    return found
