"""Decide who may do what: one function for pages, the API, sockets and the admin."""

from typing import Final, Literal, Protocol

from django.conf import settings
from django.contrib.auth.models import AnonymousUser
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest

from portal.audit import Change
from portal.http import client_address
from portal.models import AuditEntry, Membership, Project, User
from vigil_core.masking import masked

Action = Literal["see", "submit", "change", "kill", "manage"]


class Owned(Protocol):
    """A project's object that one person created, such as a job."""

    owner_id: int
    project_id: int


class Cluster:
    """Represents what belongs to no project: nodes, partitions, the queue."""


CLUSTER: Final = Cluster()
NO_CHANGE: Final = Change()


def user_of(request: HttpRequest) -> User:
    """Return the signed-in person; for use behind `login_required`."""
    assert isinstance(request.user, User)
    return request.user


def sysadmin_of(request: HttpRequest, what: str) -> User:
    """Return the signed-in person if they are a sysadmin; else raise PermissionDenied.

    `what` completes "Only sysadmins can …", as in "drain nodes".
    """
    user = user_of(request)
    if not can(user, "change", CLUSTER):
        raise PermissionDenied(f"Only sysadmins can {what}. Ask one of them.")
    return user


def can(user: User | AnonymousUser, action: Action, thing: Project | Owned | Cluster) -> bool:
    """Return whether the person may see, submit to, change, kill or manage a project, its contents, or the cluster.

    Members see their project's jobs and submit to it. A job's owner and the project's leads may change and kill it.
    Leads manage the project. Everybody sees the cluster. Sysadmins may do everything.
    """
    if not isinstance(user, User) or not user.is_active:
        return False
    if isinstance(thing, Cluster):
        return user.is_sysadmin or action == "see"
    return user.is_sysadmin or _as_member(user, action, thing)


def sees_all(user: User) -> bool:
    """Return whether the person may see whose jobs have which GPUs, and what the kernel logs of them."""
    return user.is_sysadmin or settings.VIGIL_QUEUE_VISIBLE == "everyone"


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
    """Write an audit entry of a sysadmin's action and its source address; `None` is the server's own command line."""
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
    """Write an audit entry if only being a sysadmin allowed the action: work on one's own jobs is not audited."""
    if user.is_sysadmin and not _as_member(user, "change", thing):
        note(user, action, thing, detail, change)
