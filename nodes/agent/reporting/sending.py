"""Send the buffer's batches to the portal, in a thread: sampling continues whatever happens here."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from nodes.agent.log import StatusLog
from nodes.agent.reporting.buffer import Buffer, without_log_position
from nodes.agent.reporting.enrolment import AgentTokens, TokenUnavailable, refusal
from nodes.agent.reporting.posting import (
    BATCHES,
    COMPRESSED_BYTES,
    PlantRequest,
    PortalResponse,
    PortalUnreachable,
    ReportClient,
    body,
    fitting,
)

MAX_POST_SECONDS = 120.0  # also for responses that trickle in
MAX_CONSECUTIVE_REJECTIONS = 3  # of single batches: then the fault is not in the batches
CLOCK_SECONDS = 60.0


@dataclass(frozen=True)
class RetryDelays:
    """Seconds between attempts."""

    first: float = 1.0
    longest: float = 60.0


class BatchSender(threading.Thread):
    """The sending thread. `on_rejected` gets each batch that the portal rejects, `on_plant` each fault to plant."""

    def __init__(
        self,
        portal: ReportClient,
        tokens: AgentTokens,
        buffer: Buffer,
        *,
        node: str,
        boot_id: str,
        on_rejected: Callable[[bytes], None],
        on_plant: Callable[[PlantRequest], None],
        waits: RetryDelays = RetryDelays(),  # noqa: B008 (it is frozen)
    ) -> None:
        super().__init__(name="sender", daemon=True)
        self._portal, self._tokens, self._buffer = portal, tokens, buffer
        self._node, self._boot_id, self._on_rejected, self._waits = node, boot_id, on_rejected, waits
        self._on_plant = on_plant
        self._news = threading.Event()
        self._not_before = 0.0
        self._is_ending = False
        self._status = StatusLog()
        self._cursor: int | None = None
        """The batch number that the portal wants next; None: it has not responded in this run."""
        self._most = BATCHES
        self._skipped: set[int] = set()
        self._consecutive_rejections = 0
        self._wait = 0.0
        self.is_idle = threading.Event()
        """Set while the portal has accepted everything."""

    def notify(self, *, is_urgent: bool = False) -> None:
        """Announce new batches; urgent ones do not wait for the next retry."""
        self.is_idle.clear()
        if is_urgent:
            self._not_before = 0.0
        self._news.set()

    def check_timeout(self) -> None:
        """Abort a post that does not end. The main loop calls this now and then."""
        began = self._portal.began
        if began is not None and time.monotonic() - began > MAX_POST_SECONDS:
            self._portal.interrupt()

    def finish(self, seconds: float) -> None:
        """Try once more, for at most `seconds`."""
        self.notify(is_urgent=True)
        self.is_idle.wait(seconds)
        self._is_ending = True
        self._news.set()

    def run(self) -> None:
        self._send_until_ending()
        self._portal.close()

    def _send_until_ending(self) -> None:
        while not self._is_ending:
            self._news.clear()
            delay = self._not_before - time.monotonic()
            if delay > 0:
                self._news.wait(delay)
                continue
            try:
                wait = self._send_once()
            except Exception as error:  # this thread must not die
                self._status.update("portal", f"Posting failed ({type(error).__name__}). It is retried.")
                wait = self._waits.longest
            if wait is None:
                self.is_idle.set()
                self._news.wait()
            else:
                self._not_before = time.monotonic() + wait

    def _send_once(self) -> float | None:
        """Send one post if there is something; return the delay before the next, None: until there is news."""
        try:
            token, is_secret = self._tokens.find()
            return self._enrol(token) if is_secret else self._post(token)
        except TokenUnavailable as error:
            self._status.update("token", str(error))
            return self._waits.longest
        except PortalUnreachable as error:
            self._status.update("portal", f"The portal cannot be reached: {error}. Reports are stored until it is.")
            return self._retry_delay()

    def _enrol(self, secret: str) -> float:
        self._tokens.check_room()
        answer = self._portal.enrol(self._boot_id, secret)
        if answer.token:
            self._tokens.store(answer.token)
            self._status.update("token", f"{self._node} is enrolled.")
            return 0.0
        self._status.update("token", refusal(answer, self._node))
        return answer.wait or (self._waits.longest if answer.status < 500 else self._retry_delay())

    def _post(self, token: str) -> float | None:
        first, lines = self._next()
        if self._cursor is not None and not lines:
            return None
        batches, boot_id = _same_boot(lines)
        batches = batches[: min(fitting(batches), self._most)]
        given_up = first - self._cursor if self._cursor is not None else 0
        sent_boot_id = boot_id or self._boot_id
        packed = body(stream=self._buffer.stream, first=first, given_up=given_up, boot_id=sent_boot_id, batches=batches)
        if len(packed) > COMPRESSED_BYTES and len(batches) > 1:
            self._most = len(batches) // 2
            return 0.0
        answer = self._portal.post(packed, token)
        if answer.status == 200 and answer.next is not None:
            self._note_clock(answer)
            if answer.plant is not None:
                self._on_plant(answer.plant)
            return self._advance(answer.next, first + len(batches))
        return self._handle_rejection(answer, token, first, batches)

    def _next(self) -> tuple[int, list[bytes]]:
        """Return the batches to send; none before the first response, which has the portal's position."""
        if self._cursor is None:
            return self._buffer.began, []
        number = self._cursor
        while number in self._skipped:
            number += 1
        first, lines = self._buffer.read(number, self._most)
        end = min((skipped for skipped in self._skipped if skipped > first), default=first + len(lines))
        return first, lines[: end - first]

    def _advance(self, number: int, expected: int) -> float:
        """Continue with the number that the portal wants, even if it is lower or higher than expected."""
        before, self._cursor = self._cursor, number
        # Skip batches that the portal has and this disk has lost, as after a power failure.
        self._buffer.renumber(number, self._buffer.began if before is None else self._buffer.next)
        self._buffer.note_accepted(number)
        self._skipped = {skipped for skipped in self._skipped if skipped >= number}
        self._status.update("token", "")
        if before is None:
            self._status.update("portal", f"The portal accepts {self._node}'s reports.")
            return 0.0
        if number == before:  # it accepts nothing, for whatever reason
            return self._retry_delay()
        if number >= expected:
            self._status.update("portal", f"The portal accepts {self._node}'s reports.")
            self._most, self._wait, self._consecutive_rejections = min(2 * self._most, BATCHES), 0.0, 0
        return 0.0

    def _handle_rejection(self, answer: PortalResponse, token: str, first: int, batches: list[bytes]) -> float:
        status = answer.status
        if status in {401, 403}:
            self._tokens.reject(token)
            self._status.update("token", _TOKEN_REFUSED.format(status=status, node=self._node))
            return self._waits.longest
        if status in {400, 413, 415, 422} and batches:
            return self._split(answer, first, batches)
        self._status.update("portal", _meaning(answer, self._node))
        if status == 404 or status < 400:
            return answer.wait or self._waits.longest
        return max(answer.wait, self._retry_delay())

    def _split(self, answer: PortalResponse, first: int, batches: list[bytes]) -> float:
        """Halve a rejected post, down to the batch at fault, which is then skipped."""
        if len(batches) > 1:
            self._most = len(batches) // 2
            return 0.0
        self._status.update(
            "batch", f"The portal rejects batch {first} ({answer.status}: {answer.detail}). It is skipped."
        )
        self._skipped.add(first)
        self._on_rejected(batches[0])
        self._consecutive_rejections += 1
        # If it rejects each one, another release may not; waiting means that little is lost until then.
        return self._waits.longest if self._consecutive_rejections >= MAX_CONSECUTIVE_REJECTIONS else 0.0

    def _retry_delay(self) -> float:
        self._wait = min(max(self._waits.first, 2 * self._wait), self._waits.longest)
        return self._wait * (0.5 + 0.5 * random.random())

    def _note_clock(self, answer: PortalResponse) -> None:
        ahead = answer.clock_ahead
        way = "ahead of" if ahead > 0 else "behind"
        warning = f"This machine's clock is more than a minute {way} the portal's. Let NTP set it."
        self._status.update("clock", warning if abs(ahead) > CLOCK_SECONDS else "")


_TOKEN_REFUSED = (
    "The portal rejects this token ({status}). A sysadmin creates a new one with `vigil agent enroll {node}`;"
    " write it into VIGIL_AGENT_TOKEN_FILE. Reports are stored until then."
)


def _meaning(answer: PortalResponse, node: str) -> str:
    status = answer.status
    if status == 200 or 300 <= status < 400:
        return f"The server at VIGIL_AGENT_URL is not a Vigil portal ({status}). Set it to the portal's address."
    if status == 404:
        return (
            f"The portal has no node {node}, or there is no portal at VIGIL_AGENT_URL (404)."
            " Set VIGIL_AGENT_NODE to the node's name as the portal has it."
        )
    return (
        f"The portal cannot accept reports ({status}{': ' + answer.detail if answer.detail else ''}). They are stored."
    )


def _same_boot(lines: list[bytes]) -> tuple[list[bytes], str]:
    """Return the leading batches of the same boot, and its id."""
    found = [without_log_position(line) for line in lines]
    boot_id = found[0][1] if found else ""
    until = next((place for place, (_, boot, _) in enumerate(found) if boot != boot_id), len(found))
    return [batch for batch, _, _ in found[:until]], boot_id
