"""Who holds which GPU, and since when: intervals of time, in step with what is claimed (`nodes.telemetry.claims`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property
from typing import NamedTuple

from django.db import transaction
from django.utils import timezone

from nodes.models import Holding
from nodes.telemetry.claims import Claim, Key, Running, Seen, Source, Told, Word

_BETTER = (Source.PROCESSES, Source.SCHEDULER, Source.LAUNCHER)
ROUNDED = timedelta(seconds=2)  # between two clocks, of which one tells whole seconds


class Open(NamedTuple):
    """A holding that is not over, as far as we know."""

    pk: int
    gpu_id: int
    agent_id: int
    scheduler_id: str
    name: str
    source: str
    since: datetime

    @property
    def key(self) -> Key:
        return self.gpu_id, self.scheduler_id


def update(words: Iterable[Word] = (), now: datetime | None = None) -> int:
    """Bring the open holdings in step with queue, processes and launchers; answers how many began, ended or changed.

    What a launcher has told stands for as long as its job holds its nodes. Of `words` the last counts.
    """
    now = now or timezone.now()
    rows = Holding.objects.filter(until=None, is_made_up=False).order_by()
    open_ones = [Open(*row) for row in rows.values_list(*Open._fields)]
    seen = Seen.read(now)
    if not open_ones and not any(machine.gpus for machine in seen.machines.values()):
        return 0
    going_on = [one for one in open_ones if not _is_of_an_earlier_run(one, seen.running.get(one.scheduler_id))]
    return _Changes(seen, _claims(seen, words, going_on)).write(open_ones)


def _claims(seen: Seen, words: Iterable[Word], open_ones: Iterable[Open]) -> dict[Key, Claim]:
    """Whoever knows best of each job and machine."""
    told = seen.by_launchers(words, _standing(seen, open_ones))
    claims = seen.by_processes | seen.by_scheduler
    claims = {key: claim for key, claim in claims.items() if (claim.agent_id, claim.scheduler_id) not in told}
    for (_, scheduler_id), gpus in told.items():
        job = seen.running[scheduler_id]
        claims |= {(gpu.pk, scheduler_id): seen.claim(gpu, job, Source.LAUNCHER) for gpu in gpus}
    return claims


def _standing(seen: Seen, open_ones: Iterable[Open]) -> Told:
    """What launchers had told before, unless a process refutes it."""
    there = {gpu.pk: (machine, gpu) for machine in seen.machines.values() for gpu in machine.gpus}
    found: Told = defaultdict(list)
    refuted = set()
    for one in open_ones:
        job = seen.running.get(one.scheduler_id)
        if one.source == Source.LAUNCHER and job is not None and one.gpu_id in there:
            machine, gpu = there[one.gpu_id]
            found[machine.pk, one.scheduler_id].append(gpu)
            if seen.is_refuted(job, machine, gpu):
                refuted.add((machine.pk, one.scheduler_id))
    return {key: gpus for key, gpus in found.items() if key not in refuted}


def _is_of_an_earlier_run(one: Open, job: Running | None) -> bool:
    """Whether the job has been queued again since, and runs anew: by the same number."""
    return job is not None and job.started_at is not None and one.since < job.started_at - ROUNDED


@dataclass
class _Changes:
    """What is to be written."""

    seen: Seen
    claims: Mapping[Key, Claim]
    over: list[tuple[Open, datetime]] = field(default_factory=list)
    wrong: list[int] = field(default_factory=list)
    better: dict[tuple[str, str, str], list[int]] = field(default_factory=lambda: defaultdict(list))
    kept: set[Key] = field(default_factory=set)

    def write(self, open_ones: Iterable[Open]) -> int:
        """Brings these in step; answers how many rows that took."""
        for one in open_ones:
            self._judge(one)
        new = [claim for key, claim in self.claims.items() if key not in self.kept]
        if not (new or self.over or self.wrong or self.better):
            return 0
        begun = _begun(new)
        with transaction.atomic():
            Holding.objects.filter(pk__in=self.wrong, until=None).delete()
            for until, pks in self._ends(new).items():
                Holding.objects.filter(pk__in=pks, until=None).update(until=until)
            for (source, user, name), pks in self.better.items():
                told = {"user": user, "name": name[:255]} if name else {}
                Holding.objects.filter(pk__in=pks, until=None).update(source=source, **told)
            Holding.objects.bulk_create(begun, batch_size=500, ignore_conflicts=True)
        return len(new) + len(self.over) + len(self.wrong) + sum(map(len, self.better.values()))

    def _judge(self, one: Open) -> None:
        """Whether it goes on, and by whose word."""
        job, claim = self.seen.running.get(one.scheduler_id), self.claims.get(one.key)
        if job is not None and job.started_at is not None and _is_of_an_earlier_run(one, job):
            self.over.append((one, job.started_at))
        elif claim is not None:
            self.kept.add(one.key)
            self._note_word(one, claim)
        elif one.source == Source.SCHEDULER and self._told.get((one.agent_id, one.scheduler_id)) == Source.LAUNCHER:
            self.wrong.append(one.pk)  # the scheduler counts otherwise
        elif one.source == Source.PROCESSES and job is not None and not self._is_told(one):
            self.kept.add(one.key)  # between two steps a job has no process, and holds what it holds
        else:
            self.over.append((one, self.seen.now))

    def _note_word(self, one: Open, claim: Claim) -> None:
        if not one.name and claim.name:
            self.better[claim.source, claim.user, claim.name].append(one.pk)
        elif _BETTER.index(claim.source) > _BETTER.index(one.source):
            self.better[claim.source, "", ""].append(one.pk)

    @cached_property
    def _told(self) -> dict[tuple[int, str], str]:
        """Who says what each job holds on each machine."""
        return {(claim.agent_id, claim.scheduler_id): claim.source for claim in self.claims.values()}

    def _is_told(self, one: Open) -> bool:
        return self._told.get((one.agent_id, one.scheduler_id), one.source) != Source.PROCESSES

    def _ends(self, new: Iterable[Claim]) -> dict[datetime, list[int]]:
        """When each was over: the queue is read now and then, but where another job began, this one had ended."""
        begins: dict[int, datetime] = {}
        for claim in new:
            if claim.source != Source.PROCESSES:
                begins[claim.gpu_id] = min(claim.since, begins.get(claim.gpu_id, claim.since))
        found = defaultdict(list)
        for one, until in self.over:
            begin = begins.get(one.gpu_id, until)
            found[max(one.since, min(until, begin) if begin > one.since else until)].append(one.pk)
        return found


def _begun(new: Iterable[Claim]) -> list[Holding]:
    """Rows of these, none of which lies over one that has ended: what comes back after a break holds from then on."""
    since = min((claim.since for claim in new), default=timezone.now())
    ended = Holding.objects.filter(until__gt=since, scheduler_id__in={claim.scheduler_id for claim in new}).order_by()
    latest: dict[Key, datetime] = {}
    for gpu_id, scheduler_id, until in ended.values_list("gpu_id", "scheduler_id", "until"):
        if until is not None:
            latest[gpu_id, scheduler_id] = max(until, latest.get((gpu_id, scheduler_id), until))
    return [
        Holding(
            gpu_id=claim.gpu_id, agent_id=claim.agent_id, scheduler_id=claim.scheduler_id, user=claim.user[:255],
            name=claim.name[:255], source=claim.source,
            since=max(claim.since, latest.get((claim.gpu_id, claim.scheduler_id), claim.since)),
        )
        for claim in new
    ]  # fmt: skip
