"""Test uploaded programs: what is unpacked, and what is refused before anything is."""

from __future__ import annotations

import gzip
import io
import os
import pwd
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.disk import rundir, sharing, upload

Plant = Callable[[tarfile.TarFile], None]


def packed(*plants: Plant) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for plant in (file("train.py", b"print(1)"), *plants):
            plant(archive)
    return buffer.getvalue()


def file(name: str, data: bytes = b"x", mode: int = 0o644) -> Plant:
    def add(archive: tarfile.TarFile) -> None:
        member = tarfile.TarInfo(name)
        member.size, member.mode = len(data), mode
        archive.addfile(member, io.BytesIO(data))

    return add


def other(name: str, kind: bytes, target: str = "") -> Plant:
    def add(archive: tarfile.TarFile) -> None:
        member = tarfile.TarInfo(name)
        member.type, member.linkname = kind, target
        archive.addfile(member)

    return add


def linked_by_header(target: str) -> Plant:
    """A link with its target in a separate header, which may contain any character."""

    def add(archive: tarfile.TarFile) -> None:
        member = tarfile.TarInfo("x")
        member.type, member.pax_headers = tarfile.SYMTYPE, {"linkpath": target}
        archive.addfile(member)

    return add


def folder_of(size: int) -> Plant:
    """A folder that claims a size, although folders have none."""

    def add(archive: tarfile.TarFile) -> None:
        member = tarfile.TarInfo("d")
        member.type = tarfile.DIRTYPE
        block = bytearray(member.tobuf(tarfile.GNU_FORMAT))
        block[124:136] = size.to_bytes(12, "big", signed=True)
        block[148:156] = b"%06o\0 " % (sum(block[:148]) + sum(block[156:]) + 8 * ord(" "))
        assert archive.fileobj is not None
        archive.fileobj.write(block)

    return add


def messages(code: bytes, entry: str = "train.py") -> str:
    return " ".join(problem.message for problem in upload.problems(code, entries={"script.entry": entry}))


def test_a_good_upload_is_unpacked(tmp_path: Path, settings: Any) -> None:
    settings.VIGIL_RUNS = tmp_path / "runs"
    code = packed(
        other("./", tarfile.DIRTYPE),
        other("src", tarfile.DIRTYPE),
        file("./src/model.py", b"model"),
        file("run.sh", b"#!/bin/sh", mode=0o4777),
        other("src/link.py", tarfile.SYMTYPE, "../train.py"),
        other("latest", tarfile.SYMTYPE, "src"),
    )
    assert messages(code) == ""
    name = upload.store(code)
    target = tmp_path / "code"
    upload.unpack(name, target)
    assert (target / "train.py").read_text() == "print(1)"
    assert (target / "latest" / "link.py").read_text() == "print(1)"
    assert (target / "run.sh").stat().st_mode & 0o7777 == 0o750
    assert (target / "train.py").stat().st_mode & 0o7777 == 0o640
    upload.delete(name)
    assert not list((tmp_path / "runs" / upload.UPLOADS).iterdir())


def test_what_a_killed_worker_left_is_removed(tmp_path: Path, settings: Any) -> None:
    settings.VIGIL_RUNS = tmp_path
    left = tmp_path / upload.UPLOADS / f"{upload.STAGING}x"
    (left / "code").mkdir(parents=True)
    upload.delete_stale()
    assert left.exists()
    os.utime(left, (0, 0))
    upload.delete_stale()
    assert not left.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root hands files to another Unix user")
def test_the_jobs_user_cannot_steer_what_root_unpacks(
    settings: Any, monkeypatch: pytest.MonkeyPatch, open_folder: Path
) -> None:
    """Another job of the same Unix user swaps a folder for a link while root unpacks: nothing lands behind the link."""
    settings.VIGIL_RUNS, settings.VIGIL_LOCAL_USER = open_folder / "runs", "nobody"
    settings.VIGIL_RUNS.mkdir()
    nobody = pwd.getpwnam("nobody")
    private_folder = open_folder / "roots"
    private_folder.mkdir(mode=0o700)
    name = upload.store(packed(file("d/pad"), file("d/evil")))
    run = rundir.path_of(rundir.make("default", 1))
    sharing.share(run, "nobody")
    target = run / "job" / "code"
    place, swaps = upload._extract, list[int]()

    def watched_place(archive: tarfile.TarFile, member: tarfile.TarInfo, root: Path) -> None:
        place(archive, member, root)
        if member.name != "d/pad":
            return
        child = os.fork()
        if child == 0:
            try:
                os.setgid(nobody.pw_gid)
                os.setgroups([nobody.pw_gid])
                os.setuid(nobody.pw_uid)
                os.rename(root / "d", root / "old")
                os.symlink(private_folder, root / "d")
                os._exit(0)
            except BaseException:
                os._exit(1)
        swaps.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    monkeypatch.setattr(upload, "_extract", watched_place)
    upload.unpack(name, target)
    assert swaps == [1]  # it could not even open the folder
    assert not list(private_folder.iterdir())
    for path in (target, target / "d", target / "d" / "evil", target / "train.py"):
        completed = subprocess.run(
            ["test", "-r", path, "-a", "-w", path],
            user=nobody.pw_uid,
            group=nobody.pw_gid,
            extra_groups=[],
            check=False,
        )
        assert completed.returncode == 0


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Return a folder that every Unix user may enter; those of pytest are closed."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.mark.parametrize(
    ("plants", "expected"),
    [
        ([file("/etc/x")], "leads out"),
        ([file("../x")], "leads out"),
        ([file("a/../../x")], "leads out"),
        ([other("x", tarfile.SYMTYPE, "/etc/passwd")], "link that leads out"),
        ([other("x", tarfile.SYMTYPE, "../x")], "link that leads out"),
        ([other("d/x", tarfile.SYMTYPE, "../../x")], "link that leads out"),
        ([other("x", tarfile.SYMTYPE, ".")], "link that leads out"),
        # Where "a" leads upwards, a/b/../.. is above the top, though the words add up.
        ([other("d/a", tarfile.SYMTYPE, ".."), other("x", tarfile.SYMTYPE, "d/a/b/../..")], "link that leads out"),
        ([other("a", tarfile.SYMTYPE, "b"), file("a/x")], "behind a link"),
        ([file("f"), file("f/x")], "behind a link or a file"),
        ([file("f"), file("f/g/x")], "behind a link or a file"),
        # What only a path names is a folder: a file or a link in its place could not be unpacked.
        ([file("d/x"), file("d")], "packed twice"),
        ([file("d/x"), other("d", tarfile.SYMTYPE, "train.py")], "packed twice"),
        ([file("x" * 256)], "too long a name"),
        ([file("é" * 128)], "too long a name"),
        ([file("/".join(["x" * 200] * 6))], "too long a name"),
        ([other("x", tarfile.SYMTYPE, "y" * 256)], "is a link to an invalid name"),
        ([other("x", tarfile.SYMTYPE, "y/" * 600)], "is a link to an invalid name"),
        ([linked_by_header("a\0b")], "is a link to an invalid name"),
        ([file("train.py")], "packed twice"),
        ([other("x", tarfile.LNKTYPE, "train.py")], "not a file, a folder or a link"),
        ([other("x", tarfile.CHRTYPE)], "not a file, a folder or a link"),
        ([other("x", tarfile.FIFOTYPE)], "not a file, a folder or a link"),
    ],
)
def test_tricks_are_refused(plants: list[Plant], expected: str) -> None:
    assert expected in messages(packed(*plants))


def test_the_program_must_be_there() -> None:
    assert "not in the upload" in messages(packed(), entry="main.py")


@pytest.mark.parametrize(
    "code", [b"", b"not a tar", packed()[:40], gzip.compress(b"x" * 1000)], ids=["empty", "text", "torn", "no tar"]
)
def test_what_is_no_archive(code: bytes) -> None:
    assert "tar.gz" in messages(code) or "not in the upload" in messages(code)


def test_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "MAX_BYTES", 100)
    assert "50 MB at most" in messages(packed(file("x", bytes(range(256)) * 10)))


def test_too_large_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "MAX_UNPACKED", 100_000)
    assert "More than 500 MB" in messages(packed(file("zeros", bytes(200_000))))


def test_a_size_below_zero_makes_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "MAX_UNPACKED", 100_000)
    assert "-150,000 bytes" in messages(packed(folder_of(-150_000), file("zeros", bytes(200_000))))


def test_folders_that_only_paths_name_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few thousand bytes could make millions of folders."""
    monkeypatch.setattr(upload, "MAX_MEMBERS", 1_000)
    way = "/".join("a" * 400)
    assert messages(packed(file(f"0/{way}"))) == ""
    assert "More than 1,000 files" in messages(packed(*(file(f"{number}/{way}") for number in range(4))))


def test_a_small_archive_cannot_inflate_to_a_huge_header() -> None:
    name = "x" * 50_000_000  # a long-name header of 50 MB, 50 kB packed
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", format=tarfile.GNU_FORMAT) as archive:
        archive.addfile(tarfile.TarInfo(name))
    assert len(buffer.getvalue()) < 100_000
    assert "inflates" in messages(buffer.getvalue())


def about(code: bytes, settings: Any, tmp_path: Path) -> upload.UploadedCode:
    settings.VIGIL_RUNS = tmp_path / "runs"
    return upload.describe(upload.store(code))


def test_the_same_files_have_the_same_digest(tmp_path: Path, settings: Any) -> None:
    def digest(*plants: Plant) -> str:
        return about(packed(*plants), settings, tmp_path).digest

    first, second = file("a.py", b"1"), file("b.py", b"2")
    assert digest(first, second) == digest(second, first, other("folder", tarfile.DIRTYPE))
    different = [(first,), (first, file("b.py", b"3")), (first, file("b.py", b"2", 0o755)), (first, file("c.py", b"2"))]
    different += [(first, second, other("l", tarfile.SYMTYPE, target)) for target in ("a.py", "b.py")]
    assert len({digest(*plants) for plants in different} | {digest(first, second)}) == len(different) + 1


@pytest.mark.parametrize("comment", ["", "main", "12" * 20, "12" * 20 + "\n", "<b>", "é" * 40])
def test_a_commit_is_accepted_only_in_the_form_of_a_commit(comment: str, tmp_path: Path, settings: Any) -> None:
    buffer = io.BytesIO()
    headers = {"comment": comment, upload.DIRTY: "1"}
    with tarfile.open(fileobj=buffer, mode="w:gz", pax_headers=headers) as archive:
        file("train.py")(archive)
    assert not messages(buffer.getvalue())
    sent = about(buffer.getvalue(), settings, tmp_path)
    assert (sent.commit, sent.dirty) == (("12" * 20, True) if comment == "12" * 20 else ("", False))


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        ("export A=1\n", 0o644, "#!/bin/bash"),
        ("#!/bin/bash\r\nexport A=1\r\n", 0o755, "Windows line endings"),
        ("#!/bin/bash\nexport A=1\n", 0o644, ""),
        ("export A=1\n", 0o755, ""),
    ],
)
def test_a_program_that_nothing_runs_is_refused_at_submission(text: str, mode: int, words: str) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        member = tarfile.TarInfo("run.sh")
        member.size, member.mode = len(text), mode
        archive.addfile(member, io.BytesIO(text.encode()))
    entries = {"script.entry": "run.sh"}
    found = upload.problems(buffer.getvalue(), entries=entries, programs={"script.entry"})
    assert [problem.field for problem in found] == (["script.entry"] if words else [])
    assert all(words in problem.message for problem in found)
