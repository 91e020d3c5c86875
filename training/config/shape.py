"""The shape of a mesh: how many ranks lie along each axis. No torch; training.config.mesh derives and checks it.

    [run]
    parallelism = "fsdp"       # how the ranks share a batch
    [run.mesh]
    tp = 2                     # two ranks share each matrix; the remaining ones go to fsdp's own axis, shard

Outermost first: pp, the stages of a pipeline; dp, replicas; shard, replicas that store a part each; cp, parts of the
context; tp, parts of each matrix. Neighbours on the innermost axis exchange most, so they should share a node.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from training.config import choices
from training.config.combinations import AXES
from training.config.dims import Dims

AUTO = "auto"
"""Lets training.planning.plan choose the parallelism and the axes that the run does not set."""
VOCABULARY = "vocabulary"
"""The field of a misfit that is caused by the recipe's option of that name."""
DATA_AXES = ("dp", "shard")
"""Axes along which every rank has different samples."""


class Misfit(ValueError):
    """A setting that cannot work on these ranks; `field` is its path below [run]."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field

    def __reduce__(self) -> tuple[type[Misfit], tuple[str, str]]:
        return type(self), (self.field, str(self))


@dataclass(frozen=True)
class Shape(Mapping[str, int]):
    """Maps each axis to its number of ranks; an axis that is not there has one."""

    sizes: Mapping[str, int]
    """Outermost first."""
    dims: Dims | None = None
    """Sizes of the model, if its recipe reports them."""
    global_batch: int = 1
    micro_batch: int | None = None

    def __getitem__(self, axis: str) -> int:
        return self.sizes.get(axis, 1)

    def __iter__(self) -> Iterator[str]:
        return iter(self.sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def world_size(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def coordinates(self) -> int:
        """Number of data-parallel coordinates, over which the global batch is divided."""
        return self["dp"] * self["shard"]

    @property
    def share(self) -> int:
        """Samples per step at each coordinate; if they do not divide evenly, at the one that has most."""
        return -(-self.global_batch // self.coordinates)

    def ranks_for(self, axis: str) -> int:
        """Return how many ranks an axis that splits the model can use: those not taken by other such axes."""
        return self.world_size // math.prod(size for other, size in self.items() if other not in (*DATA_AXES, axis))

    def __str__(self) -> str:
        return " × ".join(f"{axis} {size}" for axis, size in self.sizes.items())


def axes_of(name: str) -> tuple[str, ...]:
    axes = choices.get("parallel", name).constants.get("AXES", ())
    return tuple(axes) if isinstance(axes, tuple | list) else ()


def modules_by_axis(parallelism: str, axes: Mapping[str, int]) -> dict[str, str]:
    """Map each axis to the module that works along it: the chosen parallelism's own axes, and those in `axes`."""
    data_axes = dict.fromkeys(axes_of(parallelism), parallelism)
    others = {axis: name for name in choices.names("parallel") for axis in axes_of(name) if axis not in DATA_AXES}
    return {axis: name for axis, name in {**others, **data_axes}.items() if axis in data_axes or axis in axes}


def modules(parallelism: str, mesh: Mapping[str, int]) -> list[str]:
    """Return a run's parallelisms in the order in which they are applied.

    The split into pipeline stages comes first, the data-parallel one last.
    """
    if parallelism == AUTO:
        return []
    by_axis = modules_by_axis(parallelism, mesh)
    order = ["pp", *(axis for axis in by_axis if axis not in AXES), "tp", "cp"]
    return [*(by_axis[axis] for axis in order if axis in by_axis and by_axis[axis] != parallelism), parallelism]


@functools.lru_cache(maxsize=1024)
def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors in ascending order. Cached, as a plan asks for the same numbers repeatedly."""
    lower = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return (*lower, *(number // divisor for divisor in reversed(lower) if divisor * divisor != number))


def nearest_divisors(wanted: int, total: int) -> str:
    """Return `Nearest that do: 2 or 4.`"""
    below = max((number for number in divisors(total) if number <= wanted), default=None)
    above = min((number for number in divisors(total) if number > wanted), default=None)
    return _nearest_text([number for number in (below, above) if number is not None])


def nearest_multiples(value: int, unit: int) -> str:
    below = value // unit * unit
    return _nearest_text([number for number in (below, below + unit) if number])


def _nearest_text(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"The nearest that does: {numbers[0]}."
    return f"Nearest that do: {' or '.join(map(str, numbers))}."
