"""Allocate this machine's CPUs, GPUs and memory through files under one lock; first come, first served.

Standard library only and quick to import: every shim imports it, and a job's start waits for that.

    <root>/lock            taken while slots are inspected and allocated
    <root>/changed         touched whenever slots were taken or released: waiting shims check again
    <root>/capacity.json   {"cpus", "gpus": [ids], "memory_mib"} at the last submit; missing while drained
    <root>/drained.json    {"reason", "by", "at"}: nothing starts while it exists
    <root>/reserved.json   {"name", "until", "capacity"}: only its jobs start; capacity.json is missing
    <root>/queue/<id>.json   {"cpus", "gpus", "memory_mib", "min_nodes", "max_nodes", "begin_at"}: pending or running
    <root>/jobs/<id>/slots.json    {"nodes", "cpus", "gpus": [ids], "memory_mib"}: its allocation
    <root>/jobs/<id>/shim.lock     locked for the shim's lifetime: a dead shim has no allocation
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

JsonObject = dict[str, Any]
TOO_LARGE = "More than this machine has"  # a pending job's reason


@contextmanager
def locked(root: str) -> Iterator[None]:
    """Take the one lock over all slots."""
    descriptor = os.open(os.path.join(root, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def write_json(path: str, value: JsonObject) -> None:
    """Replace the file atomically."""
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


def read_json(path: str) -> JsonObject | None:
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    except (FileNotFoundError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def is_locked(path: str) -> bool:
    """Return whether a living process has this lock file locked."""
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
    """Signal waiting shims to check the slots again."""
    path = os.path.join(root, "changed")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.utime(descriptor)
    os.close(descriptor)


def changed_at(root: str) -> int:
    try:
        return os.stat(os.path.join(root, "changed")).st_mtime_ns
    except FileNotFoundError:
        return 0


def write_capacity(root: str, capacity: JsonObject) -> None:
    """Publish the capacity to the shims unless the machine is drained or reserved. Call it under the lock."""
    if is_closed(root):
        return
    if read_json(_capacity_path(root)) != capacity:
        write_json(_capacity_path(root), capacity)
        touch_changed(root)


def drain_order(root: str) -> JsonObject | None:
    """Return the drain order (reason, by, at); None if the machine is not drained."""
    return read_json(_drained_path(root))


def drain(root: str, *, reason: str, by: str) -> None:
    """Keep new jobs from starting until `undrain`. Call it under the lock, which starting jobs take too.

    Each shim decides whether its job starts, and one of an older Vigil ignores drained.json: without capacity it waits.
    """
    write_json(_drained_path(root), {"reason": reason, "by": by, "at": time.time()})
    _sync(root)  # a machine is often drained right before it is powered off
    with suppress(FileNotFoundError):
        os.unlink(_capacity_path(root))
    touch_changed(root)


def undrain(root: str, capacity: JsonObject) -> None:
    """Let pending jobs start again, unless the machine is reserved. Call it under the lock."""
    os.unlink(_drained_path(root))
    write_capacity(root, capacity)
    touch_changed(root)


def reservation(root: str) -> JsonObject | None:
    """Return the reservation (name, until, capacity); None if there is none, or it is over."""
    found = read_json(_reserved_path(root))
    return found if found is not None and found["until"] > time.time() else None


def is_closed(root: str) -> bool:
    """Return whether ordinary jobs cannot start."""
    return drain_order(root) is not None or reservation(root) is not None


def reserve(root: str, name: str, capacity: JsonObject, *, until: float) -> None:
    """Let only jobs that name the reservation start. Call it under the lock.

    As with `drain`, shims of an older Vigil wait because there is no capacity; newer ones take it from the reservation.
    """
    write_json(_reserved_path(root), {"name": name, "until": until, "capacity": capacity})
    with suppress(FileNotFoundError):
        os.unlink(_capacity_path(root))
    touch_changed(root)


def unreserve(root: str, capacity: JsonObject) -> None:
    """Remove the reservation; pending jobs start unless the machine is drained. Call it under the lock."""
    with suppress(FileNotFoundError):
        os.unlink(_reserved_path(root))
    write_capacity(root, capacity)
    touch_changed(root)


def _reserved_path(root: str) -> str:
    return os.path.join(root, "reserved.json")


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
    """Return the ids of all jobs that have a folder, ended ones too, oldest first."""
    return sorted(int(name) for name in os.listdir(os.path.join(root, "jobs")) if name.isdigit())


def ticket_path(root: str, job_id: int) -> str:
    return os.path.join(root, "queue", f"{job_id}.json")


def folder(root: str, job_id: int) -> str:
    return os.path.join(root, "jobs", str(job_id))


def alive(root: str) -> list[tuple[int, JsonObject, JsonObject | None]]:
    """Return pending and running jobs as (id, request, allocation or None), oldest first."""
    found = []
    names = [name.removesuffix(".json") for name in os.listdir(os.path.join(root, "queue"))]
    for job_id in sorted(int(name) for name in names if name.isdigit()):
        job_folder = folder(root, job_id)
        ticket = read_json(ticket_path(root, job_id))
        if ticket is not None and is_locked(os.path.join(job_folder, "shim.lock")):
            found.append((job_id, ticket, read_json(os.path.join(job_folder, "slots.json"))))
    return found


def free(capacity: JsonObject, jobs: list[tuple[int, JsonObject, JsonObject | None]]) -> JsonObject:
    """Return the resources that no job has."""
    allocations = [slots for _, _, slots in jobs if slots is not None]
    busy = {gpu for slots in allocations for gpu in slots["gpus"]}
    return {
        "cpus": capacity["cpus"] - sum(slots["cpus"] for slots in allocations),
        "gpus": [gpu for gpu in capacity["gpus"] if gpu not in busy],
        "memory_mib": capacity["memory_mib"] - sum(slots["memory_mib"] for slots in allocations),
    }


def nodes_that_fit(ticket: JsonObject, free: JsonObject) -> int:
    """Return how many of the requested nodes would fit now, at most `max_nodes`; this machine stands for each."""
    most: int = ticket["max_nodes"]
    for needed, available in (
        (ticket["cpus"], free["cpus"]),
        (ticket["gpus"], len(free["gpus"])),
        (ticket["memory_mib"], free["memory_mib"]),
    ):
        if needed:
            most = min(most, available // needed)
    return max(0, most)


def _can_ever_fit(ticket: JsonObject, capacity: JsonObject) -> bool:
    """Return whether the job would fit on an otherwise idle machine."""
    return nodes_that_fit(ticket, capacity) >= int(ticket["min_nodes"])


def _lacking(ticket: JsonObject, free_now: JsonObject, capacity: JsonObject) -> str:
    """Say which resources are missing now: "Waits for 2 CPUs; 0 of 2 are free."."""
    wants, frees = [], []
    for name, unit in (("cpus", "CPU"), ("gpus", "GPU"), ("memory_mib", "")):
        requested = ticket[name] * ticket["min_nodes"]
        available, total = (
            len(amount) if isinstance(amount, list) else amount for amount in (free_now[name], capacity[name])
        )
        if requested > available:
            wants.append(
                f"{requested} {unit}{'s' * (requested != 1)}" if unit else f"{requested / 1024:.1f} GiB of memory"
            )
            frees.append(f"{available} of {total}" if unit else f"{available / 1024:.1f} of {total / 1024:.1f}")
    return f"Waits for {' and '.join(wants)}; {' and '.join(frees)} are free."


def take(root: str, job_id: int) -> tuple[JsonObject | None, str]:
    """Allocate this job's slots if it is its turn; return them, or None and the reason for waiting."""
    with locked(root):
        if (drain_reason := drain_order(root)) is not None:
            return None, f"This machine is drained: {drain_reason['reason'].rstrip('.')}."
        reserved = reservation(root)
        capacity = reserved["capacity"] if reserved else read_json(_capacity_path(root))
        if capacity is None:
            return None, "Resources"
        jobs = alive(root)
        ticket_of_job = next((ticket for other, ticket, _ in jobs if other == job_id), None)
        if ticket_of_job is None:
            return None, "Resources"
        if reserved and ticket_of_job.get("reservation") != reserved["name"]:
            return None, f"This machine is reserved: {reserved['name']}."
        if not _can_ever_fit(ticket_of_job, capacity):
            return None, TOO_LARGE
        if _begins_later(ticket_of_job):
            return None, "BeginTime"
        # A job that no longer fits, because the machine became smaller, waits without holding up the others.
        # So does every job outside a reservation.
        waiting = (
            ticket
            for other, ticket, slots in jobs
            if other < job_id and slots is None and not _begins_later(ticket)
            and (reserved is None or ticket.get("reservation") == reserved["name"])
        )  # fmt: skip
        if any(_can_ever_fit(ticket, capacity) for ticket in waiting):
            return None, "Priority"
        free_now = free(capacity, jobs)
        nodes = nodes_that_fit(ticket_of_job, free_now)
        if nodes < ticket_of_job["min_nodes"]:
            return None, _lacking(ticket_of_job, free_now, capacity)
        slots = {
            "nodes": nodes,
            "cpus": ticket_of_job["cpus"] * nodes,
            "gpus": free_now["gpus"][: ticket_of_job["gpus"] * nodes],
            "memory_mib": ticket_of_job["memory_mib"] * nodes,
        }
        write_json(os.path.join(folder(root, job_id), "slots.json"), slots)
    touch_changed(root)
    return slots, ""


def _begins_later(ticket: JsonObject) -> bool:
    return bool((ticket.get("begin_at") or 0.0) > time.time())


def release(root: str, job_id: int, *, for_good: bool) -> None:
    """Release the job's slots; `for_good` removes it from the queue too."""
    paths = [os.path.join(folder(root, job_id), "slots.json"), *([ticket_path(root, job_id)] if for_good else [])]
    for path in paths:
        with suppress(FileNotFoundError):
            os.unlink(path)
    touch_changed(root)
