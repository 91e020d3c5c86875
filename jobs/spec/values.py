"""Check single values of a specification; each error states what to write instead."""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import PurePosixPath

from vigil_core import duration

STOP_SECONDS = 30  # what stopping needs at least, before a write of this job was measured (protocols.md §2)
_LIMIT = re.compile(r"(?:(?P<days>\d{1,3})-)?(?P<hours>\d{1,4}):(?P<minutes>[0-5]\d):(?P<seconds>[0-5]\d)\Z")
_NODES = re.compile(r"(\d{1,5}):(\d{1,5})\Z")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}\Z")
_REF = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/@^~+-]{0,199}\Z")
_SECRET = re.compile(r"https://[^/]*@|ssh://[^/@]*:[^/]*@")
_GIT = re.compile(r"(?:https://|ssh://)[A-Za-z0-9][\w.@:~/+%-]{2,500}\Z")
# Set by the launcher for every rank: a spec that sets them would break the run in strange ways.
_LAUNCHER_VARIABLES = {
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
}
_LOADER = {"LD_PRELOAD", "LD_AUDIT", "BASH_ENV", "ENV", "PYTHONSTARTUP"}


def seconds_of(limit: str) -> int:
    """Return the seconds of "HH:MM:SS" or "D-HH:MM:SS"."""
    match = _LIMIT.match(limit)
    if not match:
        raise ValueError(f'"{limit}" is not a time limit. Write {_suggest_limit(limit)}.')
    days, hours, minutes, seconds = (int(part or 0) for part in match.group("days", "hours", "minutes", "seconds"))
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def limit_of(seconds: int) -> str:
    """Return "HH:MM:SS", or "D-HH:MM:SS" from a day on."""
    days, rest = divmod(seconds, 86_400)
    clock = f"{rest // 3600:02}:{rest % 3600 // 60:02}:{rest % 60:02}"
    return f"{days}-{clock}" if days else clock


def _suggest_limit(text: str) -> str:
    """Return what the person may have meant: 12:00:00 for "12 hours", 01:30:00 for "90" (minutes, as in Slurm)."""
    found = re.findall(r"(\d{1,5})\s*([dhms])", text.lower())
    seconds = sum(int(number) * duration.UNITS[unit] for number, unit in found)
    if not found and text.strip().isdigit() and len(text.strip()) < 7:
        seconds = int(text) * 60
    return limit_of(seconds) if seconds else "HH:MM:SS, such as 12:00:00, or 2-00:00:00 for two days"


def time_limit(value: str) -> str:
    seconds = seconds_of(value)
    if seconds <= STOP_SECONDS:
        raise ValueError(
            f"{value} leaves no time to run: stopping with a last checkpoint alone needs {STOP_SECONDS} s."
            f" Write at least {limit_of(60)}."
        )
    return value


def nodes(value: object) -> object:
    if isinstance(value, str):
        match = _NODES.match(value)
        if not match:
            raise ValueError(f'"{value}" is not a number of nodes. Write 2, or "2:4" for two to four.')
        low, high = int(match[1]), int(match[2])
        if not 1 <= low <= high:
            raise ValueError(f'"{value}": the first number must be at least 1 and not above the second.')
    elif isinstance(value, int) and not isinstance(value, bool) and not 1 <= value <= 10_000:
        raise ValueError(f"{value} is not a number of nodes: at least 1, at most 10,000.")
    return value


def name(value: str) -> str:
    if not _NAME.match(value) or ".." in value:
        raise ValueError(
            f'"{value[:80]}" is not a valid name. Use letters, digits, dots, dashes and underscores,'
            " at most 64, beginning with a letter or a digit."
        )
    return value


def entry(value: str) -> str:
    path = PurePosixPath(value)
    if not value or path.is_absolute() or ".." in path.parts or "\\" in value or not value.isprintable():
        raise ValueError(f'"{value[:80]}" must be a file inside the directory, written like train.py or src/train.py.')
    return str(path)


def python(value: str) -> str:
    if value and (not PurePosixPath(value).is_absolute() or not value.isprintable()):
        raise ValueError(
            f'"{value[:80]}" must be the absolute path of an interpreter or a virtual environment, such as'
            " /home/me/.venv/bin/python; leave it empty for the portal's own."
        )
    return value


def git(value: str) -> str:
    if value and not _GIT.match(value):
        raise ValueError(f'"{value[:80]}" cannot be fetched. Write an https:// or ssh:// address of a repository.')
    if _SECRET.match(value):
        raise ValueError(
            "The address contains a password or a token that everybody in the project could read. Remove it: git asks"
            " your credential helper where the job runs, or write ssh://."
        )
    return value


def ref(value: str) -> str:
    if value and (not _REF.match(value) or ".." in value):
        raise ValueError(f'"{value[:80]}" is not a valid ref. Write a branch, a tag or a commit, such as main.')
    return value


def environment(value: dict[str, str]) -> dict[str, str]:
    for name, text in value.items():
        if not _VARIABLE.match(name):
            raise ValueError(f'"{name[:80]}" is not a valid variable name. Use letters, digits and underscores.')
        if name in _LAUNCHER_VARIABLES or name in _LOADER or name.startswith(("VIGIL_", "SLURM_", "TORCHELASTIC_")):
            raise ValueError(f"{name} is set by Vigil or the scheduler. Remove it.")
        if "\0" in text:
            raise ValueError(f"{name} contains a zero byte. Remove it.")
    return value


def tags(value: list[str]) -> list[str]:
    for tag in value:
        if not re.match(r"[\w.:/+-]{1,64}\Z", tag):
            raise ValueError(f'"{tag[:80]}" is not a valid tag. Use letters, digits and . _ : / + -, at most 64.')
    return list(dict.fromkeys(value))


def moment(value: object) -> object:
    """Return TOML's own date and time as the text that it is."""
    return value.isoformat() if isinstance(value, datetime) else value


def after(value: list[int]) -> list[int]:
    for number in value:
        if not 1 <= number < 2**63:
            raise ValueError(f"{number} is not a job. Write job numbers, like after = [12, 15].")
    return list(dict.fromkeys(value))
