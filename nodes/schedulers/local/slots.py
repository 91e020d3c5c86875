"""CPUs, GPUs and memory of this machine, shared out in files under one lock; first come, first served.

Standard library only, and light: every shim imports it, and a job's start waits for that.

    <root>/lock            held for the moment of looking and taking
    <root>/changed         touched whenever something was taken or given back: who waits looks again
    <root>/capacity.json   {"cpus", "gpus": [ids], "memory_mib"} as the last submit saw them; not there while drained
    <root>/drained.json    {"reason", "by", "at"}: nothing starts until it is gone
    <root>/queue/<id>.json   {"cpus", "gpus", "memory_mib", "min_nodes", "max_nodes", "begin_at"}: waits or runs
    <root>/jobs/<id>/slots.json    {"nodes", "cpus", "gpus": [ids], "memory_mib"}: has got them
    <root>/jobs/<id>/shim.lock     held for life by the shim: who has died holds nothing
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

Facts = dict[str, Any]
TOO_LARGE = "More than this machine has"  # why a job waits


@contextmanager
def locked(root: str) -> Iterator[None]:
    """The one lock over all slots."""
    descriptor = os.open(os.path.join(root, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def write_json(path: str, value: Facts) -> None:
    """Whole or not at all."""
    temporary = f"{path}.{os.getpid()}"
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(value, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def read_json(path: str) -> Facts | None:
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    except (FileNotFoundError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def is_held(path: str) -> bool:
    """Whether a living process holds this lock file."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def touch_changed(root: str) -> None:
    """Tell those who wait that it is worth looking again."""
    path = os.path.join(root, "changed")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.utime(descriptor)
    os.close(descriptor)


def changed_at(root: str) -> int:
    try:
        return os.stat(os.path.join(root, "changed")).st_mtime_ns
    except FileNotFoundError:
        return 0


def write_capacity(root: str, capacity: Facts) -> None:
    """Let the shims know what there is, unless it is drained; under the lock."""
    if drained(root) is None and read_json(_capacity_path(root)) != capacity:
        write_json(_capacity_path(root), capacity)
        touch_changed(root)


def drained(root: str) -> Facts | None:
    """Who drained this machine, why and when; None: it takes jobs."""
    return read_json(_drained_path(root))


def drain(root: str, *, reason: str, by: str) -> None:
    """Let nothing new start until `undrain`; under the lock, under which jobs start, too.

    Each shim decides by itself whether its job starts, and one that an older Vigil started knows nothing of
    drained.json: where there is no capacity, it waits.
    """
    write_json(_drained_path(root), {"reason": reason, "by": by, "at": time.time()})
    _sync(root)  # a machine is often drained right before its power goes
    with suppress(FileNotFoundError):
        os.unlink(_capacity_path(root))
    touch_changed(root)


def undrain(root: str, capacity: Facts) -> None:
    """Let what waits start; under the lock."""
    write_json(_capacity_path(root), capacity)
    os.unlink(_drained_path(root))
    touch_changed(root)


def _sync(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _drained_path(root: str) -> str:
    return os.path.join(root, "drained.json")


def _capacity_path(root: str) -> str:
    return os.path.join(root, "capacity.json")


def job_ids(root: str) -> list[int]:
    """Every job that has a folder, ended ones too, oldest first."""
    return sorted(int(name) for name in os.listdir(os.path.join(root, "jobs")) if name.isdigit())


def ticket_path(root: str, job_id: int) -> str:
    return os.path.join(root, "queue", f"{job_id}.json")


def folder(root: str, job_id: int) -> str:
    return os.path.join(root, "jobs", str(job_id))


def alive(root: str) -> list[tuple[int, Facts, Facts | None]]:
    """Jobs that wait or run: (id, what they ask for, what they have), oldest first."""
    found = []
    names = [name.removesuffix(".json") for name in os.listdir(os.path.join(root, "queue"))]
    for job_id in sorted(int(name) for name in names if name.isdigit()):
        place = folder(root, job_id)
        ticket = read_json(ticket_path(root, job_id))
        if ticket is not None and is_held(os.path.join(place, "shim.lock")):
            found.append((job_id, ticket, read_json(os.path.join(place, "slots.json"))))
    return found


def free(capacity: Facts, jobs: list[tuple[int, Facts, Facts | None]]) -> Facts:
    """What nobody has."""
    taken = [slots for _, _, slots in jobs if slots is not None]
    busy = {gpu for slots in taken for gpu in slots["gpus"]}
    return {
        "cpus": capacity["cpus"] - sum(slots["cpus"] for slots in taken),
        "gpus": [gpu for gpu in capacity["gpus"] if gpu not in busy],
        "memory_mib": capacity["memory_mib"] - sum(slots["memory_mib"] for slots in taken),
    }


def nodes_that_fit(ticket: Facts, room: Facts) -> int:
    """How many of the nodes asked for would fit now, at most `max_nodes`; each is played by this machine."""
    most: int = ticket["max_nodes"]
    for need, have in (
        (ticket["cpus"], room["cpus"]),
        (ticket["gpus"], len(room["gpus"])),
        (ticket["memory_mib"], room["memory_mib"]),
    ):
        if need:
            most = min(most, have // need)
    return max(0, most)


def _can_ever_fit(ticket: Facts, capacity: Facts) -> bool:
    """Whether it would fit if nobody else had anything."""
    return nodes_that_fit(ticket, capacity) >= int(ticket["min_nodes"])


def _lacking(ticket: Facts, room: Facts, capacity: Facts) -> str:
    """What there is too little of now: "Waits for 2 CPUs; 0 of 2 are free."."""
    wants, frees = [], []
    for name, unit in (("cpus", "CPU"), ("gpus", "GPU"), ("memory_mib", "")):
        asked = ticket[name] * ticket["min_nodes"]
        have, there = (len(part) if isinstance(part, list) else part for part in (room[name], capacity[name]))
        if asked > have:
            wants.append(f"{asked} {unit}{'s' * (asked != 1)}" if unit else f"{asked / 1024:.1f} GiB of memory")
            frees.append(f"{have} of {there}" if unit else f"{have / 1024:.1f} of {there / 1024:.1f}")
    return f"Waits for {' and '.join(wants)}; {' and '.join(frees)} are free."


def take(root: str, job_id: int) -> tuple[Facts | None, str]:
    """This job's slots if it is its turn, else None and why it waits."""
    with locked(root):
        if (order := drained(root)) is not None:
            return None, f"This machine is drained: {order['reason'].rstrip('.')}."
        capacity = read_json(_capacity_path(root))
        if capacity is None:
            return None, "Resources"
        jobs = alive(root)
        mine = next((ticket for other, ticket, _ in jobs if other == job_id), None)
        if mine is None:
            return None, "Resources"
        if not _can_ever_fit(mine, capacity):
            return None, TOO_LARGE
        if _begins_later(mine):
            return None, "BeginTime"
        # Who asks for more than there is, since the machine became smaller, waits for it and holds up nobody.
        waiting = (t for other, t, slots in jobs if other < job_id and slots is None and not _begins_later(t))
        if any(_can_ever_fit(ticket, capacity) for ticket in waiting):
            return None, "Priority"
        room = free(capacity, jobs)
        nodes = nodes_that_fit(mine, room)
        if nodes < mine["min_nodes"]:
            return None, _lacking(mine, room, capacity)
        slots = {
            "nodes": nodes,
            "cpus": mine["cpus"] * nodes,
            "gpus": room["gpus"][: mine["gpus"] * nodes],
            "memory_mib": mine["memory_mib"] * nodes,
        }
        write_json(os.path.join(folder(root, job_id), "slots.json"), slots)
    touch_changed(root)
    return slots, ""


def _begins_later(ticket: Facts) -> bool:
    return bool((ticket.get("begin_at") or 0.0) > time.time())


def give_back(root: str, job_id: int, *, for_good: bool) -> None:
    """Return the slots; for good, the place in the queue too."""
    paths = [os.path.join(folder(root, job_id), "slots.json"), *([ticket_path(root, job_id)] if for_good else [])]
    for path in paths:
        with suppress(FileNotFoundError):
            os.unlink(path)
    touch_changed(root)
