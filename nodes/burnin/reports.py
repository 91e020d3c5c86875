"""Read what a burn-in's program wrote on a node that may be broken: bounded, and checked before it is believed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vigil_core import untrusted

MAX_LINE = 16_384
MAX_ITEM = 200
MAX_TESTS_OF_NODE = 5_000
"""Different (test, item) of one node: 64 GPUs copy in 4,032 directions."""
MAX_VALUES = 64
MAX_GPUS = 64
MOUNT = "mount"
TESTS = ("memory", "matrix", "copy", "all-reduce", "pair", MOUNT, "host memory", "disk")
FACTS, START, END = "facts", "start", "end"
PASSED, FAILED, ABSENT = "passed", "failed", "absent"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_FILE_SYSTEM = re.compile(r"[\w.-]{1,40}")


@dataclass(frozen=True)
class BurnInMachine:
    """Describes the node as the program found it. `gpu_model` is empty where there is no GPU."""

    gpu_model: str = ""
    gpus: int = 0
    driver: str = ""
    torch: str = ""
    cuda: str = ""
    cpu: str = ""
    memlock_bytes: int | None = None
    """The job's limits; -1: no limit, None: not reported."""
    open_files: int | None = None
    shm_bytes: int | None = None

    @property
    def model(self) -> str:
        """Return the model of its GPUs, or of its processors without GPUs."""
        return self.gpu_model or self.cpu or "unknown"


@dataclass(frozen=True)
class BurnInResult:
    """Reports one result of one test."""

    test: str
    item: str
    outcome: str
    value: float | None = None
    unit: str = ""
    digest: str = ""
    basis: str = ""
    detail: str = ""


@dataclass
class ItemSummary:
    """Sums up all results of one test of one item, such as the copy "host to GPU 3". `values` are the newest ones."""

    test: str
    item: str
    unit: str = ""
    basis: str = ""
    count: int = 0
    failures: int = 0
    absences: int = 0
    values: list[float] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    detail: str = ""

    def add(self, result: BurnInResult) -> None:
        self.count += 1
        self.unit, self.basis = result.unit or self.unit, result.basis or self.basis
        if result.outcome == FAILED:
            self.failures += 1
            self.detail = self.detail or result.detail
        elif result.outcome == ABSENT:
            self.absences += 1
        if result.value is not None and result.outcome == PASSED:
            self.values = [*self.values, result.value][-MAX_VALUES:]
        if result.digest and result.digest not in self.digests:
            self.digests = [*self.digests, result.digest][:4]

    @property
    def failure_text(self) -> str:
        """Return the first failure's reason, and how often it failed."""
        times = f" ({self.failures:,} of {self.count:,} times)" if self.count > 1 else ""
        return f"{self.detail.rstrip('.') or 'failed'}{times}"


def parse_line(data: bytes) -> BurnInResult | BurnInMachine | None:
    """Return what one line reports; None for a line that the test program did not write."""
    if len(data) > MAX_LINE:
        return None
    try:
        line = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict):
        return None
    if line.get("test") == FACTS and "gpus" in line:
        return _facts(line)
    return _result(line)


def _result(line: Mapping[str, Any]) -> BurnInResult | None:
    test, item, outcome = line.get("test"), untrusted.name(line.get("item"), MAX_ITEM), line.get("outcome")
    if test not in (*TESTS, FACTS, START, END) or not item or outcome not in (PASSED, FAILED, ABSENT):
        return None
    return BurnInResult(
        test=str(test),
        item=item,
        outcome=str(outcome),
        value=untrusted.number(line.get("value")),
        unit=untrusted.name(line.get("unit"), 16),
        digest=untrusted.matching(_DIGEST, line.get("digest")) or "",
        basis=_mount_basis(line) if test == MOUNT else untrusted.line(line.get("basis"), 300),
        detail=untrusted.line(line.get("detail"), 300),
    )


def _mount_basis(line: Mapping[str, Any]) -> str:
    """Return the mount's type and source, such as "nfs4 filer:/export/data"; "" if the node could not find out."""
    kind = untrusted.matching(_FILE_SYSTEM, line.get("fstype"))
    return f"{kind} {untrusted.line(line.get('source'), 250)}".rstrip() if kind else ""


def _facts(line: Mapping[str, Any]) -> BurnInMachine:
    raw = line["gpus"]
    gpus = [gpu for gpu in raw[:MAX_GPUS] if isinstance(gpu, dict)] if isinstance(raw, list) else []
    models = [untrusted.line(gpu.get("model"), 100) for gpu in gpus]
    return BurnInMachine(
        gpu_model=max(set(models), key=models.count) if models else "",
        gpus=len(gpus),
        driver=untrusted.line(line.get("driver"), 40),
        torch=untrusted.line(line.get("torch"), 40),
        cuda=untrusted.line(line.get("cuda"), 20),
        cpu=untrusted.line(line.get("cpu"), 100),
        memlock_bytes=_limit(line.get("memlock_bytes")),
        open_files=_limit(line.get("open_files")),
        shm_bytes=_limit(line.get("shm_bytes")),
    )


def _limit(value: object) -> int | None:
    return value if type(value) is int and -1 <= value < 2**63 else None
