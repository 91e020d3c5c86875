"""The scheduler that the settings name; they come in as plain values (no Django here)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nodes.schedulers.base import Scheduler, SchedulerError
from nodes.schedulers.local.machine import Gpu, find_gpus
from nodes.schedulers.local.scheduler import LocalScheduler

NAMES = ("local", "slurm")


@dataclass(frozen=True, kw_only=True)
class SchedulerSettings:
    """What a scheduler needs to know of the site. Empty or None: find out."""

    name: str = "local"
    home: Path
    local_user: str = ""
    local_cpus: str = ""
    local_gpus: str = ""
    local_environment: str = ""
    slurm_url: str = ""
    slurm_key_file: str = ""
    slurm_token_command: str = ""
    slurm_user: str = ""
    slurm_ca_file: str = ""


def open_scheduler(settings: SchedulerSettings) -> Scheduler:
    if settings.name == "local":
        return LocalScheduler(
            settings.home / "local-scheduler",
            cpus=_cpus(settings.local_cpus),
            gpus=_gpus(settings.local_gpus),
            user=settings.local_user,
            pass_on=[name for name in settings.local_environment.split(",") if name],
        )
    if settings.name == "slurm":
        return _slurm(settings)
    raise SchedulerError(unknown(settings.name), permanent=True)


def unknown(name: str) -> str:
    return f"VIGIL_SCHEDULER={name} is not known. Set it to {' or '.join(NAMES)}."


def _slurm(settings: SchedulerSettings) -> Scheduler:
    """Nothing is asked yet, and the key is not opened: a web process may hold one of these and never use it."""
    # Not at the top: httpx takes a tenth of a second that a start without Slurm would feel.
    from nodes.schedulers.slurm.http import SlurmHttp
    from nodes.schedulers.slurm.rest import SlurmRest
    from nodes.schedulers.slurm.scheduler import Slurm
    from nodes.schedulers.slurm.tokens import Broker, KeyFile, Tokens

    if not settings.slurm_url:
        message = "VIGIL_SLURM_URL is not set. Write http://host:6820 or unix:/path, where slurmrestd listens."
        raise SchedulerError(message, permanent=True)
    if not settings.slurm_user:
        message = "Nobody to ask Slurm as: set VIGIL_SLURM_USER, or the first sysadmin's Slurm user."
        raise SchedulerError(message, permanent=True)
    tokens: Tokens
    if settings.slurm_token_command:
        tokens = Broker(settings.slurm_token_command)
    elif settings.slurm_key_file:
        tokens = KeyFile(Path(settings.slurm_key_file))
    else:
        message = "Neither VIGIL_SLURM_KEY_FILE nor VIGIL_SLURM_TOKEN_COMMAND is set: Slurm wants tokens."
        raise SchedulerError(message, permanent=True)
    http = SlurmHttp(settings.slurm_url, tokens=tokens, user=settings.slurm_user, ca_file=settings.slurm_ca_file)
    return Slurm(SlurmRest(http), tokens=tokens, user=settings.slurm_user)


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
