"""Register the admin pages of people and projects."""

import pwd
from typing import TYPE_CHECKING, Any, cast

from axes.models import AccessAttempt
from django.conf import settings
from django.contrib import admin
from django.contrib.admin.views.main import ERROR_FLAG
from django.contrib.auth.admin import UserAdmin as DjangoUserAdmin
from django.core.exceptions import ValidationError
from django.core.paginator import Paginator
from django.db import DataError, transaction
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.utils.functional import cached_property
from django.utils.html import format_html
from django.utils.text import Truncator
from unfold.admin import ModelAdmin, TabularInline
from unfold.forms import AdminPasswordChangeForm, UserChangeForm, UserCreationForm
from unfold.views import ChangeList
from unfold.widgets import UnfoldBooleanSwitchWidget

from portal import audit, record_changes
from portal.access import NO_CHANGE, note, user_of
from portal.accounts import sysadmins
from portal.accounts.forms import RevokesTokens
from portal.audit import Change
from portal.models import Announcement, AuditEntry, Membership, Token, User
from portal.records import site
from vigil_core import formatting

MAX_ROWS = 10_000
"""Maximum number of rows that are counted and can be paged through."""
SEARCHED_ROWS = 20_000
"""Number of newest rows that are searched for a word: no index helps."""
MAX_SENTENCE_LENGTH = 300
"""Characters of a change shown in the audit log's list; its page shows all."""
_CHANGE = "vigil.change"

if TYPE_CHECKING:  # generic only for the type checker
    _ModelAdmin = admin.ModelAdmin[Any]
    _UserAdmin = DjangoUserAdmin[User]
    _Paginator = Paginator[Any]
else:
    _ModelAdmin, _UserAdmin, _Paginator = admin.ModelAdmin, DjangoUserAdmin, Paginator


class AuditedAdmin(_ModelAdmin):
    """Write every change made in the admin to the audit log."""

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        """Show the list; if the query asks for an invalid number or date, show it unfiltered (Django's ?e=1)."""
        try:
            with transaction.atomic():
                return super().changelist_view(request, extra_context)
        except (ValueError, OverflowError, DataError):
            if ERROR_FLAG in request.GET and request.method == "GET":
                raise  # another cause than the query
            return redirect(f"{request.path}?{ERROR_FLAG}=1")

    def log_addition(self, request: HttpRequest, obj: Any, message: Any) -> Any:
        self._note(request, "added", obj, request.META.pop(_CHANGE, NO_CHANGE))
        return super().log_addition(request, obj, message)

    def log_change(self, request: HttpRequest, obj: Any, message: Any) -> Any:
        self._note(request, "changed", obj, request.META.pop(_CHANGE, NO_CHANGE))
        return super().log_change(request, obj, message)

    def log_deletions(self, request: HttpRequest, queryset: Any) -> Any:
        for thing in queryset:
            self._note(request, "deleted", thing, record_changes.values_of_deleted(thing))
        return super().log_deletions(request, queryset)

    def construct_change_message(self, request: HttpRequest, form: Any, formsets: Any, add: bool = False) -> Any:
        request.META[_CHANGE] = record_changes.changes_of_forms(form, formsets)
        return super().construct_change_message(request, form, formsets, add)

    def _note(self, request: HttpRequest, what: str, thing: Any, change: Change) -> None:
        note(user_of(request), f"{self.opts.model_name}.{what}", thing, change=change)


class CappedCount(int):
    """A number of rows, shown as "n+" if there are more than were counted."""

    def __str__(self) -> str:
        return f"{MAX_ROWS:,}+" if self > MAX_ROWS else int.__repr__(self)


class BoundedPaginator(_Paginator):
    """Paginate only the first MAX_ROWS rows, so that counting and skipping have a bounded cost."""

    @cached_property
    def count(self) -> int:
        rows = cast("QuerySet[Any]", self.object_list)
        return CappedCount(rows.order_by()[: MAX_ROWS + 1].count())


class NewestFirstList(ChangeList):
    """A list that the address can sort only by indexed columns."""

    def get_ordering_field(self, field_name: Any) -> Any:
        return super().get_ordering_field(field_name) if field_name in self.sortable_by else None


class ReadOnlyAdmin(AuditedAdmin, ModelAdmin):
    """Records that Vigil writes and people only read."""

    paginator = BoundedPaginator
    show_full_result_count = False

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


class HistoryAdmin(ReadOnlyAdmin):
    """Records of which there may be millions: always newest first, and searched only among the newest."""

    ordering = ("-id",)
    sortable_by = ("id",)
    show_facets = admin.ShowFacets.NEVER
    list_per_page = 50
    search_help_text = f"Among the newest {SEARCHED_ROWS:,}."

    def get_changelist(self, request: HttpRequest, **about: Any) -> type[ChangeList]:
        return NewestFirstList

    def get_search_results(self, request: HttpRequest, queryset: Any, search_term: str) -> tuple[Any, bool]:
        if search_term:
            beyond = list(queryset.order_by("-pk").values_list("pk", flat=True)[SEARCHED_ROWS : SEARCHED_ROWS + 1])
            queryset = queryset.filter(pk__gt=beyond[0]) if beyond else queryset
        return super().get_search_results(request, queryset, search_term)


class MembershipInline(TabularInline):
    model = Membership
    extra = 0
    autocomplete_fields = ("user", "project")


class PersonForm(UserChangeForm):
    """The form of a user account. Slurm user names are set only here, and the last sysadmin keeps that right."""

    def clean(self) -> dict[str, Any]:
        cleaned: dict[str, Any] = super().clean() or self.cleaned_data
        leaves = not (cleaned.get("is_superuser") and cleaned.get("is_active"))
        if leaves and self.instance.pk and sysadmins.would_leave_none([self.instance.pk]):
            lost = "is_active" if cleaned.get("is_superuser") else "is_superuser"
            self.add_error(lost, f"{self.instance} {sysadmins.LAST_SYSADMIN}")
        return cleaned

    def clean_slurm_user(self) -> str | None:
        return slurm_name(self.cleaned_data["slurm_user"])


class PasswordForm(RevokesTokens, AdminPasswordChangeForm):
    """A form in which a sysadmin sets somebody's password."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.offer_revoking()
        revoke = self.fields["revoke_tokens"]
        revoke.widget = UnfoldBooleanSwitchWidget()
        # Templates do not escape help texts, and a token's name is entered by its owner.
        revoke.help_text = format_html(
            "Tokens keep working after a password change. They have {}: {}.",
            formatting.plural(len(self.tokens), "token"),
            self.tokens_text,
        )

    def save(self, commit: bool = True) -> Any:
        with transaction.atomic():
            user = super().save(commit=commit)
            self.revoke_if_chosen()
        return user


def slurm_name(name: str | None) -> str | None:
    """Validate the Unix user that runs somebody's jobs; empty means none. Root and system users are refused."""
    if not name:
        return None
    if name == "root" or name.isdecimal():
        raise ValidationError("Jobs never run as root or as a numeric user id. Use the person's Unix user name.")
    try:
        belongs_to_system = pwd.getpwnam(name).pw_uid < 1000
    except KeyError:  # may exist on the nodes without existing here
        belongs_to_system = False
    if belongs_to_system and name != settings.VIGIL_SLURM_USER:
        raise ValidationError(f"{name} is a system account here (uid below 1000). Use the person's own Unix user name.")
    return name


@admin.register(User, site=site)
class UserAdmin(AuditedAdmin, _UserAdmin, ModelAdmin):
    called = ("person", "people")
    form = PersonForm
    add_form = UserCreationForm
    change_password_form = PasswordForm
    change_user_password_template = "records/change_password.html"
    inlines = (MembershipInline,)
    list_display = ("username", "slurm_user", "is_sysadmin", "is_active", "last_login")
    list_filter = ("is_active",)
    search_fields = ("username", "first_name", "last_name", "email", "slurm_user")
    fieldsets = (
        (None, {"fields": ("username", "password")}),
        ("Person", {"fields": ("first_name", "last_name", "email", "slurm_user")}),
        ("Permissions", {"fields": ("is_active", "is_superuser")}),
        ("Times", {"fields": ("last_login", "date_joined")}),
    )
    readonly_fields = ("last_login", "date_joined")

    def get_deleted_objects(self, objs: Any, request: HttpRequest) -> Any:
        """List what is deleted along with these people, and refuse if no sysadmin would be left."""
        deleted, counts, missing, protected = super().get_deleted_objects(objs, request)
        with transaction.atomic():
            if sysadmins.would_leave_none([user.pk for user in objs]):
                protected = [*protected, f"One of these {sysadmins.LAST_SYSADMIN}"]
        return deleted, counts, missing, protected

    @admin.display(boolean=True, description="Sysadmin", ordering="is_superuser")
    def is_sysadmin(self, user: User) -> bool:
        return user.is_superuser

    def formfield_for_dbfield(self, db_field: Any, request: HttpRequest, **options: Any) -> Any:
        field = super().formfield_for_dbfield(db_field, request, **options)
        if field is not None and db_field.name == "is_superuser":
            field.label, field.help_text = "Sysadmin", "Can do everything, everywhere, including these records."
        return field


@admin.register(Token, site=site)
class TokenAdmin(ReadOnlyAdmin):
    """Let sysadmins see who has which tokens and delete tokens; nobody sees a secret."""

    list_display = ("name", "user", "hint", "scope", "ends_at", "last_used_at", "revoked_at")
    list_filter = ("scope",)
    search_fields = ("name", "user__username")
    exclude = ("digest",)

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return True


@admin.register(AuditEntry, site=site)
class AuditEntryAdmin(HistoryAdmin):
    called = ("audit log entry", "audit log")
    list_display = ("at", "user", "address", "action", "thing", "change", "detail")
    list_filter = ("at",)
    list_select_related = ("user",)
    search_fields = ("action", "thing", "detail", "user__username", "address")

    @admin.display(description="Change")
    def change(self, entry: AuditEntry) -> str:
        return Truncator(audit.sentence(entry.before, entry.after)).chars(MAX_SENTENCE_LENGTH)


@admin.register(AccessAttempt, site=site)
class AccessAttemptAdmin(HistoryAdmin):
    """Failed sign-ins, which lock people out; deleting a row lets the person try again."""

    called = ("failed sign-in", "failed sign-ins")

    list_display = ("attempt_time", "username", "ip_address", "failures_since_start")
    search_fields = ("username", "ip_address")
    exclude = ("get_data", "post_data")

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return True


@admin.register(Announcement, site=site)
class AnnouncementAdmin(ReadOnlyAdmin):
    """Announcements; /announcements writes and withdraws them."""

    called = ("announcement", "announcements")
    list_display = ("text", "level", "starts_at", "ends_at", "written_by", "withdrawn_at")
    list_filter = ("level",)
    search_fields = ("text",)
