"""Check what Slurm permits Vigil and people to do: see jobs, drain nodes, compute for an account."""

from __future__ import annotations

import pwd
from collections.abc import Iterator

from jobs.slurm_check.checked_site import CheckedSite, Submitter
from jobs.slurm_check.finding import CheckFinding, failed, from_exception, ok, skip, warn
from nodes.schedulers.base import SchedulerError
from nodes.schedulers.slurm.http import SlurmUnreachable

MAX_PEOPLE = 200  # whose tokens are tried


def accounts(site: CheckedSite) -> Iterator[CheckFinding]:
    title = "Accounting responds (slurmdbd)"
    if not site.rest.has_accounting:
        remedy = "Start slurmrestd with accounting: without -s, or with -s slurmctld,slurmdbd."
        yield failed(title, "this slurmrestd does not serve accounting", remedy)
        return
    try:
        listed = site.accounts
    except SchedulerError as error:
        remedy = "Is slurmdbd up, with AuthAltTypes=auth/jwt and the same key in slurmdbd.conf? See its log."
        yield from_exception(title, error, remedy)
        return
    people = {association.user for association in listed.associations if association.user}
    yield ok(
        title,
        f"{len(people)} people, {len({a.account for a in listed.associations})} accounts, {len(listed.qos)} QOS",
    )


def level(site: CheckedSite) -> Iterator[CheckFinding]:
    """Check the level of Vigil's Slurm user: an administrator sees everything and may drain.

    An operator may not drain.
    """
    title = f"{site.user} may drain nodes"
    grant = f"sacctmgr modify user {site.user} set AdminLevel=Admin"
    if not site.admin_level:
        remedy = f"sacctmgr add user {site.user} account=root AdminLevel=Admin, or correct VIGIL_SLURM_USER."
        yield failed(title, f"Slurm's accounting has no user {site.user}", remedy)
    elif site.admin_level.startswith("admin"):
        yield ok(title, "AdminLevel=Administrator")
    else:
        yield warn(title, f"AdminLevel={site.admin_level.capitalize()}: drain and undrain are refused", grant)
    yield from _sees_all_jobs(site, grant)


def _sees_all_jobs(site: CheckedSite, grant: str) -> Iterator[CheckFinding]:
    title = f"{site.user} sees everybody's jobs"
    if site.admin_level.startswith(("admin", "operator")):
        yield ok(title, f"AdminLevel={site.admin_level.capitalize()}")
        return
    try:
        private = site.conf.get("PrivateData", "")
    except SchedulerError as error:
        others = {job.user for job in site.scheduler.queue()} - {site.user, ""}
        if others:
            yield ok(title, f"it sees jobs of {len(others)} other users")
        else:
            yield skip(title, str(error).partition(". ")[0], f"If slurm.conf has PrivateData=jobs: {grant}")
        return
    if {"jobs", "all"} & set(private.split(",")):
        yield failed(title, f"PrivateData={private} hides them", grant)
    else:
        yield ok(title, f"PrivateData={private or 'none'}")


def people(site: CheckedSite) -> Iterator[CheckFinding]:
    """Check everybody who may submit here: known to this machine and to accounting, and accepted by Slurm."""
    title = "People"
    if site.people is None:
        yield skip(
            title,
            "Vigil has not been started here yet, so no people are known",
            "Start it once (vigil up), then check again.",
        )
        return
    if not site.people and not site.without_project:
        remedy = "Set people's Slurm users in the administration, under People: a person without one cannot submit."
        yield warn(title, "nobody has a Slurm user yet", remedy)
        return
    usable_count = 0
    users = sorted({*site.without_project, *(submitter.slurm_user for submitter in site.people)})
    for user in users[:MAX_PEOPLE]:
        problems = list(_person(site, user))
        yield from problems
        usable_count += not problems
    if usable_count:
        named = ", ".join(users[:5]) + (" …" if len(users) > 5 else "")
        count = f"{usable_count} of" if usable_count < len(users) else "all"
        yield ok(title, f"{count} {len(users)} with a Slurm user can compute: {named}")


def _person(site: CheckedSite, user: str) -> Iterator[CheckFinding]:
    title = f"Person {user}"
    try:
        pwd.getpwnam(user)
    except KeyError:
        remedy = "Give the portal's machine the nodes' users (sssd, LDAP), or correct the Slurm user under People."
        yield failed(title, "this machine has no such Unix user, so no run directory can be shared with them", remedy)
    yield from _associations(site, user)
    try:
        site.rest.http.get("diag", user=user)
    except SlurmUnreachable:
        raise
    except SchedulerError as error:
        yield from_exception(title, error, "Does this user exist on slurmctld's machine?")


def _associations(site: CheckedSite, user: str) -> Iterator[CheckFinding]:
    title = f"Person {user}"
    try:
        accounts = {association.account for association in site.accounts.associations if association.user == user}
    except SchedulerError:  # reported by another check
        return
    projects = [submitter for submitter in site.people or () if submitter.slurm_user == user]
    if not accounts:
        account = next((submitter.account for submitter in projects if submitter.account), "…")
        yield failed(
            title, "has no association: Slurm refuses their jobs", f"sacctmgr add user {user} account={account}"
        )
        return
    for submitter in projects:
        if submitter.account and submitter.account not in accounts:
            detail = f"may not compute for {submitter.account}, the account of project {submitter.project}"
            yield failed(title, detail, f"sacctmgr add user {user} account={submitter.account}")


def projects(site: CheckedSite) -> Iterator[CheckFinding]:
    title = "Accounts of projects"
    accounts = {association.account for association in site.accounts.associations}
    missing = {slug: name for slug, name in site.accounts_of_projects.items() if name and name not in accounts}
    for slug, name in sorted(missing.items()):
        remedy = f"sacctmgr add account {name}, or correct it under Projects in the administration."
        yield failed(title, f"project {slug} has {name}, which Slurm does not know", remedy)
    if not missing:
        pairs = [
            f"{slug} → {name or 'the person’s default'}" for slug, name in sorted(site.accounts_of_projects.items())
        ]
        yield ok(
            title, ", ".join(pairs[:8]) + (" …" if len(pairs) > 8 else "") if pairs else "there are no projects yet"
        )


def account_fits(site: CheckedSite, submitter: Submitter) -> bool:
    """Return whether accounting has this person in this project's account; True if accounting is unreachable."""
    try:
        accounts = {
            association.account
            for association in site.accounts.associations
            if association.user == submitter.slurm_user
        }
    except SchedulerError:
        return True
    return submitter.account in accounts if submitter.account else bool(accounts)
