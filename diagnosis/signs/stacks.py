"""Read stack dumps by faulthandler or py-spy, which show where processes of a hung run were.

Only the main thread of each process counts. A process in a collective operation waits for others; if most are in one,
those that are not come first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from diagnosis.logs.prefixes import Prefix
from diagnosis.logs.tracebacks import StackFrame
from diagnosis.signatures.operations import operations_of
from diagnosis.signs.sign import Sign

MAX_FRAMES = 200
MAX_PROCESSES = 4_096  # processes in one file
MAX_SIGNS = 4
_THREAD = re.compile(r"(?:Current thread|Thread) 0x[0-9a-fA-F]+(?: \[[^\]]*\])? \(most recent call first\):")
_FRAME = re.compile(r'  File "(?P<path>[^"\n]{1,1000})", line (?P<line>\d{1,7}) in (?P<function>\S.*)')
_PROCESS = re.compile(r"Process (?P<pid>\d+): ?(?P<command>.*)")
_SPY_THREAD = re.compile(r'Thread (?P<id>\S+) \((?P<state>[^)]*)\)(?:: "(?P<name>[^"]*)")?')
_SPY_FRAME = re.compile(r"    (?P<function>\S.*?) \((?P<path>[^()]{1,1000}?)(?::(?P<line>\d{1,7}))?\)\s*\Z")
_RANK = re.compile(r"(?:^|/)\d{1,9}\.(\d{1,6})\.txt\Z|rank[_.-]?(\d{1,6})|(?:--(?:local[_-])?rank|RANK)[= ](\d{1,6})\b")
# Collective operations of all libraries.
_COLLECTIVES = re.compile(
    r"distributed_c10d\.py|deepspeed/comm/|horovod/|mpi4py|"
    r"\b(?:all_?reduce|all_?gather\w*|reduce_?scatter\w*|broadcast|barrier|all_to_all\w*|monitored_barrier)\b"
)
# py-spy shortens the paths of packages.
_LIBRARY_PATHS = re.compile(
    r"(?:torch|numpy|transformers|lightning|pytorch_lightning|deepspeed|accelerate|datasets|multiprocessing|concurrent|"
    r"asyncio|importlib)/|(?:threading|selectors|socket|ssl|subprocess|queue|runpy|contextlib|_bootstrap)\.py\Z"
)


@dataclass(slots=True)
class ProcessStack:
    """The main thread of one process, innermost frame last, with the line number that each frame was at."""

    name: str
    line: int
    rank: int | None
    frames: list[StackFrame] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)

    @property
    def is_waiting(self) -> bool:
        """Return whether the process is in a collective operation."""
        return any(_COLLECTIVES.search(f"{frame.path}:{frame.function}") for frame in self.frames[-6:])

    @property
    def best_frame_index(self) -> int:
        """Return the frame that describes it best: the innermost of the user's own code, else the innermost."""
        user_frames = [
            index
            for index, frame in enumerate(self.frames)
            if frame.is_user_code and not _LIBRARY_PATHS.match(frame.path)
        ]
        return user_frames[-1] if user_frames else len(self.frames) - 1


def is_dump(head: bytes) -> bool:
    """Return whether a text begins as faulthandler's dumps do, unlike what a program prints as it crashes."""
    return re.match(rb"\s*(?:Timeout \([\d:.]+\)!\s+)?(?:Current thread|Thread) 0x[0-9a-f]+", head) is not None


def parse_stacks(name: str, text: str) -> list[ProcessStack]:
    """Return the stacks in a text, one per process; the last one if a process was dumped several times."""
    spied = _parse_py_spy(name, text)
    if spied:
        return spied
    found = parse_faulthandler(name, text)
    return [found] if found is not None else []


def parse_faulthandler(name: str, text: str) -> ProcessStack | None:
    """Return the stack of one process by faulthandler, which prints the newest thread first and the main one last."""
    stack: ProcessStack | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if _THREAD.match(line):
            stack = ProcessStack(name, number, _rank_of(name))
        elif stack is not None and (found := _FRAME.match(line)) and len(stack.frames) < MAX_FRAMES:
            stack.frames.insert(0, StackFrame(found["path"], found["function"]))
            stack.numbers.insert(0, int(found["line"]))
    return stack if stack is not None and stack.frames else None


def _parse_py_spy(name: str, text: str) -> list[ProcessStack]:
    """Return py-spy's dumps of one or more processes."""
    stacks: list[ProcessStack] = []
    is_main = False
    for number, line in enumerate(text.splitlines(), 1):
        if process := _PROCESS.match(line):
            if len(stacks) == MAX_PROCESSES:
                break
            stacks.append(ProcessStack(name, number, _rank_of(f"{name} {process['command']}")))
            is_main = False
        elif stacks and (thread := _SPY_THREAD.match(line)):
            is_main = thread["name"] in {"MainThread", None} and not stacks[-1].frames
            stacks[-1].line = number if is_main else stacks[-1].line
        elif stacks and is_main and (frame := _SPY_FRAME.match(line)) and len(stacks[-1].frames) < MAX_FRAMES:
            stacks[-1].frames.insert(0, StackFrame(frame["path"], frame["function"]))
            stacks[-1].numbers.insert(0, int(frame["line"] or 0))
    return [stack for stack in stacks if stack.frames]


def _rank_of(text: str) -> int | None:
    found = _RANK.search(text)
    return int(next(filter(None, found.groups()))) if found else None


def signs_of_stacks(stacks: Sequence[ProcessStack]) -> list[Sign]:
    """Return where ranks were, those outside of a collective first if others wait in one; at most `MAX_SIGNS`."""
    waiting = [stack for stack in stacks if stack.is_waiting]
    elsewhere = [stack for stack in stacks if not stack.is_waiting]
    is_odd = bool(waiting) and 0 < len(elsewhere) < len(stacks)
    ordered = elsewhere + waiting if is_odd else list(stacks)
    return [_sign(stack, while_others_wait=is_odd and not stack.is_waiting) for stack in ordered[:MAX_SIGNS]]


def _sign(stack: ProcessStack, *, while_others_wait: bool) -> Sign:
    at = stack.best_frame_index
    frame, number = stack.frames[at], stack.numbers[at]
    who = f"rank {stack.rank}" if stack.rank is not None else "a process"
    text = f"{who} was in {frame.function} ({frame.path}:{number})"
    if at != len(stack.frames) - 1:
        inner = stack.frames[-1]
        text += f", there in {inner.function} ({inner.path.rpartition('/')[2]}:{stack.numbers[-1]})"
    groups = {"frame": f"{frame.path}:{frame.function}"}
    if while_others_wait:
        text += ", while the others waited for it"
        groups["behind"] = "yes"
    text = text.replace("\0", "")[:1000]
    prefix, doing = Prefix(rank=stack.rank), operations_of(stack.frames)
    return Sign(
        stack.name,
        stack.line,
        text,
        cause="collective.timeout",
        role="confirmation",
        prefix=prefix,
        operations=doing,
        groups=groups,
        source_kind="stacks",
    )
