"""Render a person's own pages: one-time link, password, tokens, projects."""

from typing import ClassVar, cast

from django import forms
from django.conf import settings
from django.contrib import messages
from django.contrib.auth import login, update_session_auth_hash
from django.contrib.auth.decorators import login_required
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_http_methods, require_POST

from portal.access import user_of
from portal.accounts import actions
from portal.accounts.forms import NewPasswordForm, RewordedErrors
from portal.models import Membership, Token, User
from portal.notices import channels

# Set by a one-time link: in this session a new password can be set without the old one.
MAY_SET = "may_set_password"


class TokenForm(RewordedErrors, forms.Form):
    """Ask for a new token's name, scope and lifetime."""

    names: ClassVar = {"name": "Name", "scope": "May", "days": "Days"}
    fixes: ClassVar = {
        "name.required": "Name is missing. Enter what the token is for, such as the machine that uses it.",
        "scope.required": "Choose what it may do.",
        "scope.invalid_choice": "This scope is not available to you. Choose one from the list.",
        "days.min_value": "A token is valid for at least {limit_value} day.",
        "days.max_value": "A token is valid for at most {limit_value} days.",
        "days.invalid": "Days must be a whole number, such as 90.",
    }
    name = forms.CharField(max_length=100, help_text="What it is for, such as the machine that uses it.")
    scope = forms.ChoiceField(choices=Token.Scope.choices, initial=Token.Scope.WRITE)
    days = forms.IntegerField(min_value=1)

    def __init__(self, user: User, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        most = settings.VIGIL_TOKEN_MAX_DAYS
        days = forms.IntegerField(min_value=1, max_value=most, initial=min(actions.TOKEN_DAYS, most))
        days.help_text = f"Until it expires; at most {most}"
        self.fields["days"] = days
        if not user.is_sysadmin:
            scope = cast(forms.ChoiceField, self.fields["scope"])
            scope.choices = [choice for choice in Token.Scope.choices if choice[0] != Token.Scope.ADMIN]


@sensitive_post_parameters()
@require_http_methods(["GET", "POST"])
def login_link(request: HttpRequest, secret: str) -> HttpResponse:
    """Show a button on GET, so that no preview or scanner uses up the link; POST uses it and signs in."""
    if request.method == "POST":
        user = actions.consume_link(secret)
        if user is not None:
            login(request, user, backend="allauth.account.auth_backends.AuthenticationBackend")
            request.session[MAY_SET] = True
            return redirect("set_password")
    elif link := actions.valid_link(secret):
        return _unreferred(render(request, "account/link.html", {"link_user": link.user, "secret": secret}))
    return _unreferred(render(request, "account/link_dead.html", status=410))


@sensitive_post_parameters()
@login_required
@require_http_methods(["GET", "POST"])
def set_password(request: HttpRequest) -> HttpResponse:
    """Offer to set a password after signing in by a one-time link. Others change theirs and must enter the old one."""
    user = user_of(request)
    if not request.session.get(MAY_SET) and user.has_usable_password():
        return redirect("account_change_password")
    form = NewPasswordForm(user, request.POST or None)
    if request.method == "POST" and form.is_valid():
        form.save()
        request.session.pop(MAY_SET, None)
        update_session_auth_hash(request, user)
        messages.success(request, f"Password set. Use it with your user name next time.{form.revoked_text}")
        return redirect("home")
    return render(request, "account/set_password.html", {"form": form}, status=422 if form.errors else 200)


@login_required
@require_http_methods(["GET"])
def me(request: HttpRequest) -> HttpResponse:
    return _page(request, TokenForm(user_of(request)))


@login_required
@require_http_methods(["GET", "HEAD", "POST"])
def make_token(request: HttpRequest) -> HttpResponse:
    """Respond with the page itself, not a redirect: the secret is shown only this once and is not stored."""
    if request.method != "POST":  # somebody opens the address of that page again
        return redirect("me")
    user = user_of(request)
    form = TokenForm(user, request.POST)
    if not form.is_valid():
        return _page(request, form, status=422)
    try:
        token, secret = actions.make_token(user, **form.cleaned_data)
    except actions.TokenRefused as error:
        raise PermissionDenied(str(error)) from error
    return _page(request, TokenForm(user), new_token=token, new_secret=secret)


@login_required
@require_POST
def revoke_token(request: HttpRequest, token_id: int) -> HttpResponse:
    if actions.revoke_token(user_of(request), token_id):
        messages.success(request, "Token revoked. It no longer works.")
    return redirect("me")


def _page(
    request: HttpRequest,
    form: TokenForm,
    *,
    status: int = 200,
    new_token: Token | None = None,
    new_secret: str | None = None,
) -> HttpResponse:
    user = user_of(request)
    memberships = user.memberships.select_related("project").order_by("project__slug")
    context = {
        "memberships": memberships,
        "tokens": actions.tokens_of(user),
        "token_form": form,
        "new_token": new_token,
        "new_secret": new_secret,
        "channels": channels.of_person(user),
        "project_channels": channels.of_projects(user),
        "led": [membership.project.slug for membership in memberships if membership.role == Membership.Role.LEAD],
    }
    return render(request, "account/me.html", context, status=status)


def _unreferred(response: HttpResponse) -> HttpResponse:
    """Keep the page's address, which holds a secret, out of Referer headers.

    Not "no-referrer": browsers then send the form with `Origin: null`, which the CSRF check refuses.
    """
    response.headers["Referrer-Policy"] = "strict-origin"
    return response
