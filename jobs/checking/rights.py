"""What Slurm lets us and the people do: see jobs, drain nodes, compute for an account."""

from __future__ import annotations

import pwd
from collections.abc import Iterator

from jobs.checking.finding import Finding, bad, of_error, ok, skip, warn
from jobs.checking.site import Site, Who
from nodes.schedulers.base import SchedulerError
from nodes.schedulers.slurm.http import SlurmUnreachable

MOST = 200  # people whose tokens are tried


def accounts(site: Site) -> Iterator[Finding]:
    title = "The accounts answer (slurmdbd)"
    if not site.rest.has_accounting:
        remedy = "Start slurmrestd with its accounts, too: without -s, or with -s slurmctld,slurmdbd."
        yield bad(title, "this slurmrestd serves none", remedy)
        return
    try:
        found = site.accounts
    except SchedulerError as error:
        remedy = "Is slurmdbd up, with AuthAltTypes=auth/jwt and the same key in slurmdbd.conf? See its log."
        yield of_error(title, error, remedy)
        return
    people = {one.user for one in found.associations if one.user}
    yield ok(
        title,
        f"{len(people)} people, {len({one.account for one in found.associations})} accounts, {len(found.qos)} QOS",
    )


def level(site: Site) -> Iterator[Finding]:
    """An administrator sees everything and may drain; an operator may not drain."""
    title = f"{site.user} may drain nodes"
    grant = f"sacctmgr modify user {site.user} set AdminLevel=Admin"
    if not site.admin_level:
        remedy = f"sacctmgr add user {site.user} account=root AdminLevel=Admin, or correct VIGIL_SLURM_USER."
        yield bad(title, f"Slurm's accounts know no user {site.user}", remedy)
    elif site.admin_level.startswith("admin"):
        yield ok(title, "AdminLevel=Administrator")
    else:
        yield warn(title, f"AdminLevel={site.admin_level.capitalize()}: drain and undrain are refused", grant)
    yield from _sees(site, grant)


def _sees(site: Site, grant: str) -> Iterator[Finding]:
    title = f"{site.user} sees everybody's jobs"
    if site.admin_level.startswith(("admin", "operator")):
        yield ok(title, f"AdminLevel={site.admin_level.capitalize()}")
        return
    try:
        private = site.conf.get("PrivateData", "")
    except SchedulerError as error:
        others = {job.user for job in site.scheduler.queue()} - {site.user, ""}
        if others:
            yield ok(title, f"it sees those of {len(others)} others")
        else:
            yield skip(title, str(error).partition(". ")[0], f"Where slurm.conf has PrivateData=jobs: {grant}")
        return
    if {"jobs", "all"} & set(private.split(",")):
        yield bad(title, f"PrivateData={private} hides them", grant)
    else:
        yield ok(title, f"PrivateData={private or 'none'}")


def people(site: Site) -> Iterator[Finding]:
    """Everybody who may submit here: known to this machine, to the accounts, and believed by Slurm."""
    title = "People"
    if site.people is None:
        yield skip(
            title, "Vigil has not been started here yet: nobody is known", "Start it once (vigil up), and check again."
        )
        return
    if not site.people and not site.without_project:
        remedy = "Set people's Slurm users in the administration, under People: whoever has none cannot submit."
        yield warn(title, "nobody has a Slurm user yet", remedy)
        return
    well = 0
    known = sorted({*site.without_project, *(who.slurm_user for who in site.people)})
    for user in known[:MOST]:
        problems = list(_person(site, user))
        yield from problems
        well += not problems
    if well:
        named = ", ".join(known[:5]) + (" …" if len(known) > 5 else "")
        yield ok(title, f"{well} of {len(known)} with a Slurm user can compute: {named}" if well < len(known) else
                 f"all {len(known)} with a Slurm user can compute: {named}")  # fmt: skip


def _person(site: Site, user: str) -> Iterator[Finding]:
    title = f"Person {user}"
    try:
        pwd.getpwnam(user)
    except KeyError:
        remedy = "Give the portal's machine the nodes' users (sssd, LDAP), or correct the Slurm user under People."
        yield bad(title, "this machine knows no such Unix user, so no run directory can be shared with them", remedy)
    yield from _associations(site, user)
    try:
        site.rest.http.get("diag", user=user)
    except SlurmUnreachable:
        raise
    except SchedulerError as error:
        yield of_error(title, error, "Does this user exist on slurmctld's machine?")


def _associations(site: Site, user: str) -> Iterator[Finding]:
    title = f"Person {user}"
    try:
        theirs = {one.account for one in site.accounts.associations if one.user == user}
    except SchedulerError:  # said by itself
        return
    projects = [who for who in site.people or () if who.slurm_user == user]
    if not theirs:
        account = next((who.account for who in projects if who.account), "…")
        yield bad(title, "has no association: Slurm refuses their jobs", f"sacctmgr add user {user} account={account}")
        return
    for who in projects:
        if who.account and who.account not in theirs:
            detail = f"may not compute for {who.account}, the account of project {who.project}"
            yield bad(title, detail, f"sacctmgr add user {user} account={who.account}")


def projects(site: Site) -> Iterator[Finding]:
    title = "Accounts of projects"
    known = {one.account for one in site.accounts.associations}
    missing = {slug: name for slug, name in site.accounts_of_projects.items() if name and name not in known}
    for slug, name in sorted(missing.items()):
        remedy = f"sacctmgr add account {name}, or correct it under Projects in the administration."
        yield bad(title, f"project {slug} has {name}, which Slurm does not know", remedy)
    if not missing:
        said = [
            f"{slug} → {name or 'the person’s default'}" for slug, name in sorted(site.accounts_of_projects.items())
        ]
        yield ok(title, ", ".join(said[:8]) + (" …" if len(said) > 8 else "") if said else "there are no projects yet")


def account_fits(site: Site, who: Who) -> bool:
    """Whether the accounts have this person in this project's account; true where they cannot be asked."""
    try:
        theirs = {one.account for one in site.accounts.associations if one.user == who.slurm_user}
    except SchedulerError:
        return True
    return who.account in theirs if who.account else bool(theirs)
