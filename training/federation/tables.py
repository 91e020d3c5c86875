"""Pack what clients did in rounds, and which data they have, into events; unpack events without trusting them.

No torch.

An attempt may send 50,000 events of 32 KiB, and a federation may have rounds of 50 ms with thousands of clients. So an
event covers all rounds since the last one: exact totals of each round, and what at most NAMED single clients did, those
with problems first.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

NAMED = 1000
"""Rows of single clients in one event, over all its rounds."""
ROUNDS = 400
"""Rounds in one event."""
EVENT_CHARACTERS = 31_000
"""Characters of both tables in an event; 400 rounds take at most 26,100, whatever their numbers are."""
STATES = ("trained", "late", "dropped", "rejected", "broken")
"""late: its update arrived after its round and was used. dropped: it sent nothing, or too late. rejected: the
aggregation left its update out. broken: its update was not finite."""
State = Literal["trained", "late", "dropped", "rejected", "broken"]
ROUND_COLUMNS = {
    "round": "<u4", "trained": "<u4", "late": "<u4", "dropped": "<u4", "rejected": "<u4", "broken": "<u4",
    "seconds": "<f4", "bytes_up": "<u8", "bytes_down": "<u8", "loss": "<f4", "accuracy": "<f4", "worst": "<i4",
}  # fmt: skip
"""Columns of a round. `accuracy`: NaN without a validation; `worst`: the client with the lowest accuracy, -1:
unknown."""
CLIENT_COLUMNS = {
    "round": "<u4", "client": "<u4", "state": "<u1", "loss": "<f4", "accuracy": "<f4", "seconds": "<f4",
}  # fmt: skip
"""Columns of one client in one round; NaN: unknown."""
QUANTILES = {"min": 0.0, "q25": 0.25, "median": 0.5, "q75": 0.75, "max": 1.0}
"""Quantiles that describe a distribution over clients."""
SPLIT_COUNTS = 6000
"""Counts in one event: clients times labels."""
SPLIT_LABELS = 64
"""Labels that are reported separately; further ones are added to the last."""
MIN_EVALUATED = 10
"""Evaluation samples that a client needs to be named as the one with the lowest accuracy. Three samples make an
accuracy of 0 by chance; ten distinguish 0 from a half in 999 of 1,000 cases."""
NAME_CHARACTERS = 80
"""Characters of a client's name. The next one: bytes of all names in one event."""
NAMES_BYTES = 20_000

Columns = dict[str, NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class RoundSeries:
    """The series that are reported in each round, by their names. Quantiles over clients come in addition."""

    loss: float
    round_seconds: float
    step_seconds: float
    compute_seconds: float
    wait_seconds: float
    transfer_seconds: float
    mib_up: float
    mib_down: float
    trained: float
    late: float
    dropped: float
    rejected: float
    client_learning_rate: float | None = None
    """None: it is the same in all rounds, and not reported."""

    def values(self) -> dict[str, float]:
        return {name: value for name, value in asdict(self).items() if value is not None}


class TableError(ValueError):
    """Raised for an event that `pack` would never have made."""


@dataclass
class RoundTable:
    """Rounds, and single clients in them, as columns of equal length."""

    rounds: Columns = field(default_factory=lambda: empty(ROUND_COLUMNS))
    clients: Columns = field(default_factory=lambda: empty(CLIENT_COLUMNS))

    def pack(self) -> dict[str, str]:
        """Return the fields of an event: all rounds, and as many rows of clients as fit."""
        rounds = _pack(self.rounds, ROUND_COLUMNS)
        named, room = most_notable(self.clients), EVENT_CHARACTERS - len(rounds)
        while len(packed := _pack(named, CLIENT_COLUMNS)) > room:
            named = most_notable(named, len(named["round"]) * room // len(packed))
        return {"rounds": rounds, "clients": packed}

    @classmethod
    def unpack(cls, event: Mapping[str, object]) -> RoundTable:
        """Return the content of an event; TableError for what `pack` would never have made."""
        rounds = _unpack(event.get("rounds"), ROUND_COLUMNS, most=ROUNDS)
        clients = _unpack(event.get("clients"), CLIENT_COLUMNS, most=NAMED)
        if (clients["state"] >= len(STATES)).any():
            raise TableError("an unknown client state")
        if not np.isin(clients["round"], rounds["round"]).all():
            raise TableError("a client of a round that is missing")
        return cls(rounds, clients)


@dataclass(frozen=True)
class SplitTable:
    """The data of consecutive clients, from number `first` on."""

    first: int
    labels: tuple[str, ...]
    counts: NDArray[np.uint32]
    """(clients, labels): training samples of each client."""
    evaluated: NDArray[np.uint32] | None = None
    """(clients,): evaluation samples of each client; None: runs of older versions do not report it."""

    def pack(self) -> dict[str, object]:
        packed = {"first": self.first, "labels": list(self.labels), "counts": _pack_counts(self.counts)}
        return packed if self.evaluated is None else {**packed, "evaluated": _pack_counts(self.evaluated)}

    @classmethod
    def unpack(cls, event: Mapping[str, object]) -> SplitTable:
        """Return the content of an event; TableError for what `pack` would never have made."""
        first, labels = event.get("first"), event.get("labels")
        if type(first) is not int or not 0 <= first < 2**32 or not isinstance(labels, list):
            raise TableError("no clients, or no labels")
        if not 1 <= len(labels) <= SPLIT_LABELS or not all(isinstance(name, str) for name in labels):
            raise TableError("no labels")
        counts = np.frombuffer(_inflated(event.get("counts"), 4 * SPLIT_COUNTS), dtype="<u4")
        if not len(counts) or len(counts) % len(labels):
            raise TableError("counts that fit no labels")
        counts, evaluated = counts.reshape(-1, len(labels)), None
        if "evaluated" in event:
            evaluated = np.frombuffer(_inflated(event["evaluated"], 4 * len(counts)), dtype="<u4")
            if len(evaluated) != len(counts):
                raise TableError("evaluation samples of more clients, or of fewer")
        return cls(first, tuple(name[:100] for name in labels), counts, evaluated)


@dataclass(frozen=True)
class ClientNames:
    """The names of consecutive clients, from number `first` on: the owners of their data; "": unknown."""

    first: int
    names: tuple[str, ...]

    def pack(self) -> dict[str, object]:
        """Return the fields of an event, with names made `readable`."""
        body = base64.b85encode(zlib.compress("\n".join(map(readable, self.names)).encode())).decode()
        return {"first": self.first, "names": body}

    @classmethod
    def unpack(cls, event: Mapping[str, object]) -> ClientNames:
        """Return the content of an event; TableError for what `pack` would never have made."""
        first = event.get("first")
        if type(first) is not int or not 0 <= first < 2**32:
            raise TableError("no clients")
        try:
            names = _inflated(event.get("names"), NAMES_BYTES).decode().split("\n")
        except UnicodeDecodeError:
            raise TableError("names that are not UTF-8 text") from None
        if any(name != readable(name) for name in names):
            raise TableError("names with characters that cannot be printed")
        return cls(first, tuple(names))


@dataclass(frozen=True)
class Coverage:
    """The number of clients, and of their samples, that have counted in no round so far."""

    clients: int
    never: int
    """Clients that never counted."""
    excluded: int
    """Those of them that were selected."""
    samples: int
    never_samples: int
    foremost: tuple[int, ...]
    """The ids of some of them, those with most samples first."""

    @property
    def never_share(self) -> float:
        return self.never_samples / max(1, self.samples)

    @property
    def text(self) -> str:
        """Return a sentence: "3 of 7 clients never counted, 54 % of samples."; "" if all have counted."""
        if not self.never:
            return ""
        percent = 100 * self.never_share
        share = f"{percent:.0f} %" if percent >= 1 else "under 1 %"
        never_selected = self.never - self.excluded
        more = (
            f" ({never_selected:,} {'was' if never_selected == 1 else 'were'} never selected)" if never_selected else ""
        )
        return f"{self.never:,} of {self.clients:,} clients never counted, {share} of samples{more}."

    def pack(self) -> dict[str, object]:
        return {**{name: getattr(self, name) for name in COVERAGE}, "foremost": list(self.foremost)}

    @classmethod
    def unpack(cls, payload: object) -> Coverage | None:
        """Return the coverage of an event; None for what `pack` would never have made."""
        if not isinstance(payload, Mapping) or not isinstance(payload.get("foremost"), list):
            return None
        counts = {name: payload.get(name) for name in COVERAGE}
        foremost = payload["foremost"][:COVERAGE_NAMED]
        if any(type(value) is not int or not 0 <= value < 2**53 for value in [*counts.values(), *foremost]):
            return None
        found = cls(**counts, foremost=tuple(foremost))  # type: ignore[arg-type]
        is_right = found.excluded <= found.never <= found.clients and found.never_samples <= found.samples
        return found if is_right else None


COVERAGE = ("clients", "never", "excluded", "samples", "never_samples")
COVERAGE_NAMED = 8
"""Clients in `foremost` at most."""


def name_events(names: Sequence[str]) -> list[ClientNames]:
    """Return the names of all clients, in as many events as they need."""
    found: list[ClientNames] = []
    first, size, some = 0, 0, list[str]()
    for number, name in enumerate(map(readable, names)):
        taken = len(name.encode()) + 1
        if size + taken > NAMES_BYTES:
            found.append(ClientNames(first, tuple(some)))
            first, size, some = number, 0, []
        some.append(name)
        size += taken
    return [*found, ClientNames(first, tuple(some))] if some else found


def readable(name: str) -> str:
    """Return a name without line breaks, control characters and characters that change the direction of text."""
    return "".join(letter for letter in name[: 2 * NAME_CHARACTERS] if letter.isprintable())[:NAME_CHARACTERS].strip()


def limited_labels(counts: NDArray[np.int64], labels: Sequence[str]) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Return counts (clients, labels) and names of at most SPLIT_LABELS labels; further ones are summed as "others"."""
    names = tuple(name[:100] for name in labels) or ("samples",)
    if len(names) <= SPLIT_LABELS:
        return counts, names
    shown = SPLIT_LABELS - 1
    counts = np.concatenate([counts[:, :shown], counts[:, shown:].sum(axis=1, keepdims=True)], axis=1)
    return counts, (*names[:shown], "others")


def split_events(
    counts: NDArray[np.int64], labels: Sequence[str], evaluated: NDArray[np.int64] | None = None
) -> list[SplitTable]:
    """Return the data of all clients, in as many events as they need. `counts`: (clients, labels); see SplitTable."""
    counts, names = limited_labels(counts, labels)
    each = SPLIT_COUNTS // (len(names) + 1)
    return [
        SplitTable(
            first,
            names,
            counts[first : first + each].astype(np.uint32),
            None if evaluated is None else evaluated[first : first + each].astype(np.uint32),
        )
        for first in range(0, len(counts), each)
    ]


def empty(columns: Mapping[str, str]) -> Columns:
    return {name: np.zeros(0, dtype=kind) for name, kind in columns.items()}


def most_notable(clients: Columns, most: int = NAMED) -> Columns:
    """Return at most `most` rows: clients with problems first, then those of the newest round."""
    if len(clients["round"]) <= most:
        return clients
    order = np.lexsort((clients["client"], -clients["round"].astype(np.int64), clients["state"] == 0))[:most]
    return {name: values[order] for name, values in clients.items()}


def _pack_counts(counts: NDArray[np.uint32]) -> str:
    return base64.b85encode(zlib.compress(counts.astype("<u4").tobytes())).decode()


def _pack(columns: Columns, kinds: Mapping[str, str]) -> str:
    body = b"".join(columns[name].astype(kind).tobytes() for name, kind in kinds.items())
    return base64.b85encode(zlib.compress(body)).decode()


def _unpack(text: object, kinds: Mapping[str, str], *, most: int) -> Columns:
    width = sum(np.dtype(kind).itemsize for kind in kinds.values())
    body = _inflated(text, width * most)
    if len(body) % width:
        raise TableError("columns of different lengths")
    rows, found, begin = len(body) // width, {}, 0
    for name, kind in kinds.items():
        found[name] = np.frombuffer(body, dtype=kind, count=rows, offset=begin)
        begin += rows * np.dtype(kind).itemsize
    return found


def _inflated(text: object, most: int) -> bytes:
    if not isinstance(text, str):
        raise TableError("no table")
    try:
        unpacker = zlib.decompressobj()
        body = unpacker.decompress(base64.b85decode(text.encode("ascii")), most + 1)
    except (ValueError, zlib.error, binascii.Error) as error:
        raise TableError(f"no table: {error}") from None
    if len(body) > most or not unpacker.eof:
        raise TableError("a table that is cut short, or far too large")
    return body
