"""Read changes from the admin's forms: values before and after, for the audit log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from django.forms import BaseForm, BaseInlineFormSet, ModelChoiceField
from django.forms.models import ModelForm

from portal.audit import Change
from vigil_core import formatting

Values = dict[str, Any]


def changes_of_forms(form: BaseForm, formsets: Iterable[BaseInlineFormSet[Any, Any, Any]]) -> Change:
    """Return the changes of a submitted form and of the rows below it."""
    before, after = _of_form(form)
    for row_before, row_after in (row for formset in formsets or () for row in _of_rows(formset)):
        before |= row_before
        after |= row_after
    return Change(before=before, after=after)


def values_of_deleted(thing: Any) -> Change:
    """Return the values of a record that is about to be deleted."""
    return Change(before={field.name: getattr(thing, field.attname) for field in thing._meta.concrete_fields})


def _of_form(form: BaseForm) -> tuple[Values, Values]:
    before: Values = {}
    after: Values = {}
    is_new = isinstance(form, ModelForm) and form.instance._state.adding
    for name in form.changed_data:
        after[name] = _shown(form.cleaned_data.get(name, ""))
        if name in form.initial and not is_new:
            before[name] = _chosen(form, name)
    if revoked := getattr(form, "revoked", 0):
        after["revoked"] = formatting.plural(revoked, "API token")
    return before, after


def _of_rows(formset: BaseInlineFormSet[Any, Any, Any]) -> Iterator[tuple[Values, Values]]:
    """Yield each row that was added, deleted or changed; the names of its values begin with the row's own."""
    model: Any = formset.model
    kind = str(model._meta.verbose_name)
    new, changed = formset.new_objects, [row for row, _ in formset.changed_objects]
    for form in formset.forms:
        row, (before, after) = form.instance, _of_form(form)
        if row in formset.deleted_objects:
            yield {f"{kind} {row}": _row(row)}, {}
        elif any(row is added for added in new):
            yield {}, {f"{kind} {row}": _row(row)}
        elif any(row is edited for edited in changed):
            lead = f"{kind} {row}"
            yield (
                {f"{lead}, {name}": value for name, value in before.items()},
                {f"{lead}, {name}": value for name, value in after.items()},
            )


def _row(row: Any) -> str:
    """Return the values of a row, without its relations and key."""
    fields = [field for field in row._meta.concrete_fields if not field.is_relation and not field.primary_key]
    return ", ".join(f"{field.name} {getattr(row, field.attname)}" for field in fields)


def _chosen(form: BaseForm, name: str) -> Any:
    """Return the previous value; for a choice among records its name."""
    value, field = form.initial[name], form.fields.get(name)
    if isinstance(field, ModelChoiceField) and field.queryset is not None and value is not None:
        return _shown(field.queryset.filter(pk=value).first() or value)
    return value


def _shown(value: Any) -> Any:
    return str(value) if hasattr(value, "_meta") else value
