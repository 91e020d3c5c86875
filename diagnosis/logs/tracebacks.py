"""Python tracebacks as structure: each is one piece, with its frames, its exception and what was being done.

Fed with the lines of one stream (one rank's, without prefixes, with their indentation). A log may begin or end in the
middle of one. Chains and wrappers are followed to where it began: "direct cause" and a worker's or a remote's own
traceback come before what was raised because of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

MESSAGE_LINES = 40  # of one exception
FRAMES = 400  # of one traceback: recursion prints a thousand

_HEADER = re.compile(
    r"\s*(?:\+ )?(?:(?:Original |Remote |Exception Group )?Traceback \(most recent call last\)|"
    r"(?P<stack>(?:(?:Current thread|Thread) 0x\w+.*|Stack) \(most recent call first\):))"
)
# What a group of exceptions is drawn with.
_MARGIN = re.compile(r" {2,}(?:\| ?|\+[-+]{3}[-+ \d]*$)")
_RICH = re.compile(r"\s*╭─+ Traceback \(most recent call last\) ─+╮")
_FRAME = re.compile(r'\s*File "(?P<path>[^"]{1,500})", line (?P<line>\d+)(?:,? in (?P<function>.{1,200}))?\s*$')
_RICH_FRAME = re.compile(r"\s*│ +(?P<path>[^ ]{1,500}):(?P<line>\d+) in (?P<function>[\w<>.]+)")
_RAISED = re.compile(r"(?P<type>(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:\([\w.]+\))?)(?:: ?(?P<message>.*))?$")
# Where nothing but the line itself says that it ends a traceback, the class's name has to.
_LIKE_AN_ERROR = re.compile(
    r"(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception|Interrupt|SystemExit|Failed|Failure|Fault|Timeout|OutOfMemory\w*|"
    r"Missing\w*|NotFound|Exit|StopIteration|Empty|Full|Expired)\b"
)
_BECAUSE = "The above exception was the direct cause of the following exception:"
_DURING = "During handling of the above exception, another exception occurred:"
_WRAPPERS = re.compile(
    r"Caught \w+ in (?:DataLoader worker process|replica|pin memory thread)|RemoteTraceback|RayTaskError|RemoteError|"
    r"ProcessRaisedException|ProcessExitedException|Process \d+ terminated with the following error|"
    r"\(\d+ sub-exceptions?\)|WorkerError|BrokenProcessPool|raised by (?:worker|rank|actor)|"
    r"\bClientsFailed: .+ so:"
)
_OWN = re.compile(r"site-packages|dist-packages|/lib(?:64)?/python\d|/opt/conda/|^<|/pyenv/|/usr/lib/")
_RULE = re.compile(r"([-=*#_~])\1{9,}")  # drawn before what somebody else says
_SOURCE = re.compile(
    r"\s{4,}\S|\s*[~^]+\s*$|\s*\.\.\.<\d+ lines?>\.\.\.|\s*\[Previous line repeated \d+ more times?\]|\s*(?:│|╭|╰|╮|╯)"
)


@dataclass(frozen=True, slots=True)
class Frame:
    path: str
    function: str
    code: str = ""

    @property
    def is_own(self) -> bool:
        """Whether it is code of the person's: no package's, no interpreter's."""
        return not _OWN.search(self.path)


@dataclass(slots=True)
class Traceback:
    """One traceback. `line`: of its exception; 0 where the log ends before it. `first`: where it begins. From 1 on."""

    first: int
    line: int = 0
    type: str = ""
    message: str = ""
    frames: list[Frame] = field(default_factory=list)
    is_whole: bool = True
    is_stack: bool = False  # a dump of where a thread is, not an exception's
    wraps: Traceback | None = None  # a worker's, which this one only passes on
    because: Traceback | None = None  # its direct cause
    during: Traceback | None = None  # what was being handled when it was raised
    last: int = 0

    @property
    def name(self) -> str:
        """The exception's class without its module."""
        return self.type.rsplit(".", 1)[-1]

    @property
    def text(self) -> str:
        return f"{self.type}: {self.message}" if self.message else self.type

    @property
    def chain(self) -> list[Traceback]:
        """From where it began to what was raised in the end."""
        found, at, seen = [self], self, {id(self)}
        while (before := at.wraps or at.because or at.during) is not None and id(before) not in seen:
            found.append(before)
            seen.add(id(before))
            at = before
        return found[::-1]

    @property
    def own(self) -> Frame | None:
        """The innermost frame of the person's own code."""
        return next((frame for frame in reversed(self.frames) if frame.is_own), None)


class Reader:
    """Reads the tracebacks of one stream, line by line."""

    def __init__(self) -> None:
        self.found: list[Traceback] = []
        self._open: Traceback | None = None
        self._last: Traceback | None = None  # ended, and its message may go on
        self._message_left = 0
        self._link = ""
        self._code_due = False
        self._was_logged = False

    @property
    def is_open(self) -> bool:
        return self._open is not None

    def feed(self, number: int, text: str, *, is_logged: bool = False) -> bool:
        """One line; whether it belongs to a traceback. `is_logged`: a time or a level stood before it."""
        if is_logged and self._last is not None and not self._was_logged:
            self._message_left = 0
        if margin := _MARGIN.match(text):
            text = text[margin.end() :]
        self._was_logged = is_logged
        if (header := _HEADER.match(text)) or _RICH.match(text):
            return self._begin(number, header)
        if frame := _FRAME.match(text) or _RICH_FRAME.match(text):
            return self._frame(number, frame)
        if self._open is not None:
            return self._within(number, text)
        if text.strip() in (_BECAUSE, _DURING):
            self._link = "because" if text.strip() == _BECAUSE else "during"
            return True
        if self._last is not None and self._message_left and self._goes_on(text):
            self._message_left -= 1
            self._last.message += f"\n{text.rstrip()}"
            self._last.last = number
            return True
        if (
            (raised := _RAISED.match(text.strip()))
            and _LIKE_AN_ERROR.fullmatch(raised["type"])
            and not text[:1].isspace()
        ):
            self._open = Traceback(number, is_whole=False)
            return self._end(number, raised["type"], raised["message"] or "")
        if text.strip():
            self._last, self._link = (None, "") if not self._link else (self._last, self._link)
        elif self._last is not None and self._last.message.strip():
            self._message_left = 0
        return False

    def end_message(self) -> None:
        """What comes next is not of the last exception's message."""
        self._message_left = 0

    def finish(self) -> list[Traceback]:
        """All that were read; one that the log breaks off in is there without its exception."""
        if self._open is not None and self._open.frames:
            self._open.is_whole = False
            self._keep(self._open)
        self._open = None
        return self.found

    def _begin(self, number: int, header: re.Match[str] | None) -> bool:
        if self._open is not None and self._open.frames and not self._open.type:
            self._open.is_whole = False
            self._keep(self._open)
        self._open = Traceback(number, is_stack=bool(header and header["stack"]))
        self._code_due = False
        return True

    def _frame(self, number: int, frame: re.Match[str]) -> bool:
        if self._open is None:
            self._open = Traceback(number, is_whole=False)
        function = frame["function"] or ""
        if len(self._open.frames) < FRAMES:
            self._open.frames.append(Frame(frame["path"], function.strip()))
        self._code_due = True
        return True

    def _within(self, number: int, text: str) -> bool:
        current = self._open
        assert current is not None
        stripped = text.strip()
        if not stripped:
            if current.frames and current.is_stack:
                self._close_stack(number)
            return True
        if _SOURCE.match(text) and (current.frames or not _RAISED.match(stripped)):
            if self._code_due and current.frames and not re.fullmatch(r"[\s~^│]+", text):
                last = current.frames[-1]
                current.frames[-1] = Frame(last.path, last.function, stripped[:300])
                self._code_due = False
            return True
        if current.is_stack:
            self._close_stack(number)
            return False
        raised = _RAISED.match(stripped)
        if raised is None or (
            not current.is_whole and not _LIKE_AN_ERROR.fullmatch(raised["type"]) and not raised["message"]
        ):
            # Something else was printed in between, or the log was cut: the traceback may still go on.
            current.last = number
            if not current.frames:
                self._open = None
            return False
        if current.frames or _LIKE_AN_ERROR.fullmatch(raised["type"]):
            return self._end(number, raised["type"], raised["message"] or "")
        return False

    def _end(self, number: int, kind: str, message: str) -> bool:
        ended, before = self._open, self._last
        assert ended is not None
        ended.line, ended.last, ended.type, ended.message = number, number, kind[:200], message[:4000].rstrip()
        if before is not None:
            if self._link == "because":
                ended.because = before
            elif self._link == "during":
                ended.during = before
            elif _WRAPPERS.search(before.text) and before in self.found:
                # What a wrapper passes on follows it: the outer one is what came of it.
                before.wraps = ended
                self.found.remove(before)
                self.found.append(before)
                self._open, self._last, self._message_left, self._link = None, ended, MESSAGE_LINES, ""
                return True
            if self._link and before in self.found:
                self.found.remove(before)
        self._keep(ended)
        self._open, self._last, self._message_left, self._link = None, ended, MESSAGE_LINES, ""
        return True

    def _close_stack(self, number: int) -> None:
        if self._open is not None:
            self._open.last = number
            self._keep(self._open)
        self._open = None

    def _keep(self, traceback: Traceback) -> None:
        self.found.append(traceback)

    def _goes_on(self, text: str) -> bool:
        """Whether a line after an exception's first belongs to its message."""
        if _RULE.fullmatch(text.strip()):
            return False
        return bool(text.strip()) and (text[:1] in " \t" or not _RAISED.match(text.strip()) or ":" not in text)


def tracebacks(lines: Iterable[tuple[int, str]]) -> list[Traceback]:
    """The tracebacks of one stream's lines, numbered."""
    reader = Reader()
    for number, text in lines:
        reader.feed(number, text)
    return reader.finish()
