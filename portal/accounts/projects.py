"""Delete projects. The site's default project is deleted only with a successor."""

from __future__ import annotations

from django.db import transaction

from portal.models import Project


class NoSuccessor(Exception):
    """Raised when the default project would be deleted and no successor was named."""


def delete(project: Project, successor: Project | None = None) -> None:
    """Delete a project; `successor` becomes the default project if this one was. Raises NoSuccessor.

    All projects are locked, so that nobody deletes the successor at the same moment.
    """
    with transaction.atomic():
        rows = {row.pk: row for row in Project.objects.select_for_update().order_by("pk")}
        if rows[project.pk].is_default:
            new_default = rows.get(successor.pk) if successor is not None and successor.pk != project.pk else None
            if new_default is None:
                raise NoSuccessor
            Project.objects.filter(pk=project.pk).update(is_default=False)
            Project.objects.filter(pk=new_default.pk).update(is_default=True)
        project.delete()


def ensure_default() -> tuple[Project, bool]:
    """Return the default project, created if the site has none, and whether it was created."""
    found = Project.objects.filter(is_default=True).first()
    if found is not None:
        return found, False
    project, made = Project.objects.get_or_create(slug="default", defaults={"title": "Default"})
    Project.objects.filter(pk=project.pk).update(is_default=True)
    return project, made
