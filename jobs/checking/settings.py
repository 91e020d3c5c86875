"""The settings that Slurm needs, and the key: what can be told without asking anybody."""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path

from jobs.checking.finding import Finding, bad, of_error, ok, warn
from jobs.checking.site import Site
from nodes.schedulers import choose
from nodes.schedulers.base import SchedulerError
from nodes.schedulers.slurm.tokens import TOO_OPEN, KeyFileTokens


def look(site: Site) -> Iterator[Finding]:
    yield _scheduler(site)
    yield url(site)
    yield tokens(site)
    yield user(site)


def _scheduler(site: Site) -> Finding:
    title = "VIGIL_SCHEDULER"
    if site.scheduler_name not in choose.NAMES:
        return bad(title, f"{site.scheduler_name}: not known", "Set VIGIL_SCHEDULER=slurm.")
    if choose.capabilities_of(site.scheduler_name).has_slurm_options:
        return ok(title, site.scheduler_name)
    means = "jobs run on this machine"
    return bad(title, f"{site.scheduler_name}: {means}", "Set VIGIL_SCHEDULER=slurm.")


def url(site: Site) -> Finding:
    title = "Where slurmrestd is"
    if not site.url:
        return bad(
            title,
            "VIGIL_SLURM_URL is not set",
            "Write http://host:6820, https://… or unix:/path, where slurmrestd listens.",
        )
    return ok(title, "VIGIL_SLURM_URL is set" if "@" in site.url else site.url)  # it may hold a password


def tokens(site: Site) -> Finding:
    title = "Where tokens come from"
    if site.token_command and site.key_file:
        detail = "VIGIL_SLURM_TOKEN_COMMAND and VIGIL_SLURM_KEY_FILE are both set; the command is used"
        return warn(title, detail, "Keep one of them.")
    if site.token_command:
        return ok(title, f"VIGIL_SLURM_TOKEN_COMMAND ({site.token_command.split(maxsplit=1)[0]})")
    if site.key_file:
        return ok(title, f"VIGIL_SLURM_KEY_FILE={site.key_file}")
    detail = "neither VIGIL_SLURM_KEY_FILE nor VIGIL_SLURM_TOKEN_COMMAND is set"
    return bad(title, detail, "Set VIGIL_SLURM_KEY_FILE to a copy of slurmctld's jwt_hs256.key.")


def user(site: Site) -> Finding:
    title = "Who asks Slurm"
    if not site.user:
        return bad(title, "nobody", "Set VIGIL_SLURM_USER to the portal's own Slurm user, as vigil.")
    return ok(title, site.user)


def key(site: Site) -> Iterator[Finding]:
    """Whoever reads the key is every user of the cluster."""
    title = "The key"
    if site.token_command:
        yield _from_command(site)
        return
    path = Path(site.key_file)
    try:
        KeyFileTokens(path).token_for("nobody")  # reads it as the worker does
        found = path.stat()
    except SchedulerError as error:
        yield of_error(title, SchedulerError(f"{path}: {error}"))
        return
    mode, owner = stat.S_IMODE(found.st_mode), _name(found.st_uid)
    if found.st_uid not in {os.geteuid(), 0}:
        detail = f"{path} belongs to {owner}, who can change it"
        yield warn(title, detail, f"chown {_name(os.geteuid())} {path}; chmod 0600 {path}")
    else:
        yield ok(title, f"{path}, mode {mode:04o}, of {owner}")


def key_mode(site: Site) -> Finding | None:
    """What is wrong with the key file by its mode alone: it is not opened. None: nothing that can be seen from here."""
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


def identity(site: Site) -> Iterator[Finding]:
    """The worker's user is the one who owns VIGIL_HOME; as another one, the files would prove nothing."""
    title, me = "Runs as", _name(os.geteuid())
    owner = site.home.stat().st_uid
    if owner != os.geteuid():
        detail = f"{me}, but {site.home} belongs to {_name(owner)}"
        yield bad(title, detail, f"Run it as the worker's Unix user: sudo -u {_name(owner)} vigil check slurm")
    elif os.geteuid() == 0:
        remedy = "Give Vigil a Unix user of its own, who is no root: docs/slurm.md."
        yield warn(title, "root: a mistake of the portal's is one of root's", remedy)
    else:
        yield ok(title, f"{me}, the owner of {site.home}")


def _from_command(site: Site) -> Finding:
    title = "The token command"
    try:
        site.own_tokens().token_for(site.user)
    except SchedulerError as error:
        return of_error(title, error, "Run it by hand as this user; it prints a token and nothing else.")
    return ok(title, f"prints a token for {site.user}")


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
