"""Which scheduler: by its name in the settings, which come in as plain values (no Django here)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nodes.schedulers.base import Scheduler, SchedulerError
from nodes.schedulers.local import Gpu, LocalScheduler, find_gpus


@dataclass(frozen=True, kw_only=True)
class SchedulerSettings:
    """What a scheduler needs to know of the site. Empty or None: find out."""

    name: str = "local"
    home: Path
    local_user: str = ""
    local_cpus: str = ""
    local_gpus: str = ""
    local_environment: str = ""


def open_scheduler(settings: SchedulerSettings) -> Scheduler:
    if settings.name == "local":
        return LocalScheduler(
            settings.home / "local-scheduler",
            cpus=_cpus(settings.local_cpus),
            gpus=_gpus(settings.local_gpus),
            user=settings.local_user,
            pass_on=[name for name in settings.local_environment.split(",") if name],
        )
    raise SchedulerError(f"VIGIL_SCHEDULER={settings.name} is not known. Set it to local.", permanent=True)


def _cpus(text: str) -> int | None:
    """VIGIL_LOCAL_CPUS: how many CPU slots there are; more than the cores oversubscribes them."""
    if not text:
        return None
    if not text.isdecimal() or not 1 <= int(text) <= 100_000:
        raise SchedulerError(f"VIGIL_LOCAL_CPUS={text} is not a number of CPU slots.", permanent=True)
    return int(text)


def _gpus(text: str) -> tuple[Gpu, ...]:
    """VIGIL_LOCAL_GPUS: the indices to use, such as 0,1; "none" hides them all; empty: every one that there is."""
    if text == "none":
        return ()
    found = find_gpus()
    if not text:
        return found
    chosen = [index.strip() for index in text.split(",")]
    missing = [index for index in chosen if index not in {gpu.index for gpu in found}]
    if missing:
        message = f"VIGIL_LOCAL_GPUS={text}: this machine has no GPU {', '.join(missing)}."
        raise SchedulerError(message, permanent=True)
    return tuple(gpu for gpu in found if gpu.index in chosen)
