"""Find or create the attempt's folder: one per (scheduler id, restart count), whichever node creates it."""

from __future__ import annotations

import errno
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from training.attempt.files import read_json, write_json
from training.attempt.workspace import FOLDER
from training.launch.plan import LaunchPlan

CHECKPOINT = re.compile(r"step-\d{1,18}(\.g\d{1,9})?")
TAKEN = frozenset({errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR})
SUBFOLDERS = ("spool", "logs", "flight", "stacks", "members", "heartbeat")


@dataclass(frozen=True)
class Attempt:
    """The folder of one (scheduler id, restart count).

    `resume`: the checkpoint a person chose for this attempt, or "".
    """

    folder: Path
    number: int
    resume: str = ""


def take_attempt(plan: LaunchPlan) -> Attempt:
    """Return the attempt that already has a folder, or create the next one.

    Another node or an earlier launcher may have made the folder. It is created exclusively, so that all nodes of one
    launch agree on its number.
    """
    owner = {"scheduler_id": plan.scheduler_id, "restart_count": plan.restart_count}
    hint = read_json(plan.run_dir / "portal" / "attempt.json") or {}
    hinted = hint.get("number")
    wanted = hinted if type(hinted) is int and hinted > 0 else 0
    while True:
        folders = _folders(plan.job_dir)
        existing = next((number for number, folder in folders.items() if _owned(folder, owner)), None)
        number = existing or (wanted if wanted and wanted not in folders else max([wanted, *folders], default=0) + 1)
        if existing or _make(plan.job_dir / f"attempt-{number}", owner):
            chosen = hint.get("resume") if number == wanted else None
            resume = chosen if isinstance(chosen, str) and CHECKPOINT.fullmatch(chosen) else ""
            return Attempt(plan.job_dir / f"attempt-{number}", number, resume)


def _folders(job_dir: Path) -> dict[int, Path]:
    with os.scandir(job_dir) as entries:
        return {int(m[1]): Path(entry.path) for entry in entries if (m := FOLDER.fullmatch(entry.name))}


def _owned(folder: Path, owner: dict[str, object]) -> bool:
    return read_json(folder / "owner.json") == owner


def _make(folder: Path, owner: dict[str, object]) -> bool:
    """Create the folder with its owner file inside; return False if it already exists.

    A folder that is prepared aside and renamed appears complete; the rename fails where a folder, never empty, exists.
    """
    staging = folder.with_name(f".{folder.name}.{os.urandom(4).hex()}")
    for part in SUBFOLDERS:
        (staging / part).mkdir(parents=True)
    write_json(staging / "owner.json", owner, durable=True)
    try:
        os.rename(staging, folder)
    except OSError as error:
        shutil.rmtree(staging, ignore_errors=True)
        if error.errno not in TAKEN:
            raise
        return False
    return True
