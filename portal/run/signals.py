"""Handle signals of the supervisor: requests to stop, and the death of a child, which wakes it up."""

from __future__ import annotations

import select
import signal
import socket
import time
from collections.abc import Callable

_wakeup: socket.socket | None = None


def sleep(seconds: float) -> None:
    """Sleep, but wake up for any signal, so that a death is noticed at once."""
    if _wakeup is None:
        time.sleep(seconds)
    elif select.select([_wakeup], [], [], seconds)[0]:
        _wakeup.recv(4096)


def handle(request_stop: Callable[[], None]) -> None:
    """Call `request_stop` on Ctrl-C, TERM and HUP; a second signal calls it again."""
    global _wakeup
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    _wakeup = reader
    signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)

    def on_signal(number: int, frame: object) -> None:
        request_stop()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN or number == signal.SIGTERM:
            signal.signal(number, on_signal)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
