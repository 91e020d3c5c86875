"""Format numbers, times and states in pages (a builtin: needs no load). The rules are in vigil_core.formatting."""

from __future__ import annotations

import re
from datetime import datetime
from urllib.parse import urlencode

from django import template
from django.template.context import Context
from django.urls import reverse
from django.utils import timezone
from django.utils.html import conditional_escape, escape, format_html, format_html_join
from django.utils.safestring import SafeString

from vigil_core import formatting

register = template.Library()
_DOCUMENT = re.compile(r"docs/([a-z-]+/[a-z-]+)\.md")
_NUMBERED = re.compile(r"(?<![\w.-])[A-Za-z][\w.]*(?:-[\w.]+)*-\d[\w-]*")  # dgx-03, gpt-760m-seed-2
_MAX_UNBROKEN = 24  # longer names may be wider than a phone

for _name in ("count", "loss", "measure", "percent", "share", "disk", "memory", "duration", "word", "family", "exact"):
    register.filter(_name, getattr(formatting, _name))


@register.filter
def plural(number: int, forms: str) -> str:
    """Return the number with its noun: `{{ n|plural:"job" }}`, `{{ n|plural:"entry,entries" }}`."""
    singular, _, many = forms.partition(",")
    return formatting.plural(number, singular, many)


@register.filter
def mib(size: float | str | None) -> str:
    """Return an amount of memory given in MiB: "70.2 GiB". Django passes "" for a missing value."""
    return formatting.memory(size * 2**20 if isinstance(size, int | float) else None)


@register.filter
def code(text: str) -> SafeString:
    """Return a sentence as HTML, with text in `backticks` set as code."""
    parts = str(text).split("`")
    if len(parts) % 2 == 0:  # an unpaired backtick
        return escape(text)
    return format_html_join(
        "", "{}", ((format_html("<code>{}</code>", p) if i % 2 else p,) for i, p in enumerate(parts))
    )


@register.filter
def remedy(text: str) -> SafeString:
    """Set `backticks` as code, and the name of a file in docs/ as a link to its page of the documentation."""
    return SafeString(_DOCUMENT.sub(_linked, code(text)))  # `code` has escaped it


@register.filter
def unbroken(text: str) -> SafeString:
    """Keep names with a number together: browsers break "dgx-03" after the hyphen."""
    return SafeString(_NUMBERED.sub(_nowrap, conditional_escape(text)))


def _nowrap(found: re.Match[str]) -> str:
    name = found[0]  # word characters, dots and hyphens only
    return f'<span class="nowrap">{name}</span>' if len(name) <= _MAX_UNBROKEN else name


def _linked(found: re.Match[str]) -> str:
    return format_html('<a href="{}">{}</a>', reverse("doc", args=[found[1]]), found[0])


def _time(then: datetime | None, text: str, live: str = "") -> str | SafeString:
    if then is None:
        return formatting.MISSING
    return format_html(
        '<time datetime="{}" title="{}"{}>{}</time>',
        formatting.machine_time(then),
        formatting.exact(then),
        format_html(' data-time="{}"', live) if live else "",
        text,
    )


@register.filter
def ago(then: datetime | None) -> str:
    """Return how long ago, kept up to date by the page's timer."""
    return _time(then, formatting.ago(then) if then else "", "ago")


@register.filter
def until(then: datetime | None) -> str:
    return _time(then, formatting.until(then) if then else "", "until")


@register.filter
def clock(then: datetime | None) -> str:
    return _time(then, formatting.clock(then) if then else "")


@register.filter
def second(then: datetime | None) -> str:
    """Return the time to the second, for comparing times of the same day."""
    return _time(then, formatting.second(then) if then else "")


@register.filter
def day(then: datetime | None) -> str:
    return _time(then, formatting.date(then) if then else "")


@register.filter
def elapsed(then: datetime | None) -> str:
    """Return the time since as a duration that keeps counting."""
    return _time(then, formatting.duration((timezone.now() - then).total_seconds()) if then else "", "elapsed")


@register.simple_tag
def icon(name: str) -> SafeString:
    """Return a line icon of the sprite; it is decorative, the text next to it has the meaning."""
    return format_html('<svg class="i" aria-hidden="true"><use href="#i-{}"/></svg>', name)


@register.simple_tag
def glyph(state: str) -> SafeString:
    """Return a state's glyph alone, for use next to a text that names the state."""
    name = formatting.family(state)
    return format_html('<svg class="glyph" data-state="{}" aria-hidden="true"><use href="#s-{}"/></svg>', name, name)


@register.simple_tag
def state(name: str, *, pill: bool = False, quiet: bool = False) -> SafeString:
    """Return glyph and word, never colour alone. `quiet` shows the word only to screen readers."""
    return format_html(
        '<span class="state{}" data-state="{}">{}{}</span>',
        " pill" if pill else "",
        formatting.family(name),
        glyph(name),
        format_html('<span class="sr">{}</span>', formatting.word(name)) if quiet else formatting.word(name),
    )


@register.simple_tag(takes_context=True)
def query(context: Context, **changes: object) -> str:
    """Return this page's address with some of its parameters changed; None removes one."""
    params = context["request"].GET.copy()
    for name, value in changes.items():
        params.pop(name, None)
        if value not in (None, ""):
            params[name] = str(value)
    pairs = [(key, value) for key, values in params.lists() for value in values if value]
    return "?" + urlencode(pairs) if pairs else context["request"].path


@register.simple_tag(takes_context=True)
def sorter(context: Context, name: str, title: str, classes: str = "") -> SafeString:
    """Return a column header that sorts by it. `sort` is the address's parameter, `-name` is descending."""
    now = context["search"].sort
    direction = {name: "ascending", f"-{name}": "descending"}.get(now)
    wanted = f"-{name}" if (direction == "ascending" or (direction is None and name == "created")) else name
    return format_html(
        '<th scope="col"{}{}><a href="{}">{}</a></th>',
        format_html(' class="{}"', classes) if classes else "",
        format_html(' aria-sort="{}"', direction) if direction else "",
        query(context, sort=wanted, after=None),
        title,
    )


@register.filter
def at(things: dict[object, object], key: object) -> object:
    """Return a dictionary's entry by a key that is a variable."""
    return things.get(key)
