"""A complete private Slurm on this machine: munged, MariaDB, slurmdbd, slurmctld, slurmrestd and a slurmd per node.

    python -m tests.slurm.cluster [--release 24.11]      runs one until Ctrl-C and prints how to reach it

Every daemon stays in the foreground as a child process that the kernel ends with this one; each can be killed and
restarted separately. They run in a room (tests/slurm/room.py) whose /usr is the release's; when the room is closed or
its creator dies, everything left in it ends as well: steps of jobs, hooks, commands.
"""

from __future__ import annotations

import argparse
import hmac
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from portal.run.child import die_with
from tests.slurm import config, release
from tests.slurm.config import Layout
from tests.slurm.people import ALICE, BOB, PORTAL, People
from tests.slurm.release import CHECKOUT, Release
from tests.slurm.room import Room, as_user

PATIENCE_S = 30.0
QOS = ("qos=normal,small", "DefaultQOS=normal")
ACCOUNTS = ("vision", "speech")


class Cluster:
    """A running cluster. `daemons` are its processes by name: munged, mariadbd, slurmdbd, slurmctld, dgx01 …"""

    def __init__(self, layout: Layout, release: Release) -> None:
        self.layout, self.release = layout, release
        self.url = f"http://127.0.0.1:{layout.port_of('slurmrestd')}"
        self.socket = layout.rest_socket
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "MUNGE"))}
        self._inside = {
            **clean,
            "PATH": f"{os.environ['PATH']}:/usr/sbin:/usr/bin:/sbin:/bin",
            "SLURM_CONF": str(layout.slurm_conf),
        }
        # For whoever is outside, as root: Slurm's commands enter the room by themselves.
        self.environment = {**self._inside, "PATH": f"{layout.bin}:{self._inside['PATH']}"}
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.room: Room | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Return every daemon, in the order in which they are started."""
        return ("munged", "mariadbd", "slurmdbd", "slurmctld", *self.layout.names, "slurmrestd")

    def up(self) -> None:
        config.write(self.layout, self.release)
        self.room = Room(self.release.usr, self.release.ld_cache, visible=[CHECKOUT, self.layout.folder])
        config.write_commands(self.layout, self.room.command_prefix)
        self._make_database()
        for name in self.names:
            self.start(name)
            if name == "mariadbd":
                self._let_slurm_in()
        self.wait_for(lambda: self.idle() == len(self.layout.names), "every node to be idle")
        self._make_accounts()
        if self.release.needs_usage_file:
            self._save_usage()

    def down(self) -> None:
        """End everything, running jobs as well; kill what does not exit."""
        for name in reversed(self.names):
            if process := self.daemons.pop(name, None):
                process.terminate()
                try:
                    process.wait(3)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        if self.room:
            self.room.close()
            self.room = None

    def start(self, name: str) -> None:
        """Start one daemon and wait until it answers."""
        with (self.layout.folder / "log" / f"{name}.log").open("ab") as log:
            parent = os.getpid()
            self.daemons[name] = subprocess.Popen(
                self._enter(*self._command(name)),
                env=self._environment_of(name),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                umask=0o000 if name == "slurmrestd" else 0o022,  # its socket is for everybody
                preexec_fn=lambda: die_with(parent),
            )
        self.wait_for(lambda: self._answers(name), f"{name} to answer", name)

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to one daemon alone, as when its machine fails; the processes it started live on."""
        process = self.daemons.pop(name)
        process.send_signal(number)
        process.wait(PATIENCE_S)

    @contextmanager
    def without(self, *names: str) -> Iterator[None]:
        """Kill daemons, and afterwards restart them and wait until they are well. Slurm keeps its state."""
        if "slurmctld" in names:
            self._let_it_save()
        for name in names:
            self.kill(name)
        try:
            yield
        finally:
            for name in names:
                self.start(name)
            self.wait_for(self.is_well, "every node to answer again")

    @contextmanager
    def configured(self, *lines: str) -> Iterator[None]:
        """Add lines to slurm.conf, and remove them afterwards."""
        conf = self.layout.slurm_conf
        before = conf.read_text()
        try:
            self._configure("\n".join((before.rstrip(), *lines, "")))
            yield
        finally:
            self._configure(before)

    def _configure(self, text: str) -> None:
        self.layout.slurm_conf.write_text(text)
        self.run("scontrol", "reconfigure")
        self.wait_for(self.is_well, "every node to answer again")

    def run(
        self, *command: str | Path, user: str = "", folder: Path | None = None, stdin: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> str:  # fmt: skip
        """Run a command in the room, as root or another user, by default in the scratch folder; return its output."""
        done = subprocess.run(
            self._enter(*(as_user(user, *command) if user else command), folder=folder or self.layout.scratch),
            env={**self._inside, **(environment or {})}, input=stdin, capture_output=True, text=True, timeout=60,
            check=False,
        )  # fmt: skip
        if done.returncode:
            raise AssertionError(f"{' '.join(map(str, command))}: {done.stderr.strip() or done.returncode}")
        return done.stdout

    def enroll(self, user: str, account: str, **limits: str | int) -> None:
        """Let a user submit for an account; limits are named as in sacctmgr (MaxJobs=2, GrpTRES="gres/gpu=4")."""
        association = self.run("sacctmgr", "-nP", "show", "assoc", f"user={user}", f"account={account}", "format=user")
        if not association.strip():
            self.run("sacctmgr", "-i", "add", "user", user, f"account={account}", *QOS)
        if limits:
            words = [f"{name}={value}" for name, value in limits.items()]
            self.run("sacctmgr", "-i", "modify", "user", "where", f"name={user}", f"account={account}", "set", *words)

    def token(self, user: str = "root", life_s: int = 600) -> str:
        """Return a JWT (RFC 7519) like those of `scontrol token`: HS256 with the raw bytes of the key file."""
        now = int(time.time())
        parts = [{"alg": "HS256", "typ": "JWT"}, {"exp": now + life_s, "iat": now, "sun": user}]
        text = b".".join(_base64url(json.dumps(part).encode()) for part in parts)
        signature = hmac.digest(self.layout.jwt_key.read_bytes(), text, "sha256")
        return (text + b"." + _base64url(signature)).decode()

    def log(self, name: str) -> str:
        return (self.layout.folder / "log" / f"{name}.log").read_text(errors="replace")

    def wait_for(self, condition: Callable[[], bool], what: str, daemon: str = "") -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            died = daemon and self.daemons[daemon].poll() is not None
            if died or time.monotonic() > deadline:
                raise AssertionError(f"waited for {what}; its log ends with\n{self.log(daemon or 'slurmctld')[-2000:]}")
            time.sleep(0.02)

    def _command(self, name: str) -> Sequence[str]:
        layout, folder = self.layout, self.layout.folder
        if name == "munged":
            return [
                "munged", "--foreground", "--force", f"--socket={layout.munge_socket}", "--num-threads=2",
                f"--key-file={folder}/etc/munge.key", f"--pid-file={folder}/run/munged.pid",
                f"--seed-file={folder}/run/munge.seed", f"--log-file={folder}/log/munged.own.log",
            ]  # fmt: skip
        if name == "mariadbd":
            return [
                "mariadbd", *self._mariadb, "--bind-address=127.0.0.1",
                f"--port={layout.port_of(name)}", f"--socket={layout.mysql_socket}", "--skip-name-resolve",
                "--innodb-flush-log-at-trx-commit=0", "--innodb-lock-wait-timeout=900", "--performance-schema=0",
            ]  # fmt: skip
        if name == "slurmrestd":
            self.socket.unlink(missing_ok=True)
            where = (f"127.0.0.1:{layout.port_of(name)}", f"unix:{self.socket}")
            return as_user(config.REST_USER, "slurmrestd", "-a", "rest_auth/jwt", *where)
        if name in layout.names:
            return ["slurmd", "-D", "-f", str(layout.slurm_conf), "-N", name]
        return [name, "-D"]

    def _environment_of(self, name: str) -> dict[str, str]:
        return {**self._inside, "SLURM_JWT": "daemon"} if name == "slurmrestd" else self._inside

    def _answers(self, name: str) -> bool:
        if name == "munged":
            return self.layout.munge_socket.is_socket()
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.layout.port_of(name))) == 0

    def _make_database(self) -> None:
        if (self.layout.folder / "mysql" / "mysql").is_dir():
            return
        self.run(
            "mariadb-install-db", *self._mariadb, "--skip-test-db", "--auth-root-authentication-method=normal"
        )  # fmt: skip

    def _let_it_save(self) -> None:
        """Wait until slurmctld has saved its current state, within five seconds: jobs that it forgets would run on."""
        state, now = self.layout.folder / "state" / "job_state", time.time()
        deadline = time.monotonic() + 6
        while time.monotonic() < deadline and not (state.exists() and state.stat().st_mtime > now):
            time.sleep(0.05)
        time.sleep(0.2)  # nodes' and others', right afterwards

    def _save_usage(self) -> None:
        """Have slurmctld write all its state, as it does every five minutes and when it is told to end."""
        self.run("scontrol", "reconfigure")
        self.wait_for((self.layout.folder / "state" / "assoc_usage").exists, "slurmctld to write assoc_usage")
        self.wait_for(self.is_well, "every node to answer again")

    @property
    def _mariadb(self) -> tuple[str, ...]:
        # A separate folder for temporary files: the server deletes those of other servers in /tmp.
        folder = self.layout.folder
        files = (f"--datadir={folder}/mysql", f"--tmpdir={folder}/mysql-tmp", "--innodb-log-file-size=8M")
        return ("--no-defaults", "--user=root", *files)

    def _let_slurm_in(self) -> None:
        grant = (
            "CREATE USER IF NOT EXISTS slurm@'127.0.0.1' IDENTIFIED BY 'slurm';"
            " GRANT ALL ON slurm_acct.* TO slurm@'127.0.0.1';"
        )
        self.run("mariadb", "--no-defaults", "-S", self.layout.mysql_socket, "-u", "root", "-e", grant)

    def _make_accounts(self) -> None:
        """Create two accounts and a second QOS: alice uses one account, bob the other; the portal manages nodes."""
        People()
        self.run("sacctmgr", "-i", "add", "account", ",".join(ACCOUNTS), "Description=lab", "Organization=lab")
        self.run("sacctmgr", "-i", "add", "qos", "small", "MaxTRESPerUser=gres/gpu=2")
        # An Operator may not drain nodes.
        for name, account, level in ((PORTAL, "vision", "Admin"), (ALICE, "vision", "None"), (BOB, "speech", "None")):
            self.run("sacctmgr", "-i", "add", "user", name, f"account={account}", *QOS, f"AdminLevel={level}")

    def _enter(self, *command: str | Path, folder: Path = Path("/")) -> list[str]:
        assert self.room, "the cluster is not up"
        return self.room.enter(*command, folder=folder)

    def idle(self) -> int:
        """Return how many nodes are idle."""
        return self.node_states().count("idle")

    def is_well(self) -> bool:
        """Return whether every node responds, in whatever state. (`*`: no response; `unk`: never registered.)"""
        states = self.node_states()
        return len(states) == len(self.layout.names) and not any(
            state.endswith("*") or state.startswith(("down", "unk")) for state in states
        )

    def state(self, job: str) -> str:
        """Return a job's state in Slurm's words, while Slurm still remembers the job."""
        return self.run("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T").strip()

    def node_states(self) -> list[str]:
        """Return each node's state; none while slurmctld starts and may reset connections."""
        try:
            return self.run("sinfo", "--noheader", "--Node", "--partition=batch", "--format=%T").split()
        except AssertionError:
            return []


def _base64url(data: bytes) -> bytes:
    return urlsafe_b64encode(data).rstrip(b"=")


def _free_range(size: int) -> int:
    """Return the first of `size` ports below the ephemeral range, all of them free."""
    for first in range(17_000 + os.getpid() % 100 * 100, 32_000, 100):
        probes = []
        try:
            for port in range(first, first + size):
                probes.append(socket.create_server(("127.0.0.1", port)))
        except OSError:
            continue
        else:
            return first
        finally:
            for probe in probes:
                probe.close()
    raise AssertionError("no free range of ports")


@contextmanager
def cluster(name: str = "22.05", *, nodes: int = 4, **settings: Any) -> Iterator[Cluster]:
    """Provide a fresh cluster of a release, removed afterwards. Settings are those of `Layout`: min_job_age_s …"""
    chosen = release.find(name)
    folder = Path(tempfile.mkdtemp(prefix="vigil-slurm-"))
    folder.chmod(0o755)  # munge wants a path that everybody may walk, and jobs read the configuration
    created = Cluster(Layout(folder, _free_range(nodes + 4), nodes, **settings), chosen)
    try:
        created.up()
        yield created
    finally:
        created.down()
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.slurm.cluster")
    parser.add_argument("--release", default="22.05", choices=[item.name for item in release.RELEASES])
    chosen = parser.parse_args().release
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    release.main([chosen])
    began = time.monotonic()
    with cluster(chosen) as created:
        print(f"Slurm {chosen} is up after {time.monotonic() - began:.1f} s.", flush=True)
        print(f"export SLURM_CONF={created.layout.slurm_conf} PATH={created.layout.bin}:$PATH", flush=True)
        print(f"VIGIL_SLURM_URL={created.url} VIGIL_SLURM_KEY_FILE={created.layout.jwt_key}", flush=True)
        print(f"or over the socket {created.socket}", flush=True)
        try:
            signal.pause()
        except KeyboardInterrupt:
            return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
