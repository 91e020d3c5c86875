"""Provide a private Slurm: Debian's packages of one release, unpacked under var/slurm and never installed.

    python -m tests.slurm.release [22.05 …]     prepares them; does nothing if they are ready
    python -m tests.slurm.release --turn        prints the release whose turn it is: `.ci/run` alternates between them

The machine itself is not changed: the daemons run in a room (tests/slurm/room.py) where the unpacked folder is /usr.
Packages come from the mirror that this machine's apt uses, with their signatures checked.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.landing.parts import turn

CHECKOUT = Path(__file__).resolve().parents[2]
CACHE = CHECKOUT / "var" / "slurm"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")

SLURM = (
    "slurmctld", "slurmd", "slurmdbd", "slurmrestd", "slurm-client", "slurm-wlm-basic-plugins",
    "slurm-wlm-mysql-plugin", "slurm-wlm-jwt-plugin", "munge", "mariadb-server-core", "mariadb-client-core",
)  # fmt: skip
# What scripts of jobs expect in /usr, and the libraries of this machine's Python and of torch.
BASE = (
    "bash", "coreutils", "curl", "dash", "debianutils", "findutils", "gawk", "grep", "gzip", "hostname", "libc-bin",
    "mount", "ncurses-base", "procps", "sed", "tar", "tzdata", "util-linux",
)  # fmt: skip
LIBRARIES = ("libc6", "libc-bin", "libexpat1", "libgomp1", "libpython3-stdlib", "libstdc++6")
# Dependencies that are never used here: a third of the whole.
UNUSED = re.compile(r"(perl|perl-base|perl-modules-.*|libperl5.*|systemd|udev|dbus.*|debconf|adduser|libx11-data)$")
LAYOUT = 2
NOT_UNPACKED = ("doc", "info", "locale", "man", "lintian", "bash-completion", "icons")


class NoSlurm(Exception):
    """There is no Slurm to start. The message says how to get one."""


@dataclass(frozen=True)
class Release:
    """A release of Slurm as a Debian suite packages it."""

    name: str
    suite: str
    debian: int

    def __str__(self) -> str:
        return self.name

    @property
    def folder(self) -> Path:
        return CACHE / self.name

    @property
    def usr(self) -> Path:
        return self.folder / "root" / "usr"

    @property
    def ld_cache(self) -> Path:
        return self.folder / "ld.so.cache"

    @property
    def is_ready(self) -> bool:
        recipe = self.folder / "recipe"
        return recipe.is_file() and recipe.read_text() == _recipe()

    @property
    def cgroup_plugin(self) -> str:
        # From 23.11 on slurmd refuses to start where there are no cgroups to own; before, it knows no "disabled".
        return "disabled" if self.name > "23" else "autodetect"

    @property
    def needs_usage_file(self) -> bool:
        """Return whether slurmctld, where it has started before, ends at once without its file assoc_usage."""
        return self.name > "25"


RELEASES = (Release("22.05", "bookworm", 12), Release("24.11", "trixie", 13), Release("26.05", "forky", 14))

# Debian 13 has a libmariadb3 (11.8.9) that refuses each result of slurmdbd. This one has the same ABI.
OLDER_CLIENT = "bookworm"


def find(name: str) -> Release:
    """Return the unpacked release of that name."""
    releases = {release.name: release for release in RELEASES}
    if name not in releases:
        raise NoSlurm(f"there is no release {name}: {', '.join(releases)}")
    if os.geteuid() != 0:
        raise NoSlurm("a private Slurm needs root: its jobs run as other users, in mounts of their own")
    if not releases[name].is_ready:
        raise NoSlurm(f"Slurm {name} is not unpacked: .venv/bin/python -m tests.slurm.release")
    return releases[name]


def release_to_test() -> Release:
    """Return the release to test: each commit moves on to the next one."""
    return RELEASES[turn(len(RELEASES))]


def prepare(release: Release) -> None:
    """Unpack into a temporary folder and rename it: others see either all of it or nothing."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two runs of make take turns
        if release.is_ready:
            return
        aside = Path(tempfile.mkdtemp(prefix=f".{release.name}-", dir=CACHE))
        try:
            _unpack(release, aside)
            if release.folder.exists():
                release.folder.rename(aside / "old")
            (aside / "new").rename(release.folder)
        finally:
            for left in CACHE.glob(f".{release.name}-*"):
                if not _is_in_use(left):
                    shutil.rmtree(left, ignore_errors=True)


def _is_in_use(folder: Path) -> bool:
    """Return whether a running cluster has it as its /usr, even if it was moved since."""
    for mounts in Path("/proc").glob("[0-9]*/mountinfo"):
        with suppress(OSError):
            if f"{folder}/" in mounts.read_text():
                return True
    return False


def _unpack(release: Release, aside: Path) -> None:
    new = aside / "new"
    root = new / "root"
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / "usr" / name).mkdir(parents=True)
        (root / name).symlink_to(f"usr/{name}")
    with Apt(aside / "apt", release.suite) as apt:
        _extract(apt.download((*SLURM, *BASE, *LIBRARIES)), root)
    if release.suite != OLDER_CLIENT:
        with Apt(aside / "older", OLDER_CLIENT) as apt:
            _extract(apt.alone("libmariadb3"), root)
    if _debian() > release.debian:
        # This machine's Python was built for its own C library, which runs older programs as well.
        with Apt(aside / "newer", _os_release()["VERSION_CODENAME"]) as apt:
            _extract(apt.download(LIBRARIES), root)
    _link(root / "usr")
    _make_ld_cache(root, new / "ld.so.cache")
    (new / "recipe").write_text(_recipe())


class Apt:
    """A private apt in a folder: another suite than the machine's, nothing installed, the same mirror and keys."""

    def __init__(self, folder: Path, suite: str) -> None:
        self.folder = folder
        for name in ("lists/partial", "archives/partial", "sources.d"):
            (folder / name).mkdir(parents=True)
        (folder / "status").touch()
        signed_by = f" [signed-by={KEYRING}]" if KEYRING.exists() else ""
        (folder / "sources.list").write_text(f"deb{signed_by} {_mirror()} {suite} main\n")

    def __enter__(self) -> Apt:
        self._run("update")
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def download(self, packages: Sequence[str]) -> list[Path]:
        """Download the packages and their dependencies, each checked against the signed list."""
        plan = self._run("install", "--simulate", "--no-install-recommends", *packages)
        names = [line.split()[1] for line in plan.splitlines() if line.startswith("Inst ")]
        self._run("download", *(name for name in names if not UNUSED.match(name)))
        return list((self.folder / "archives").glob("*.deb"))

    def alone(self, package: str) -> list[Path]:
        """Download one package without its dependencies."""
        self._run("download", package)
        return list((self.folder / "archives").glob("*.deb"))

    def _run(self, *words: str) -> str:
        settings = {
            "Dir::State": self.folder, "Dir::State::lists": self.folder / "lists",
            "Dir::State::status": self.folder / "status", "Dir::Cache": self.folder,
            "Dir::Etc::sourcelist": self.folder / "sources.list", "Dir::Etc::sourceparts": self.folder / "sources.d",
            "Dir::Etc::preferencesparts": self.folder / "sources.d", "Dir::Etc::preferences": "/dev/null",
            "Acquire::Languages": "none", "APT::Sandbox::User": "root",
        }  # fmt: skip
        command = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in settings.items()), *words]
        return _run(command, cwd=self.folder / "archives")


def _mirror() -> str:
    """Return the mirror of this machine's own suite, in whichever form its sources are written."""
    codename = _os_release().get("VERSION_CODENAME", "")
    if _os_release().get("ID") != "debian" or not shutil.which("apt-get"):
        raise NoSlurm("Slurm's packages are unpacked from Debian's mirror: run these tests on a Debian machine")
    lines = _run(["apt-get", "indextargets", "--format", "$(RELEASE) $(COMPONENT) $(REPO_URI)", "Created-By: Packages"])
    for line in lines.splitlines():
        suite, component, uri = line.split()
        if (suite, component) == (codename, "main"):
            return uri
    raise NoSlurm(f"apt's sources name no mirror of {codename} main")


def _extract(packages: Sequence[Path], root: Path) -> None:
    excluded = [f"--exclude=./usr/share/{name}" for name in NOT_UNPACKED]

    def extract(package: Path) -> None:
        with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", package], stdout=subprocess.PIPE) as reader:
            # Packages that ship /lib/… follow the links into /usr.
            into = ["tar", "-x", "--keep-directory-symlink", "-C", str(root), *excluded]
            done = subprocess.run(into, stdin=reader.stdout, capture_output=True, text=True, check=False)
        if done.returncode or reader.returncode:
            raise NoSlurm(f"{package.name} cannot be unpacked: {done.stderr.strip()}")

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(extract, packages))


def _link(usr: Path) -> None:
    """Create the links that the packages' own scripts would create."""
    for folder in (usr / "bin", usr / "sbin"):
        for program in folder.glob("slurm*-wlm"):
            (folder / program.name.removesuffix("-wlm")).symlink_to(program.name)
    for link, target in (("sh", "dash"), ("awk", "gawk")):
        with suppress(FileNotFoundError):
            (usr / "bin" / link).unlink()
        (usr / "bin" / link).symlink_to(target)


def _make_ld_cache(root: Path, cache: Path) -> None:
    """Write the loader's cache of libraries, by the machine's configuration, which may name a Python in /usr/local."""
    (root / "etc").mkdir(exist_ok=True)
    shutil.copy("/etc/ld.so.conf", root / "etc" / "ld.so.conf")
    shutil.copytree("/etc/ld.so.conf.d", root / "etc" / "ld.so.conf.d", dirs_exist_ok=True)
    _run(["chroot", str(root), "/sbin/ldconfig"])
    (root / "etc" / "ld.so.cache").rename(cache)


def _run(command: Sequence[str], cwd: Path | None = None) -> str:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoSlurm(f"{command[0]} {' '.join(command[-3:])} failed: {done.stderr.strip()[-1000:]}")
    return done.stdout


def _os_release() -> dict[str, str]:
    return platform.freedesktop_os_release()


def _debian() -> int:
    return int(_os_release().get("VERSION_ID", "0").split(".")[0] or 0)


def _recipe() -> str:
    """Return a digest that changes with everything on which the unpacked folder depends."""
    parts = (LAYOUT, SLURM, BASE, LIBRARIES, UNUSED.pattern, NOT_UNPACKED, _debian())
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def main(names: Sequence[str] = ()) -> int:
    if "--turn" in names:
        print(release_to_test())
        return 0
    chosen = names or [release.name for release in RELEASES]
    if os.geteuid() != 0:
        raise NoSlurm("a private Slurm needs root: sudo make test-slurm")
    for release in RELEASES:
        if release.name in chosen and not release.is_ready:
            began = time.monotonic()
            print(f"Unpacking Slurm {release} of Debian {release.suite} …", flush=True)
            prepare(release)
            print(f"  {time.monotonic() - began:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except NoSlurm as error:
        sys.exit(str(error))
