"""REST: game days, for sysadmins."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.conf import settings
from ninja import Query, Router, Schema, Status
from pydantic import Field

from jobs.errors import Conflict
from jobs.gameday import start as game_days
from jobs.gameday.faults import FAULTS
from jobs.gameday.report import DrillReport, drill_reports
from jobs.models import Drill, GameDay
from portal.http.api import ApiRequest, PageQuery, Text
from portal.http.openapi import described
from portal.http.paging import SortOrder, page
from portal.http.problems import Problem
from portal.sysadmins import FORBIDDEN, only_sysadmins, only_sysadmins_see

router = Router(tags=["game days"])
NO_GAME_DAY = FORBIDDEN | {404: "No such game day."}
_DRILL_FIELDS = (
    "fault", "state", "node", "driver", "planted_at", "noticed_s", "verdict_s", "cause", "is_cause_right", "action",
    "is_action_right", "in_service_s", "training_again_s", "are_losses_identical", "detail", "slurm",
)  # fmt: skip


class EarlierDrill(Schema):
    """Describes what the last drill of the same fault on this partition measured."""

    game_day: int
    state: str
    version: str
    driver: str
    slurm: str
    noticed_s: float | None
    in_service_s: float | None
    training_again_s: float | None


class DrillShape(Schema):
    """Describes one injected fault. Seconds count from the fault; null: not known, or the question does not arise."""

    fault: str
    title: str
    state: str = Field(description="waiting, running, passed, failed or not tried.")
    detail: str = Field(description="What went wrong, or why it was not tried.")
    job: int | None
    node: str
    driver: str
    slurm: str = Field(description="The node's version of Slurm, as its agent reports it.")
    planted_at: datetime | None
    noticed_s: float | None = Field(description="Until Vigil knew that something had failed.")
    verdict_s: float | None
    cause: str = Field(description="The verdict; for a fault of a node, the health rule that noticed it.")
    is_cause_right: bool | None
    entry: int | None = Field(description="For a fault of a node: the health entry.")
    action: str
    is_action_right: bool | None
    in_service_s: float | None = Field(description="Until a drained node was back in service.")
    training_again_s: float | None = Field(description="Until the first step of the next attempt.")
    are_losses_identical: bool | None = Field(
        description="Whether all losses are identical to those of the undisturbed run."
    )
    earlier: EarlierDrill | None


class GameDayShape(Schema):
    id: int
    partition: str
    project: str
    version: str = Field(description="Vigil's version.")
    started_by: str | None
    requested_at: datetime
    ended_at: datetime | None
    problem: str = Field(description="Why the game day ended early; empty if it did not.")
    drills: list[DrillShape]
    url: str


class GameDays(Schema):
    items: list[GameDayShape]
    next: str | None = None


class NewGameDay(Schema):
    model_config = {"extra": "forbid"}
    partition: Text = Field("", max_length=255, description="Empty: the scheduler's default.")
    project: Text = Field("", max_length=64, description="May be empty if you may submit in only one.")
    faults: list[Text] = Field([], max_length=len(FAULTS), description="Names of the faults to plant; empty means all.")


@router.post(
    "",
    response={201: GameDayShape},
    summary="Start a game day (sysadmins)",
    openapi_extra=described(
        errors=FORBIDDEN | {409: "A game day already runs on this partition.", 422: "The request is invalid."}
    ),
)
def start(request: ApiRequest, body: NewGameDay) -> Status[dict[str, Any]]:
    """Start drills one after the other: faults in small jobs of yours, and faults on idle nodes whose agents allow it.

    A fault on a node may drain that node until the drill ends.
    """
    only_sysadmins(request, "start game days")
    try:
        game_day = game_days.start(request.auth, body.project, body.partition, body.faults)
    except Conflict as error:
        raise Problem(409, str(error)) from None
    except game_days.InvalidGameDay as error:
        raise Problem(422, str(error), kind="invalid") from None
    return Status(201, _shape(game_day))


@router.get("", response=GameDays, summary="Game days, newest first", openapi_extra=described(errors=FORBIDDEN))
def list_game_days(request: ApiRequest, query: Query[PageQuery]) -> dict[str, Any]:
    """List game days with the result of every fault."""
    only_sysadmins_see(request, "game days")
    rows = GameDay.objects.select_related("started_by", "project")
    found = page(rows, SortOrder("id", descending=True), cursor=query.cursor, limit=min(query.limit, 20))
    return {"items": [_shape(row) for row in found.items], "next": found.next}


@router.get("/{int:game_day_id}", response=GameDayShape, summary="One game day",
            openapi_extra=described(errors=NO_GAME_DAY))  # fmt: skip
def game_day(request: ApiRequest, game_day_id: int) -> dict[str, Any]:
    """Return a game day; each fault is compared with the last time on this partition."""
    only_sysadmins_see(request, "game days")
    return _shape(_game_day(game_day_id))


@router.post("/{int:game_day_id}/cancel", response=GameDayShape, summary="Cancel a game day (sysadmins)",
             openapi_extra=described(errors=NO_GAME_DAY | {409: "The game day has ended."}))  # fmt: skip
def cancel(request: ApiRequest, game_day_id: int) -> dict[str, Any]:
    """End the game day and cancel its running job."""
    only_sysadmins(request, "cancel game days")
    try:
        game_days.cancel(request.auth, _game_day(game_day_id))
    except Conflict as error:
        raise Problem(409, str(error)) from None
    return _shape(_game_day(game_day_id))


def _shape(row: GameDay) -> dict[str, Any]:
    same = ("id", "partition", "version", "requested_at", "ended_at", "problem")
    return {name: getattr(row, name) for name in same} | {
        "project": row.project.slug,
        "started_by": row.started_by.username if row.started_by else None,
        "drills": [_drill_shape(report) for report in drill_reports(row)],
        "url": f"{settings.VIGIL_PUBLIC_URL}/gameday/{row.pk}",
    }


def _drill_shape(report: DrillReport) -> dict[str, Any]:
    drill = report.drill
    return {name: getattr(drill, name) for name in _DRILL_FIELDS} | {
        "title": report.title,
        "job": drill.job_id,
        "entry": drill.entry_id,
        "earlier": _earlier_shape(report.earlier) if report.earlier else None,
    }


def _earlier_shape(drill: Drill) -> dict[str, Any]:
    same = ("state", "driver", "slurm", "noticed_s", "in_service_s", "training_again_s")
    return {name: getattr(drill, name) for name in same} | {
        "game_day": drill.game_day_id,
        "version": drill.game_day.version,
    }


def _game_day(game_day_id: int) -> GameDay:
    rows = GameDay.objects.select_related("started_by", "project")
    found = rows.filter(pk=game_day_id).first()
    if found is None:
        raise Problem(404, f"There is no game day {game_day_id}. GET /api/v1/gamedays lists them.")
    return found
