"""`python -P -m training.shipper RUN_DIR ATTEMPT_DIR`: post what this node's ranks have spooled (protocols.md §3).

A separate process alongside the ranks, standard library only, so that it starts in milliseconds and outlives them.
The spool is authoritative and the portal's response is the cursor: whatever is lost, delayed or repeated on the way,
the next post continues where the portal says. The process ends when its stdin closes, after a limited time to post
the rest.

Where nodes cannot reach the portal, the token file says so ("reports": "tail"): the portal then reads the spools
itself, and this process waits until that changes.

With --every-node one process posts for all nodes: for a job that was submitted to Slurm directly, where none of our
processes run on the other nodes. Their files are read through a shared file system.
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
from training.reporting.lines import ReportBatch
from training.reporting.posting import PortalConnection, PortalUnreachable, PostResponse, StreamPortion, pack
from training.reporting.spool import Spool, open_folder, spool_names

POLL_SECONDS = 0.05
IDLE_SECONDS = 1.0  # between two readings of the token file while it says that nothing is to be posted
GAP_SECONDS = 0.15  # between two posts, so that the flushes of several ranks travel together
POINTS = 20_000  # per post; the portal accepts 50,000
BATCHES = 2_000
EVENTS = 500
STREAMS = 1_000
MAX_WAIT = 5.0
# At the end, waiting is pointless without a response or a token: the portal reads the spool from disk.
HOPELESS_SECONDS, UNKNOWN_SECONDS = 3.0, 0.5
READS_PER_SECOND = 400  # of sizes of files that other nodes write: each is a request to the file server
LIST_SECONDS = 2.0  # list the folder again after this time: two changes within one tick change its time only once
LARGE = 256 * 1024  # a stream of this size was already shipped by a shipper that died: ask the portal for its cursor


@dataclass
class _ShippedStream:
    """One stream that is being shipped, read up to the portal's cursor as far as that is known."""

    spool: Spool
    size: int = -1
    more: bool = True  # there may be something to read
    has_cursor: bool = True  # False: the portal has yet to report its cursor
    end_accepted: bool = False


class Shipper:
    """Posts streams. `node`: only that node's streams; None: all."""

    def __init__(self, run_dir: Path, attempt_dir: Path, *, node: str | None) -> None:
        self._token_file, self._owner = run_dir / "portal" / "token", read_json(attempt_dir / "owner.json") or {}
        self._directory = open_folder(attempt_dir / "spool")
        self._node = node
        self._sources: dict[str, _ShippedStream] = {}
        self._ignored: set[str] = set()  # streams of other nodes, or invalid ones
        self._listed_mtime = self._token_mtime = -1
        self._listed_at = self._scanned_at = 0.0
        self._portal: PortalConnection | None = None
        self._is_tailed = False
        self._pending: list[StreamPortion] = []
        self._failures = 0
        self._next_post = 0.0
        self._last_message = ""

    def work(self) -> bool:
        """Do one round: scan for new data, and post it if it is time.

        Returns True if there may be more to do at once.
        """
        has_portal = self._find_portal()
        if self._is_tailed:
            return False
        if self._node is not None or time.monotonic() - self._scanned_at >= self.pause:
            self._scan()
            self._scanned_at = time.monotonic()
        if not has_portal or time.monotonic() < self._next_post:
            return False
        self._pending = self._pending or self._gather()
        if not self._pending:
            return False
        self._post()
        return self._failures == 0

    @property
    def is_done(self) -> bool:
        """Whether everything on disk has been posted."""
        return not self._pending and not any(source.more for source in self._sources.values())

    @property
    def pause(self) -> float:
        """Seconds until there may be something to do again."""
        if self._is_tailed:
            return IDLE_SECONDS
        if self._node is not None:
            return POLL_SECONDS
        return max(POLL_SECONDS * 5, len(self._sources) / READS_PER_SECOND)

    @property
    def patience(self) -> float:
        """Seconds worth waiting at the end, in the current state."""
        if self._portal is None:
            return UNKNOWN_SECONDS
        return HOPELESS_SECONDS if self._failures else float("inf")

    def rescan(self) -> None:
        """Scan everything in the next round, because the writers have ended."""
        self._scanned_at = self._listed_at = 0.0

    def close(self) -> None:
        if self._portal:
            self._portal.close()
        os.close(self._directory)

    # Finding data.

    def _scan(self) -> None:
        """Find streams that have appeared or grown."""
        mtime, now = os.fstat(self._directory).st_mtime_ns, time.monotonic()
        if mtime != self._listed_mtime or now - self._listed_at > LIST_SECONDS:
            self._listed_mtime, self._listed_at = mtime, now
            for name in spool_names(self._directory):
                if name not in self._sources and name not in self._ignored:
                    self._sources[name] = _ShippedStream(Spool(self._directory, name))
        for name, source in list(self._sources.items()):
            size = source.spool.size(of_another_node=self._node is None)
            if size != source.size:
                if source.size < 0 and size > LARGE:
                    source.has_cursor = False
                source.size, source.more = size, True
            if source.end_accepted or (source.spool.has_ended and source.spool.header is None):
                self._ignore(name)

    def _ignore(self, name: str) -> None:
        del self._sources[name]
        self._ignored.add(name)

    def _gather(self) -> list[StreamPortion]:
        """Assemble the next post: a fair share of every stream that has data, within the limits."""
        portions: list[StreamPortion] = []
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

    def _portion(self, name: str, source: _ShippedStream, share: int) -> StreamPortion | None:
        spool = source.spool
        first = spool.next_seq
        batches: list[ReportBatch] = []
        points = events = 0
        while source.has_cursor and points < POINTS // 2 and events < EVENTS // 2 and len(batches) < share:
            # One by one if batches are large, so that a post never exceeds its limits by much.
            more = spool.read(limit=1 if points > 1000 or events > 20 else 8)
            if not more:
                source.more = False
                break
            batches += more
            points += sum(batch.points for batch in more)
            events += sum(len(batch.events) for batch in more)
        if spool.header is None and not source.has_cursor:
            spool.read(limit=0)
        if spool.header is None:
            source.more = False
            return None
        if self._node is not None and spool.header.node != self._node:
            self._ignore(name)
            return None
        if not batches and source.has_cursor and not spool.has_ended:
            return None
        return StreamPortion(spool.header, first, batches, end=spool.has_ended and source.has_cursor)

    # Posting.

    def _find_portal(self) -> bool:
        """Return whether the portal is known: it leaves a token for exactly this submission of the job."""
        try:
            mtime = os.stat(self._token_file).st_mtime_ns
        except OSError:
            return self._portal is not None
        if mtime != self._token_mtime:
            self._token_mtime = mtime
            token = read_json(self._token_file) or {}
            if all(token.get(key) == self._owner.get(key) for key in ("scheduler_id", "restart_count")):
                self._is_tailed = token.get("reports") == "tail"
                if self._is_tailed:
                    self._leave_portal()
                else:
                    self._open_portal(token)
        return self._portal is not None

    def _open_portal(self, token: dict[str, object]) -> None:
        try:
            portal = PortalConnection(str(token["url"]), int(str(token["attempt"])), str(token["token"]))
        except (KeyError, ValueError):
            self._log("the token file is invalid")
            return
        if self._portal:
            self._portal.close()
        self._portal, self._failures, self._next_post = portal, 0, 0.0

    def _leave_portal(self) -> None:
        """Stop posting. If posting is requested again later, the portal reports each stream's cursor."""
        if self._portal:
            self._portal.close()
        self._portal = None
        self._sources.clear()
        self._pending = []
        self._listed_mtime = -1
        self._log("the portal reads the spools itself")

    def _post(self) -> None:
        assert self._portal is not None
        body = pack(self._pending)
        if body is None:
            self._reduce_post(413)
            return
        try:
            answer = self._portal.post(body)
        except PortalUnreachable as error:
            self._back_off(f"the portal does not respond ({error})", 0.0)
            return
        if answer.status == 200:
            self._apply_cursors(answer)
        elif answer.status in {400, 413, 422}:
            self._reduce_post(answer.status)
        else:
            self._back_off(f"the portal answered {answer.status}", answer.wait)

    def _apply_cursors(self, answer: PostResponse) -> None:
        """Continue where the portal says, even before what has been sent."""
        for portion in self._pending:
            source = next((s for s in self._sources.values() if s.spool.stream == portion.header.stream), None)
            if source is None:
                continue
            cursor = answer.cursors.get(portion.header.stream, portion.first)
            source.end_accepted = portion.end and cursor == portion.after
            source.has_cursor = True
            if cursor != source.spool.next_seq:
                source.spool.seek(cursor)
                source.more = True
        self._pending = []
        self._failures = 0
        self._next_post = time.monotonic() + GAP_SECONDS
        self._log("the portal accepts reports")

    def _back_off(self, message: str, requested: float) -> None:
        """Retry the post later; nothing is read meanwhile, so memory does not grow."""
        self._failures += 1
        wait = max(min(0.1 * 2 ** min(self._failures, 10), MAX_WAIT), min(requested, 30.0))
        self._next_post = time.monotonic() + wait * random.uniform(0.5, 1.5)
        self._log(message)

    def _reduce_post(self, status: int) -> None:
        """Halve a post that was refused for its content, down to one batch, which is then reported and skipped."""
        portion = self._pending[0]
        if len(self._pending) > 1 or len(portion.batches) > 1:
            for other in self._pending[1:]:
                self._rewind(other.header.stream, other.first)
            keep = max(1, len(portion.batches) // 2) if len(self._pending) == 1 else len(portion.batches)
            if keep < len(portion.batches) or portion.end:
                self._rewind(portion.header.stream, portion.first + keep)
            self._pending = [StreamPortion(portion.header, portion.first, portion.batches[:keep])]
            return
        self._log(f"a batch of stream {portion.header.stream} was refused with {status}")
        refused = [{"kind": "report.refused", "time": batch.time, "status": status} for batch in portion.batches]
        if portion.batches and portion.batches[0].events != refused:
            portion.batches = [ReportBatch(portion.batches[0].seq, portion.batches[0].time, {}, list(refused))]
        else:  # the portal refuses the stream itself
            self._pending = []
            for name in [name for name, s in self._sources.items() if s.spool.stream == portion.header.stream]:
                self._ignore(name)

    def _rewind(self, stream: str, seq: int) -> None:
        for source in self._sources.values():
            if source.spool.stream == stream:
                source.spool.seek(seq)
                source.more = True

    def _log(self, line: str) -> None:
        if line != self._last_message:
            self._last_message = line
            with suppress(OSError):  # a full disk
                print(time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), line, file=sys.stderr, flush=True)


def run(shipper: Shipper, *, drain: float) -> None:
    """Ship until stdin closes; then until everything is posted, `drain` seconds are over, or there is no hope."""
    ending: float | None = None
    while True:
        busy = shipper.work()
        if ending is None:
            readable, _, _ = select.select([sys.stdin], [], [], 0 if busy else shipper.pause)
            if readable and not os.read(sys.stdin.fileno(), 64):
                ending = time.monotonic()
                shipper.rescan()
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
    streams = parser.add_mutually_exclusive_group(required=True)
    streams.add_argument("--node")
    streams.add_argument(
        "--every-node", action="store_true", help="post for all nodes, and ignore signals to the whole job"
    )
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
