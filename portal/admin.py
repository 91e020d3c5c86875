"""The records of people and projects; this site holds every app's admin, for sysadmins only."""

import pwd
from typing import TYPE_CHECKING, Any, cast

from axes.models import AccessAttempt
from django.conf import settings
from django.contrib import admin
from django.contrib.auth.admin import UserAdmin as DjangoUserAdmin
from django.core.exceptions import ValidationError
from django.http import HttpRequest
from unfold.admin import ModelAdmin, TabularInline
from unfold.forms import AdminPasswordChangeForm, UserChangeForm, UserCreationForm
from unfold.sites import UnfoldAdminSite

from portal.access import note
from portal.models import AuditEntry, Membership, Token, User

if TYPE_CHECKING:  # generic only for the type checker
    _ModelAdmin = admin.ModelAdmin[Any]
    _UserAdmin = DjangoUserAdmin[User]
else:
    _ModelAdmin, _UserAdmin = admin.ModelAdmin, DjangoUserAdmin


class Records(UnfoldAdminSite):
    """Django's admin, for superusers alone: being staff is not enough."""

    def has_permission(self, request: HttpRequest) -> bool:
        return isinstance(request.user, User) and request.user.is_sysadmin


site = Records(name="admin")


class Audited(_ModelAdmin):
    """Whatever is changed here is in the audit log."""

    def log_addition(self, request: HttpRequest, obj: Any, message: Any) -> Any:
        self._note(request, "added", obj, message)
        return super().log_addition(request, obj, message)

    def log_change(self, request: HttpRequest, obj: Any, message: Any) -> Any:
        self._note(request, "changed", obj, message)
        return super().log_change(request, obj, message)

    def log_deletions(self, request: HttpRequest, queryset: Any) -> Any:
        for thing in queryset:
            self._note(request, "deleted", thing, "")
        return super().log_deletions(request, queryset)

    def _note(self, request: HttpRequest, what: str, thing: Any, message: Any) -> None:
        note(cast(User, request.user), f"{self.opts.model_name}.{what}", thing, str(message))


class ReadOnly(Audited, ModelAdmin):
    """Records that Vigil writes and people only read."""

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


class MembershipInline(TabularInline):
    model = Membership
    extra = 0
    autocomplete_fields = ("user", "project")


class PersonForm(UserChangeForm):
    """Slurm user names are set here and nowhere else."""

    def clean_slurm_user(self) -> str | None:
        return slurm_name(self.cleaned_data["slurm_user"])


def slurm_name(name: str | None) -> str | None:
    """A Unix user for somebody's jobs; empty is nobody. Root is never anybody's, nor a user of the system's own."""
    if not name:
        return None
    if name == "root" or name.isdecimal():
        raise ValidationError("Jobs never run as root or as a bare number. Take the person's own Unix user name.")
    try:
        belongs_to_system = pwd.getpwnam(name).pw_uid < 1000
    except KeyError:  # known on the nodes, perhaps, and not here
        belongs_to_system = False
    if belongs_to_system and name != settings.VIGIL_SLURM_USER:
        raise ValidationError(
            f"{name} is the system's own here (uid below 1000). Take the person's own Unix user name."
        )
    return name


@admin.register(User, site=site)
class UserAdmin(Audited, _UserAdmin, ModelAdmin):
    form = PersonForm
    add_form = UserCreationForm
    change_password_form = AdminPasswordChangeForm
    inlines = (MembershipInline,)
    list_display = ("username", "slurm_user", "is_superuser", "is_active", "last_login")
    list_filter = ("is_superuser", "is_active")
    search_fields = ("username", "first_name", "last_name", "email", "slurm_user")
    fieldsets = (
        (None, {"fields": ("username", "password")}),
        ("Person", {"fields": ("first_name", "last_name", "email", "slurm_user")}),
        ("May", {"fields": ("is_active", "is_superuser")}),
        ("Times", {"fields": ("last_login", "date_joined")}),
    )
    readonly_fields = ("last_login", "date_joined")


@admin.register(Token, site=site)
class TokenAdmin(ReadOnly):
    """Sysadmins see who has which tokens, and delete those that must die; nobody sees a secret."""

    list_display = ("name", "user", "hint", "scope", "expires_at", "last_used_at", "revoked_at")
    list_filter = ("scope",)
    search_fields = ("name", "user__username")
    exclude = ("digest",)

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return True


@admin.register(AuditEntry, site=site)
class AuditEntryAdmin(ReadOnly):
    list_display = ("at", "user", "action", "thing", "detail")
    list_filter = ("action",)
    search_fields = ("thing", "detail", "user__username")
    date_hierarchy = "at"


@admin.register(AccessAttempt, site=site)
class AccessAttemptAdmin(ReadOnly):
    """Who was locked out for guessing; deleting the row lets them try again."""

    list_display = ("attempt_time", "username", "ip_address", "failures_since_start")
    search_fields = ("username", "ip_address")
    exclude = ("get_data", "post_data")

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return True
