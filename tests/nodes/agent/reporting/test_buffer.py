"""Test batches on disk: each once, in order, within limits, whatever ends the agent or fills the disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nodes.agent.reporting.buffer import (
    BATCHES_PER_SEGMENT,
    Buffer,
    StateUnusable,
    batches_of,
    with_log_position,
    without_log_position,
)
from tests.nodes.agent.disks import occupy
from tests.nodes.agent.running import ROOT


def line(number: int, *, boot: str = "boot", seq: int = -1, size: int = 0) -> bytes:
    batch = {"at": number, "period": 1, "n": 10, "more": os.urandom(size // 2).hex(), "events": []}
    return with_log_position(json.dumps(batch, separators=(",", ":")).encode(), boot, seq)


def numbers(buffer: Buffer, first: int = 0) -> list[int]:
    """The places in the stream of all that can be read, each checked against what it holds."""
    found: list[int] = []
    while first < buffer.next:
        first, lines = buffer.read(first, 7)
        found += [first + place for place in range(len(lines))]
        assert [batch["at"] for batch in batches_of(lines)] == found[len(found) - len(lines) :]
        first += len(lines)
    return found


def fill(buffer: Buffer, count: int, *, size: int = 0) -> None:
    for _ in range(count):
        buffer.append(line(buffer.next, size=size), is_sync=False)


def test_a_line_carries_its_place_in_the_kernel_log() -> None:
    assert without_log_position(line(3, boot="b", seq=7)) == (
        b'{"at":3,"period":1,"n":10,"more":"","events":[]}',
        "b",
        7,
    )
    assert without_log_position(b'{"at":3}') == (b'{"at":3}', "", -1)
    hostile = with_log_position(b'{"events":[{"name":",\\"kmsg\\":[\\"x\\",9]}"}]}', "b", 7)
    assert without_log_position(hostile)[1:] == ("b", 7)


def test_segments_are_squeezed_and_read_like_the_rest(tmp_path: Path) -> None:
    buffer = Buffer(tmp_path)
    fill(buffer, 2 * BATCHES_PER_SEGMENT + 5)
    names = sorted(path.name for path in (tmp_path / buffer.stream).iterdir())
    assert names == ["000000000000-60.jsonl.gz", "000000000060-60.jsonl.gz", "000000000120.jsonl"]
    assert numbers(buffer) == list(range(125))
    assert numbers(buffer, 59) == list(range(59, 125))


def test_it_goes_on_where_it_was_left(tmp_path: Path) -> None:
    buffer = Buffer(tmp_path)
    fill(buffer, 3)
    buffer.append(line(3, boot="b", seq=42), is_sync=True)
    buffer.close()
    again = Buffer(tmp_path)
    assert (again.stream, again.next, again.began) == (buffer.stream, 4, 4)
    assert (again.boot_id, again.kernel_seq) == ("b", 42)
    fill(again, 2)
    assert numbers(again) == list(range(6))


def test_a_torn_last_line_is_none(tmp_path: Path) -> None:
    buffer = Buffer(tmp_path)
    fill(buffer, 3)
    buffer.close()
    (path,) = (tmp_path / buffer.stream).iterdir()
    path.rename(path.with_name("000000000000.jsonl"))
    path = path.with_name("000000000000.jsonl")
    path.write_bytes(b"".join(line(number) + b"\n" for number in range(3))[:-2])
    again = Buffer(tmp_path)
    assert again.next == 2
    fill(again, 1)
    assert numbers(again) == [0, 1, 2]


def test_an_interrupted_compaction_leaves_each_batch_once(tmp_path: Path) -> None:
    buffer = Buffer(tmp_path)
    fill(buffer, BATCHES_PER_SEGMENT + 1)
    buffer.close()
    folder = tmp_path / buffer.stream
    (folder / "000000000000.jsonl").write_bytes(b"".join(line(number) + b"\n" for number in range(60)))
    (folder / "000000000060.tmp").write_bytes(b"half")
    assert numbers(Buffer(tmp_path)) == list(range(61))
    assert len(list(folder.iterdir())) == 2


def test_of_a_damaged_segment_the_rest_is_read(tmp_path: Path) -> None:
    buffer = Buffer(tmp_path)
    fill(buffer, 2 * BATCHES_PER_SEGMENT, size=200)
    buffer.close()
    path = tmp_path / buffer.stream / "000000000000-60.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-200])
    found = numbers(Buffer(tmp_path))
    assert found[-60:] == list(range(60, 120))
    assert found[:-60] == list(range(len(found) - 60))


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    buffer = Buffer(tmp_path)
    with pytest.raises(StateUnusable, match="Another agent writes to"):
        Buffer(tmp_path)
    buffer.close()
    Buffer(tmp_path).close()


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StateUnusable, match="VIGIL_AGENT_STATE"):
        Buffer(tmp_path / "file" / "state")


def test_beyond_its_limit_the_oldest_batches_are_dropped_after_the_portal_knows(tmp_path: Path) -> None:
    buffer = Buffer(tmp_path, limit_bytes=100_000)
    fill(buffer, 120, size=500)
    assert buffer.surplus() is None
    fill(buffer, 240, size=1000)
    given = buffer.surplus()
    assert given is not None
    assert (given.first, given.count) == (0, 60)
    assert buffer.read(0, 1)[0] == 0, "it stays until it is dropped"
    buffer.drop(given)
    assert buffer.read(0, 1)[0] == 60
    while given := buffer.surplus():
        buffer.drop(given)
    assert buffer.size <= 100_000
    assert numbers(buffer)[-1] == 359


def test_accepted_batches_are_retained_for_a_day_and_dropped_first(tmp_path: Path) -> None:
    buffer = Buffer(tmp_path, retention_seconds=1000.0)
    fill(buffer, 200)
    buffer.note_accepted(130)
    assert buffer.surplus() is None
    assert numbers(buffer) == list(range(200)), "a portal restored from its backup asks again"
    assert buffer.surplus(now=4e9) is None
    assert numbers(buffer) == list(range(120, 200))


def test_taken_batches_make_room_before_any_is_given_up(tmp_path: Path) -> None:
    buffer = Buffer(tmp_path, limit_bytes=1)
    fill(buffer, 130)
    buffer.note_accepted(60)
    given = buffer.surplus()
    assert given is not None
    assert given.first == 60


def test_it_goes_on_beyond_what_this_disk_has_lost(tmp_path: Path) -> None:
    """A machine without power: the portal has batches that were never on disk for good."""
    before = Buffer(tmp_path)
    fill(before, 65)
    before.close()
    buffer = Buffer(tmp_path)
    for place in range(70):
        buffer.append(line(75 + place), is_sync=False)
    buffer.renumber(75, buffer.began)
    assert buffer.next == 145
    assert numbers(buffer, 75) == list(range(75, 145))
    fill(buffer, 1)
    buffer.close()
    assert numbers(Buffer(tmp_path), 75) == list(range(75, 146))


# A disk without room.


def test_on_a_full_disk_batches_wait_in_memory(small_disk: Path) -> None:
    buffer = Buffer(small_disk)
    fill(buffer, 3)
    filler = occupy(small_disk)
    fill(buffer, 70, size=500)
    assert "No space" in buffer.problem
    assert numbers(buffer) == list(range(73)), "they can be sent all the same"
    filler.unlink()
    fill(buffer, 1)
    assert buffer.problem == ""
    buffer.close()
    assert numbers(Buffer(small_disk)) == list(range(74))


def test_a_disk_that_is_full_from_the_beginning(small_disk: Path) -> None:
    filler = occupy(small_disk)
    buffer = Buffer(small_disk / "state")
    fill(buffer, 2)
    assert "No space" in buffer.problem
    filler.unlink()
    fill(buffer, 1)
    buffer.close()
    again = Buffer(small_disk / "state")
    assert again.stream == buffer.stream
    assert numbers(again) == [0, 1, 2]


def test_memory_has_a_limit_too(small_disk: Path) -> None:
    buffer = Buffer(small_disk, limit_in_memory=50_000)
    fill(buffer, 3)
    occupy(small_disk)
    fill(buffer, 100, size=1000)
    given = buffer.surplus()
    assert given is not None
    assert given.is_in_memory
    assert given.count == BATCHES_PER_SEGMENT
    before = numbers(buffer)
    buffer.drop(given)
    assert numbers(buffer) == [item for item in before if item not in range(given.first, given.first + given.count)]


def test_a_disk_that_may_only_be_read(small_disk: Path) -> None:
    buffer = Buffer(small_disk)
    fill(buffer, 2)
    buffer.close()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    again = Buffer(small_disk)
    assert again.stream == buffer.stream
    fill(again, 2)
    assert "Read-only" in again.problem
    assert numbers(again) == [0, 1, 2, 3]
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    fill(again, 1)
    assert again.problem == ""
    again.close()


# kill -9.

WRITES = """
import sys
from pathlib import Path
from nodes.agent.reporting.buffer import Buffer
from tests.nodes.agent.reporting.test_buffer import line
buffer = Buffer(Path(sys.argv[1]))
print(buffer.next, flush=True)
while True:
    number = buffer.append(line(buffer.next, size=buffer.next * 37 % 5000), is_sync=buffer.next % 7 == 0)
    print(number, flush=True)
"""


@pytest.mark.slow
def test_killed_at_any_moment_it_has_all_that_was_written(tmp_path: Path) -> None:
    """A run continues where the one before was killed: no number comes twice, none is left out, each batch is whole."""
    least = 0
    for turn in range(12):
        command = [sys.executable, "-c", WRITES, str(tmp_path)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            began = int(writer.stdout.readline())
            assert began >= least
            while int(writer.stdout.readline()) < began + 11 * turn + 40:
                pass
            writer.send_signal(signal.SIGKILL)
            written = [int(item) for item in writer.stdout.read().split("\n")[:-1]]
        least = max(written, default=began) + 1
    buffer = Buffer(tmp_path)
    assert buffer.next >= least
    assert numbers(buffer) == list(range(buffer.next))
