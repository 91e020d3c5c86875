"""Describe the site that this process belongs to: Django's settings and the people in its database."""

from __future__ import annotations

from pathlib import Path

from django.conf import settings
from django.db import DatabaseError

from jobs.slurm_check.checked_site import CheckedSite, Submitter
from nodes.cluster import sync
from portal.access import can
from portal.models import Project, User


def site() -> CheckedSite:
    """Return the site with its people, without any network access."""
    this_site = settings_only()
    this_site.open = sync.scheduler
    try:
        this_site.user = this_site.user or sync.service_user()
        users = list(User.objects.filter(is_active=True).exclude(slurm_user=None).exclude(slurm_user="").order_by("pk"))
        projects = list(Project.objects.order_by("pk"))
        people = [who for user in users for who in _submitters(user, projects)]
        this_site.accounts_of_projects = {project.slug: project.slurm_account for project in projects}
    except DatabaseError:
        this_site.people = None
        return this_site
    placed = {who.slurm_user for who in people}
    this_site.people = people
    this_site.without_project = [str(user.slurm_user) for user in users if user.slurm_user not in placed]
    return this_site


def settings_only() -> CheckedSite:
    """Return the site as a start checks it: without people, and without the scheduler."""
    return CheckedSite(
        home=Path(settings.VIGIL_HOME),
        runs=Path(settings.VIGIL_RUNS),
        scheduler_name=settings.VIGIL_SCHEDULER,
        url=settings.VIGIL_SLURM_URL,
        key_file=settings.VIGIL_SLURM_KEY_FILE,
        token_command=settings.VIGIL_SLURM_TOKEN_COMMAND,
        user=settings.VIGIL_SLURM_USER,
        ca_file=settings.VIGIL_SLURM_CA_FILE,
        report_url=settings.VIGIL_REPORT_URL,
        reports=settings.VIGIL_REPORTS,
    )


def _submitters(user: User, projects: list[Project]) -> list[Submitter]:
    """Return the person once for each project that they may submit to."""
    project_ids = set(Project.objects.filter(memberships__user=user).values_list("pk", flat=True))
    places = [project for project in projects if project.pk in project_ids and can(user, "submit", project)]
    return [Submitter(user.username, str(user.slurm_user), project.slug, project.slurm_account) for project in places]
