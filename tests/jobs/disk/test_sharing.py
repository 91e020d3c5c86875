"""Test run directories shared by a portal and one of several people: three real, unprivileged Unix users."""

from __future__ import annotations

import errno
import os
import pwd
import shutil
import subprocess
import tarfile
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.disk import rundir, sharing, trash, upload
from jobs.disk.sharing import Acl
from jobs.errors import Refused
from tests.jobs.disk.test_upload import file, other, packed
from tests.slurm.people import ALICE, BOB, GROUP, PORTAL, People
from training.launch.access import restore_access

people = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("useradd"), reason="Unix users are made by root, with useradd"
)

bits = st.integers(0, 7)
numbers = st.dictionaries(st.integers(0, 2**32 - 2), bits, max_size=5)


@given(st.builds(Acl, bits, bits, bits, users=numbers, groups=numbers, mask=st.none() | bits))
def test_a_list_is_what_was_packed(acl: Acl) -> None:
    assert sharing.parse(sharing.pack(acl)) == acl


@pytest.mark.parametrize(
    "data", [b"", b"\2\0\0", b"\1\0\0\0", b"\2\0\0\0", b"\2\0\0\0\1\0\7\0", b"\2\0\0\0" + b"x" * 24]
)
def test_what_is_no_list(data: bytes) -> None:
    with pytest.raises(ValueError, match="not an access control list"):
        sharing.parse(data)


def test_nothing_is_shared_with_ourselves(runs: Path) -> None:
    run = rundir.path_of(rundir.make("default", 1))
    for user in ("", pwd.getpwuid(os.geteuid()).pw_name):
        sharing.share(run, user)
        assert not any(name.startswith("system.posix_acl") for name in os.listxattr(run / "job"))


def test_an_unknown_user_is_named(runs: Path) -> None:
    run = rundir.path_of(rundir.make("default", 1))
    with pytest.raises(Refused, match="no Unix user nobody-of-this-name. Give it the same users as the nodes"):
        sharing.share(run, "nobody-of-this-name")


def test_a_file_system_without_lists_is_refused(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    run = rundir.path_of(rundir.make("default", 1))
    monkeypatch.setattr(os, "setxattr", refuse)
    somebody = next(entry.pw_name for entry in pwd.getpwall() if entry.pw_uid != os.geteuid())
    with pytest.raises(Refused, match=f"so access cannot be granted to {somebody} alone. Mount it with POSIX ACLs"):
        sharing.share(run, somebody)
    assert run.stat().st_mode & 0o7777 == 0o2700


@pytest.fixture(scope="module")
def made_people() -> People:
    return People()


class Lab:
    """A run root as an administrator makes it, a job of alice's in it, and what each of the three does there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        shutil.chown(root, PORTAL, GROUP)
        root.chmod(0o2710)
        self.directory = ""

    @property
    def run(self) -> Path:
        return rundir.path_of(self.directory)

    def make(self) -> None:
        def work() -> str:
            directory = rundir.make("vision", 7)
            run = rundir.path_of(directory)
            sharing.share(run, ALICE)
            rundir.write(run / "portal" / "token", "a secret", mode=0o600)
            rundir.write(run / "portal" / "batch.sh", "#!/bin/sh\necho started", mode=0o750)
            return directory

        self.directory = self.ours(work)

    def ours(self, work: Callable[[], str], name: str = PORTAL) -> str:
        """Return what our own functions return in a process of this Unix user; its errors are raised here."""
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                user = pwd.getpwnam(name)
                os.setgroups(os.getgrouplist(name, user.pw_gid))
                os.setgid(user.pw_gid)
                os.setuid(user.pw_uid)
                os.umask(0o077)
                os.write(writing, work().encode())
                os._exit(0)
            except BaseException as error:
                os.write(writing, repr(error).encode())
                os._exit(1)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            report = pipe.read()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, report
        return report

    def person(self, name: str, script: str) -> subprocess.CompletedProcess[str]:
        """Run a shell as this person in the run directory, whose path is $run."""
        user = pwd.getpwnam(name)
        return subprocess.run(
            ["/bin/bash", "-c", f"set -eu; run={self.run}; {textwrap.dedent(script)}"],
            user=name, group=user.pw_gid, extra_groups=os.getgrouplist(name, user.pw_gid), cwd="/",
            env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=False, timeout=30,
        )  # fmt: skip

    def does(self, name: str, script: str) -> str:
        done = self.person(name, script)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def lab(made_people: People, settings: Any) -> Iterator[Lab]:
    with tempfile.TemporaryDirectory(prefix="vigil-share-") as folder:  # pytest's own are closed to other users
        os.chmod(folder, 0o755)
        settings.VIGIL_RUNS = Path(folder) / "runs"
        settings.VIGIL_RUNS.mkdir()
        found = Lab(settings.VIGIL_RUNS)
        found.make()
        yield found


@people
class TestThreeUsers:
    def test_the_job_reads_what_is_for_it_and_changes_none_of_it(self, lab: Lab) -> None:
        assert (
            lab.does(ALICE, "cat $run/portal/token; $run/portal/batch.sh; ls $run") == "a secretstarted\njob\nportal\n"
        )
        for attack in (
            "echo x > $run/portal/token", "rm -f $run/portal/token", "touch $run/portal/x", "touch $run/x",
            "mv $run/job $run/portal/x", "chmod o+rwx $run", "chmod o+rwx $run/job", "ls $run/../..", "ls $run/..",
        ):  # fmt: skip
            done = lab.person(ALICE, attack)
            assert done.returncode != 0, attack
            assert "Permission denied" in done.stderr or "not permitted" in done.stderr

    def test_what_the_portal_writes_later_is_read_too(self, lab: Lab) -> None:
        def again() -> str:
            rundir.write(lab.run / "portal" / "token", "another", mode=0o600)
            rundir.write(lab.run / "portal" / "pinned.json", "{}")
            return ""

        lab.ours(again)
        assert lab.does(ALICE, "cat $run/portal/*.json $run/portal/token") == "{}another"

    def test_the_portal_reads_and_removes_what_the_job_made(self, lab: Lab) -> None:
        lab.does(
            ALICE,
            """
            cd $run/job
            for mask in 077 027 000; do
                umask $mask
                mkdir -p attempt-$mask/spool attempt-$mask/logs/deep/er
                echo $mask > attempt-$mask/logs/0.0.log
                echo x > attempt-$mask/spool/0.0.jsonl
                mkdir -p checkpoints/step-$mask
                echo x > checkpoints/step-$mask/COMMITTED
            done
            """,
        )

        def work() -> str:
            logs = [rundir.read_under(lab.run, f"job/attempt-{mask}/logs/0.0.log") for mask in ("077", "027", "000")]
            assert logs == [b"077\n", b"027\n", b"000\n"]
            assert rundir.has_checkpoint(lab.directory, "step-077")
            with rundir.folder_under(lab.run, "job/attempt-077") as folder:
                shutil.rmtree("spool", dir_fd=folder)
            for mask in ("077", "027"):
                trash.discard_checkpoint(lab.directory, f"step-{mask}")
            assert rundir.names_under(lab.run, "job/checkpoints") == ["step-000"]
            trash.empty()
            with trash.moved_to_trash(lab.directory):
                pass
            assert len(os.listdir(lab.root / trash.TRASH)) == 1
            trash.empty()
            return ""

        lab.ours(work)
        assert sorted(path.name for path in lab.root.rglob("*")) == [trash.TRASH, "vision"]

    @pytest.mark.lengthy
    def test_nobody_else_gets_in(self, lab: Lab) -> None:
        lab.does(ALICE, "umask 0; mkdir $run/job/open; echo x > $run/job/open/file; chmod -R 777 $run/job/open")
        paths = ("$run/portal", "$run/portal/token", "$run/job", "$run/job/open", "$run/job/open/file")
        attacks = [f"{tool} {path}" for path in paths for tool in ("stat", "ls", "cat", "touch", "chmod 777", "rm -r")]
        attacks += [
            "ls $run",
            "cd $run",
            "ls $run/..",
            "touch $run/x",
            "touch $run/../x",
            "mv $run $run.2",
            "rm -r $run",
        ]
        for attack in attacks:
            done = lab.person(BOB, attack)
            assert done.returncode != 0, attack
            assert "Permission denied" in done.stderr or "not permitted" in done.stderr, done.stderr

    def test_what_the_job_closed_to_others_is_reported_once_and_left(
        self, lab: Lab, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Only its owner can open it again. The other entries are removed."""
        lab.does(ALICE, "cd $run/job; mkdir -m 700 own; echo x > own/file; mkdir other; echo x > other/file")

        def work() -> str:
            assert rundir.names_under(lab.run, "job/own") == []
            with trash.moved_to_trash(lab.directory):
                pass
            trash.empty()
            trash.empty()
            return "\n".join(record.getMessage() for record in caplog.records)

        report = lab.ours(work)
        assert report.count("cannot be removed; its owner, or root, can") == 1
        left = {path.name for path in next((lab.root / trash.TRASH).iterdir()).rglob("*")}
        assert left == {"job", "own", "file"}

    def test_what_was_closed_is_opened_when_the_attempt_ends(self, lab: Lab) -> None:
        lab.does(
            ALICE, "cd $run/job; mkdir -p a/b brought/inner; touch brought/inner/x; chmod 0 a/b; chmod 500 a; ln -s / l"
        )

        def end() -> str:
            for folder in (lab.run / "job" / "brought", lab.run / "job" / "brought" / "inner"):
                for name in (sharing.ACCESS, sharing.DEFAULT):  # as `cp -a` leaves a folder from elsewhere
                    os.removexattr(folder, name)
                folder.chmod(0o755)
            restore_access(lab.run / "job")
            return ""

        def remove() -> str:
            with trash.moved_to_trash(lab.directory):
                pass
            trash.empty()
            return ""

        lab.ours(end, ALICE)
        lab.ours(remove)
        assert not list((lab.root / trash.TRASH).iterdir())

    def test_uploaded_code_belongs_to_both(self, lab: Lab) -> None:
        code = packed(file("d/run.sh", b"#!/bin/sh\necho ran", 0o755), other("link", tarfile.SYMTYPE, "d"))

        def work() -> str:
            upload.unpack(upload.store(code), lab.run / "job" / "code")
            return ""

        lab.ours(work)
        text = "cd $run/job/code; ./link/run.sh; echo x > d/made; mkdir -p d/new; echo y >> train.py; touch d/new/file"
        assert lab.does(ALICE, text) == "ran\n"
        assert lab.person(BOB, "ls $run/job/code").returncode != 0

        def remove() -> str:
            shutil.rmtree(lab.run / "job" / "code")
            return ""

        lab.ours(remove)

    def test_a_job_that_changes_hands(self, lab: Lab) -> None:
        """The sysadmin corrects a person's name on the cluster: from the next attempt on, the former one is out."""

        def work() -> str:
            sharing.share(lab.run, BOB)
            return ""

        lab.ours(work)
        assert lab.person(ALICE, "ls $run").returncode != 0
        assert lab.does(BOB, "ls $run") == "job\nportal\n"
