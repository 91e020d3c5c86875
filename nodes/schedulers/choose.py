"""Open the scheduler that the settings name. Settings arrive as plain values: no Django here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nodes.schedulers.base import Capabilities, Scheduler, SchedulerError
from nodes.schedulers.local import capabilities as local
from nodes.schedulers.local.machine import LocalGpu, find_gpus
from nodes.schedulers.local.scheduler import LocalScheduler
from nodes.schedulers.slurm import capabilities as slurm

_CAPABILITIES = {"local": local.CAPABILITIES, "slurm": slurm.CAPABILITIES}
NAMES = tuple(_CAPABILITIES)


@dataclass(frozen=True, kw_only=True)
class SchedulerSettings:
    """Configure a scheduler for a site. Empty or None means: detect it."""

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
            inherited=[name for name in settings.local_environment.split(",") if name],
        )
    if settings.name == "slurm":
        return _slurm(settings)
    raise SchedulerError(unknown_scheduler(settings.name), permanent=True)


def capabilities_of(name: str) -> Capabilities:
    """Return what the scheduler of this name can do, without opening it. Raises SchedulerError for an unknown name."""
    if name not in _CAPABILITIES:
        raise SchedulerError(unknown_scheduler(name), permanent=True)
    return _CAPABILITIES[name]


def unknown_scheduler(name: str) -> str:
    return f"VIGIL_SCHEDULER={name} is not supported. Set it to {' or '.join(NAMES)}."


def _slurm(settings: SchedulerSettings) -> Scheduler:
    """Return a Slurm client. It opens no connection and no key until its first call: a web process may never use it."""
    # Not at the top: httpx takes a tenth of a second that a start without Slurm would feel.
    from nodes.schedulers.slurm.http import SlurmHttp
    from nodes.schedulers.slurm.rest import SlurmRest
    from nodes.schedulers.slurm.scheduler import Slurm
    from nodes.schedulers.slurm.tokens import CommandTokens, KeyFileTokens, TokenSource

    if not settings.slurm_url:
        message = "VIGIL_SLURM_URL is not set. Write http://host:6820 or unix:/path, where slurmrestd listens."
        raise SchedulerError(message, permanent=True)
    if not settings.slurm_user:
        message = "No user for Slurm requests. Set VIGIL_SLURM_USER, or the first sysadmin's Slurm user."
        raise SchedulerError(message, permanent=True)
    tokens: TokenSource
    if settings.slurm_token_command:
        tokens = CommandTokens(settings.slurm_token_command)
    elif settings.slurm_key_file:
        tokens = KeyFileTokens(Path(settings.slurm_key_file))
    else:
        message = "Neither VIGIL_SLURM_KEY_FILE nor VIGIL_SLURM_TOKEN_COMMAND is set. Slurm needs tokens: set one."
        raise SchedulerError(message, permanent=True)
    http = SlurmHttp(settings.slurm_url, tokens=tokens, user=settings.slurm_user, ca_file=settings.slurm_ca_file)
    return Slurm(SlurmRest(http), tokens=tokens, user=settings.slurm_user)


def _cpus(text: str) -> int | None:
    """Parse VIGIL_LOCAL_CPUS, the number of CPU slots; more than the machine has oversubscribes it."""
    if not text:
        return None
    if not text.isdecimal() or not 1 <= int(text) <= 100_000:
        raise SchedulerError(f"VIGIL_LOCAL_CPUS={text} is not a number of CPU slots.", permanent=True)
    return int(text)


def _gpus(text: str) -> tuple[LocalGpu, ...]:
    """Parse VIGIL_LOCAL_GPUS: indices to use such as 0,1; "none" uses no GPU; empty uses every GPU."""
    if text == "none":
        return ()
    installed = find_gpus()
    if not text:
        return installed
    chosen = [index.strip() for index in text.split(",")]
    missing = [index for index in chosen if index not in {gpu.index for gpu in installed}]
    if missing:
        message = f"VIGIL_LOCAL_GPUS={text}: this machine has no GPU {', '.join(missing)}."
        raise SchedulerError(message, permanent=True)
    return tuple(gpu for gpu in installed if gpu.index in chosen)
