"""Check the settings that Slurm needs, and the key: whatever needs no network access."""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path

from jobs.slurm_check.checked_site import CheckedSite
from jobs.slurm_check.finding import CheckFinding, failed, from_exception, ok, warn
from nodes.schedulers import choose
from nodes.schedulers.base import SchedulerError
from nodes.schedulers.slurm.tokens import TOO_OPEN, KeyFileTokens


def check(site: CheckedSite) -> Iterator[CheckFinding]:
    yield _scheduler(site)
    yield url(site)
    yield tokens(site)
    yield user(site)


def _scheduler(site: CheckedSite) -> CheckFinding:
    title = "VIGIL_SCHEDULER"
    if site.scheduler_name not in choose.NAMES:
        return failed(title, f"{site.scheduler_name}: not known", "Set VIGIL_SCHEDULER=slurm.")
    if choose.capabilities_of(site.scheduler_name).has_slurm_options:
        return ok(title, site.scheduler_name)
    means = "jobs run on this machine"
    return failed(title, f"{site.scheduler_name}: {means}", "Set VIGIL_SCHEDULER=slurm.")


def url(site: CheckedSite) -> CheckFinding:
    title = "Address of slurmrestd"
    if not site.url:
        return failed(
            title,
            "VIGIL_SLURM_URL is not set",
            "Write http://host:6820, https://… or unix:/path, where slurmrestd listens.",
        )
    return ok(title, "VIGIL_SLURM_URL is set" if "@" in site.url else site.url)  # it may contain a password


def tokens(site: CheckedSite) -> CheckFinding:
    title = "Source of tokens"
    if site.token_command and site.key_file:
        detail = "VIGIL_SLURM_TOKEN_COMMAND and VIGIL_SLURM_KEY_FILE are both set; the command is used"
        return warn(title, detail, "Keep one of them.")
    if site.token_command:
        return ok(title, f"VIGIL_SLURM_TOKEN_COMMAND ({site.token_command.split(maxsplit=1)[0]})")
    if site.key_file:
        return ok(title, f"VIGIL_SLURM_KEY_FILE={site.key_file}")
    detail = "neither VIGIL_SLURM_KEY_FILE nor VIGIL_SLURM_TOKEN_COMMAND is set"
    return failed(title, detail, "Set VIGIL_SLURM_KEY_FILE to a copy of slurmctld's jwt_hs256.key.")


def user(site: CheckedSite) -> CheckFinding:
    title = "Vigil's Slurm user"
    if not site.user:
        return failed(title, "nobody", "Set VIGIL_SLURM_USER to the portal's own Slurm user, as vigil.")
    return ok(title, site.user)


def key(site: CheckedSite) -> Iterator[CheckFinding]:
    """Check the key file: anybody who reads the key can act as every user of the cluster."""
    title = "The key"
    if site.token_command:
        yield _from_command(site)
        return
    path = Path(site.key_file)
    try:
        KeyFileTokens(path).token_for("nobody")  # reads it as the worker does
        status = path.stat()
    except SchedulerError as error:
        yield from_exception(title, SchedulerError(f"{path}: {error}"))
        return
    mode, owner = stat.S_IMODE(status.st_mode), _name(status.st_uid)
    if status.st_uid not in {os.geteuid(), 0}:
        detail = f"{path} belongs to {owner}, who can change it"
        yield warn(title, detail, f"chown {_name(os.geteuid())} {path}; chmod 0600 {path}")
    else:
        yield ok(title, f"{path}, mode {mode:04o}, of {owner}")


def key_mode(site: CheckedSite) -> CheckFinding | None:
    """Return what is wrong with the key file's mode, without opening it; None if nothing can be seen from here."""
    path = Path(site.key_file)
    try:
        mode = path.stat().st_mode
    except PermissionError:
        return None  # as in a web process with less rights than the worker
    except OSError as error:
        detail = f"VIGIL_SLURM_KEY_FILE={path} cannot be found: {error.strerror}"
        return warn("The key", detail, "Put a copy of slurmctld's jwt_hs256.key there, for the worker's user alone.")
    if mode & TOO_OPEN:
        detail = f"the Slurm key {path} is open to others (mode {stat.S_IMODE(mode):04o}), so it is not used"
        return warn("The key", detail, f"chmod 0600 {path}")
    return None


def identity(site: CheckedSite) -> Iterator[CheckFinding]:
    """Check that this runs as the owner of VIGIL_HOME, the worker's user: as another one, file checks prove nothing."""
    title, me = "Runs as", _name(os.geteuid())
    owner = site.home.stat().st_uid
    if owner != os.geteuid():
        detail = f"{me}, but {site.home} belongs to {_name(owner)}"
        yield failed(title, detail, f"Run it as the worker's Unix user: sudo -u {_name(owner)} vigil check slurm")
    elif os.geteuid() == 0:
        remedy = "Give Vigil a Unix user of its own other than root: docs/how-to/slurm.md."
        yield warn(title, "root: any bug of the portal would act with root's permissions", remedy)
    else:
        yield ok(title, f"{me}, the owner of {site.home}")


def _from_command(site: CheckedSite) -> CheckFinding:
    title = "The token command"
    try:
        site.make_tokens().token_for(site.user)
    except SchedulerError as error:
        return from_exception(title, error, "Run it by hand as this user; it must print a token and nothing else.")
    return ok(title, f"prints a token for {site.user}")


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
