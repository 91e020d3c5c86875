"""The trial of an entry in a process of its own, so that no pattern takes more than a few seconds of anybody."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from diagnosis.signatures.entry import FIELDS, Entry
from diagnosis.trial.checks import CPU_SECONDS, Finding, Trial, read

SECONDS = 30.0  # of waiting; the processor's are fewer
AT_ONCE = 2  # in one process that asks
WAIT_S = 10.0  # for a place among those
ROOT = Path(__file__).resolve().parents[1]
_places = threading.BoundedSemaphore(AT_ONCE)


def try_entry(raw: Mapping[str, Any], others: Iterable[Entry] = ()) -> Trial:
    """Try an entry as somebody wrote it, beside the others of the site."""
    glance = Trial()
    if read(raw, glance) is None or not glance.is_fit:  # needs no process to be seen
        return glance
    if not _places.acquire(timeout=WAIT_S):
        return _refused("Others are being tried just now. Try again in a moment.")
    try:
        return _asked({"entry": dict(raw), "others": [plain(other) for other in others]})
    finally:
        _places.release()


def plain(entry: Entry) -> dict[str, Any]:
    """An entry's fields as JSON and TOML have them, without those that say nothing."""
    found = {name: getattr(entry, name) for name in FIELDS}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items() if value}


def _asked(question: dict[str, Any]) -> Trial:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "diagnosis.trial.checks"],
            input=json.dumps(question),
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
            env={"PATH": os.environ.get("PATH", ""), "PYTHONPATH": os.pathsep.join(paths)},
        )
    except subprocess.TimeoutExpired:
        return _refused(f"It was not done within {SECONDS:.0f} s.")
    if done.returncode < 0:
        return _refused(f"It took more than {CPU_SECONDS} s, or more memory than there is for it.")
    try:
        told = json.loads(done.stdout)
        findings = [Finding(**one) for one in told["findings"]]
        return Trial(findings, told["seconds"], told["megabytes"])
    except (ValueError, KeyError, TypeError):
        said = done.stderr.strip().splitlines()
        return _refused(f"It could not be tried: {said[-1][:200] if said else 'nothing was answered'}.")


def _refused(why: str) -> Trial:
    return Trial([Finding("error", "pattern", why)])
