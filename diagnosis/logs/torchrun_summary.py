"""Parse torchrun's summary of which rank failed first: several lines that belong together."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_BEGIN = re.compile(r"Root Cause \(first observed failure\):")
_FIELD = re.compile(r"\s+(time|host|rank|exitcode|error_file|traceback) *: (.*)")
MAX_LINES = 12  # that one may have


@dataclass(slots=True)
class TorchrunSummary:
    """The first failure that torchrun's elastic agent observed."""

    line: int
    text: str = ""
    fields: dict[str, str] = field(default_factory=dict)

    @property
    def groups(self) -> dict[str, str]:
        """Return rank, node and exit code under the group names of an exit entry."""
        found = {"first": "yes"}
        if rank := re.match(r"\d{1,6}", self.fields.get("rank", "")):
            found["rank"] = rank[0]
        if code := re.match(r"-?\d{1,5}", self.fields.get("exitcode", "")):
            found["code"] = code[0]
        if (host := self.fields.get("host", "")) and re.fullmatch(r"[\w.-]{1,255}", host):
            found["node"] = host.partition(".")[0]
        return found


class SummaryReader:
    """Collect summaries from the lines of a log, fed in order."""

    def __init__(self) -> None:
        self.found: list[TorchrunSummary] = []
        self._left = 0

    def feed(self, number: int, text: str) -> None:
        if _BEGIN.search(text):
            self.found.append(TorchrunSummary(number, text.strip()))
            self._left = MAX_LINES
        elif self._left:
            self._left -= 1
            if match := _FIELD.match(text):
                self.found[-1].fields[match[1]] = match[2].strip()[:300]
                self.found[-1].text += f"\n{text.rstrip()}"
                if match[1] == "traceback":
                    self._left = 0
