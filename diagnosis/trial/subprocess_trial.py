"""Try an entry in a separate process, so that no pattern takes more than a few seconds of anybody's time."""

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
from diagnosis.trial.checks import CPU_SECONDS, EntryTrial, TrialFinding, check_fields

SECONDS = 30.0  # of waiting; CPU time is limited further
MAX_CONCURRENT = 2  # per process
WAIT_S = 10.0  # for a free place
ROOT = Path(__file__).resolve().parents[2]
"""The folder from which the packages are imported."""
_slots = threading.BoundedSemaphore(MAX_CONCURRENT)


def try_entry(raw: Mapping[str, Any], others: Iterable[Entry] = ()) -> EntryTrial:
    """Try an entry as somebody wrote it, alongside the site's other entries.

    Blocks for at most `WAIT_S + SECONDS`; a trial that finds no place or does not end in time is returned with an
    error.
    """
    glance = EntryTrial()
    if check_fields(raw, glance) is None or not glance.is_fit:  # no process needed
        return glance
    if not _slots.acquire(timeout=WAIT_S):
        return _rejected("Other entries are being tried. Try again in a moment.")
    try:
        return _run({"entry": dict(raw), "others": [entry_as_json(other) for other in others]})
    finally:
        _slots.release()


def entry_as_json(entry: Entry) -> dict[str, Any]:
    """Return an entry's fields as JSON and TOML have them, without empty ones."""
    found = {name: getattr(entry, name) for name in FIELDS}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items() if value}


def _run(request: dict[str, Any]) -> EntryTrial:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "diagnosis.trial.checks"],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
            env={"PATH": os.environ.get("PATH", ""), "PYTHONPATH": os.pathsep.join(paths)},
        )
    except subprocess.TimeoutExpired:
        return _rejected(f"Not finished within {SECONDS:.0f} s.")
    if done.returncode < 0:
        return _rejected(f"It took more than {CPU_SECONDS} s of CPU time, or too much memory.")
    try:
        answer = json.loads(done.stdout)
        findings = [TrialFinding(**finding) for finding in answer["findings"]]
        return EntryTrial(findings, answer["seconds"], answer["megabytes"])
    except (ValueError, KeyError, TypeError):
        error_lines = done.stderr.strip().splitlines()
        return _rejected(f"It could not be tried: {error_lines[-1][:200] if error_lines else 'no answer'}.")


def _rejected(why: str) -> EntryTrial:
    return EntryTrial([TrialFinding("error", "pattern", why)])
