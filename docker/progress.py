"""Runs pip into a log and tells meanwhile how far its downloads are:  progress.py LOG COMMAND…

On a terminal one line that is written anew; elsewhere a line every now and then. All figures are read off what pip has
told and put on disk, so that they hold for any pip: nothing is guessed but the seconds that are left.
"""

from __future__ import annotations

import glob
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from urllib.parse import unquote

LOOK_S = 0.5
PLAIN_EVERY_S = float(os.environ.get("VIGIL_PROGRESS_EVERY", "15"))
SMALL = 10_000_000  # bytes: a file below that is there before anybody has read a line about it
WINDOW_S = 10.0  # over which the speed is taken
DOWNLOADING = re.compile(rb"Downloading (?:\S*/)?(\S+\.(?:whl|gz|zip)) \(([\d.]+) (bytes|kB|MB|GB)\)")
UNITS = {b"bytes": 1, b"kB": 10**3, b"MB": 10**6, b"GB": 10**9}
INSTALLING = b"Installing collected packages"


class Downloads:
    """What pip fetches: the file that comes in now, and how fast."""

    def __init__(self, log: Path, folder: Path) -> None:
        self.log, self.folder = log, folder
        self.told_from = log.stat().st_size if log.exists() else 0
        self.seen: deque[tuple[float, int]] = deque()

    def line(self, now: float) -> str:
        """How things stand, in a line; empty where there is nothing worth telling."""
        told = self._told()
        files = DOWNLOADING.findall(told)
        got = self._bytes("*")
        self.seen.append((now, got))
        while self.seen[0][0] < now - WINDOW_S:
            self.seen.popleft()
        if INSTALLING in told:
            return f"{_size(got)} downloaded, unpacking" if got else "unpacking"
        if not files:
            return ""
        name, number, unit = files[-1]
        return self._of_file(unquote(name.decode()), float(number) * UNITS[unit], got)

    def _of_file(self, name: str, size: float, got: int) -> str:
        title = "-".join(name.split("-")[:2])
        if size < SMALL:
            return f"{_size(got)} downloaded, now {title}"
        here = min(self._bytes(glob.escape(name)), int(size))
        parts = [f"{title}: {_size(here)} of {_size(size)}"]
        if (speed := self._speed()) > 0:
            parts.append(f"{_size(speed)}/s")
            parts.append(f"about {_seconds((size - here) / speed)} left")
        if got > here * 1.05:
            parts.append(f"{_size(got)} in all")
        return ", ".join(parts)

    def _speed(self) -> float:
        (first, before), (last, after) = self.seen[0], self.seen[-1]
        return (after - before) / (last - first) if last > first else 0.0

    def _told(self) -> bytes:
        with self.log.open("rb") as file:
            file.seek(self.told_from)
            return file.read()

    def _bytes(self, name: str) -> int:
        total = 0
        # Not Path.glob, which raises when pip clears a folder away under it.
        for path in glob.iglob(os.path.join(glob.escape(str(self.folder)), "pip-unpack-*", name)):
            try:
                total += os.stat(path).st_size
            except OSError:  # moved on meanwhile
                continue
        return total


class Terminal:
    """One line, written anew, and gone at the end."""

    def tell(self, text: str, now: float) -> None:
        width = os.get_terminal_size(sys.stdout.fileno()).columns or 80
        sys.stdout.write(f"\r  {text[: width - 3]}\033[K")
        sys.stdout.flush()

    def end(self) -> None:
        sys.stdout.write("\r\033[K")
        sys.stdout.flush()


class Plain:
    """A line now and then, for logs of machines."""

    def __init__(self) -> None:
        self.next = time.monotonic() + PLAIN_EVERY_S

    def tell(self, text: str, now: float) -> None:
        if text and now >= self.next:
            print(f"  {text}", flush=True)
            self.next = now + PLAIN_EVERY_S

    def end(self) -> None:
        pass


def run(log: Path, command: list[str]) -> int:
    """The command's exit status, told of until then."""
    with tempfile.TemporaryDirectory(prefix="vigil-pip-") as folder, log.open("ab") as out:
        downloads, shown = Downloads(log, Path(folder)), Terminal() if sys.stdout.isatty() else Plain()
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env={**os.environ, "TMPDIR": folder}
        )
        try:
            while True:
                try:
                    status = child.wait(LOOK_S)
                except subprocess.TimeoutExpired:
                    now = time.monotonic()
                    shown.tell(downloads.line(now), now)
                else:
                    return status
        finally:
            shown.end()
            if child.poll() is None:
                child.terminate()
                child.wait()


def _size(value: float) -> str:
    """ "84 MB", "1.2 GB"."""
    if value >= 1e9:
        return f"{value / 1e9:.1f} GB"
    return f"{value / 1e6:.0f} MB" if value >= 1e7 else f"{value / 1e6:.1f} MB"


def _seconds(value: float) -> str:
    """ "40 s", "3 min"."""
    return f"{max(1, round(value))} s" if value < 100 else f"{round(value / 60)} min"


if __name__ == "__main__":
    try:
        sys.exit(run(Path(sys.argv[1]), sys.argv[2:]))
    except KeyboardInterrupt:
        sys.exit(130)
