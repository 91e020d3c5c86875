"""torchrun's summary of which rank failed first: several lines that mean something only together."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_BEGIN = re.compile(r"Root Cause \(first observed failure\):")
_FIELD = re.compile(r"\s+(time|host|rank|exitcode|error_file|traceback) *: (.*)")
LINES = 12  # that one may have


@dataclass(slots=True)
class Summary:
    """The first failure that the elastic agent saw."""

    line: int
    text: str = ""
    fields: dict[str, str] = field(default_factory=dict)

    @property
    def groups(self) -> dict[str, str]:
        """As an exit's: rank, node, code."""
        found = {"first": "yes"}
        if rank := re.match(r"\d{1,6}", self.fields.get("rank", "")):
            found["rank"] = rank[0]
        if code := re.match(r"-?\d{1,5}", self.fields.get("exitcode", "")):
            found["code"] = code[0]
        if (host := self.fields.get("host", "")) and re.fullmatch(r"[\w.-]{1,255}", host):
            found["node"] = host.partition(".")[0]
        return found


class SummaryReader:
    """Fed with every line that is read closely."""

    def __init__(self) -> None:
        self.found: list[Summary] = []
        self._left = 0

    def feed(self, number: int, text: str) -> None:
        if _BEGIN.search(text):
            self.found.append(Summary(number, text.strip()))
            self._left = LINES
        elif self._left:
            self._left -= 1
            if told := _FIELD.match(text):
                self.found[-1].fields[told[1]] = told[2].strip()[:300]
                self.found[-1].text += f"\n{text.rstrip()}"
                if told[1] == "traceback":
                    self._left = 0
