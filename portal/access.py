"""Decide who may do what, in one function for pages, API, sockets and admin."""

from typing import Final, Literal, Protocol

from django.contrib.auth.models import AnonymousUser
from django.http import HttpRequest

from portal.audit import Change
from portal.http import client_address
from portal.models import AuditEntry, Membership, Project, User
from vigil_core.masking import masked

Action = Literal["see", "submit", "change", "kill", "manage"]


class Owned(Protocol):
    """A thing of a project that one person made, as a job."""

    owner_id: int
    project_id: int


class Cluster:
    """Stands for everything that belongs to no project: nodes, partitions, the queue."""


CLUSTER: Final = Cluster()
NO_CHANGE: Final = Change()


def user_of(request: HttpRequest) -> User:
    """The person who is signed in, behind `login_required`."""
    assert isinstance(request.user, User)
    return request.user


def can(user: User | AnonymousUser, action: Action, thing: Project | Owned | Cluster) -> bool:
    """Return whether the person may see, submit to, change, kill or manage a project, its contents, or the cluster.

    Members see what their project has and submit to it; its owner and the project's leads change a job and kill it;
    leads manage the project; everybody sees the cluster; sysadmins do everything.
    """
    if not isinstance(user, User) or not user.is_active:
        return False
    if isinstance(thing, Cluster):
        return user.is_sysadmin or action == "see"
    return user.is_sysadmin or _as_member(user, action, thing)


def _as_member(user: User, action: Action, thing: Project | Owned) -> bool:
    project_id = thing.pk if isinstance(thing, Project) else thing.project_id
    role = Membership.objects.filter(user=user, project_id=project_id).values_list("role", flat=True).first()
    if role is None:
        return False
    if role == Membership.Role.LEAD:
        return True
    if action in {"change", "kill"} and not isinstance(thing, Project):
        return thing.owner_id == user.pk
    return action in {"see", "submit"}


def note(user: User | None, action: str, thing: object, detail: str = "", change: Change = NO_CHANGE) -> None:
    """Write down what a sysadmin did, from where; `None` is somebody at the server's own command line."""
    before, after = change.stored()
    AuditEntry.objects.create(
        user=user,
        action=action[:64],
        thing=masked(str(thing))[:200],
        detail=masked(detail),
        before=before,
        after=after,
        address=client_address.current(),
    )


def note_if_sysadmin(user: User, action: str, thing: Owned, detail: str = "", change: Change = NO_CHANGE) -> None:
    """Write it down if only being a sysadmin allowed it: what people do to their own jobs is nobody's business."""
    if user.is_sysadmin and not _as_member(user, "change", thing):
        note(user, action, thing, detail, change)
