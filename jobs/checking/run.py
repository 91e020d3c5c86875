"""All checks in the order in which a sysadmin mends things. To add one: write a function, and name it here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from jobs.checking import cluster, conf, rights, runs, settings, slurmrestd, trial
from jobs.checking.finding import Finding, bad, of_error, skip
from jobs.checking.site import Site
from nodes.schedulers.base import SchedulerError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Check:
    """`needs`: others by name, without which it cannot be looked at."""

    name: str
    look: Callable[[Site], Iterable[Finding]]
    needs: tuple[str, ...] = ()


CHECKS = (
    Check("Unix user", settings.identity),
    Check("settings", settings.look),
    Check("key", settings.key, ("settings",)),
    Check("slurmrestd", slurmrestd.reach, ("settings", "key")),
    Check("token", slurmrestd.believed, ("slurmrestd",)),
    Check("forged token", slurmrestd.rejects_forged_tokens, ("token",)),
    Check("version", slurmrestd.speaks, ("token",)),
    Check("clocks", slurmrestd.clocks, ("token",)),
    Check("accounts", rights.accounts, ("token",)),
    Check("rights", rights.level, ("accounts",)),
    Check("people", rights.people, ("token",)),
    Check("projects", rights.projects, ("accounts",)),
    Check("nodes", cluster.nodes, ("token",)),
    Check("partitions", cluster.partitions, ("token",)),
    Check("run root", runs.there),
    Check("run root's mode", runs.mode, ("run root",)),
    Check("run root's group", runs.group, ("run root",)),
    Check("the way to it", runs.ways, ("run root",)),
    Check("access control lists", runs.lists, ("run root",)),
    Check("room", runs.room, ("run root",)),
    Check("Vigil's folder", runs.code),
)


def look(site: Site, wishes: trial.Wishes | None, tell: trial.Tell) -> Iterator[Finding]:
    """Every finding as it is made. `wishes` None: without jobs."""
    failed: set[str] = set()
    jobs = [] if wishes is None else [_jobs(wishes, tell)]
    # slurm.conf last: where this machine cannot tell it, a job's node has.
    for check in (*CHECKS, *jobs, Check("slurm.conf", conf.look, ("settings", "key"))):
        missing = [name for name in check.needs if name in failed]
        if missing:
            failed.add(check.name)
            yield skip(check.name[:1].upper() + check.name[1:], f"not looked at: it needs {missing[0]}")
            continue
        for finding in _safely(check, site):
            if finding.level == "error":
                failed.add(check.name)
            yield finding


def _jobs(wishes: trial.Wishes, tell: trial.Tell) -> Check:
    return Check("jobs", lambda site: trial.look(site, wishes, tell), ("token", "partitions", "run root"))


def _safely(check: Check, site: Site) -> Iterator[Finding]:
    """None hides the others, whatever happens in it."""
    title = check.name[:1].upper() + check.name[1:]
    try:
        yield from check.look(site)
    except (SchedulerError, OSError) as error:
        yield of_error(title, error)
    except Exception as error:
        logger.exception("the check %s failed", check.name)
        yield bad(
            title, f"the check itself failed: {type(error).__name__}", "Please report it, with what the log says."
        )
