"""Test reading the kernel's log: records of a device, a file or a FIFO."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes.agent.kernel_log.aggregation import XidAggregator
from nodes.agent.kernel_log.reader import KernelLog, parse
from nodes.agent.kernel_log.watch import KernelWatch
from nodes.agent.log import StatusLog
from tests.waiting import until

DEVICE = Path("/dev/kmsg")


def line(seq: int, text: str, *, priority: int = 4, microseconds: int = 1_000_000) -> str:
    return f"{priority},{seq},{microseconds},-;{text}\n"


def opened(path: Path, reported_seq: int = -1) -> KernelLog:
    log = KernelLog(path, reported_seq)
    log.open()
    assert log.problem == ""
    return log


def test_records_of_the_kernel_are_recognised_by_their_facility() -> None:
    assert parse(b"4,7,1500000,-;text\n SUBSYSTEM=pci\n DEVICE=+pci:0000:05:00.0\n") is not None
    of_the_kernel = parse(b"4,7,1500000,-,caller=T1;NVRM: a;b")
    assert of_the_kernel is not None
    assert of_the_kernel[0] is True
    assert (of_the_kernel[1].seq, of_the_kernel[1].at, of_the_kernel[1].text) == (7, 1.5, "NVRM: a;b")
    somebodys = parse(b"12,8,1500000,-;NVRM: Xid (PCI:0000:05:00): 79")
    assert somebodys is not None
    assert somebodys[0] is False


def test_escapes_are_what_they_stand_for() -> None:
    found = parse(rb"4,7,0,-;one\x0atwo \x5c \xff")
    assert found is not None
    assert found[1].text == "one\ntwo \\ �"


@given(st.binary(max_size=200))
def test_no_line_raises(data: bytes) -> None:
    found = parse(data)
    if found is not None:
        assert found[1].seq >= 0
        assert isinstance(found[1].text, str)


@pytest.mark.parametrize("record", ["", "no record", "4,5;x", "a,b,c,-;x", "-4,5,6,-;x", f"4,{2**64},6,-;x"])
def test_what_is_no_record_is_passed(record: str, tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_text(f"{record}\n{line(3, 'well')}")
    assert [found.text for found in opened(path).read()] == ["well"]


def test_a_file_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_text(line(0, "old"))
    log = opened(path)
    assert [record.text for record in log.read()] == ["old"]
    with open(path, "a") as file:
        file.write(line(1, "new") + line(2, "half")[:-3])
    assert [record.text for record in log.read()] == ["new"]
    with open(path, "a") as file:
        file.write("lf\n")
    assert [record.seq for record in log.read()] == [2]
    path.write_text(line(3, "cut"))
    assert [record.text for record in log.read()] == ["cut"]
    replaced = tmp_path / "other"
    replaced.write_text(line(4, "replaced"))
    replaced.rename(path)
    assert [record.text for record in log.read()] == ["replaced"]
    path.unlink()
    assert log.read() == []
    assert log.fileno() is None


def test_a_fifo_is_read_as_it_comes(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    os.mkfifo(path)
    log = opened(path)
    assert log.read() == []
    with open(path, "w") as file:
        file.write(line(0, "one") + line(1, "two", priority=12))
    assert [record.text for record in log.read()] == ["one"]
    assert log.last_seq == 1
    assert log.fileno() is not None
    log.close()


def test_a_missing_log_is_reported(tmp_path: Path) -> None:
    log = KernelLog(tmp_path / "none")
    log.open()
    assert "No such file" in log.problem
    assert log.read() == []


@pytest.mark.skipif(not os.access(DEVICE, os.R_OK), reason="the kernel log may not be read here")
def test_the_device_of_the_kernel() -> None:
    log = opened(DEVICE)
    records = log.read()
    while more := log.read():
        records += more
    assert records
    assert [record.seq for record in records] == sorted({record.seq for record in records})
    before, texts = log.last_seq, []
    with open(DEVICE, "wb", buffering=0) as device:
        device.write(b"<3>vigil's tests were here\n")  # what a program writes is of its own facility

    def has_come() -> bool:
        texts.extend(record.text for record in log.read())
        return log.last_seq > before

    until(has_come)
    assert "vigil's tests" not in " ".join(texts)
    log.close()


@pytest.mark.skipif(not os.access(DEVICE, os.W_OK), reason="the kernel log may not be written here")
def test_a_line_of_this_process_is_readable_before_the_next_line() -> None:
    """Without a newline the kernel would keep the record open, and show it to nobody until something else is logged."""
    log = opened(DEVICE)
    while log.read():
        pass
    log.write("vigil's tests write a line of their own")
    assert [record.text for record in log.read()] == ["vigil's tests write a line of their own"]
    log.close()


class Ring:
    """Reads of /dev/kmsg of which one finds that the ring went round."""

    def __init__(self, *answers: bytes | int) -> None:
        self.answers = list(answers)

    def __call__(self, file: int, size: int) -> bytes:
        if not self.answers:
            raise BlockingIOError
        answer = self.answers.pop(0)
        if isinstance(answer, int):
            raise OSError(answer, os.strerror(answer))
        return answer


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Something that is read a record at a time; what is read is the test's."""
    return Path("/dev/null")


def record(seq: int) -> bytes:
    return line(seq, "x").encode()


def test_records_that_the_ring_lost_are_reported(device: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = opened(device)
    monkeypatch.setattr(os, "read", Ring(record(5), record(6), errno.EPIPE, record(40)))
    assert [item.seq for item in log.read()] == [5, 6, 40]
    assert log.overruns == [(7, 39)]


def test_those_lost_while_nobody_read_are_reported_too(device: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = opened(device, reported_seq=10)
    monkeypatch.setattr(os, "read", Ring(record(15), record(16)))
    log.read()
    assert log.overruns == [(11, 14)]


@pytest.mark.parametrize(("reported_seq", "first"), [(-1, 900), (10, 3), (10, 11)])
def test_what_was_never_promised_is_not_missing(
    reported_seq: int, first: int, device: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = opened(device, reported_seq=reported_seq)
    monkeypatch.setattr(os, "read", Ring(errno.EPIPE, record(first)))
    log.read()
    assert log.overruns == []


def test_a_device_that_fails_is_closed_and_reported(device: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = opened(device)
    monkeypatch.setattr(os, "read", Ring(errno.EPERM))
    assert log.read() == []
    assert "not permitted" in log.problem
    assert log.fileno() is None


def test_a_reopened_log_repeats_no_event(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_text(line(7, "NVRM: Xid (PCI:0000:05:00): 79"))
    xids = XidAggregator("boot", lambda bus: "", 5.0)
    watch = KernelWatch(KernelLog(path), xids, StatusLog(), Path("/proc"))
    watch.open()
    watch.read()
    assert [event["seq"] for event in watch.take()] == [7]
    watch.log.problem = "it was taken away"
    with open(path, "a") as file:
        file.write(line(8, "NVRM: Xid (PCI:0000:05:00): 31"))
    watch.open()
    watch.read()
    assert [event["seq"] for event in watch.take()] == [8]
    assert watch.seq == 8
    watch.log.close()
