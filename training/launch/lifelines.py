"""Connections between launchers that carry nothing: when a process dies its kernel closes them, and never before.

A launcher whose connection has closed *and* whose port then refuses is gone for certain, within milliseconds, on this
machine or another. One that is paused, cut off by the network, or whose whole machine lost its power proves nothing
this way: for these the heartbeats in files count (members.py).
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

CONNECT_SECONDS = 2.0
RETRY_SECONDS = (0.05, 5.0)  # first and longest: soon after a loss, rarely where a firewall is in between
MOST_ACCEPTED = 4096


@dataclass
class _Peer:
    id: str
    address: tuple[str, int]
    is_here: bool  # on this machine, in the same network: then nothing but the process itself can refuse
    due: float = 0.0  # when to try next
    wait: float = RETRY_SECONDS[0]
    is_held: bool = False
    was_held: bool = False


class Lifelines:
    """One thread, as names may take seconds to resolve. `hold` and `proven_dead` never wait."""

    def __init__(self, me: str) -> None:
        self._me = me.encode()
        self._listener = socket.create_server(("", 0), backlog=1024)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._peers: dict[str, _Peer] = {}
        self._dead: set[str] = set()
        self._wake, self._woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._accepted = 0
        threading.Thread(target=self._live, name="lifelines", daemon=True).start()

    def hold(self, peer: str, host: str, port: int, *, is_here: bool) -> None:
        """Notice, from now on, the death of the launcher with this id, which listens there."""
        if peer not in self._peers and port:
            self._peers[peer] = _Peer(peer, ("127.0.0.1" if is_here else host, port), is_here)
            with suppress(BlockingIOError):
                os.write(self._woken, b"x")

    def proven_dead(self, peer: str) -> bool:
        return peer in self._dead

    def proven_live(self, peer: str) -> bool:
        return peer in self._peers and self._peers[peer].is_held

    def _live(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select(self._next_due()):
                    if key.fileobj is self._listener:
                        self._accept(selector)
                    elif key.fileobj == self._wake:
                        os.read(self._wake, 4096)
                    else:
                        self._hear(selector, key)
                for peer in self._missed():
                    if time.monotonic() >= peer.due:
                        self._connect(selector, peer)

    def _missed(self) -> list[_Peer]:
        return [peer for peer in list(self._peers.values()) if not peer.is_held and peer.id not in self._dead]

    def _next_due(self) -> float | None:
        """Seconds, never more than the longest wait: whatever a clock has done, this thread goes on."""
        due = min((peer.due for peer in self._missed()), default=None)
        return None if due is None else min(max(0.0, due - time.monotonic()), RETRY_SECONDS[1])

    def _accept(self, selector: selectors.BaseSelector) -> None:
        with suppress(OSError):
            connection, _ = self._listener.accept()
            if self._accepted >= MOST_ACCEPTED:
                connection.close()
                return
            self._accepted += 1
            connection.setblocking(False)
            connection.send(self._me)  # a port that somebody else has got meanwhile proves nothing
            selector.register(connection, selectors.EVENT_READ)

    def _hear(self, selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
        """Nothing is ever said: what can be read is the end."""
        connection = key.fileobj
        assert isinstance(connection, socket.socket)
        with suppress(OSError):
            if connection.recv(64):
                return
        selector.unregister(connection)
        connection.close()
        if key.data is None:
            self._accepted -= 1
            return
        # A dying process may close its connections before it closes its port: asked again soon.
        key.data.is_held, key.data.due, key.data.wait = False, 0.0, RETRY_SECONDS[0]

    def _connect(self, selector: selectors.BaseSelector, peer: _Peer) -> None:
        peer.due, peer.wait = time.monotonic() + peer.wait, min(peer.wait * 2, RETRY_SECONDS[1])
        try:
            connection = socket.create_connection(peer.address, CONNECT_SECONDS)
        except ConnectionRefusedError:
            if peer.was_held or peer.is_here:
                self._dead.add(peer.id)
            return
        except (OSError, ValueError, OverflowError):  # also what cannot be a name or a port
            return
        said = _said(connection, len(peer.id))
        if said != peer.id.encode():
            connection.close()
            if peer.was_held and said:  # somebody else's process has the port now
                self._dead.add(peer.id)
            return
        connection.setblocking(False)
        peer.is_held = peer.was_held = True
        selector.register(connection, selectors.EVENT_READ, peer)


def _said(connection: socket.socket, length: int) -> bytes:
    with suppress(OSError):
        return connection.recv(length, socket.MSG_WAITALL)
    return b""
