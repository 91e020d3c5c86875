"""What an attempt ran with, as captured by its launcher (training.provenance), and what changed since the one before.

The file lies in the job's own folder, so anybody's program may have written it: what is not what it should be is left
out, whatever it is, and nothing is believed beyond being shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from jobs.disk import rundir
from jobs.disk.captured import Captured, Change, Gpu, Ran, cpu_of, gpus_of
from jobs.disk.folders import find_folder, root_of
from jobs.models import Attempt
from vigil_core import untrusted

MOST_BYTES = 256 * 1024
MOST_GPUS = 64
MOST_VARIABLES = 200
LOOK_BACK = 5  # attempts, for one that has captured anything to compare with
_VERSION = 1
_PROJECT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_RELEASE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._!+-]{0,63}")
_HEX = re.compile(r"[0-9a-f]{12,64}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")


def read(attempt: Attempt) -> Captured | None:
    """What was captured, or None while there is nothing (or nothing that can be read)."""
    root, folder = root_of(attempt), find_folder(attempt)
    if root is None or not folder:
        return None
    found = rundir.read_json_under(root, f"job/{folder}/environment.json", limit=MOST_BYTES)
    return None if found is None else parse(found)


def parse(found: dict[str, Any]) -> Captured | None:
    """The fields that are what they should be; None where it is no captured environment at all."""
    if type(found.get("version")) is not int or found["version"] != _VERSION:
        return None
    values = {name: _READERS.get(name, untrusted.name)(found.get(name)) for name in _FIELDS}
    return Captured(**{name: value for name, value in values.items() if value is not None})


def ran(attempt: Attempt) -> Ran | None:
    """One attempt's, compared with the one before."""
    environment = read(attempt)
    if environment is None:
        return None
    earlier = Attempt.objects.filter(job=attempt.job_id, number__lt=attempt.number).select_related("job")
    for before in earlier.order_by("-number")[:LOOK_BACK]:
        if (known := read(before)) is not None:
            return Ran(environment, before.number, list(changes(known, environment)))
    return Ran(environment)


def history(attempts: list[Attempt], *, most: int) -> dict[int, Ran]:
    """What the newest `most` attempts ran with, by number; they come oldest first, and each one's file is read once."""
    found, before = dict[int, Ran](), (0, Captured())
    for attempt in attempts[-most:]:
        if (environment := read(attempt)) is None:
            continue
        number, known = before
        changed = list(changes(known, environment)) if number else []
        found[attempt.number] = Ran(environment, number or None, changed)
        before = (attempt.number, environment)
    return found


def changes(before: Captured, after: Captured) -> Iterator[Change]:
    """What differs, what is likeliest to matter first. What only one of the two could tell is no change."""
    if before.kernel and after.kernel:  # both told of their machine: a driver that is not there is gone
        pairs = [("driver", before.driver, after.driver), ("GPUs", gpus_of(before), gpus_of(after))]
        yield from (Change(what, old, new) for what, old, new in pairs if old != new)
    pairs = [(what, getattr(before, name), getattr(after, name)) for what, name in _COMPARED]
    pairs.append(("CPU", cpu_of(before), cpu_of(after)))
    yield from (Change(what, old, new) for what, old, new in pairs if old and new and old != new)
    if before.vigil_commit == after.vigil_commit and "" != before.vigil_digest != after.vigil_digest != "":
        yield Change("Vigil's trainer", before.vigil_digest[:12], after.vigil_digest[:12])
    if before.packages and after.packages:
        for name in sorted(before.packages.keys() | after.packages.keys()):
            old, new = before.packages.get(name, ""), after.packages.get(name, "")
            # Of a list that was cut, what is missing may well be there.
            cut = (not old and before.packages_left_out) or (not new and after.packages_left_out)
            if old != new and not cut:
                yield Change(name, old, new)
    for name in sorted(set(before.variables) ^ set(after.variables)):
        yield Change(f"variable {name}", *(("set", "") if name in before.variables else ("", "set")))


_COMPARED = (
    ("commit", "commit"),
    ("configuration", "config_hash"),
    ("code", "digest"),
    ("Python", "python"),
    ("interpreter", "executable"),
    ("CUDA of the driver", "cuda"),
    ("torch is for", "torch_for"),
    ("Vigil", "vigil"),
    ("Vigil's commit", "vigil_commit"),
    ("system", "os"),
    ("kernel", "kernel"),
)


def _packages(value: object) -> dict[str, str] | None:
    if not isinstance(value, dict):
        return None
    sound = (
        (untrusted.matching(_PROJECT, name), untrusted.matching(_RELEASE, release)) for name, release in value.items()
    )
    return dict(sorted((name, release) for name, release in sound if name and release))


def _gpus(value: object) -> list[Gpu] | None:
    if not isinstance(value, list):
        return None
    found = [gpu for gpu in value[:MOST_GPUS] if isinstance(gpu, dict)]
    return [
        Gpu(name, untrusted.number(gpu.get("memory_gib"), 1e5))
        for gpu in found
        if (name := untrusted.name(gpu.get("name"), 96))
    ]


def _variables(value: object) -> list[str] | None:
    if not isinstance(value, list):
        return None
    return sorted({name for item in value[:MOST_VARIABLES] if (name := untrusted.matching(_NAME, item))})


_FIELDS = [field.name for field in fields(Captured)]
_READERS: dict[str, Any] = {
    "captured_at": untrusted.moment,
    "packages": _packages,
    "packages_left_out": untrusted.count,
    "cpus": untrusted.count,
    "memory_gib": lambda value: untrusted.number(value, 1e7),
    "gpus": _gpus,
    "commit": lambda value: untrusted.matching(untrusted.COMMIT, value),
    "vigil_commit": lambda value: untrusted.matching(untrusted.COMMIT, value),
    "dirty": lambda value: value if isinstance(value, bool) else None,
    "digest": lambda value: untrusted.matching(_HEX, value),
    "vigil_digest": lambda value: untrusted.matching(_HEX, value),
    "config_hash": lambda value: untrusted.matching(_HEX, value),
    "variables": _variables,
}
