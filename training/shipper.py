"""`python -P -m training.shipper RUN_DIR ATTEMPT_DIR`: posts what this node's ranks have spooled (protocols.md §3).

A process of its own beside the ranks, standard library only, so that it starts in milliseconds and outlives them. The
spool is the truth and the portal's answer is the cursor: whatever is lost on the way, answered late or said twice, the
next post goes on where the portal says. It ends when its stdin does: after a bounded moment to post the rest.
Where nodes cannot reach the portal its token says so ("reports": "tail"): then the portal reads the spools by itself,
and this process waits for another word.
With --every-node one of them posts for all nodes: of a job that Slurm got past Vigil, where nothing of ours runs on the
others. What those write is seen through a shared file system.
"""

from __future__ import annotations

import argparse
import os
import random
import select
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from training.attempt.files import read_json
from training.reporting.lines import Batch
from training.reporting.posting import Answer, Portal, Portion, Unreachable, packed
from training.reporting.spool import Spool, open_folder, spool_names

POLL_SECONDS = 0.05
IDLE_SECONDS = 1.0  # between two looks at the token, where it says that nothing is to be posted
GAP_SECONDS = 0.15  # between two posts, so that the flushes of several ranks travel together
POINTS = 20_000  # a post; the portal takes 50,000
BATCHES = 2_000
EVENTS = 500
STREAMS = 1_000
LONGEST_WAIT = 5.0
# At the end, without an answer or without ever a token, waiting is no use: the portal reads the spool from disk.
HOPELESS_SECONDS, UNKNOWN_SECONDS = 3.0, 0.5
LOOKS_A_SECOND = 400  # at files that others write: each asks the file system's server
LIST_SECONDS = 2.0  # the folder is listed again then, whatever its time says: of two changes in a tick it tells one
LARGE = 256 * 1024  # a stream of this size was shipped before, by a shipper that died: ask where it stands


@dataclass
class _Source:
    """One stream that is being shipped. `cursor` is the portal's word, as far as we have heard it."""

    spool: Spool
    size: int = -1
    more: bool = True  # something may be there to read
    asked: bool = True  # False: the portal has yet to say where it stands
    told_end: bool = False


class Shipper:
    """`node`: whose streams; None: everybody's."""

    def __init__(self, run_dir: Path, attempt_dir: Path, *, node: str | None) -> None:
        self._token_file, self._owner = run_dir / "portal" / "token", read_json(attempt_dir / "owner.json") or {}
        self._directory = open_folder(attempt_dir / "spool")
        self._node = node
        self._sources: dict[str, _Source] = {}
        self._others: set[str] = set()  # streams of other nodes, or of nobody
        self._listed = self._token_seen = -1
        self._listed_at = self._noticed_at = 0.0
        self._portal: Portal | None = None
        self._is_tailed = False
        self._pending: list[Portion] = []
        self._failures = 0
        self._next_post = 0.0
        self._said = ""

    def work(self) -> bool:
        """One round: notice what has grown, post it if it is time. True if there may be more to do at once."""
        has_portal = self._find_portal()
        if self._is_tailed:
            return False
        if self._node is not None or time.monotonic() - self._noticed_at >= self.pause:
            self._notice()
            self._noticed_at = time.monotonic()
        if not has_portal or time.monotonic() < self._next_post:
            return False
        self._pending = self._pending or self._gather()
        if not self._pending:
            return False
        self._post()
        return self._failures == 0

    @property
    def is_done(self) -> bool:
        """Everything on disk is posted."""
        return not self._pending and not any(source.more for source in self._sources.values())

    @property
    def pause(self) -> float:
        """Seconds until something may be to do again."""
        if self._is_tailed:
            return IDLE_SECONDS
        if self._node is not None:
            return POLL_SECONDS
        return max(POLL_SECONDS * 5, len(self._sources) / LOOKS_A_SECOND)

    @property
    def patience(self) -> float:
        """Seconds worth waiting at the end, as things stand."""
        if self._portal is None:
            return UNKNOWN_SECONDS
        return HOPELESS_SECONDS if self._failures else float("inf")

    def look_again(self) -> None:
        """Look at everything in the next round: who wrote it has ended."""
        self._noticed_at = self._listed_at = 0.0

    def close(self) -> None:
        if self._portal:
            self._portal.close()
        os.close(self._directory)

    # What is there.

    def _notice(self) -> None:
        """Streams that have appeared or grown."""
        listed, now = os.fstat(self._directory).st_mtime_ns, time.monotonic()
        if listed != self._listed or now - self._listed_at > LIST_SECONDS:
            self._listed, self._listed_at = listed, now
            for name in spool_names(self._directory):
                if name not in self._sources and name not in self._others:
                    self._sources[name] = _Source(Spool(self._directory, name))
        for name, source in list(self._sources.items()):
            size = source.spool.size(of_another_node=self._node is None)
            if size != source.size:
                if source.size < 0 and size > LARGE:
                    source.asked = False
                source.size, source.more = size, True
            if source.told_end or (source.spool.ended and source.spool.header is None):
                self._leave(name)

    def _leave(self, name: str) -> None:
        del self._sources[name]
        self._others.add(name)

    def _gather(self) -> list[Portion]:
        """The next post: a fair share of every stream that has something, within the limits."""
        portions: list[Portion] = []
        points = events = batches = 0
        waiting = [(name, source) for name, source in self._sources.items() if source.more]
        random.shuffle(waiting)  # so that none starves when there is more than one post can take
        share = max(1, BATCHES // max(1, len(waiting)))
        for name, source in waiting[:STREAMS]:
            if points >= POINTS or events >= EVENTS or batches >= BATCHES:
                break
            portion = self._portion(name, source, share)
            if portion:
                portions.append(portion)
                points += sum(batch.points for batch in portion.batches)
                events += sum(len(batch.events) for batch in portion.batches)
                batches += len(portion.batches)
        return portions

    def _portion(self, name: str, source: _Source, share: int) -> Portion | None:
        spool = source.spool
        first = spool.next_seq
        batches: list[Batch] = []
        points = events = 0
        while source.asked and points < POINTS // 2 and events < EVENTS // 2 and len(batches) < share:
            # One by one where batches are large, so that a post never gets far beyond its limits.
            found = spool.read(limit=1 if points > 1000 or events > 20 else 8)
            if not found:
                source.more = False
                break
            batches += found
            points += sum(batch.points for batch in found)
            events += sum(len(batch.events) for batch in found)
        if spool.header is None and not source.asked:
            spool.read(limit=0)
        if spool.header is None:
            source.more = False
            return None
        if self._node is not None and spool.header.node != self._node:
            self._leave(name)
            return None
        if not batches and source.asked and not spool.ended:
            return None
        return Portion(spool.header, first, batches, end=spool.ended and source.asked)

    # Where it goes.

    def _find_portal(self) -> bool:
        """The portal, once it has left a token for exactly this submission of the job."""
        try:
            seen = os.stat(self._token_file).st_mtime_ns
        except OSError:
            return self._portal is not None
        if seen != self._token_seen:
            self._token_seen = seen
            told = read_json(self._token_file) or {}
            if all(told.get(key) == self._owner.get(key) for key in ("scheduler_id", "restart_count")):
                self._is_tailed = told.get("reports") == "tail"
                if self._is_tailed:
                    self._leave_portal()
                else:
                    self._open_portal(told)
        return self._portal is not None

    def _open_portal(self, told: dict[str, object]) -> None:
        try:
            portal = Portal(str(told["url"]), int(str(told["attempt"])), str(told["token"]))
        except (KeyError, ValueError):
            self._say("the token file makes no sense")
            return
        if self._portal:
            self._portal.close()
        self._portal, self._failures, self._next_post = portal, 0, 0.0

    def _leave_portal(self) -> None:
        """Post nothing more. Should it be asked for again, the portal says where each stream goes on."""
        if self._portal:
            self._portal.close()
        self._portal = None
        self._sources.clear()
        self._pending = []
        self._listed = -1
        self._say("the portal reads the spools by itself")

    def _post(self) -> None:
        assert self._portal is not None
        body = packed(self._pending)
        if body is None:
            self._lighten(413)
            return
        try:
            answer = self._portal.post(body)
        except Unreachable as error:
            self._back_off(f"the portal does not answer ({error})", 0.0)
            return
        if answer.status == 200:
            self._obey(answer)
        elif answer.status in {400, 413, 422}:
            self._lighten(answer.status)
        else:
            self._back_off(f"the portal answered {answer.status}", answer.wait)

    def _obey(self, answer: Answer) -> None:
        """Go on where the portal says, even behind what was sent already."""
        for portion in self._pending:
            source = next((s for s in self._sources.values() if s.spool.stream == portion.header.stream), None)
            if source is None:
                continue
            cursor = answer.cursors.get(portion.header.stream, portion.first)
            source.told_end = portion.end and cursor == portion.after
            source.asked = True
            if cursor != source.spool.next_seq:
                source.spool.seek(cursor)
                source.more = True
        self._pending = []
        self._failures = 0
        self._next_post = time.monotonic() + GAP_SECONDS
        self._say("the portal takes reports")

    def _back_off(self, why: str, asked: float) -> None:
        """Keep the post and try again later; meanwhile nothing is read, so memory stays what it is."""
        self._failures += 1
        wait = max(min(0.1 * 2 ** min(self._failures, 10), LONGEST_WAIT), min(asked, 30.0))
        self._next_post = time.monotonic() + wait * random.uniform(0.5, 1.5)
        self._say(why)

    def _lighten(self, status: int) -> None:
        """A post refused for its content: half of it, down to one batch, which then is named and passed over."""
        portion = self._pending[0]
        if len(self._pending) > 1 or len(portion.batches) > 1:
            for other in self._pending[1:]:
                self._rewind(other.header.stream, other.first)
            keep = max(1, len(portion.batches) // 2) if len(self._pending) == 1 else len(portion.batches)
            if keep < len(portion.batches) or portion.end:
                self._rewind(portion.header.stream, portion.first + keep)
            self._pending = [Portion(portion.header, portion.first, portion.batches[:keep])]
            return
        self._say(f"a batch of stream {portion.header.stream} was refused with {status}")
        named = [{"kind": "report.refused", "time": batch.time, "status": status} for batch in portion.batches]
        if portion.batches and portion.batches[0].events != named:
            portion.batches = [Batch(portion.batches[0].seq, portion.batches[0].time, {}, list(named))]
        else:  # it is the stream itself that the portal does not want
            self._pending = []
            for name in [name for name, s in self._sources.items() if s.spool.stream == portion.header.stream]:
                self._leave(name)

    def _rewind(self, stream: str, seq: int) -> None:
        for source in self._sources.values():
            if source.spool.stream == stream:
                source.spool.seek(seq)
                source.more = True

    def _say(self, line: str) -> None:
        if line != self._said:
            self._said = line
            with suppress(OSError):  # a full disk
                print(time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), line, file=sys.stderr, flush=True)


def run(shipper: Shipper, *, drain: float) -> None:
    """Ship until stdin ends; then until everything is posted, or `drain` seconds are over, or there is no hope."""
    ending: float | None = None
    while True:
        busy = shipper.work()
        if ending is None:
            readable, _, _ = select.select([sys.stdin], [], [], 0 if busy else shipper.pause)
            if readable and not os.read(sys.stdin.fileno(), 64):
                ending = time.monotonic()
                shipper.look_again()
            continue
        waited = time.monotonic() - ending
        if (shipper.is_done and not busy) or waited > min(drain, shipper.patience):
            return
        if not busy:
            time.sleep(POLL_SECONDS / 5)


def main() -> int:
    parser = argparse.ArgumentParser(prog="training.shipper")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("attempt_dir", type=Path)
    whose = parser.add_mutually_exclusive_group(required=True)
    whose.add_argument("--node")
    whose.add_argument("--every-node", action="store_true", help="and let no signal to the whole job end it")
    parser.add_argument("--drain", type=float, default=10.0)
    arguments = parser.parse_args()
    if arguments.every_node:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
    shipper = Shipper(arguments.run_dir, arguments.attempt_dir, node=arguments.node)
    try:
        run(shipper, drain=arguments.drain)
    finally:
        shipper.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
