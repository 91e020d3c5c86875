"""Parse Python tracebacks: frames, the exception, and how chained exceptions belong together.

A reader is fed with the lines of one stream (one rank's, without prefixes, with their indentation). A log may begin or
end in the middle of a traceback. Chains and wrappers are followed to where they began: a direct cause, or a worker's
own traceback, comes before the exception that was raised because of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

MAX_MESSAGE_LINES = 40  # of one exception
MAX_FRAMES = 400  # of one traceback: recursion prints a thousand

_HEADER = re.compile(
    r"\s*(?:\+ )?(?:(?:Original |Remote |Exception Group )?Traceback \(most recent call last\)|"
    r"(?P<stack>(?:(?:Current thread|Thread) 0x\w+.*|Stack) \(most recent call first\):))"
)
# The margin that exception groups are drawn with.
_MARGIN = re.compile(r" {2,}(?:\| ?|\+[-+]{3}[-+ \d]*$)")
_RICH = re.compile(r"\s*╭─+ Traceback \(most recent call last\) ─+╮")
_FRAME = re.compile(r'\s*File "(?P<path>[^"]{1,500})", line (?P<line>\d+)(?:,? in (?P<function>.{1,200}))?\s*$')
_RICH_FRAME = re.compile(r"\s*│ +(?P<path>[^ ]{1,500}):(?P<line>\d+) in (?P<function>[\w<>.]+)")
_RAISED = re.compile(r"(?P<type>(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:\([\w.]+\))?)(?:: ?(?P<message>.*))?$")
# If only the line itself shows that it ends a traceback, the class's name must look like an exception's.
_LIKE_AN_ERROR = re.compile(
    r"(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception|Interrupt|SystemExit|Failed|Failure|Fault|Timeout|OutOfMemory\w*|"
    r"Missing\w*|NotFound|Exit|StopIteration|Empty|Full|Expired)\b"
)
_CAUSE_LINE = "The above exception was the direct cause of the following exception:"
_HANDLING_LINE = "During handling of the above exception, another exception occurred:"
_WRAPPERS = re.compile(
    r"Caught \w+ in (?:DataLoader worker process|replica|pin memory thread)|RemoteTraceback|RayTaskError|RemoteError|"
    r"ProcessRaisedException|ProcessExitedException|Process \d+ terminated with the following error|"
    r"\(\d+ sub-exceptions?\)|WorkerError|BrokenProcessPool|raised by (?:worker|rank|actor)|"
    r"\bClientsFailed: .+ (?:failed with|so):"
)
_LIBRARY_PATHS = re.compile(r"site-packages|dist-packages|/lib(?:64)?/python\d|/opt/conda/|^<|/pyenv/|/usr/lib/")
_SEPARATOR = re.compile(r"([-=*#_~])\1{9,}")  # drawn between the output of different sources
_SOURCE_LINE = re.compile(
    r"\s{4,}\S|\s*[~^]+\s*$|\s*\.\.\.<\d+ lines?>\.\.\.|\s*\[Previous line repeated \d+ more times?\]|\s*(?:│|╭|╰|╮|╯)"
)


@dataclass(frozen=True, slots=True)
class StackFrame:
    """One frame of a traceback or a stack dump."""

    path: str
    function: str
    code: str = ""

    @property
    def is_user_code(self) -> bool:
        """Return whether the frame is the user's own code, not a package's or the interpreter's."""
        return not _LIBRARY_PATHS.search(self.path)


@dataclass(slots=True)
class Traceback:
    """One traceback.

    Lines count from 1: `first` is where it begins, `line` has its exception (0 if the log ends before it).
    """

    first: int
    line: int = 0
    type: str = ""
    message: str = ""
    frames: list[StackFrame] = field(default_factory=list)
    is_whole: bool = True
    is_stack: bool = False  # a dump of where a thread is, not an exception's
    wraps: Traceback | None = None  # a worker's, which this one only passes on
    direct_cause: Traceback | None = None  # its direct cause
    handled: Traceback | None = None  # what was being handled when it was raised
    last: int = 0

    @property
    def name(self) -> str:
        """Return the exception's class without its module."""
        return self.type.rsplit(".", 1)[-1]

    @property
    def text(self) -> str:
        return f"{self.type}: {self.message}" if self.message else self.type

    @property
    def chain(self) -> list[Traceback]:
        """Return the linked tracebacks, from where the failure began to what was raised in the end."""
        found, at, visited = [self], self, {id(self)}
        while (before := at.wraps or at.direct_cause or at.handled) is not None and id(before) not in visited:
            found.append(before)
            visited.add(id(before))
            at = before
        return found[::-1]

    @property
    def user_frame(self) -> StackFrame | None:
        """Return the innermost frame of the user's own code, or None."""
        return next((frame for frame in reversed(self.frames) if frame.is_user_code), None)


class TracebackReader:
    """Read the tracebacks of one stream, line by line."""

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
        """Read one line and return whether it belongs to a traceback. `is_logged`: a time or a level precedes it."""
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
            return self._read_inside(number, text)
        if text.strip() in (_CAUSE_LINE, _HANDLING_LINE):
            self._link = "because" if text.strip() == _CAUSE_LINE else "during"
            return True
        if self._last is not None and self._message_left and self._continues_message(text):
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
        """Stop adding lines to the message of the last exception."""
        self._message_left = 0

    def finish(self) -> list[Traceback]:
        """Return all tracebacks; one that the log breaks off in has no exception."""
        if self._open is not None and self._open.frames:
            self._open.is_whole = False
            self._store(self._open)
        self._open = None
        return self.found

    def _begin(self, number: int, header: re.Match[str] | None) -> bool:
        if self._open is not None and self._open.frames and not self._open.type:
            self._open.is_whole = False
            self._store(self._open)
        self._open = Traceback(number, is_stack=bool(header and header["stack"]))
        self._code_due = False
        return True

    def _frame(self, number: int, frame: re.Match[str]) -> bool:
        if self._open is None:
            self._open = Traceback(number, is_whole=False)
        function = frame["function"] or ""
        if len(self._open.frames) < MAX_FRAMES:
            self._open.frames.append(StackFrame(frame["path"], function.strip()))
        self._code_due = True
        return True

    def _read_inside(self, number: int, text: str) -> bool:
        current = self._open
        assert current is not None
        stripped = text.strip()
        if not stripped:
            if current.frames and current.is_stack:
                self._close_stack(number)
            return True
        if _SOURCE_LINE.match(text) and (current.frames or not _RAISED.match(stripped)):
            if self._code_due and current.frames and not re.fullmatch(r"[\s~^│]+", text):
                last = current.frames[-1]
                current.frames[-1] = StackFrame(last.path, last.function, stripped[:300])
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
                ended.direct_cause = before
            elif self._link == "during":
                ended.handled = before
            elif _WRAPPERS.search(before.text) and before in self.found:
                # A wrapper's exception follows the one that it wraps: the outer one is the consequence.
                before.wraps = ended
                self.found.remove(before)
                self.found.append(before)
                self._open, self._last, self._message_left, self._link = None, ended, MAX_MESSAGE_LINES, ""
                return True
            if self._link and before in self.found:
                self.found.remove(before)
        self._store(ended)
        self._open, self._last, self._message_left, self._link = None, ended, MAX_MESSAGE_LINES, ""
        return True

    def _close_stack(self, number: int) -> None:
        if self._open is not None:
            self._open.last = number
            self._store(self._open)
        self._open = None

    def _store(self, traceback: Traceback) -> None:
        self.found.append(traceback)

    def _continues_message(self, text: str) -> bool:
        """Return whether a line belongs to the message that the exception's line began."""
        if _SEPARATOR.fullmatch(text.strip()):
            return False
        return bool(text.strip()) and (text[:1] in " \t" or not _RAISED.match(text.strip()) or ":" not in text)
