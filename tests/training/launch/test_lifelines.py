"""Test that a closed connection, and nothing else, proves that a process died."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.waiting import until
from training.launch.lifelines import Lifelines

PEER = """
import sys, time
from training.launch.lifelines import Lifelines
print(Lifelines("peer").port, flush=True)
time.sleep(600)
"""


@pytest.fixture
def peer() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    process = subprocess.Popen([sys.executable, "-c", PEER], stdout=subprocess.PIPE)
    assert process.stdout is not None
    yield process, int(process.stdout.readline())
    process.kill()
    process.communicate()


@pytest.mark.slow
def test_a_killed_process_is_proven_dead_and_a_paused_process_is_not(peer: tuple[subprocess.Popen[bytes], int]) -> None:
    process, port = peer
    ours = Lifelines("us")
    ours.watch("peer", "127.0.0.1", port, is_here=False)
    until(lambda: ours.is_proven_live("peer"))
    os.kill(process.pid, signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)  # sent is not stopped: its other threads may go on for a moment
    other = Lifelines("other")  # meets it only now: it does not answer, which proves nothing
    other.watch("peer", "127.0.0.1", port, is_here=False)
    unknown = Lifelines("unknown")  # and this one asks a port that nobody ever answered at
    unknown.watch("nobody", "127.0.0.1", 1, is_here=False)
    unknown.watch("nobody here", "127.0.0.1", 1, is_here=True)
    until(lambda: unknown.is_proven_dead("nobody here"))
    assert not ours.is_proven_dead("peer")
    assert not other.is_proven_dead("peer")
    assert not other.is_proven_live("peer")
    process.kill()
    until(lambda: ours.is_proven_dead("peer"))
    assert not unknown.is_proven_dead("nobody")


def test_a_stranger_at_the_port_is_not_the_peer() -> None:
    """The port of one that died may be another's by now."""
    stranger, ours = Lifelines("stranger"), Lifelines("us")
    ours.watch("peer", "127.0.0.1", stranger.port, is_here=False)
    ours.watch("stranger", "127.0.0.1", stranger.port, is_here=False)
    until(lambda: ours.is_proven_live("stranger"))
    assert not ours.is_proven_live("peer")
    assert not ours.is_proven_dead("peer")
