"""Run all checks in the order in which a sysadmin fixes things. To add one, write a function and name it here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from jobs.slurm_check import cluster, conf, rights, run_root, settings, slurmrestd, trial
from jobs.slurm_check.checked_site import CheckedSite
from jobs.slurm_check.finding import CheckFinding, failed, from_exception, skip
from nodes.schedulers.base import SchedulerError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SiteCheck:
    """A check by name. `needs`: names of checks that must pass first."""

    name: str
    run: Callable[[CheckedSite], Iterable[CheckFinding]]
    needs: tuple[str, ...] = ()


CHECKS = (
    SiteCheck("Unix user", settings.identity),
    SiteCheck("settings", settings.check),
    SiteCheck("key", settings.key, ("settings",)),
    SiteCheck("slurmrestd", slurmrestd.reach, ("settings", "key")),
    SiteCheck("token", slurmrestd.accepts_token, ("slurmrestd",)),
    SiteCheck("forged token", slurmrestd.refuses_forged_token, ("token",)),
    SiteCheck("version", slurmrestd.supports, ("token",)),
    SiteCheck("clocks", slurmrestd.clocks, ("token",)),
    SiteCheck("accounts", rights.accounts, ("token",)),
    SiteCheck("rights", rights.level, ("accounts",)),
    SiteCheck("people", rights.people, ("token",)),
    SiteCheck("projects", rights.projects, ("accounts",)),
    SiteCheck("nodes", cluster.nodes, ("token",)),
    SiteCheck("partitions", cluster.partitions, ("token",)),
    SiteCheck("VIGIL_RUNS", run_root.exists),
    SiteCheck("VIGIL_RUNS: mode", run_root.mode, ("VIGIL_RUNS",)),
    SiteCheck("VIGIL_RUNS: group", run_root.group, ("VIGIL_RUNS",)),
    SiteCheck("VIGIL_RUNS: parent folders", run_root.path, ("VIGIL_RUNS",)),
    SiteCheck("access control lists", run_root.lists, ("VIGIL_RUNS",)),
    SiteCheck("VIGIL_RUNS: free space", run_root.room, ("VIGIL_RUNS",)),
    SiteCheck("Vigil's folder", run_root.code),
)


def run_checks(
    site: CheckedSite, options: trial.TrialOptions | None, report: trial.ProgressReporter
) -> Iterator[CheckFinding]:
    """Yield every finding as it is made. Without `options` no trial jobs are submitted."""
    unmet: set[str] = set()
    jobs = [] if options is None else [_jobs(options, report)]
    # slurm.conf comes last: if this machine cannot read it, a trial job's node has.
    for check in (*CHECKS, *jobs, SiteCheck("slurm.conf", conf.check, ("settings", "key"))):
        missing = [name for name in check.needs if name in unmet]
        if missing:
            unmet.add(check.name)
            yield skip(check.name[:1].upper() + check.name[1:], f"not checked: it needs {missing[0]}")
            continue
        for finding in _run_safely(check, site):
            if finding.level == "error":
                unmet.add(check.name)
            yield finding


def _jobs(options: trial.TrialOptions, report: trial.ProgressReporter) -> SiteCheck:
    return SiteCheck(
        "jobs", lambda site: trial.run_trials(site, options, report), ("token", "partitions", "VIGIL_RUNS")
    )


def _run_safely(check: SiteCheck, site: CheckedSite) -> Iterator[CheckFinding]:
    """Run a check so that its failure does not hide the others."""
    title = check.name[:1].upper() + check.name[1:]
    try:
        yield from check.run(site)
    except (SchedulerError, OSError) as error:
        yield from_exception(title, error)
    except Exception as error:
        logger.exception("the check %s failed", check.name)
        yield failed(
            title, f"the check itself failed: {type(error).__name__}", "Please report it, with what the log says."
        )
