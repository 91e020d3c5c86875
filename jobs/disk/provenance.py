"""Read the environment that an attempt's launcher captured (training.provenance), and compare it with earlier ones.

The file lies in the job's own folder, so any program may have written it: fields of unexpected form are left out, and
the rest is only shown, never relied on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from jobs.disk import rundir
from jobs.disk.captured import CapturedEnvironment, CapturedGpu, EnvironmentChange, EnvironmentDiff, cpu_of, gpus_of
from jobs.disk.folders import find_folder, root_of
from jobs.models import Attempt
from vigil_core import untrusted

MAX_BYTES = 256 * 1024
MAX_GPUS = 64
MAX_VARIABLES = 200
MAX_EARLIER_ATTEMPTS = 5  # searched for an environment to compare with
_VERSION = 1
_PROJECT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_RELEASE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._!+-]{0,63}")
_HEX = re.compile(r"[0-9a-f]{12,64}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")


def read(attempt: Attempt) -> CapturedEnvironment | None:
    """Return the captured environment, or None if there is none that can be read."""
    root, folder = root_of(attempt), find_folder(attempt)
    if root is None or not folder:
        return None
    found = rundir.read_json_under(root, f"job/{folder}/environment.json", limit=MAX_BYTES)
    return None if found is None else parse(found)


def parse(found: dict[str, Any]) -> CapturedEnvironment | None:
    """Return the fields that have the expected form, or None if this is no captured environment at all."""
    if type(found.get("version")) is not int or found["version"] != _VERSION:
        return None
    values = {name: _READERS.get(name, untrusted.name)(found.get(name)) for name in _FIELDS}
    return CapturedEnvironment(**{name: value for name, value in values.items() if value is not None})


def compare_with_earlier(attempt: Attempt) -> EnvironmentDiff | None:
    """Return one attempt's environment, compared with the one before."""
    environment = read(attempt)
    if environment is None:
        return None
    earlier = Attempt.objects.filter(job=attempt.job_id, number__lt=attempt.number).select_related("job")
    for before in earlier.order_by("-number")[:MAX_EARLIER_ATTEMPTS]:
        if (earlier_environment := read(before)) is not None:
            return EnvironmentDiff(environment, before.number, list(changes(earlier_environment, environment)))
    return EnvironmentDiff(environment)


def history(attempts: list[Attempt], *, most: int) -> dict[int, EnvironmentDiff]:
    """Return the environments of the newest `most` attempts by number.

    Attempts come oldest first; each file is read once.
    """
    by_number, before = dict[int, EnvironmentDiff](), (0, CapturedEnvironment())
    for attempt in attempts[-most:]:
        if (environment := read(attempt)) is None:
            continue
        number, earlier = before
        changed = list(changes(earlier, environment)) if number else []
        by_number[attempt.number] = EnvironmentDiff(environment, number or None, changed)
        before = (attempt.number, environment)
    return by_number


def changes(before: CapturedEnvironment, after: CapturedEnvironment) -> Iterator[EnvironmentChange]:
    """Yield the differences, the most relevant first. A value that only one side knows is not a difference."""
    if before.kernel and after.kernel:  # both captured their machine: a driver that is missing was removed
        pairs = [("driver", before.driver, after.driver), ("GPUs", gpus_of(before), gpus_of(after))]
        yield from (EnvironmentChange(what, old, new) for what, old, new in pairs if old != new)
    pairs = [(what, getattr(before, name), getattr(after, name)) for what, name in _COMPARED]
    pairs.append(("CPU", cpu_of(before), cpu_of(after)))
    yield from (EnvironmentChange(what, old, new) for what, old, new in pairs if old and new and old != new)
    if before.vigil_commit == after.vigil_commit and "" != before.vigil_digest != after.vigil_digest != "":
        yield EnvironmentChange("Vigil's trainer", before.vigil_digest[:12], after.vigil_digest[:12])
    if before.packages and after.packages:
        for name in sorted(before.packages.keys() | after.packages.keys()):
            old, new = before.packages.get(name, ""), after.packages.get(name, "")
            # Of a list that was cut, what is missing may well be there.
            cut = (not old and before.packages_left_out) or (not new and after.packages_left_out)
            if old != new and not cut:
                yield EnvironmentChange(name, old, new)
    for name in sorted(set(before.variables) ^ set(after.variables)):
        yield EnvironmentChange(f"variable {name}", *(("set", "") if name in before.variables else ("", "set")))


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


def _gpus(value: object) -> list[CapturedGpu] | None:
    if not isinstance(value, list):
        return None
    found = [gpu for gpu in value[:MAX_GPUS] if isinstance(gpu, dict)]
    return [
        CapturedGpu(name, untrusted.number(gpu.get("memory_gib"), 1e5))
        for gpu in found
        if (name := untrusted.name(gpu.get("name"), 96))
    ]


def _variables(value: object) -> list[str] | None:
    if not isinstance(value, list):
        return None
    return sorted({name for item in value[:MAX_VARIABLES] if (name := untrusted.matching(_NAME, item))})


_FIELDS = [field.name for field in fields(CapturedEnvironment)]
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
