"""Render log lines for a browser.

Terminal colours become spans and everything else is escaped: nothing in a log is ever interpreted as HTML.
"""

from __future__ import annotations

import re

from django.utils.html import escape
from django.utils.safestring import SafeString, mark_safe

# Colours (captured), other control sequences, titles and links, single characters.
_SEQUENCE = re.compile(r"\x1b\[([0-9;]*)m|\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[@-Z\\-_]")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f]")
_COLOURS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
_ERROR = re.compile(r"\b(ERROR|CRITICAL|FATAL|Traceback|[A-Z]\w*Error:|[A-Z]\w*Exception:)")
_WARNING = re.compile(r"\b(WARN|WARNING|[A-Z]\w*Warning:)")


def level(text: str) -> str:
    """Return "error", "warn" or "": the level shown in the margin of a line."""
    text = plain(text)
    if _ERROR.search(text):
        return "error"
    return "warn" if _WARNING.search(text) else ""


def plain(text: str) -> str:
    """Return the line without terminal sequences.

    A progress bar that rewrites its line with carriage returns is reduced to its last state.
    """
    text = _SEQUENCE.sub("", text)
    return _CONTROL.sub("", text.rstrip("\r").rpartition("\r")[2])


def spans(text: str, search: str = "") -> SafeString:
    """Return the line as HTML: escaped, colours as classes (`a-red`, `a-bold`), search matches marked."""
    text = text.rstrip("\r").rpartition("\r")[2]
    out: list[str] = []
    classes: set[str] = set()
    at = 0
    for match in _SEQUENCE.finditer(text):
        out.append(_span(text[at : match.start()], classes, search))
        if match[1] is not None:
            _apply(match[1], classes)
        at = match.end()
    out.append(_span(text[at:], classes, search))
    return mark_safe("".join(out))  # every piece has been escaped in _marked


def _span(text: str, classes: set[str], search: str) -> str:
    text = _CONTROL.sub("", text)
    if not text:
        return ""
    inside = _marked(text, search)
    return f'<span class="{" ".join(sorted(classes))}">{inside}</span>' if classes else inside


def _marked(text: str, search: str) -> str:
    if not search:
        return escape(text)
    parts = re.split(f"({re.escape(search)})", text, flags=re.IGNORECASE)
    return "".join(f"<mark>{escape(part)}</mark>" if i % 2 else escape(part) for i, part in enumerate(parts))


def _apply(codes: str, classes: set[str]) -> None:
    """Apply a "select graphic rendition" sequence; unsupported codes (256 colours, backgrounds) are skipped."""
    numbers = [int(code) if code else 0 for code in codes.split(";")][:32]
    at = 0
    while at < len(numbers):
        code = numbers[at]
        if code == 0:
            classes.clear()
        elif code in {1, 2, 3, 4}:
            classes.add({1: "a-bold", 2: "a-dim", 3: "a-italic", 4: "a-line"}[code])
        elif code == 22:
            classes -= {"a-bold", "a-dim"}
        elif 30 <= code <= 37 or 90 <= code <= 97 or code == 39:
            classes -= {f"a-{colour}" for colour in _COLOURS}
            if code != 39:
                classes.add(f"a-{_COLOURS[code % 10]}")
        elif code in {38, 48} and at + 1 < len(numbers):
            at += 4 if numbers[at + 1] == 2 else 2
        at += 1
