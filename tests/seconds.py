"""Report the duration of each folder of tests: a table after every run, stored in var/seconds/ and printed.

Loaded for every run (`-p` in pyproject.toml). TEST_STAGE names the file; a run by hand writes pytest.tsv.
"""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import pytest

RESULTS_FOLDER = Path(__file__).resolve().parents[1] / "var" / "seconds"
SHOWN_FILES = 10
HEADER = "folder\tfile\ttests\tseconds"


@dataclass
class Seconds:
    """The number of tests and their duration, including fixtures, by file."""

    tests: Counter[str] = field(default_factory=Counter)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, file: str, seconds: float, *, is_test: bool) -> None:
        self.tests[file] += is_test
        self.seconds[file] += seconds

    def read(self, table: str) -> None:
        """Add the content of a `table`."""
        for line in table.splitlines()[1:]:
            _, file, tests, seconds = line.split("\t")
            self.tests[file] += int(tests)
            self.seconds[file] += float(seconds)

    def by_folder(self) -> Seconds:
        """Return the same by folder."""
        found = Seconds()
        for file, seconds in self.seconds.items():
            folder = folder_of(file)
            found.tests[folder] += self.tests[file]
            found.seconds[folder] += seconds
        return found

    def by_cost(self) -> list[str]:
        return sorted(self.seconds, key=lambda name: -self.seconds[name])

    def lines(self, names: list[str]) -> Iterator[str]:
        """Return lines for people: seconds, their share, tests."""
        whole = sum(self.seconds.values()) or 1.0
        for name in names:
            yield (f"{self.seconds[name]:8.1f} s {self.seconds[name] / whole:5.0%} {self.tests[name]:6,} tests  {name}")

    def table(self) -> str:
        """Return lines for programs: one file per line, tabs between fields."""
        rows = [f"{folder_of(file)}\t{file}\t{self.tests[file]}\t{self.seconds[file]:.2f}" for file in self.by_cost()]
        return "\n".join([HEADER, *rows]) + "\n"


def folder_of(file: str) -> str:
    """Return the test's folder."""
    return str(PurePosixPath(file).parent)


class Recorder:
    """Record every report. With several workers only their controller receives all reports, so it alone writes."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.began = time.monotonic()
        self.seconds = Seconds()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        self.seconds.add(file, report.duration, is_test=report.when == "call" and report.outcome != "rerun")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.seconds.seconds:
            return
        write(self.seconds)
        folders = self.seconds.by_folder()
        if len(folders.seconds) == 1:
            return  # pytest's last line shows the duration of a single folder
        terminalreporter.section("seconds by folder")
        terminalreporter.write_line("\n".join(folders.lines(folders.by_cost())))
        terminalreporter.write_line(f"{SHOWN_FILES} slowest files:")
        terminalreporter.write_line("\n".join(self.seconds.lines(self.seconds.by_cost()[:SHOWN_FILES])))
        terminalreporter.write_line(self._write_results())

    def _write_results(self) -> str:
        whole, wall = sum(self.seconds.seconds.values()), time.monotonic() - self.began
        return f"{whole:,.0f} s of tests in {wall:,.0f} s"


def write(seconds: Seconds) -> None:
    """Store the table of durations; skip it in a checkout that is not writable."""
    try:
        RESULTS_FOLDER.mkdir(parents=True, exist_ok=True)
        (RESULTS_FOLDER / f"{os.environ.get('TEST_STAGE', 'pytest')}.tsv").write_text(seconds.table())
    except OSError:
        return


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(config), "vigil-seconds")
