"""REST endpoints for the current user, their projects and their tokens."""

from datetime import datetime
from typing import Annotated, Literal

from django.db.models import OuterRef, Subquery
from ninja import Router, Schema, Status
from pydantic import Field, StringConstraints

from portal.accounts import actions
from portal.http.api import ApiRequest, bad_field
from portal.http.openapi import described
from portal.http.problems import Problem
from portal.models import Membership, Project, Token

router = Router(tags=["people"])
Scope = Literal["read", "write", "admin"]


class ProjectShape(Schema):
    slug: str
    title: str
    role: Literal["researcher", "lead"] | None = Field(description="Null for a sysadmin who is no member.")
    slurm_account: str
    keep_checkpoints_days: int | None = Field(
        description="Days after a job's end until only its last checkpoint is kept; null: all are kept forever."
    )


class Projects(Schema):
    items: list[ProjectShape]
    next: str | None = None


class Me(Schema):
    username: str
    sysadmin: bool
    slurm_user: str | None
    token_scope: Scope | None = Field(description="Scope of the token in use; null for a session.")


class TokenShape(Schema):
    id: int
    name: str
    hint: str
    scope: Scope
    created_at: datetime
    expires_at: datetime
    last_used_at: datetime | None
    expired: bool


class NewToken(TokenShape):
    secret: str = Field(description="Shown only once.")


class Tokens(Schema):
    items: list[TokenShape]
    next: str | None = None


class TokenRequest(Schema):
    model_config = {"extra": "forbid"}
    name: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=100, pattern=r"^[^\x00]*$")]
    scope: Scope = "write"
    days: int | None = Field(
        None, ge=1, le=3650, description="Until it expires; at most the site's VIGIL_TOKEN_MAX_DAYS. Default: 90."
    )


@router.get("/me", response=Me, summary="The signed-in person")
def me(request: ApiRequest) -> dict[str, object]:
    """Return who the token or session belongs to, and what it may do. A good first request to test a token."""
    user = request.auth
    return {
        "username": user.username,
        "sysadmin": user.is_sysadmin,
        "slurm_user": user.slurm_user,
        "token_scope": request.token_scope,
    }


@router.get("/projects", response=Projects, summary="Projects you can see")
def projects(request: ApiRequest) -> dict[str, object]:
    """List the projects that you are a member of. Sysadmins see all projects; those of others have no role."""
    role = Membership.objects.filter(user=request.auth, project=OuterRef("pk")).values("role")
    found = Project.objects.visible_to(request.auth).annotate(role=Subquery(role))
    return {"items": list(found.values("slug", "title", "role", "slurm_account", "keep_checkpoints_days"))}


@router.get("/tokens", response=Tokens, summary="Your tokens")
def tokens(request: ApiRequest) -> dict[str, object]:
    """List your API tokens, without secrets, which are shown only once. Revoked tokens are left out."""
    return {"items": [_shape(token) for token in actions.tokens_of(request.auth)]}


@router.post(
    "/tokens",
    response={201: NewToken},
    summary="Create a token; its secret is shown once",
    openapi_extra=described(errors={403: "The token cannot create one with this scope, or is read-only."}),
)
def make_token(request: ApiRequest, body: TokenRequest) -> Status[dict[str, object]]:
    """Create an API token. Only this response has its secret. A token cannot create one with a wider scope."""
    scopes = Token.Scope.values
    if request.token_scope is not None and scopes.index(body.scope) > scopes.index(request.token_scope):
        raise Problem(
            403, "A token cannot create one with a wider scope than its own. Sign in to do that.", kind="scope"
        )
    try:
        token, secret = actions.make_token(request.auth, body.name, body.scope, body.days)
    except actions.TokenRefused as error:
        raise bad_field(error.field, str(error)) from error
    return Status(201, {**_shape(token), "secret": secret})


@router.delete(
    "/tokens/{int:token_id}",
    response={204: None},
    summary="Revoke a token",
    openapi_extra=described(errors={404: "You have no such token."}),
)
def revoke_token(request: ApiRequest, token_id: int) -> Status[None]:
    """Revoke an API token. It stops working at once."""
    if not actions.revoke_token(request.auth, token_id):
        raise Problem(404, f"You have no token {token_id}.")
    return Status(204, None)


def _shape(token: Token) -> dict[str, object]:
    names = ("id", "name", "hint", "scope", "created_at", "last_used_at")
    shown = {name: getattr(token, name) for name in names}
    return {**shown, "expires_at": token.ends_at, "expired": token.is_expired}
