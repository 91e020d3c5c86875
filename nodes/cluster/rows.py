"""Store what a scheduler reports in rows. Only changes are written, in short transactions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from datetime import UTC, datetime
from hashlib import blake2b
from math import inf
from operator import attrgetter
from typing import Any, ClassVar, Protocol

from django.db import transaction

from nodes.models import Association, Fact, License, Node, Partition, Qos, QueuedJob, Reservation
from portal.bulk import chunks

AT_ONCE = 1000  # rows per transaction, for example at the first reading of a large cluster
BATCH = 200  # rows per statement: drivers limit the number of values
_BOUNDS = {"IntegerField": (-(2**31), 2**31 - 1), "BigIntegerField": (-(2**63), 2**63 - 1)}
FORM = "1"  # increased when the same data is to be stored differently: then every row is rewritten


class ReportedRecord(Protocol):
    """Any dataclass that a scheduler reports."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


@dataclass(frozen=True)
class RowKind:
    """A kind of row, and the columns that identify its rows.

    Those of a kind that `outlasts_unreadable` stay while a record that may be theirs cannot be read.
    """

    model: type[Fact]
    key: tuple[str, ...]
    outlasts_unreadable: bool = False


NODES = RowKind(Node, ("name",), outlasts_unreadable=True)
PARTITIONS = RowKind(Partition, ("name",))
QOS = RowKind(Qos, ("name",))
ASSOCIATIONS = RowKind(Association, ("account", "user", "partition"))
RESERVATIONS = RowKind(Reservation, ("name",))
LICENSES = RowKind(License, ("name",))
QUEUE = RowKind(QueuedJob, ("scheduler_id",))


@dataclass
class Difference:
    """The changes that bring the rows in step with the scheduler."""

    kind: RowKind
    changed: list[Fact]
    gone: list[int]
    unreadable: int = 0  # records that no column can hold, such as a priority of 2^64: left out
    unconfirmed: Sequence[int] = ()  # rows that stay, though no record that could be read is theirs

    def pieces(self) -> Iterator[Difference]:
        """Yield the difference in parts of AT_ONCE rows; rows that were not reported are in the first."""
        yield Difference(self.kind, self.changed[:AT_ONCE], self.gone, unconfirmed=self.unconfirmed)
        for start in range(AT_ONCE, len(self.changed), AT_ONCE):
            yield Difference(self.kind, self.changed[start : start + AT_ONCE], [])

    def write(self) -> None:
        """Write the changes; part of the caller's transaction."""
        objects = self.kind.model._default_manager
        if self.changed:
            columns = [field.name for field in self.kind.model._meta.concrete_fields if not field.primary_key]
            objects.bulk_create(
                self.changed,
                batch_size=BATCH,
                update_conflicts=True,
                unique_fields=list(self.kind.key),
                update_fields=[name for name in columns if name not in self.kind.key],
            )
        for keys in chunks(self.gone):
            objects.filter(pk__in=keys).delete()
        for keys in chunks(self.unconfirmed):
            objects.filter(pk__in=keys).update(digest="")


def differences(
    kind: RowKind, reported: Iterable[ReportedRecord], *, unparsed: int = 0, made_up: bool = False
) -> Difference:
    """Compare reported records with the rows; made-up rows stay, except those that a scheduler reports as real.

    `unparsed` records were reported, too, and nobody knows of what.
    """
    rows = kind.model._default_manager.filter(is_made_up=made_up)
    columns = ("pk", "digest", *kind.key)
    stored = {tuple(key): (pk, digest) for pk, digest, *key in rows.values_list(*columns).iterator()}
    changed: dict[tuple[object, ...], Fact] = {}
    reported_keys, unreadable = set(), 0
    digest_of, key_of = _digester(kind.model), _getter(kind.key)
    for record in reported:
        key, digest = key_of(record), digest_of(record)
        if stored.get(key, (0, ""))[1] != digest:
            row = kind.model(**columns_of(record, kind.model), digest=digest, is_made_up=made_up)
            if not _is_storable(row):
                unreadable += 1
                continue
            changed[key] = row
        reported_keys.add(key)
    missing = [row for key, row in stored.items() if key not in reported_keys]
    if kind.outlasts_unreadable and (unparsed or unreadable):
        unconfirmed = [pk for pk, digest in missing if digest]
        return Difference(kind, list(changed.values()), [], unreadable, unconfirmed)
    return Difference(kind, list(changed.values()), [pk for pk, _ in missing], unreadable)


def write(*found: Difference, also: Callable[[], object] | None = None) -> None:
    """Write all differences in one transaction; very many are split, so that other writers do not wait long."""
    rest = list(found)
    if sum(len(difference.changed) for difference in found) > AT_ONCE:
        pieces = [piece for difference in found for piece in difference.pieces()]
        rest = pieces[-1:]
        for piece in pieces[:-1]:
            with transaction.atomic():
                piece.write()
    with transaction.atomic():
        for difference in rest:
            difference.write()
        if also is not None:
            also()


def columns_of(record: ReportedRecord, model: type[Fact]) -> dict[str, Any]:
    """Return a dataclass as the columns of its row."""
    most = {field.name: field.max_length for field in model._meta.concrete_fields}
    return {field.name: _column(field.name, getattr(record, field.name), most[field.name]) for field in fields(record)}


def _column(name: str, value: Any, most: int | None) -> Any:
    if isinstance(value, str):
        return value.replace("\0", "")[:most]  # databases store no NUL, and no more than the column's length
    if name.endswith("_at"):
        return None if value is None else datetime.fromtimestamp(value, UTC)
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, Mapping):
        return {key: list(inner) if isinstance(inner, tuple) else inner for key, inner in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return {key: dict(inner) if isinstance(inner, Mapping) else inner for key, inner in asdict(value).items()}
    return value


def _is_storable(row: Fact) -> bool:
    """Return whether every whole number is within its column on every database."""
    for column in row._meta.concrete_fields:
        value = getattr(row, column.attname)
        low, high = _BOUNDS.get(column.get_internal_type(), (-inf, inf))
        if isinstance(value, int) and not low <= value <= high:
            return False
    return True


def _getter(names: tuple[str, ...]) -> Callable[[ReportedRecord], tuple[object, ...]]:
    get = attrgetter(*names)
    return (lambda record: (get(record),)) if len(names) == 1 else get


def _digester(model: type[Fact]) -> Callable[[ReportedRecord], str]:
    """Return a fast function that distinguishes two descriptions: there may be thousands every 15 s."""
    internal = {"id", "digest", "is_made_up"}
    names = tuple(field.name for field in model._meta.concrete_fields if field.name not in internal)
    get, form = attrgetter(*names), f"{FORM} {names}".encode()

    def digest(record: ReportedRecord) -> str:
        return blake2b(form + repr(get(record)).encode(errors="surrogatepass"), digest_size=12).hexdigest()

    return digest
