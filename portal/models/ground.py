"""Define the basic records: people, projects, tokens, notices, leases, and the chunks of every series."""

import secrets
from datetime import datetime, timedelta
from hashlib import sha256
from typing import ClassVar, Self

from django.conf import settings
from django.contrib.auth.models import AbstractUser, UserManager
from django.core.validators import MaxValueValidator, MinValueValidator, RegexValidator
from django.db import models
from django.db.models import Exists, OuterRef, Q, Subquery
from django.utils import timezone

SLUG = RegexValidator(
    r"^[a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?\Z", "Lower-case letters, digits, dots and dashes, at most 64."
)


DEFAULT_PROJECT = "default"
"""The project of specifications that name none."""


def digest(secret: str) -> str:
    """Return what is stored of a person's or job's secret. Secrets are random, so a plain hash suffices."""
    return sha256(secret.encode()).hexdigest()


class User(AbstractUser):
    """A person. Sysadmins are Django's superusers."""

    slurm_user = models.CharField(max_length=32, unique=True, null=True, blank=True, help_text="Set by sysadmins only.")
    seen_at = models.DateTimeField(
        null=True, blank=True, help_text="Events up to this time have been seen on the home page."
    )

    objects: ClassVar[UserManager[Self]] = UserManager()

    @property
    def is_sysadmin(self) -> bool:
        return self.is_active and self.is_superuser


class ProjectQuerySet(models.QuerySet["Project"]):
    def visible_to(self, user: User) -> Self:
        return self if user.is_sysadmin else self.filter(memberships__user=user)

    def named(self, slug: str) -> Self:
        """Return the project of this name. If none is called "default", that name means the site's default project."""
        if slug == DEFAULT_PROJECT and not Project.objects.filter(slug=slug).exists():
            return self.filter(is_default=True)
        return self.filter(slug=slug)


class Project(models.Model):
    """Owns jobs, GPU-hours and disk use, and has members. Jobs that name no project belong to the default one."""

    slug = models.CharField(max_length=64, unique=True, validators=[SLUG])
    title = models.CharField(max_length=200, blank=True)
    is_default = models.BooleanField(default=False, editable=False)
    slurm_account = models.CharField(max_length=64, blank=True)
    job_environment = models.TextField(
        blank=True,
        max_length=20_000,
        help_text="Default environment of its jobs: TOML, as under [environment] in a specification.",
    )
    restart_on = models.TextField(
        blank=True,
        max_length=20_000,
        help_text='What to do after a failure of its jobs, by cause: TOML, as under [restart.on]: "gpu.*" = "restart".',
    )
    keep_checkpoints_days = models.PositiveIntegerField(
        null=True,
        blank=True,
        validators=[MinValueValidator(1), MaxValueValidator(3650)],
        help_text="Days after a job's end until only its last checkpoint is kept; empty: all are kept forever.",
    )
    created_at = models.DateTimeField(auto_now_add=True)

    objects = ProjectQuerySet.as_manager()

    class Meta:
        ordering = ("slug",)
        constraints = (
            models.UniqueConstraint(fields=["is_default"], condition=Q(is_default=True), name="one_default_project"),
        )

    def __str__(self) -> str:
        return self.slug


class Membership(models.Model):
    class Role(models.TextChoices):
        RESEARCHER = "researcher"
        LEAD = "lead"

    user = models.ForeignKey(User, models.CASCADE, related_name="memberships")
    project = models.ForeignKey(Project, models.CASCADE, related_name="memberships")
    role = models.CharField(max_length=16, choices=Role.choices, default=Role.RESEARCHER)

    class Meta:
        constraints = (models.UniqueConstraint(fields=["user", "project"], name="one_membership_a_project"),)

    def __str__(self) -> str:
        return f"{self.user} in {self.project}"


def _longest_life() -> timedelta:
    return timedelta(days=settings.VIGIL_TOKEN_MAX_DAYS)


class TokenQuerySet(models.QuerySet["Token"]):
    def alive(self) -> Self:
        now = timezone.now()
        is_young = Q(expires_at__gt=now, created_at__gt=now - _longest_life())
        return self.filter(is_young, revoked_at=None, user__is_active=True)


class Token(models.Model):
    """A person's API token. The secret is shown once; only its digest is stored."""

    class Scope(models.TextChoices):
        READ = "read"
        WRITE = "write"
        ADMIN = "admin"

    user = models.ForeignKey(User, models.CASCADE, related_name="tokens")
    name = models.CharField(max_length=100)
    hint = models.CharField(max_length=12, help_text="The secret's first characters, to tell tokens apart.")
    digest = models.CharField(max_length=64, unique=True)
    scope = models.CharField(max_length=8, choices=Scope.choices, default=Scope.WRITE)
    created_at = models.DateTimeField(auto_now_add=True)
    expires_at = models.DateTimeField()
    last_used_at = models.DateTimeField(null=True, blank=True)
    revoked_at = models.DateTimeField(null=True, blank=True)

    objects = TokenQuerySet.as_manager()

    class Meta:
        ordering = ("-created_at",)

    def __str__(self) -> str:
        return f"{self.name} ({self.hint}…)"

    @property
    def ends_at(self) -> datetime:
        """Return when it expires: as created, or earlier if the site has shortened the lifetime of tokens since."""
        return min(self.expires_at, self.created_at + _longest_life())

    @property
    def is_expired(self) -> bool:
        return self.ends_at <= timezone.now()

    @classmethod
    def issue(cls, user: User, name: str, *, scope: str = Scope.WRITE, days: int = 90) -> tuple["Token", str]:
        """Create a token and return it with its secret, which cannot be read again."""
        secret = f"vgl_{secrets.token_urlsafe(32)}"
        expires_at = timezone.now() + min(timedelta(days=days), _longest_life())
        token = cls.objects.create(
            user=user, name=name, scope=scope, hint=secret[:8], digest=digest(secret), expires_at=expires_at
        )
        return token, secret


class LoginLink(models.Model):
    """A one-time link that signs a browser in; GET shows a button, POST consumes it."""

    user = models.ForeignKey(User, models.CASCADE, related_name="login_links")
    digest = models.CharField(max_length=64, unique=True)
    created_at = models.DateTimeField(auto_now_add=True)
    expires_at = models.DateTimeField()
    used_at = models.DateTimeField(null=True, blank=True)

    def __str__(self) -> str:
        return f"for {self.user}"


class IdempotencyKey(models.Model):
    """The response to a POST with this key, so that a repeat gets the same response and changes nothing."""

    LIFE = timedelta(hours=24)

    user = models.ForeignKey(User, models.CASCADE)
    route = models.CharField(max_length=100)
    key = models.CharField(max_length=255)
    body_digest = models.CharField(max_length=64)
    thing_id = models.BigIntegerField(help_text="What the first call created: a job or an attempt.")
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints = (models.UniqueConstraint(fields=["user", "route", "key"], name="one_answer_a_key"),)

    def __str__(self) -> str:
        return self.key


class Lease(models.Model):
    """A right to act and its current holder. `fence` rises with each new holder, whose every write checks it."""

    name = models.CharField(max_length=64, primary_key=True)
    holder = models.CharField(max_length=100)
    fence = models.BigIntegerField(default=0)
    expires_at = models.DateTimeField()

    def __str__(self) -> str:
        return self.name


class AuditEntry(models.Model):
    """An action by a person on somebody else's objects or on the cluster.

    `before` and `after` have the values that changed, without secrets (portal.audit).
    """

    user = models.ForeignKey(User, models.SET_NULL, null=True)
    action = models.CharField(max_length=64)
    thing = models.CharField(max_length=200)
    detail = models.TextField(blank=True)
    before = models.JSONField(default=dict, blank=True)
    after = models.JSONField(default=dict, blank=True)
    address = models.GenericIPAddressField(null=True, blank=True, help_text="Empty: done on the server's command line.")
    at = models.DateTimeField(auto_now_add=True, db_index=True)

    class Meta:
        verbose_name_plural = "audit entries"

    def __str__(self) -> str:
        return f"{self.action} {self.thing}"


class NoticeQuerySet(models.QuerySet["Notice"]):
    def visible_to(self, user: User) -> Self:
        personal = Q(audience=Notice.Audience.PERSON, user=user)
        return self.filter(personal | Q(audience=Notice.Audience.SYSADMINS) if user.is_sysadmin else personal)

    def active(self) -> Self:
        return self.filter(withdrawn_at=None)

    def unread_by(self, user: User) -> Self:
        return self.exclude(Exists(NoticeRead.objects.filter(notice=OuterRef("pk"), user=user)))

    def with_read_at(self, user: User) -> Self:
        """Annotate `read_at`: when this person read the notice, or None."""
        read = NoticeRead.objects.filter(notice=OuterRef("pk"), user=user)
        return self.annotate(read_at=Subquery(read.values("read_at")[:1]))


class Notice(models.Model):
    """A notification on somebody's home page (portal.notify), shown until its reason ends."""

    class Audience(models.TextChoices):
        PERSON = "person"
        SYSADMINS = "sysadmins", "all sysadmins"

    class Tone(models.TextChoices):
        NOTICE = "notice"
        WARN = "warn", "warning"

    key = models.CharField(max_length=200, unique=True, help_text="Identifies the reason, which is reported once.")
    kind = models.CharField(max_length=64, help_text="A short word, such as gpu.idle.")
    tone = models.CharField(max_length=8, choices=Tone.choices, default=Tone.NOTICE)
    audience = models.CharField(max_length=16, choices=Audience.choices)
    user = models.ForeignKey(User, models.CASCADE, null=True, blank=True, related_name="notices")
    title = models.CharField(max_length=300, help_text="A sentence.")
    detail = models.CharField(max_length=1000, blank=True)
    link = models.CharField(max_length=500, blank=True, help_text="Link: a path of this site.")
    facts = models.JSONField(default=list, blank=True, help_text="Pairs of name and value with further facts.")
    edition = models.CharField(
        max_length=64, blank=True, help_text="A new edition is reported again while the notice is active."
    )
    raised_at = models.DateTimeField(help_text="When it was raised.")
    last_raised_at = models.DateTimeField(help_text="When it was last confirmed.")
    withdrawn_at = models.DateTimeField(null=True, blank=True)

    objects = NoticeQuerySet.as_manager()

    class Meta:
        indexes = (models.Index(fields=["kind"], condition=Q(withdrawn_at=None), name="standing_notices"),)
        constraints = (
            models.CheckConstraint(
                condition=Q(audience="person", user__isnull=False) | Q(~Q(audience="person"), user=None),
                name="one_audience_a_notice",
            ),
        )

    def __str__(self) -> str:
        return self.key


class NoticeRead(models.Model):
    """Records that a person has read a notice in its current edition."""

    notice = models.ForeignKey(Notice, models.CASCADE, related_name="reads")
    user = models.ForeignKey(User, models.CASCADE, related_name="+")
    read_at = models.DateTimeField()

    class Meta:
        constraints = (models.UniqueConstraint(fields=["notice", "user"], name="read_once_a_person"),)

    def __str__(self) -> str:
        return f"{self.notice_id} by {self.user_id}"


class Series(models.Model):
    """A named curve, such as an attempt's loss or a GPU's temperature. `column` distinguishes a band's columns."""

    class Column(models.TextChoices):
        VALUE = ""
        MIN = "min"
        MEDIAN = "median"
        MAX = "max"
        WORST = "worst"

    owner_kind = models.CharField(max_length=16)
    owner_id = models.BigIntegerField()
    name = models.CharField(max_length=128)
    column = models.CharField(max_length=8, choices=Column.choices, default=Column.VALUE, blank=True)

    class Meta:
        constraints = (
            models.UniqueConstraint(
                fields=["owner_kind", "owner_id", "column", "name"], name="one_series_a_name_and_column"
            ),
        )

    def __str__(self) -> str:
        return f"{self.name} of {self.owner_kind} {self.owner_id}"


class Chunk(models.Model):
    """Points of one series and incarnation (portal.series.codec); `data` comes last: an outline never reads it.

    Loose, as reports bring them: ranks `rank`..`rank_last` × steps. Gathered: many loose ones in one, not enough yet to
    merge. Merged: 1,024 points of one rank (fewer at the end). A loose point takes precedence over a gathered one of
    the same step, a gathered one over a merged one, and among chunks of the same kind the later one wins.
    """

    class Kind(models.IntegerChoices):
        LOOSE = 0
        GATHERED = 1
        MERGED = 2

    series = models.ForeignKey(Series, models.CASCADE, related_name="chunks", db_index=False)
    incarnation = models.IntegerField()
    kind = models.SmallIntegerField(choices=Kind.choices)
    rank = models.IntegerField()
    rank_last = models.IntegerField()
    first_step = models.BigIntegerField()
    last_step = models.BigIntegerField()
    n = models.IntegerField()
    stride = models.BigIntegerField(help_text="The distance between neighbouring steps; 0 if it varies.")
    first_time = models.FloatField(help_text="Unix seconds.")
    last_time = models.FloatField()
    min = models.FloatField(null=True, help_text="Over finite values, as are max and sum.")
    max = models.FloatField(null=True)
    sum = models.FloatField()
    odd = models.IntegerField(help_text="How many values are NaN or infinite.")
    data = models.BinaryField()

    class Meta:
        indexes = (
            models.Index(fields=["series", "kind", "rank", "last_step"], name="chunks_of_a_rank"),
            models.Index(fields=["series", "incarnation"], condition=models.Q(kind__lt=2), name="unmerged_chunks"),
        )

    def __str__(self) -> str:
        return f"{self.n} points from step {self.first_step}"
