"""Export the models of this app, where Django looks for them."""

from portal.models.announcement import Announcement, AnnouncementQuerySet
from portal.models.ground import (
    DEFAULT_PROJECT,
    SLUG,
    AuditEntry,
    Chunk,
    IdempotencyKey,
    Lease,
    LoginLink,
    Membership,
    Notice,
    NoticeQuerySet,
    NoticeRead,
    Project,
    ProjectQuerySet,
    Series,
    Token,
    TokenQuerySet,
    User,
    digest,
)
from portal.models.heartbeat import Heartbeat
from portal.models.outbox import Channel, Delivery
from portal.models.runbook import SiteRunbook

__all__ = [
    "DEFAULT_PROJECT",
    "SLUG",
    "Announcement",
    "AnnouncementQuerySet",
    "AuditEntry",
    "Channel",
    "Chunk",
    "Delivery",
    "Heartbeat",
    "IdempotencyKey",
    "Lease",
    "LoginLink",
    "Membership",
    "Notice",
    "NoticeQuerySet",
    "NoticeRead",
    "Project",
    "ProjectQuerySet",
    "Series",
    "SiteRunbook",
    "Token",
    "TokenQuerySet",
    "User",
    "digest",
]
