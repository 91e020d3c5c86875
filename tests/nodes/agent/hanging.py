"""Mount a file system that hangs as long as a test wants: FUSE, whose server is the test and does not answer."""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_HEAD = struct.Struct("<IIQQIIII")  # length, operation, id, node, uid, gid, pid, padding
_REPLY = struct.Struct("<IiQ")
INIT, STATFS, GETATTR, OPENDIR, RELEASEDIR = 26, 17, 3, 27, 29
DETACH = 2
_ATTRIBUTES = struct.pack("<QII", 60, 0, 0) + struct.pack(
    "<QQQQQQIIIIIIIIII", 1, 0, 0, 0, 0, 0, 0, 0, 0, 0o40755, 2, 0, 0, 0, 4096, 0
)
_STATFS = struct.pack("<QQQQQIIII6I", 1000, 500, 500, 100, 50, 4096, 255, 4096, 0, *[0] * 6)
_ANSWERS = {
    STATFS: _STATFS,
    GETATTR: _ATTRIBUTES,
    OPENDIR: struct.pack("<QII", 1, 0, 0),
    RELEASEDIR: b"",
}


@dataclass
class FileSystem:
    """A file system that answers only while `well` is set; requests received meanwhile are answered then."""

    path: Path
    well: threading.Event = field(default_factory=threading.Event)
    _file: int = -1

    def serve(self) -> None:
        with suppress(OSError):
            while True:
                request = os.read(self._file, 1 << 20)
                self._answer(*_HEAD.unpack_from(request)[1:3], request)

    def _answer(self, operation: int, number: int, request: bytes) -> None:
        if operation == INIT:
            major, minor, readahead = struct.unpack_from("<III", request, _HEAD.size)
            report = struct.pack("<IIIIHHIIHHI7I", 7, 31, readahead, 0, 12, 10, 65_536, 1, 0, 0, 0, *[0] * 7)
            self._reply(number, 0, report)
        else:
            threading.Thread(target=self._later, args=(operation, number), daemon=True).start()

    def _later(self, operation: int, number: int) -> None:
        self.well.wait()
        answer = _ANSWERS.get(operation)
        self._reply(number, 0 if answer is not None else -38, answer or b"")

    def _reply(self, number: int, error: int, data: bytes) -> None:
        with suppress(OSError):  # the client has died
            os.write(self._file, _REPLY.pack(_REPLY.size + len(data), error, number) + data)


class NoFuse(Exception):
    """FUSE is not available on this machine."""


@contextmanager
def hanging(path: Path) -> Iterator[FileSystem]:
    """Mount it at a new folder. Raises NoFuse."""
    path.mkdir()
    try:
        file = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise NoFuse from error
    options = f"fd={file},rootmode=40755,user_id=0,group_id=0,allow_other".encode()
    if _libc.mount(b"vigil-test", str(path).encode(), b"fuse", 0, options) != 0:
        os.close(file)
        raise NoFuse
    system = FileSystem(path, _file=file)
    threading.Thread(target=system.serve, daemon=True).start()
    try:
        yield system
    finally:
        system.well.set()
        _libc.umount2(str(path).encode(), DETACH)
        os.close(file)
