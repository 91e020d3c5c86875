"""Check at start for what would make a site misbehave later, and say how to fix it.

`manage.py prepare` (and so `vigil up` and every container) runs the checks tagged `vigil`; `manage.py check --deploy`
runs all.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from django.apps import AppConfig
from django.conf import settings
from django.core.checks import CheckMessage, Error, Warning, register

from jobs.disk import rundir, sharing
from jobs.errors import SpecError
from jobs.spec import restarts
from nodes import software_inventory
from nodes.telemetry import exporters
from portal.run import redis
from portal.run.file_systems import NETWORK_FILE_SYSTEMS, file_system
from vigil_core import formatting, installation

TAG = "vigil"
ROOM_BYTES = 2 * 1024**3


@register(TAG)
def database_is_local(app_configs: Sequence[AppConfig] | None, **_: Any) -> list[CheckMessage]:
    """Refuse SQLite on a network file system: its locks do not work across machines, which corrupts it."""
    database = settings.DATABASES["default"]
    if not str(database["ENGINE"]).endswith("sqlite3"):
        return []
    kind = file_system(Path(str(database["NAME"])).parent)
    if kind not in NETWORK_FILE_SYSTEMS:
        return []
    hint = "Put VIGIL_HOME on a local disk (VIGIL_RUNS may stay on the shared one), or use PostgreSQL: DATABASE_URL."
    return [Error(f"SQLite cannot be used on {kind} ({database['NAME']}).", hint=hint, id="vigil.E001")]


@register(TAG)
def runs_can_be_written(app_configs: Sequence[AppConfig] | None, **_: Any) -> list[CheckMessage]:
    """Check that run directories can be created, and that nobody outside the group can read them."""
    runs: Path = settings.VIGIL_RUNS
    try:
        rundir.open_root()
    except OSError as error:
        if error.errno == errno.ENOTCONN:
            hint = "Mount its file system, or create it. Jobs wait until then."
            return [Warning(f"{runs} does not exist.", hint=hint, id="vigil.W004")]
        return [Error(f"{runs} cannot be created: {error.strerror}.", hint="Set VIGIL_RUNS.", id="vigil.E002")]
    if not os.access(runs, os.W_OK | os.X_OK):
        hint = "Change its owner to the user that runs Vigil, or set VIGIL_RUNS."
        return [Error(f"{runs} is not writable.", hint=hint, id="vigil.E002")]
    found: list[CheckMessage] = []
    if runs.stat().st_mode & stat.S_IRWXO:
        found.append(Warning(f"Everybody on this machine can read {runs}.", hint=f"chmod o= {runs}", id="vigil.W001"))
    if _runs_are_shared() and not sharing.is_possible(runs):
        hint = "Mount it with POSIX ACLs (ext4, XFS, Lustre and NFS 3 support them), or set VIGIL_RUNS to one that has."
        message = f"The file system of {runs} has no access control lists: jobs of other Unix users are refused."
        found.append(Warning(message, hint=hint, id="vigil.W005"))
    free = shutil.disk_usage(runs).free
    if free < ROOM_BYTES:
        room = formatting.plain_spaces(formatting.disk(free))
        hint = "Delete jobs that are no longer needed, or move VIGIL_RUNS to a larger disk."
        found.append(Warning(f"Only {room} are free on the disk of {runs}.", hint=hint, id="vigil.W002"))
    return found


@register(TAG)
def home_is_closed(app_configs: Sequence[AppConfig] | None, **_: Any) -> list[CheckMessage]:
    """Check that others cannot enter VIGIL_HOME: it holds password hashes and the key that signs sessions.

    Vigil creates it closed; a folder that existed before keeps its mode.
    """
    home: Path = settings.VIGIL_HOME
    if not home.stat().st_mode & stat.S_IRWXO:
        return []
    message, hint = f"Everybody on this machine can enter {home}.", f"chmod o= {home}"
    if settings.VIGIL_LOCAL_USER:
        return [
            Error(f"{message} So can everybody's jobs, as {settings.VIGIL_LOCAL_USER}.", hint=hint, id="vigil.E007")
        ]
    return [Warning(message, hint=hint, id="vigil.W007")]


def _runs_are_shared() -> bool:
    """Return whether jobs run as other Unix users than the portal."""
    from nodes.cluster.sync import unix_user
    from nodes.schedulers import choose

    return settings.VIGIL_SCHEDULER not in choose.NAMES or bool(unix_user("anybody"))


@register(TAG)
def scheduler_is_supported(app_configs: Sequence[AppConfig] | None, **_: Any) -> list[CheckMessage]:
    """Refuse an unknown scheduler: the portal would start, but run no job."""
    from nodes.schedulers import choose

    name = settings.VIGIL_SCHEDULER
    return [] if name in choose.NAMES else [Error(choose.unknown_scheduler(name), id="vigil.E006")]


def _has_capability(name: str) -> bool:
    """Return whether the scheduler has a capability; False for an unknown scheduler, which its own check reports."""
    from nodes.schedulers import choose

    is_known = settings.VIGIL_SCHEDULER in choose.NAMES
    return is_known and bool(getattr(choose.capabilities_of(settings.VIGIL_SCHEDULER), name))


@register(TAG)
def slurm_is_configured(app_configs: Sequence[AppConfig] | None, **_: Any) -> list[CheckMessage]:
    """Check the settings that Slurm needs, without contacting it. `vigil check slurm` tests everything."""
    if not _has_capability("is_remote"):
        return []
    from jobs.slurm_check import local_site
    from jobs.slurm_check import settings as slurm_settings

    site = local_site.settings_only()
    found = [finding for finding in (slurm_settings.url(site), slurm_settings.tokens(site)) if finding.level == "error"]
    if found:
        message = " ".join(f"{finding.detail}. {finding.remedy}" for finding in found)
        return [Error(f"VIGIL_SCHEDULER=slurm, and {message}", id="vigil.E005")]
    mentioned = slurm_settings.key_mode(site) if site.key_file and not site.token_command else None
    if mentioned is None:
        return []
    return [Warning(f"{mentioned.detail[:1].upper()}{mentioned.detail[1:]}.", hint=mentioned.remedy, id="vigil.W006")]


@register(TAG)
def exporters_are_valid(app_configs: Sequence[AppConfig] | None, **_: Any) -> list[CheckMessage]:
    """Refuse malformed exporter settings: nodes would go unmonitored, and only the worker's log would say so."""
    try:
        exporters.exporters(settings.VIGIL_DCGM_EXPORTERS)
    except ValueError as error:
        hint = "Write each as NODE=http://HOST:9400/metrics, separated by commas, or one per line in @FILE."
        return [Error(f"VIGIL_DCGM_EXPORTERS: {error}", hint=hint, id="vigil.E008")]
    return []


@register(TAG)
def minimum_versions_are_valid(app_configs: Sequence[AppConfig] | None, **_: Any) -> list[CheckMessage]:
    """Warn of minimum versions that cannot be read: the portal works, but ignores them."""
    problem = software_inventory.site_minimums()[1]
    if not problem:
        return []
    hint = "docs/reference/inventory.md describes the file. Until then only the minimums that ship with Vigil count."
    return [Warning(f"VIGIL_MINIMUM_VERSIONS: {problem}", hint=hint, id="vigil.W010")]


@register(TAG)
def people_can_sign_in(app_configs: Sequence[AppConfig] | None, **_: Any) -> list[CheckMessage]:
    """Refuse a public URL without TLS: beyond loopback, cookies are only sent over TLS."""
    url = urlsplit(settings.VIGIL_PUBLIC_URL)
    if settings.ON_LOOPBACK or url.scheme == "https":
        return []
    hint = "Put a TLS proxy in front of it and set VIGIL_PUBLIC_URL=https://… and VIGIL_BEHIND_PROXY=1."
    message = f"Nobody can sign in at {settings.VIGIL_PUBLIC_URL}: its cookies are only sent over https."
    return [Error(message, hint=hint, id="vigil.E003")]


@register(TAG)
def restart_rules_are_valid(app_configs: Sequence[AppConfig] | None, **_: Any) -> list[CheckMessage]:
    """Check VIGIL_RESTART_ON at start; it is parsed again at each failure, where an error would go unnoticed."""
    try:
        restarts.parse_toml(settings.VIGIL_RESTART_ON)
    except SpecError as error:
        hint = 'Write lines such as "gpu.*" = "restart" (docs/reference/jobspec.md).'
        return [Error(f"VIGIL_RESTART_ON is invalid: {error}", hint=hint, id="vigil.E009")]
    return []


@register(TAG)
def trainer_is_installed(app_configs: Sequence[AppConfig] | None, **_: Any) -> list[CheckMessage]:
    """Warn if torch is missing: jobs of the local scheduler run in this environment by default. Never imports it."""
    if not _has_capability("runs_jobs_here") or "VIGIL_JOB_PYTHON" in os.environ or importlib.util.find_spec("torch"):
        return []
    install = "Run `make run` again" if installation.IS_CHECKOUT else "Install it next to Vigil: pip install torch"
    hint = f"{install}; or name a Python that has it in VIGIL_JOB_PYTHON; or use Slurm."
    return [Warning("torch is not installed: jobs on this machine will fail.", hint=hint, id="vigil.W003")]


@register(TAG, deploy=True)
def redis_answers(app_configs: Sequence[AppConfig] | None, **_: Any) -> list[CheckMessage]:
    if problem := redis.url_answers(settings.REDIS_URL):
        hint = "Start it (`vigil up` starts a private one), or set REDIS_URL."
        return [Error(f"Redis does not answer: {problem}.", hint=hint, id="vigil.E004")]
    return []
