"""Test what `vigil submit` packs of a folder, and what it refuses."""

import io
import os
import tarfile

import pytest

from jobs.disk import upload
from tests.repositories import git, write
from vigil_cli.code_archive import Unpackable, pack


def unpacked(code: bytes) -> dict[str, str]:
    with tarfile.open(fileobj=io.BytesIO(code)) as archive:
        members = {m.name: m for m in archive}
        return {
            name: f"-> {m.linkname}" if m.issym() else archive.extractfile(m).read().decode()
            for name, m in members.items()
        }


@pytest.fixture
def code(tmp_path):
    return write(tmp_path / "code", {"train.py": "1", "lib/a.py": "2", "__pycache__/x.pyc": "no"})


def test_pack_takes_everything_where_there_is_no_git(code):
    packed = pack(code)
    assert unpacked(packed.code) == {"train.py": "1", "lib/a.py": "2"}
    assert pack(code).code == packed.code


def test_pack_takes_what_git_tracks_as_it_is_now(code):
    write(code, {"gone.py": "", ".gitignore": "*.secret\n", "key.secret": "hush", "notes.txt": "untracked"})
    git(code, "init", "-q")
    git(code, "add", "train.py", "lib", "gone.py", ".gitignore")
    git(code, "commit", "-qm", "all")
    write(code, {"train.py": "modified"})
    (code / "gone.py").unlink()
    packed = pack(code)
    assert unpacked(packed.code) == {"train.py": "modified", "lib/a.py": "2", ".gitignore": "*.secret\n"}
    assert packed.left_out == ["__pycache__/x.pyc", "notes.txt"]
    assert unpacked(pack(code / "lib").code) == {"a.py": "2"}, "a folder within a repository"


def test_pack_records_the_commit_of_the_files(code):
    def headers() -> dict[str, str]:
        with tarfile.open(fileobj=io.BytesIO(pack(code).code)) as archive:
            return dict(archive.pax_headers)

    assert headers() == {}
    git(code, "init", "-q")
    git(code, "add", "train.py")
    assert headers() == {}, "nothing is committed yet"
    git(code, "commit", "-qm", "all")
    commit = git(code, "rev-parse", "HEAD")
    assert headers() == {"comment": commit}, "what is not sent makes no difference"
    write(code, {"train.py": "modified"})
    assert headers() == {"comment": commit, upload.DIRTY: "1"}


def test_packing_a_strangers_repository_runs_nothing_of_it(code, tmp_path):
    """Whoever unpacks a folder with its .git has its filters, which git runs to see whether a file has changed."""
    mark = tmp_path / "was run"
    write(code, {".gitattributes": "*.py filter=a=b\n"})
    git(code, "init", "-q")
    git(code, "add", ".")
    git(code, "commit", "-qm", "first")
    for kind in ("clean", "process"):
        git(code, "config", f"filter.a=b.{kind}", f"touch '{mark}'; cat")
    git(code, "config", "filter.a=b.required", "true")
    (code / "train.py").touch()
    assert pack(code).files
    assert not mark.exists()


def test_pack_keeps_links_within_and_refuses_those_that_lead_out(code, tmp_path):
    (code / "inner").symlink_to("lib/a.py")
    assert unpacked(pack(code).code)["inner"] == "-> lib/a.py"
    for target in ("/etc/passwd", "../outside", "lib/../../outside", str(code / "train.py")):
        (code / "evil").unlink(missing_ok=True)
        (code / "evil").symlink_to(target)
        with pytest.raises(Unpackable, match="evil is a link to"):
            pack(code)


def test_pack_refuses_a_pipe_and_too_much(code, monkeypatch):
    os.mkfifo(code / "pipe")
    with pytest.raises(Unpackable, match="pipe is not a file"):
        pack(code)
    (code / "pipe").unlink()
    (code / "weights.bin").write_bytes(os.urandom(200_000))
    monkeypatch.setattr("vigil_cli.code_archive.MAX_BYTES", 100_000)
    with pytest.raises(Unpackable, match="weights.bin"):
        pack(code)
    with pytest.raises(Unpackable, match="not a folder"):
        pack(code / "nowhere")


def test_what_the_portal_takes_is_what_we_pack(code):
    (code / "inner").symlink_to("lib/a.py")
    assert upload.problems(pack(code).code, entries={"script.entry": "train.py"}) == []
