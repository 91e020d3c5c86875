"""A private, whole Slurm on this machine: munged, MariaDB, slurmdbd, slurmctld, slurmrestd and a slurmd for each node.

    python -m tests.slurm.cluster      brings one up until Ctrl-C and says how to reach it

Every daemon stays in the foreground as a child of ours that the kernel ends with us, so no test leaves one behind; each
can be killed and started again by itself. Wants root: slurmrestd must run as another user than Slurm.
"""

from __future__ import annotations

import hmac
import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from portal.supervise import die_with
from tests.slurm import config
from tests.slurm.config import Layout

PATIENCE_S = 30.0
PACKAGES = (
    "slurmctld", "slurmd", "slurmdbd", "slurmrestd", "slurm-client", "slurm-wlm-basic-plugins",
    "slurm-wlm-mysql-plugin", "slurm-wlm-jwt-plugin", "munge", "mariadb-server",
)  # fmt: skip
REST_USER = "www-data"


class NoSlurm(Exception):
    """There is no Slurm to start. The message says how to get one."""


class Cluster:
    """One running cluster. `daemons` are its processes by name: munged, mariadbd, slurmdbd, slurmctld, dgx01 …"""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.url = f"http://127.0.0.1:{layout.port_of('slurmrestd')}"
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "MUNGE"))},
            "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin",
            "SLURM_CONF": str(layout.slurm_conf),
        }
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Every daemon, in the order in which they are started."""
        return ("munged", "mariadbd", "slurmdbd", "slurmctld", *self.layout.names, "slurmrestd")

    def up(self) -> None:
        config.write(self.layout)
        self._make_database()
        for name in self.names:
            self.start(name)
            if name == "mariadbd":
                self._let_slurm_in()
        self.wait_for(lambda: self.idle() == len(self.layout.names), "every node to be idle")

    def down(self) -> None:
        """End everything; whoever does not go is killed."""
        for name in reversed(self.names):
            if process := self.daemons.pop(name, None):
                process.terminate()
                try:
                    process.wait(3)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    def start(self, name: str) -> None:
        """Start one daemon and wait until it answers."""
        with (self.layout.folder / "log" / f"{name}.log").open("ab") as log:
            parent = os.getpid()
            self.daemons[name] = subprocess.Popen(
                self._command(name), env=self._environment_of(name), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, preexec_fn=lambda: die_with(parent),
            )  # fmt: skip
        self.wait_for(lambda: self._answers(name), f"{name} to answer", name)

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """A signal to one daemon alone, as when its machine loses it; what it started lives on."""
        process = self.daemons.pop(name)
        process.send_signal(number)
        process.wait(PATIENCE_S)

    def run(self, *command: str | Path, **options: object) -> str:
        """What one of Slurm's commands prints."""
        done = subprocess.run(
            [str(word) for word in command], env=self.environment, capture_output=True, text=True, timeout=60,
            check=False, **options,  # type: ignore[call-overload]
        )  # fmt: skip
        if done.returncode:
            raise AssertionError(f"{' '.join(map(str, command))}: {done.stderr.strip() or done.returncode}")
        return str(done.stdout)

    def token(self, user: str = "root", life_s: int = 600) -> str:
        """A JWT (RFC 7519) as `scontrol token` makes them: HS256 over the raw bytes of the key file."""
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
                "mariadbd", "--no-defaults", *_as_mysql(), f"--datadir={folder}/mysql", "--bind-address=127.0.0.1",
                f"--port={layout.port_of(name)}", f"--socket={layout.mysql_socket}", "--skip-name-resolve",
                "--innodb-flush-log-at-trx-commit=0", "--innodb-lock-wait-timeout=900", "--performance-schema=0",
            ]  # fmt: skip
        if name == "slurmrestd":
            user = pwd.getpwnam(REST_USER)
            return [
                "setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups",
                "slurmrestd", "-a", "rest_auth/jwt", f"127.0.0.1:{layout.port_of(name)}",
            ]  # fmt: skip
        if name in layout.names:
            return ["slurmd", "-D", "-f", str(layout.slurm_conf), "-N", name]
        return [name, "-D"]

    def _environment_of(self, name: str) -> dict[str, str]:
        return {**self.environment, "SLURM_JWT": "daemon"} if name == "slurmrestd" else self.environment

    def _answers(self, name: str) -> bool:
        if name == "munged":
            return self.layout.munge_socket.is_socket()
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.layout.port_of(name))) == 0

    def _make_database(self) -> None:
        folder = self.layout.folder / "mysql"
        if (folder / "mysql").is_dir():
            return
        if os.geteuid() == 0:
            shutil.chown(folder, "mysql")
        self.run(
            "mariadb-install-db", "--no-defaults", *_as_mysql(), f"--datadir={folder}", "--skip-test-db",
            "--auth-root-authentication-method=normal",
        )  # fmt: skip

    def _let_slurm_in(self) -> None:
        grant = (
            "CREATE USER IF NOT EXISTS slurm@'127.0.0.1' IDENTIFIED BY 'slurm';"
            " GRANT ALL ON slurm_acct.* TO slurm@'127.0.0.1';"
        )
        self.run("mariadb", "--no-defaults", "-S", self.layout.mysql_socket, "-u", "root", "-e", grant)

    def idle(self) -> int:
        """How many nodes have nothing to do."""
        states = self.run("sinfo", "--noheader", "--Node", "--partition=batch", "--format=%T").split()
        return sum(state == "idle" for state in states)


def _base64url(data: bytes) -> bytes:
    return urlsafe_b64encode(data).rstrip(b"=")


def _as_mysql() -> list[str]:
    return ["--user=mysql"] if os.geteuid() == 0 else []


def find() -> None:
    """NoSlurm unless everything is installed."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    if os.geteuid() != 0:
        raise NoSlurm("a private Slurm cluster needs root: slurmrestd must run as another user than Slurm")
    if missing := [
        name for name in ("slurmctld", "slurmrestd", "munged", "mariadbd") if not shutil.which(name, path=path)
    ]:
        raise NoSlurm(f"{', '.join(missing)} not found: apt-get install --no-install-recommends {' '.join(PACKAGES)}")


def _free_range(size: int) -> int:
    """The first of `size` ports below those that the kernel gives to outgoing connections, all of them free."""
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
def cluster(nodes: int = 4) -> Iterator[Cluster]:
    """A fresh cluster, gone afterwards."""
    find()
    folder = Path(tempfile.mkdtemp(prefix="vigil-slurm-"))
    folder.chmod(0o755)  # munge wants a path that everybody may walk, and jobs read the configuration
    made = Cluster(Layout(folder, _free_range(nodes + 4), nodes))
    try:
        made.up()
        yield made
    finally:
        made.down()
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    began = time.monotonic()
    with cluster() as made:
        print(f"Slurm is up after {time.monotonic() - began:.1f} s.", flush=True)
        print(f"export SLURM_CONF={made.layout.slurm_conf}", flush=True)
        print(f"VIGIL_SLURM_URL={made.url} VIGIL_SLURM_KEY_FILE={made.layout.jwt_key}", flush=True)
        try:
            signal.pause()
        except KeyboardInterrupt:
            return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
