"""Run pip with its output in a log, and show the progress of its downloads:  progress.py LOG COMMAND…

On a terminal, one line is updated in place; elsewhere, a line is printed periodically. All figures come from pip's
output and the files on disk, so that they work with any version of pip; only the remaining time is an estimate.
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

POLL_S = 0.5
PLAIN_EVERY_S = float(os.environ.get("VIGIL_PROGRESS_EVERY", "15"))
SMALL = 10_000_000  # bytes; a smaller file is complete before anybody could read a line about it
WINDOW_S = 10.0  # the speed is averaged over this time
DOWNLOADING = re.compile(rb"Downloading (?:\S*/)?(\S+\.(?:whl|gz|zip)) \(([\d.]+) (bytes|kB|MB|GB)\)")
UNITS = {b"bytes": 1, b"kB": 10**3, b"MB": 10**6, b"GB": 10**9}
INSTALLING = b"Installing collected packages"


class Downloads:
    """Measure pip's downloads: the current file and its speed."""

    def __init__(self, log: Path, folder: Path) -> None:
        self.log, self.folder = log, folder
        self.log_start = log.stat().st_size if log.exists() else 0
        self.samples: deque[tuple[float, int]] = deque()

    def line(self, now: float) -> str:
        """Return the progress as one line; empty if there is nothing to report."""
        output = self._pip_output()
        files = DOWNLOADING.findall(output)
        total = self._bytes("*")
        self.samples.append((now, total))
        while self.samples[0][0] < now - WINDOW_S:
            self.samples.popleft()
        if INSTALLING in output:
            return f"{_size(total)} downloaded, unpacking" if total else "unpacking"
        if not files:
            return ""
        name, number, unit = files[-1]
        return self._file_progress(unquote(name.decode()), float(number) * UNITS[unit], total)

    def _file_progress(self, name: str, size: float, total: int) -> str:
        title = "-".join(name.split("-")[:2])
        if size < SMALL:
            return f"{_size(total)} downloaded, now {title}"
        downloaded = min(self._bytes(glob.escape(name)), int(size))
        parts = [f"{title}: {_size(downloaded)} of {_size(size)}"]
        if (speed := self._speed()) > 0:
            parts.append(f"{_size(speed)}/s")
            parts.append(f"about {_seconds((size - downloaded) / speed)} left")
        if total > downloaded * 1.05:
            parts.append(f"{_size(total)} in all")
        return ", ".join(parts)

    def _speed(self) -> float:
        (first, before), (last, after) = self.samples[0], self.samples[-1]
        return (after - before) / (last - first) if last > first else 0.0

    def _pip_output(self) -> bytes:
        with self.log.open("rb") as file:
            file.seek(self.log_start)
            return file.read()

    def _bytes(self, name: str) -> int:
        total = 0
        # Not Path.glob: it raises an exception when pip deletes a folder during the search.
        for path in glob.iglob(os.path.join(glob.escape(str(self.folder)), "pip-unpack-*", name)):
            try:
                total += os.stat(path).st_size
            except OSError:  # pip has moved or deleted the file
                continue
        return total


class Terminal:
    """Show progress as one line that is updated in place and cleared at the end."""

    def show(self, text: str, now: float) -> None:
        width = os.get_terminal_size(sys.stdout.fileno()).columns or 80
        sys.stdout.write(f"\r  {text[: width - 3]}\033[K")
        sys.stdout.flush()

    def end(self) -> None:
        sys.stdout.write("\r\033[K")
        sys.stdout.flush()


class Plain:
    """Print a progress line periodically, for output that is not a terminal."""

    def __init__(self) -> None:
        self.next = time.monotonic() + PLAIN_EVERY_S

    def show(self, text: str, now: float) -> None:
        if text and now >= self.next:
            print(f"  {text}", flush=True)
            self.next = now + PLAIN_EVERY_S

    def end(self) -> None:
        pass


def run(log: Path, command: list[str]) -> int:
    """Run the command, show its progress and return its exit status."""
    with tempfile.TemporaryDirectory(prefix="vigil-pip-") as folder, log.open("ab") as out:
        downloads, display = Downloads(log, Path(folder)), Terminal() if sys.stdout.isatty() else Plain()
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env={**os.environ, "TMPDIR": folder}
        )
        try:
            while True:
                try:
                    status = child.wait(POLL_S)
                except subprocess.TimeoutExpired:
                    now = time.monotonic()
                    display.show(downloads.line(now), now)
                else:
                    return status
        finally:
            display.end()
            if child.poll() is None:
                child.terminate()
                child.wait()


def _size(value: float) -> str:
    """Format a number of bytes: "84 MB", "1.2 GB"."""
    if value >= 1e9:
        return f"{value / 1e9:.1f} GB"
    return f"{value / 1e6:.0f} MB" if value >= 1e7 else f"{value / 1e6:.1f} MB"


def _seconds(value: float) -> str:
    """Format a duration: "40 s", "3 min"."""
    return f"{max(1, round(value))} s" if value < 100 else f"{round(value / 60)} min"


if __name__ == "__main__":
    try:
        sys.exit(run(Path(sys.argv[1]), sys.argv[2:]))
    except KeyboardInterrupt:
        sys.exit(130)
