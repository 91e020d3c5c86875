"""Refuse query parameters that an endpoint does not have: a misspelt one must not be ignored silently."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any

from django.http import HttpRequest
from ninja.operation import Operation

from portal.http.problems import FieldError, Problem

MAX_NAMED = 20  # parameters of one request


def strict(run: Callable[..., Any]) -> Callable[..., Any]:
    """Make an operation refuse unknown query parameters, after it has authenticated the request.

    A decorator for `NinjaAPI.add_decorator(…, mode="view")`, which hands over each operation's `run`.
    """
    operation: Operation = run.__self__  # type: ignore[attr-defined]
    parameters = parameters_of(operation)
    values_of = operation._get_values

    def checked(request: HttpRequest, *others: Any) -> dict[str, Any]:
        if unknown := [name for name in request.GET if name not in parameters]:
            raise _problem(unknown, parameters)
        return values_of(request, *others)

    operation._get_values = checked  # type: ignore[assignment, method-assign]
    return run


def parameters_of(operation: Operation) -> list[str]:
    """Return the names of an operation's query parameters, in the order in which the schema has them."""
    models: Any = [model for model in operation.models if model.__ninja_param_source__ == "query"]
    return [name for model in models for name in model.__ninja_flatten_map__]


def _problem(unknown: Sequence[str], parameters: Sequence[str]) -> Problem:
    errors = [FieldError(field=name[:80], message=_message(name[:80], parameters)) for name in unknown[:MAX_NAMED]]
    return Problem(422, " ".join(error["message"] for error in errors[:3]), kind="invalid", errors=errors)


def _message(name: str, parameters: Sequence[str]) -> str:
    if not parameters:
        return f"Unknown query parameter {name!r}: this address takes none."
    close = difflib.get_close_matches(name, parameters, n=1)
    guess = f" Did you mean {close[0]}?" if close else ""
    return f"Unknown query parameter {name!r}.{guess} This address takes {', '.join(parameters)}."
