"""The thread that brings the buffer's batches to the portal. Sampling goes on whatever happens here."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from nodes.agent.buffer import Buffer, unmarked
from nodes.agent.enrolment import NoToken, Tokens, refusal
from nodes.agent.posting import BATCHES, COMPRESSED_BYTES, Answer, Portal, Unreachable, body, fitting
from nodes.agent.speaking import Told

LONGEST_POST_SECONDS = 120.0  # bytes that dribble in are no answer
REFUSED_IN_A_ROW = 3  # batches alone: then it is no batch that is wrong
CLOCK_SECONDS = 60.0


@dataclass(frozen=True)
class Waits:
    """Seconds between tries."""

    first: float = 1.0
    longest: float = 60.0


class Sender(threading.Thread):
    """`refused` is told of each batch that the portal will not have."""

    def __init__(
        self,
        portal: Portal,
        tokens: Tokens,
        buffer: Buffer,
        *,
        node: str,
        boot_id: str,
        refused: Callable[[bytes], None],
        waits: Waits = Waits(),  # noqa: B008 (it is frozen)
    ) -> None:
        super().__init__(name="sender", daemon=True)
        self._portal, self._tokens, self._buffer = portal, tokens, buffer
        self._node, self._boot_id, self._refused, self._waits = node, boot_id, refused, waits
        self._news = threading.Event()
        self._not_before = 0.0
        self._is_ending = False
        self._told = Told()
        self._cursor: int | None = None
        """What the portal goes on with; None: it has not said in this run."""
        self._most = BATCHES
        self._passed: set[int] = set()
        self._refused_in_a_row = 0
        self._wait = 0.0
        self.is_idle = threading.Event()
        """All that there is has been taken."""

    def hurry(self, *, is_urgent: bool = False) -> None:
        """There is something new; what is urgent waits for no next try."""
        self.is_idle.clear()
        if is_urgent:
            self._not_before = 0.0
        self._news.set()

    def tend(self) -> None:
        """From the loop, now and then: a post that does not end is ended."""
        began = self._portal.began
        if began is not None and time.monotonic() - began > LONGEST_POST_SECONDS:
            self._portal.interrupt()

    def finish(self, seconds: float) -> None:
        """Try once more, for at most so long."""
        self.hurry(is_urgent=True)
        self.is_idle.wait(seconds)
        self._is_ending = True
        self._news.set()

    def run(self) -> None:
        self._live()
        self._portal.close()

    def _live(self) -> None:
        while not self._is_ending:
            self._news.clear()
            left = self._not_before - time.monotonic()
            if left > 0:
                self._news.wait(left)
                continue
            try:
                wait = self._turn()
            except Exception as error:  # a thread that must live
                self._told.say("portal", f"Posting failed ({type(error).__name__}). It is tried again.")
                wait = self._waits.longest
            if wait is None:
                self.is_idle.set()
                self._news.wait()
            else:
                self._not_before = time.monotonic() + wait

    def _turn(self) -> float | None:
        """One post, if there is something; answers how long to wait before the next, None: for news."""
        try:
            token, is_secret = self._tokens.find()
            return self._enrol(token) if is_secret else self._post(token)
        except NoToken as trouble:
            self._told.say("token", str(trouble))
            return self._waits.longest
        except Unreachable as trouble:
            self._told.say("portal", f"The portal can't be reached: {trouble}. What there is to tell is kept for it.")
            return self._later()

    def _enrol(self, secret: str) -> float:
        self._tokens.check_room()
        answer = self._portal.enrol(self._boot_id, secret)
        if answer.token:
            self._tokens.keep(answer.token)
            self._told.say("token", f"{self._node} is enrolled.")
            return 0.0
        self._told.say("token", refusal(answer, self._node))
        return answer.wait or (self._waits.longest if answer.status < 500 else self._later())

    def _post(self, token: str) -> float | None:
        first, lines = self._next()
        if self._cursor is not None and not lines:
            return None
        batches, boot_id = _of_one_boot(lines)
        batches = batches[: min(fitting(batches), self._most)]
        given_up = first - self._cursor if self._cursor is not None else 0
        told_boot = boot_id or self._boot_id
        packed = body(stream=self._buffer.stream, first=first, given_up=given_up, boot_id=told_boot, batches=batches)
        if len(packed) > COMPRESSED_BYTES and len(batches) > 1:
            self._most = len(batches) // 2
            return 0.0
        answer = self._portal.post(packed, token)
        if answer.status == 200 and answer.next is not None:
            self._note_clock(answer)
            return self._take(answer.next, first + len(batches))
        return self._judge(answer, token, first, batches)

    def _next(self) -> tuple[int, list[bytes]]:
        """What to send; nothing at all until the portal has said where it stands: that is what such a post asks."""
        if self._cursor is None:
            return self._buffer.began, []
        number = self._cursor
        while number in self._passed:
            number += 1
        first, lines = self._buffer.read(number, self._most)
        until = min((one for one in self._passed if one > first), default=first + len(lines))
        return first, lines[: until - first]

    def _take(self, number: int, expected: int) -> float:
        """The portal's word for where it stands counts, also where it is lower or higher than expected."""
        before, self._cursor = self._cursor, number
        # What the portal has and this disk has lost, as a machine without power does, is passed over.
        self._buffer.renumber(number, self._buffer.began if before is None else self._buffer.next)
        self._buffer.note_taken(number)
        self._passed = {one for one in self._passed if one >= number}
        self._told.say("token", "")
        if before is None:
            self._told.say("portal", f"The portal takes what {self._node} tells.")
            return 0.0
        if number == before:  # it takes nothing, whatever its reason
            return self._later()
        if number >= expected:
            self._told.say("portal", f"The portal takes what {self._node} tells.")
            self._most, self._wait, self._refused_in_a_row = min(2 * self._most, BATCHES), 0.0, 0
        return 0.0

    def _judge(self, answer: Answer, token: str, first: int, batches: list[bytes]) -> float:
        status = answer.status
        if status in {401, 403}:
            self._tokens.refuse(token)
            self._told.say("token", _TOKEN_REFUSED.format(status=status, node=self._node))
            return self._waits.longest
        if status in {400, 413, 415, 422} and batches:
            return self._split(answer, first, batches)
        self._told.say("portal", _meaning(answer, self._node))
        if status == 404 or status < 400:
            return answer.wait or self._waits.longest
        return max(answer.wait, self._later())

    def _split(self, answer: Answer, first: int, batches: list[bytes]) -> float:
        """Something in these is wrong or too much: half of them, down to the one, which is then passed over."""
        if len(batches) > 1:
            self._most = len(batches) // 2
            return 0.0
        self._told.say(
            "batch", f"The portal refuses batch {first} ({answer.status}: {answer.detail}). It is passed over."
        )
        self._passed.add(first)
        self._refused(batches[0])
        self._refused_in_a_row += 1
        # If it refuses each of them, another release may not: then little is lost meanwhile.
        return self._waits.longest if self._refused_in_a_row >= REFUSED_IN_A_ROW else 0.0

    def _later(self) -> float:
        self._wait = min(max(self._waits.first, 2 * self._wait), self._waits.longest)
        return self._wait * (0.5 + 0.5 * random.random())

    def _note_clock(self, answer: Answer) -> None:
        ahead = answer.clock_ahead
        way = "ahead of" if ahead > 0 else "behind"
        told = f"This machine's clock is more than a minute {way} the portal's. Let NTP set it."
        self._told.say("clock", told if abs(ahead) > CLOCK_SECONDS else "")


_TOKEN_REFUSED = (
    "The portal does not take this token ({status}). A sysadmin makes another with `vigil agent enroll {node}`;"
    " write it into VIGIL_AGENT_TOKEN_FILE. What there is to tell is kept."
)


def _meaning(answer: Answer, node: str) -> str:
    status = answer.status
    if status == 200 or 300 <= status < 400:
        return f"What answers at VIGIL_AGENT_URL is no portal of Vigil ({status}). Set it to the portal's address."
    if status == 404:
        return (
            f"The portal knows no node {node}, or none is at VIGIL_AGENT_URL (404)."
            " Set VIGIL_AGENT_NODE to the node's name as the portal has it."
        )
    return f"The portal can't take reports ({status}{': ' + answer.detail if answer.detail else ''}). They are kept."


def _of_one_boot(lines: list[bytes]) -> tuple[list[bytes], str]:
    """Batches from the beginning on that are of the same boot, and which."""
    found = [unmarked(line) for line in lines]
    boot_id = found[0][1] if found else ""
    until = next((place for place, (_, boot, _) in enumerate(found) if boot != boot_id), len(found))
    return [batch for batch, _, _ in found[:until]], boot_id
