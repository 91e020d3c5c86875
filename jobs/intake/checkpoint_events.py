"""Store what trainers report about checkpoints, with as many queries for 2,000 events as for one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from django.db import connection
from django.utils import timezone

from jobs import starting_steps
from jobs.models import Attempt, Checkpoint, EarlyPrune
from portal import bulk
from training.manifest import NAME
from vigil_core import untrusted

COMMITTED, PRUNED, DAMAGED = "checkpoint.committed", "checkpoint.pruned", "checkpoint.damaged"
KINDS = frozenset({COMMITTED, PRUNED, DAMAGED})
Key = tuple[int, int]  # step and generation

_REPORTED = ("parent_step", "parent_generation", "bytes", "seconds", "consumed_samples", "world_size", "created_at")
_CHANGED = (*_REPORTED, "name", "state", "problem", "pinned", "verify_tries", "verify_after")
State = Checkpoint.State


def apply(attempt: Attempt, events: Sequence[Mapping[str, Any]]) -> None:
    """Update the checkpoint rows from events, in their order.

    The caller holds the attempt's row lock. An event may be applied again without effect. An attached job's checkpoints
    are its owner's: Vigil keeps no rows of them.
    """
    if attempt.job.is_attached:
        return
    keyed = [(key, event) for event in events if event.get("kind") in KINDS and (key := _key_of(event)) is not None]
    if keyed:
        changes = _Changes.read(attempt, [key for key, _ in keyed])
        for key, event in keyed:
            changes.apply(key, event)
        changes.write()
    _note_start(attempt, events)


def _key_of(event: Mapping[str, Any]) -> Key | None:
    step, generation = (
        untrusted.count(event.get("step")),
        untrusted.count(event.get("generation"), untrusted.MAX_INTEGER),
    )
    return None if step is None or generation is None else (step, generation)


@dataclass
class _Changes:
    """The rows that a post's events are about, changed in memory and then written."""

    attempt: Attempt
    rows: dict[Key, Checkpoint]
    plain: dict[int, list[Checkpoint]]
    """The rows that now have the plain name, step-<n>, by step."""
    newest_plain: dict[int, int]
    """The highest generation that ever had the plain name, by step; removed ones included."""
    pruned_early: set[Key]
    """Removals that were reported before the commit."""
    changed: dict[Key, Checkpoint] = field(default_factory=dict)
    new_early: set[Key] = field(default_factory=set)

    @classmethod
    def read(cls, attempt: Attempt, keys: Iterable[Key]) -> _Changes:
        wanted = sorted(set(keys))
        steps = {step for step, _ in wanted}
        job = Checkpoint.objects.filter(job_id=attempt.job_id)
        named = job.filter(step__in=steps, name__in=[_plain_name(step) for step in steps])
        ids = [*_ids_of(attempt.job_id, wanted), *named.exclude(state=State.PRUNED).values_list("pk", flat=True)]
        # Locked, as verification and retention change single rows meanwhile.
        rows = {
            (row.step, row.generation): row
            for row in job.filter(pk__in=ids).order_by("pk").select_for_update(of=("self",))
        }
        newest_plain: dict[int, int] = defaultdict(lambda: -1)
        for step, generation in named.values_list("step", "generation"):
            newest_plain[step] = max(generation, newest_plain[step])
        plain = defaultdict(list)
        for row in rows.values():
            if row.name == _plain_name(row.step) and row.state != State.PRUNED:
                plain[row.step].append(row)
        early = EarlyPrune.objects.filter(job_id=attempt.job_id, step__in=steps).values_list("step", "generation")
        return cls(attempt, rows, plain, newest_plain, set(early) & set(wanted))

    def apply(self, key: Key, event: Mapping[str, Any]) -> None:
        row = self.rows.get(key)
        match event["kind"]:
            case "checkpoint.committed" if row is None:
                self._add(key, event)
            case "checkpoint.committed" if row.state == State.CORRUPT:  # type: ignore[union-attr]
                # Its trainer wrote it again, or read it through to start from it.
                self._change(
                    row, **_reported(event), state=State.COMMITTED, problem="", verify_tries=0, verify_after=None
                )
            case "checkpoint.pruned" if row is None:
                self.new_early.add(key)
            case "checkpoint.pruned" if row.state != State.PRUNED:  # type: ignore[union-attr]
                self._change(row, state=State.PRUNED, pinned=False)
                self.plain[row.step] = [checkpoint for checkpoint in self.plain[row.step] if checkpoint is not row]  # type: ignore[union-attr]
            case "checkpoint.damaged" if row is not None and row.resumable:
                self._change(row, state=State.CORRUPT, problem=str(event.get("reason"))[:2000])

    def write(self) -> None:
        old = [row for row in self.changed.values() if row.pk is not None]
        Checkpoint.objects.bulk_create([row for row in self.changed.values() if row.pk is None])
        bulk.update_rows(old, _CHANGED)
        early = [EarlyPrune(job_id=self.attempt.job_id, step=step, generation=g) for step, g in sorted(self.new_early)]
        EarlyPrune.objects.bulk_create(early, ignore_conflicts=True)

    def _add(self, key: Key, event: Mapping[str, Any]) -> None:
        step, generation = key
        plain, exact = _plain_name(step), f"{_plain_name(step)}.g{generation}"
        name = exact if event.get("name") == exact else plain
        row = Checkpoint(job_id=self.attempt.job_id, attempt=self.attempt, step=step, generation=generation, name=name)
        self.rows[key] = row
        # After an outage the streams of two incarnations arrive in any order: its removal may have been reported first.
        is_gone = key in self.pruned_early or key in self.new_early
        self._change(row, **_reported(event), state=State.PRUNED if is_gone else State.COMMITTED)
        if name == plain:
            self._move_aside(row)

    def _move_aside(self, new: Checkpoint) -> None:
        """Rename other generations' checkpoints of this step, as their trainer did on disk.

        It was the older one that moved, also where the newer one was reported first.
        """
        older = [row for row in self.plain[new.step] if row.generation < new.generation]
        if self.newest_plain[new.step] > new.generation:
            older.append(new)
        for row in older:
            self._change(row, name=f"{row.name}.g{row.generation}", problem="")
        alive = [*self.plain[new.step], *([new] if new.state != State.PRUNED else [])]
        self.plain[new.step] = [row for row in alive if row not in older]
        if new not in older:
            self.newest_plain[new.step] = max(new.generation, self.newest_plain[new.step])

    def _change(self, row: Checkpoint | None, **values: Any) -> None:
        assert row is not None
        for name, value in values.items():
            setattr(row, name, value)
        self.changed[row.step, row.generation] = row


def _ids_of(job_id: int, keys: Sequence[Key]) -> list[int]:
    """Return the ids of the rows of exactly these steps and generations, by the unique index."""
    found = []
    for chunk in bulk.chunks(keys):
        pairs = ", ".join(["(%s, %s)"] * len(chunk))
        statement = f"SELECT id FROM jobs_checkpoint WHERE job_id = %s AND (step, generation) IN (VALUES {pairs})"
        with connection.cursor() as cursor:
            cursor.execute(statement, [job_id, *(number for key in chunk for number in key)])
            found += [pk for (pk,) in cursor.fetchall()]
    return found


def _plain_name(step: int) -> str:
    return f"step-{step}"


def _reported(event: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a committed checkpoint from its trainer's report."""
    return {
        "parent_step": untrusted.count(event.get("parent_step")),
        "parent_generation": untrusted.count(event.get("parent_generation"), untrusted.MAX_INTEGER),
        "bytes": untrusted.count(event.get("bytes")) or 0,
        "seconds": untrusted.duration(event.get("seconds")),
        "consumed_samples": untrusted.count(event.get("consumed_samples")),
        "world_size": untrusted.count(event.get("world_size"), untrusted.MAX_INTEGER),
        "created_at": _time(event.get("time")),
    }


def _note_start(attempt: Attempt, events: Iterable[Mapping[str, Any]]) -> None:
    """Record the checkpoint that an attempt requeued by the scheduler resumed from: only its ranks know it."""
    kind = starting_steps.kind_of(attempt.job)
    begun = (str(event.get("resumed_from")) for event in events if event.get("kind") == kind)
    names = {name: int(match["step"]) for name in begun if (match := NAME.fullmatch(name))}
    if not names or attempt.resume_from_id is not None or attempt.origin != Attempt.Origin.REQUEUED:
        return
    # By step, as the index has it: a job may have 50,000 checkpoints.
    rows = Checkpoint.objects.filter(job_id=attempt.job_id, step__in=set(names.values()), name__in=list(names))
    newest = {row.name: row for row in rows.exclude(attempt=attempt).order_by("generation")}
    checkpoint = next((newest[name] for name in names if name in newest), None)
    if checkpoint is not None:
        Attempt.objects.filter(pk=attempt.pk, resume_from=None).update(resume_from=checkpoint)
        attempt.resume_from = checkpoint


def _time(value: object) -> datetime:
    return untrusted.moment(value) or timezone.now()
