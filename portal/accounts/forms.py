"""Reword the errors of the account forms: name the field as on the page, and say how to fix it."""

from __future__ import annotations

from typing import Any, ClassVar

from allauth.account import forms as allauth
from django import forms
from django.contrib.auth.forms import SetPasswordForm
from django.core.exceptions import ValidationError
from django.db import transaction

from portal.accounts import actions
from portal.models import Token
from vigil_core import formatting

_FIXES = {
    "required": "{name} is missing. Fill it in.",
    "max_length": "{name} is too long: use at most {limit_value} characters.",
    "invalid": "{name} must be a whole number.",
    "min_value": "{name} is too small: use at least {limit_value}.",
    "max_value": "{name} is too large: use at most {limit_value}.",
    "null_characters_not_allowed": "{name} contains a NUL character. Remove it.",
    "username_password_mismatch": "Wrong user name or password. Passwords are case-sensitive.",
    "incorrect_password": "This is not your password. Enter the one that you sign in with.",
    "enter_current_password": "This is not your current password. Enter the one that you sign in with.",
    "password_mismatch": "The passwords differ. Enter the new password again in both fields.",
    "password_too_short": "Too short: use at least {min_length} characters.",
    "password_too_common": "Too common and easily guessed. Choose another.",
    "password_too_similar": "Too similar to your name. Choose another.",
}


class RewordedErrors(forms.BaseForm):
    """A form whose error messages are Vigil's own, chosen by error code and using the field's label on the page."""

    names: ClassVar[dict[str, str]]
    fixes: ClassVar[dict[str, str]] = {}  # of this form: {"field.code" or "code": sentence}

    def add_error(self, field: str | None, error: Any) -> None:
        error = error if isinstance(error, ValidationError) else ValidationError(error)
        if hasattr(error, "error_dict"):
            super().add_error(field, error)
        else:
            super().add_error(
                field, ValidationError([self._reworded(field or "", problem) for problem in error.error_list])
            )

    def _reworded(self, field: str, error: ValidationError) -> ValidationError:
        code = error.code or ""
        fix = self.fixes.get(f"{field}.{code}") or self.fixes.get(code) or _FIXES.get(code)
        if fix is None:
            return error
        about = {"name": self.names.get(field, "This"), **(error.params or {})}
        return ValidationError(fix.format_map(about), code=error.code)


class LoginForm(RewordedErrors, allauth.LoginForm):
    names: ClassVar = {"login": "User name", "password": "Password"}


class ReauthenticateForm(RewordedErrors, allauth.ReauthenticateForm):
    names: ClassVar = {"password": "Password"}


MAX_NAMED = 8
"""Maximum number of tokens that the new-password form names."""


class RevokesTokens(forms.Form):
    """A new-password form that offers to revoke the person's API tokens; on by default for sysadmins.

    Sessions of other browsers end automatically when the password changes; tokens do not.
    """

    user: Any
    revoke_tokens = forms.BooleanField(required=False, label="Revoke the API tokens")
    revoked = 0

    def offer_revoking(self) -> None:
        """Look up the tokens that the choice is about. Setting a first password revokes none."""
        alive = Token.objects.alive().filter(user=self.user)
        self.tokens = [*alive] if self.user.has_usable_password() else []
        self.fields["revoke_tokens"].initial = self.user.is_sysadmin

    def revoke_if_chosen(self) -> None:
        if self.tokens and self.cleaned_data.get("revoke_tokens"):
            self.revoked = actions.revoke_all_tokens(self.user)

    @property
    def tokens_text(self) -> str:
        """Return which tokens there are: "laptop (write, used 3 d ago), ci (read, never used) and 3 more"."""
        shown = [f"{token.name} ({token.get_scope_display().lower()}, {_used(token)})" for token in self.tokens]
        more = len(shown) - MAX_NAMED
        return formatting.listed([*shown[:MAX_NAMED], f"{more} more"] if more > 0 else shown)

    @property
    def revoked_text(self) -> str:
        """Return a sentence to append to a message: how many tokens were revoked; "" if none."""
        return f" {formatting.plural(self.revoked, 'API token')} revoked." if self.revoked else ""


def _used(token: Token) -> str:
    return f"used {formatting.ago(token.last_used_at)}" if token.last_used_at else "never used"


class ChangePasswordForm(RewordedErrors, RevokesTokens, allauth.ChangePasswordForm):
    names: ClassVar = {
        "oldpassword": "The current password",
        "password1": "The new password",
        "password2": "The repeated password",
    }
    fixes: ClassVar = {
        "password2.required": "Enter the new password again.",
        "password2.": _FIXES["password_mismatch"],  # allauth's error has no code
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.offer_revoking()

    def save(self) -> None:
        with transaction.atomic():
            super().save()
            self.revoke_if_chosen()


class NewPasswordForm(RewordedErrors, RevokesTokens, SetPasswordForm):  # type: ignore[type-arg]
    names: ClassVar = {"new_password1": "Password", "new_password2": "Repeat the password"}
    fixes: ClassVar = {"new_password2.required": "Enter the password again."}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.offer_revoking()

    def save(self, commit: bool = True) -> Any:
        with transaction.atomic():
            user = super().save(commit=commit)
            self.revoke_if_chosen()
        return user
