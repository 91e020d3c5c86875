"""Who may do what: one function for pages, API, sockets and admin."""

from typing import Literal, Protocol

from django.contrib.auth.models import AnonymousUser

from portal.models import Membership, Project, User

Action = Literal["see", "submit", "change", "manage"]


class Owned(Protocol):
    """A thing of a project that one person made, as a job."""

    owner_id: int
    project_id: int


def can(user: User | AnonymousUser, action: Action, thing: Project | Owned) -> bool:
    """Whether the person may see, submit to, change or manage a project or something in it.

    Members see what their project has and submit to it; its owner and the project's leads change a job;
    leads manage the project; sysadmins do everything.
    """
    if not isinstance(user, User) or not user.is_active:
        return False
    if user.is_sysadmin:
        return True
    project_id = thing.pk if isinstance(thing, Project) else thing.project_id
    role = Membership.objects.filter(user=user, project_id=project_id).values_list("role", flat=True).first()
    if role is None:
        return False
    if role == Membership.Role.LEAD:
        return True
    if action == "change" and not isinstance(thing, Project):
        return thing.owner_id == user.pk
    return action in {"see", "submit"}
