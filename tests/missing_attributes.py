"""Fail a test during which a template reads an attribute that one of our objects lacks.

Django renders such an attribute as empty and treats it as false, so that a page silently loses a sentence when a field
is renamed but its template is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.template.base import Variable, VariableDoesNotExist

OURS = frozenset({"console", "diagnosis", "gpus", "jobs", "nodes", "portal", "training", "vigil_core"})
ADMIN = frozenset({"cl", "adminform", "inline_admin_form", "inline_admin_formset"})
"""Variables of the admin's templates, which read attributes that are optional."""

_resolve = Variable._resolve_lookup  # type: ignore[attr-defined]
_missing: list[str] = []


def _resolve_and_note(variable: Variable, context: Any) -> Any:
    try:
        return _resolve(variable, context)
    except VariableDoesNotExist as error:
        name, owner = error.params
        if type(owner).__module__.split(".")[0] in OURS and variable.lookups[0] not in ADMIN:
            _missing.append(f"{type(owner).__qualname__}.{name} (as {variable.var})")
        raise


Variable._resolve_lookup = _resolve_and_note  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def _no_missing_attributes() -> Iterator[None]:
    _missing.clear()
    yield
    assert not _missing, f"a template read attributes that do not exist: {', '.join(sorted(set(_missing)))}"
