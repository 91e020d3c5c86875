"""Detect dead launchers by idle connections: the kernel closes them when a process dies, and never before.

A launcher whose connection has closed *and* whose port then refuses is certainly gone; that shows within
milliseconds, on this machine or another. A launcher that is paused, cut off by the network, or whose machine lost
power cannot be proven dead this way: for these the heartbeat files count (members.py).
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
RETRY_SECONDS = (0.05, 5.0)  # first and longest: soon after a loss, rarely where a firewall drops packets
MAX_ACCEPTED = 4096


@dataclass
class _Peer:
    id: str
    address: tuple[str, int]
    is_here: bool  # on this machine and network: a refusal then proves that the process has ended
    due: float = 0.0  # when to try next
    wait: float = RETRY_SECONDS[0]
    is_connected: bool = False
    was_connected: bool = False


class Lifelines:
    """Watches peers from one thread, as resolving names may take seconds. The public methods never block."""

    def __init__(self, me: str) -> None:
        self._me = me.encode()
        self._listener = socket.create_server(("", 0), backlog=1024)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._peers: dict[str, _Peer] = {}
        self._dead: set[str] = set()
        self._wake_reader, self._wake_writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._accepted = 0
        threading.Thread(target=self._run, name="lifelines", daemon=True).start()

    def watch(self, peer: str, host: str, port: int, *, is_here: bool) -> None:
        """Watch the launcher with this id, which listens at this address, and notice its death."""
        if peer not in self._peers and port:
            self._peers[peer] = _Peer(peer, ("127.0.0.1" if is_here else host, port), is_here)
            with suppress(BlockingIOError):
                os.write(self._wake_writer, b"x")

    def is_proven_dead(self, peer: str) -> bool:
        return peer in self._dead

    def is_proven_live(self, peer: str) -> bool:
        return peer in self._peers and self._peers[peer].is_connected

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._wake_reader, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select(self._next_due()):
                    if key.fileobj is self._listener:
                        self._accept(selector)
                    elif key.fileobj == self._wake_reader:
                        os.read(self._wake_reader, 4096)
                    else:
                        self._read(selector, key)
                for peer in self._disconnected():
                    if time.monotonic() >= peer.due:
                        self._connect(selector, peer)

    def _disconnected(self) -> list[_Peer]:
        return [peer for peer in list(self._peers.values()) if not peer.is_connected and peer.id not in self._dead]

    def _next_due(self) -> float | None:
        """Return seconds until the next try, at most the longest wait: the thread goes on even if the clock jumps."""
        due = min((peer.due for peer in self._disconnected()), default=None)
        return None if due is None else min(max(0.0, due - time.monotonic()), RETRY_SECONDS[1])

    def _accept(self, selector: selectors.BaseSelector) -> None:
        with suppress(OSError):
            connection, _ = self._listener.accept()
            if self._accepted >= MAX_ACCEPTED:
                connection.close()
                return
            self._accepted += 1
            connection.setblocking(False)
            connection.send(
                self._me
            )  # so that the peer can tell us from another program that has got this port meanwhile
            selector.register(connection, selectors.EVENT_READ)

    def _read(self, selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
        """Handle a readable connection: peers send nothing after their id, so it has closed."""
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
        # A dying process may close its connections before its port: try again soon.
        key.data.is_connected, key.data.due, key.data.wait = False, 0.0, RETRY_SECONDS[0]

    def _connect(self, selector: selectors.BaseSelector, peer: _Peer) -> None:
        peer.due, peer.wait = time.monotonic() + peer.wait, min(peer.wait * 2, RETRY_SECONDS[1])
        try:
            connection = socket.create_connection(peer.address, CONNECT_SECONDS)
        except ConnectionRefusedError:
            if peer.was_connected or peer.is_here:
                self._dead.add(peer.id)
            return
        except (OSError, ValueError, OverflowError):  # also for an invalid name or port
            return
        received = _receive(connection, len(peer.id))
        if received != peer.id.encode():
            connection.close()
            if peer.was_connected and received:  # another process has the port now
                self._dead.add(peer.id)
            return
        connection.setblocking(False)
        peer.is_connected = peer.was_connected = True
        selector.register(connection, selectors.EVENT_READ, peer)


def _receive(connection: socket.socket, length: int) -> bytes:
    with suppress(OSError):
        return connection.recv(length, socket.MSG_WAITALL)
    return b""
