"""Lay out the map of the cluster: a rack is a column, a node a row, a GPU a cell with data for all four views. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from zlib import crc32

from django.utils.functional import cached_property  # before Python 3.12, functools' takes a lock each time

from console.pages.cluster_map.rows import MapGpu, MapNode
from nodes.cluster.racks import natural_sort_key
from nodes.health import temperature
from vigil_core import formatting

BUSY_PERCENT = 50  # racks are compared by busy GPUs, because idle ones are cooler anyway
WARM_C = 2.0
LOW_C, HIGH_C = 30, 86
FOLDS_AT, CANVAS_AT = 64, 256  # from this number of nodes details fold, and cells are painted on a canvas
TALLEST = {"full": 12, "folded": 32, "canvas": 40}  # maximum rows per column of nodes without a rack
COLOURS = 8
MARKS = {"busy": "", "wasted": "z", "idle": "", "drained": "–", "lost": "×", "broken": "!", "hot": "▲", "stray": "?"}
WORDS = {
    "busy": "in use", "wasted": "allocated but idle", "idle": "free", "drained": "not schedulable", "lost": "lost",
    "broken": "broken", "hot": "hot", "stray": "working but not allocated",
}  # fmt: skip


@dataclass(slots=True)
class MapCell:
    """A GPU on the map: `state` with its mark, buckets of utilisation and temperature (0 to 8, "" if not reported)."""

    device: MapGpu
    state: str

    @property
    def mark(self) -> str:
        return MARKS[self.state]

    @property
    def use(self) -> int | str:
        percent = self.device.percent
        return "" if percent is None else min(8, percent * 9 // 100)

    @property
    def heat(self) -> int | str:
        return "" if self.device.temperature_c is None else heat_bucket(self.device.temperature_c)

    @property
    def owner(self) -> str:
        holder = self.device.holder
        return initials(holder.user) if holder else "··" if self.device.is_allocated else ""

    @property
    def colour(self) -> int | str:
        holder = self.device.holder
        return colour(holder.user) if holder else ""

    @property
    def is_viewers(self) -> bool:
        return bool(self.device.holder and self.device.holder.is_viewer)

    @property
    def label(self) -> str:
        """Return the accessible label: "GPU 3: in use by mira, wren, 93 %, 61 °C"."""
        device, holder = self.device, self.device.holder
        parts = [f"GPU {device.index}: {WORDS[self.state]}"]
        if holder and holder.user:
            parts[0] += f" by {holder.user}" if self.state in {"busy", "wasted"} else f", allocated to {holder.user}"
            parts.append(holder.name)
        if device.percent is not None:
            parts.append(f"{device.percent}{formatting.NBSP}%")
        if device.temperature_c is not None:
            parts.append(f"{device.temperature_c}{formatting.NBSP}°C")
        return ", ".join(part for part in parts if part)


@dataclass
class MapRow:
    """A node on the map."""

    machine: MapNode

    @cached_property
    def name(self) -> str:
        return self.machine.name

    @cached_property
    def family(self) -> str:
        """Return the family of the glyph before its name: a warning if it needs attention."""
        machine = self.machine
        return (
            "warn" if machine.is_in_service and self.needs_attention else family(machine.state, machine.is_in_service)
        )

    @cached_property
    def states(self) -> list[str]:
        """Return its GPUs' states: all that a painted map needs of thousands of cells."""
        return [_state(device, self.machine) for device in self.machine.devices]

    @cached_property
    def cells(self) -> list[MapCell]:
        return [MapCell(device, state) for device, state in zip(self.machine.devices, self.states, strict=True)]

    @cached_property
    def needs_attention(self) -> bool:
        return self.machine.is_silent or bool({"lost", "broken", "hot"}.intersection(self.states))

    @cached_property
    def gpus(self) -> int:
        """Return how many the scheduler allocates from, or, if it knows of none, how many the agent sees."""
        return self.machine.gpus or len(self.machine.devices)

    @cached_property
    def used(self) -> int:
        """Return how many are allocated, counted as in the list of nodes and on the home page."""
        machine = self.machine
        used = machine.gpus_used if machine.gpus else sum([device.is_allocated for device in machine.devices])
        return min(self.gpus, used)

    @property
    def free(self) -> int:
        """Return how many GPUs the scheduler would allocate: a hot or lost GPU may still count as free there."""
        return self.machine.gpus_free

    @cached_property
    def limit_c(self) -> int:
        """Return the temperature from which a script draws its GPUs as hot."""
        return min(
            [temperature.hot_from_c(device.slowdown_c) for device in self.machine.devices],
            default=temperature.DEFAULT_HOT_C,
        )

    @cached_property
    def why(self) -> str:
        """Return one line with what matters most about it."""
        return self.trouble or self.jobs_text

    @cached_property
    def trouble(self) -> str:
        machine = self.machine
        if not machine.is_in_service or not machine.takes_jobs:
            word = formatting.word(machine.state)
            return f"{word}, {machine.reason}" if machine.reason else word
        for state, word in (("lost", "lost"), ("broken", "broken"), ("hot", "hot")):
            if state in self.states:
                indices = [str(device.index) for device in self.in_state(state)]
                return f"{'GPU' if len(indices) == 1 else 'GPUs'} {', '.join(indices)} {word}"
        if machine.silent_since:
            return f"agent silent since {formatting.clock(machine.silent_since)}"
        return ""

    @cached_property
    def jobs_text(self) -> str:
        """Return its jobs and what is free: "plover, 2 free"."""
        named = list(dict.fromkeys([job.name for job in self.machine.jobs if job.name]))
        devices = self.machine.devices
        named = named or list(dict.fromkeys(device.holder.name for device in devices if device.holder))
        parts = [*named[:2], *([f"{len(named) - 2} more"] if len(named) > 2 else [])]
        if devices:
            hidden = any(device.is_allocated and device.holder is None for device in devices)
            parts += ["in use"] if hidden and not named else []
            parts += [self._free_text()] if self.free else []
        return ", ".join(part for part in parts if part) or formatting.word(self.machine.state)

    def _free_text(self) -> str:
        """Return "free", "2 free", or of several types "1 a100 and 5 1g.10gb free"."""
        by_type = [f"{count} {kind}" for kind, count in self.machine.free_by_type.items() if count]
        if by_type:
            return f"{formatting.listed(by_type)} free"
        return f"{self.free} free" if self.free < self.gpus else "free"

    def in_state(self, state: str) -> list[MapGpu]:
        return [
            device for device, gpu_state in zip(self.machine.devices, self.states, strict=True) if gpu_state == state
        ]


_BROKEN = frozenset({"down", "not_responding", "fail", "failing"})
_FAMILIES = {
    "idle": "completed", "mixed": "running", "allocated": "running", "completing": "completing", "unknown": "notice"
}  # fmt: skip


@dataclass
class MapColumn:
    """A rack, or nodes of a partition that are in no rack."""

    name: str
    is_rack: bool
    rows: list[MapRow]
    part: str = ""  # "2 of 3" of a partition that is too tall for one column
    off_c: float | None = None  # °C above its neighbours

    @cached_property
    def devices(self) -> list[MapGpu]:
        return [device for row in self.rows for device in row.machine.devices]

    @cached_property
    def gpus(self) -> int:
        return sum(row.gpus for row in self.rows)

    @cached_property
    def used(self) -> int:
        return sum(row.used for row in self.rows)

    @cached_property
    def wasted(self) -> int:
        return sum(row.states.count("wasted") for row in self.rows)

    @cached_property
    def cpus(self) -> int:
        return sum(row.machine.cpus for row in self.rows)

    @cached_property
    def cpus_used(self) -> int:
        return sum(row.machine.cpus_used for row in self.rows)

    @cached_property
    def kilowatts(self) -> float | None:
        return kilowatts(self.devices)

    @cached_property
    def percent(self) -> float | None:
        percents = [device.percent for device in self.devices if device.percent is not None]
        return fmean(percents) if percents else None

    @cached_property
    def mean_c(self) -> float | None:
        temperatures = [device.temperature_c for device in self.devices if device.temperature_c is not None]
        return fmean(temperatures) if temperatures else None

    @cached_property
    def working_c(self) -> float | None:
        """Return the mean temperature of its working GPUs."""
        temperatures = [
            device.temperature_c
            for device in self.devices
            if device.temperature_c is not None and (device.percent or 0) >= BUSY_PERCENT
        ]
        return fmean(temperatures) if temperatures else None

    @property
    def is_warm(self) -> bool:
        return self.off_c is not None and self.off_c >= WARM_C

    @cached_property
    def troubles(self) -> list[MapRow]:
        return [row for row in self.rows if row.trouble]


@dataclass
class RackMap:
    columns: list[MapColumn]
    size: str  # full, folded or canvas
    owners: list[tuple[str, str, int, int]] = field(default_factory=list)  # letters, user, colour, GPUs

    @cached_property
    def has_racks(self) -> bool:
        return any(column.is_rack for column in self.columns)

    @cached_property
    def gpus(self) -> int:
        return sum(column.gpus for column in self.columns)


def draw(machines: Sequence[MapNode], partitions: Sequence[str]) -> RackMap:
    """Return the map of these machines, with partitions in their given order."""
    rows = [MapRow(machine) for machine in machines]
    size = _size(len(rows))
    racks = _racks([row for row in rows if row.machine.rack])
    _compare(racks)
    return RackMap([*racks, *_by_partition(rows, partitions, TALLEST[size])], size, _owners(rows))


def draw_rack(drawn: RackMap, name: str) -> RackMap:
    """Return the map of one rack, or of one partition's nodes without a rack, at its best size."""
    columns = [column for column in drawn.columns if column.name == name]
    rows = [row for column in columns for row in column.rows]
    return RackMap(columns, _size(len(rows)), _owners(rows))


def cell_of(device: MapGpu, machine: MapNode) -> MapCell:
    return MapCell(device, _state(device, machine))


def _size(nodes: int) -> str:
    return "full" if nodes <= FOLDS_AT else "folded" if nodes <= CANVAS_AT else "canvas"


def _state(device: MapGpu, machine: MapNode) -> str:
    if device.is_lost:
        return "lost"
    if device.is_broken:
        return "broken"
    if temperature.is_hot(device.temperature_c, device.slowdown_c, throttle=device.throttle):
        return "hot"
    if device.is_allocated:
        return "wasted" if device.is_wasted else "busy"
    if device.percent:
        return "stray"
    return "idle" if machine.takes_jobs else "drained"


def kilowatts(devices: Iterable[MapGpu]) -> float | None:
    watts = [device.watts for device in devices if device.watts is not None]
    return sum(watts) / 1000 if watts else None


def family(state: str, is_in_service: bool) -> str:
    """Return the glyph family of a node's state: fine, busy, or needs attention."""
    if not is_in_service:
        return "node_fail" if state in _BROKEN else "cancelled"
    return _FAMILIES.get(state, "pending")


def initials(user: str) -> str:
    """Return two letters that tell people apart: initials of first and last name if the user name has both."""
    parts = [part for part in user.replace("-", ".").replace("_", ".").split(".") if part]
    return (parts[0][0] + parts[1][0] if len(parts) > 1 else user[:2]).lower()


def colour(user: str) -> int:
    """Return a person's colour, 1 to 8, the same every day."""
    return crc32(user.encode()) % COLOURS + 1


def heat_bucket(celsius: int) -> int:
    return max(0, min(8, (celsius - LOW_C) * 9 // (HIGH_C - LOW_C)))


def _racks(rows: Iterable[MapRow]) -> list[MapColumn]:
    by_rack: dict[str, list[MapRow]] = defaultdict(list)
    for row in rows:
        by_rack[row.machine.rack].append(row)
    for rack_rows in by_rack.values():
        rack_rows.sort(key=lambda row: (row.machine.slot, natural_sort_key(row.name)))
    order = sorted(by_rack, key=lambda rack: (by_rack[rack][0].machine.rack_order, natural_sort_key(rack), rack))
    return [MapColumn(rack, True, by_rack[rack]) for rack in order]


def _by_partition(rows: Iterable[MapRow], partitions: Sequence[str], tallest: int) -> Iterator[MapColumn]:
    """Yield columns of nodes without a rack, by their first partition, of at most `tallest` nodes."""
    place = {name: i for i, name in enumerate(partitions)}
    groups: dict[str, list[MapRow]] = defaultdict(list)
    for row in rows:
        if not row.machine.rack:
            names = sorted(row.machine.partitions, key=lambda name: (place.get(name, len(place)), name))
            groups[names[0] if names else ""].append(row)
    for name in sorted(groups, key=lambda name: (not name, place.get(name, len(place)), name)):
        partition_rows = sorted(groups[name], key=lambda row: natural_sort_key(row.name))
        parts = -(-len(partition_rows) // tallest)
        height = -(-len(partition_rows) // parts)
        for part in range(parts):
            part_text = f"{part + 1} of {parts}" if parts > 1 else ""
            yield MapColumn(
                name or "No partition", False, partition_rows[part * height : (part + 1) * height], part_text
            )


def _compare(racks: Sequence[MapColumn]) -> None:
    """Set how much warmer each rack's working GPUs are than those of its neighbours."""
    means = [rack.working_c for rack in racks]
    for i, rack in enumerate(racks):
        neighbours = [mean for mean in (*means[max(0, i - 1) : i], *means[i + 1 : i + 2]) if mean is not None]
        mean = means[i]
        if neighbours and mean is not None:
            rack.off_c = mean - fmean(neighbours)


def _owners(rows: Iterable[MapRow]) -> list[tuple[str, str, int, int]]:
    """Return people by the number of GPUs they use, most first."""
    gpus_by_user = Counter([device.holder.user for row in rows for device in row.machine.devices if device.holder])
    return [(initials(user), user, colour(user), gpus) for user, gpus in gpus_by_user.most_common() if user]
