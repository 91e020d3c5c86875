"""Projects that go: the site's default one hands its place to another."""

from __future__ import annotations

from django.db import transaction

from portal.models import Project


class NoSuccessor(Exception):
    """The default project, of which nobody has said what takes its place."""


def delete(project: Project, successor: Project | None = None) -> None:
    """Delete a project; of the default one `successor` is the default from now on. Raises NoSuccessor.

    All projects are locked: a successor that somebody else deletes at the same moment is the default by then.
    """
    with transaction.atomic():
        rows = {row.pk: row for row in Project.objects.select_for_update().order_by("pk")}
        if rows[project.pk].is_default:
            heir = rows.get(successor.pk) if successor is not None and successor.pk != project.pk else None
            if heir is None:
                raise NoSuccessor
            Project.objects.filter(pk=project.pk).update(is_default=False)
            Project.objects.filter(pk=heir.pk).update(is_default=True)
        project.delete()


def ensure_default() -> tuple[Project, bool]:
    """Return the default project, made if the site has none, and whether it was made."""
    found = Project.objects.filter(is_default=True).first()
    if found is not None:
        return found, False
    project, made = Project.objects.get_or_create(slug="default", defaults={"title": "Default"})
    Project.objects.filter(pk=project.pk).update(is_default=True)
    return project, made
