"""Secrets in lines that are shown elsewhere than where they were written: tokens, passwords, keys become dots."""

from __future__ import annotations

import re

DOTS = "•••"
_KNOWN = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{8,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{20,}|glpat-[\w-]{16,}|sk-[\w-]{16,}|xox[abprs]-[\w-]{10,}|"
    r"AKIA[0-9A-Z]{16}|ASIA[0-9A-Z]{16}|AIza[\w-]{30,}|vgl_[\w-]{16,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{5,})"
)
_NAMED = re.compile(
    r"(?i)(?P<name>[\w-]*(?:password|passwd|secret|token|api[_-]?key|access[_-]?key|private[_-]?key|credential)[\w-]*['\"]?\s*[=:]\s*['\"]?)"
    r"(?P<value>[^\s'\",;&)}\]]{4,})"
)
_BEARER = re.compile(r"(?i)\b(?P<name>(?:bearer|basic)\s+)(?P<value>[\w.~+/=-]{8,})")
_LOGIN = re.compile(r"(?P<name>://[^/\s:@]{1,100}:)(?P<value>[^@\s/]{1,200})(?=@)")
_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*", re.DOTALL)
# Words that stand where a value could, and numbers of tokens.
_HARMLESS = re.compile(r"(?i)(?:none|null|true|false|missing|invalid|expired|required|not|is|\d+(?:\.\d+)?)\Z")


def masked(text: str) -> str:
    """The text with whatever looks like a secret made unreadable."""
    text = _KEY.sub(DOTS, text)
    text = _KNOWN.sub(DOTS, text)
    for pattern in (_LOGIN, _BEARER):
        text = pattern.sub(lambda found: found["name"] + DOTS, text)
    return _NAMED.sub(lambda found: found[0] if _HARMLESS.match(found["value"]) else found["name"] + DOTS, text)
