"""Build the images and test them: `make test-image`, or with pytest's options `python -m tests.image -k proxy`.

Everything runs in separate namespaces: no process and no mount outlives the run, however it ends.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.image.build import build
from tests.image.storage import FOLDER, RUN, Failed, buildah, run

NEEDED = {"buildah": "buildah", "debootstrap": "debootstrap", "ip": "iproute2", "unshare": "util-linux"}
APART = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation=private")


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--apart"]:
        sys.exit(build_and_test(arguments[1:]))
    refuse_what_is_missing()
    os.execvp(APART[0], [*APART, sys.executable, "-m", "tests.image", "--apart", *arguments])


def refuse_what_is_missing() -> None:
    packages = sorted(package for program, package in NEEDED.items() if not shutil.which(program))
    if packages:
        sys.exit(f"The images are built with programs that are not here: apt-get install {' '.join(packages)}")
    if os.geteuid():
        sys.exit(
            "The images are built as root: layers are mounted, and every step runs in a chroot. sudo make test-image"
        )


def build_and_test(options: list[str]) -> int:
    RUN.mkdir(parents=True, exist_ok=True)
    with Path(FOLDER, "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two at once take turns
        # buildah's notes on what it has mounted must not outlive the mounts.
        run("mount", "-t", "tmpfs", "-o", "mode=700", "tmpfs", str(RUN))
        try:
            buildah("rm", "--all")  # containers of a run that was killed
            build()
        except Failed as error:
            print(error, file=sys.stderr)
            return 1
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "--timeout=900",
            "--durations=5",
            str(Path(__file__).parent),
            *options,
        ]
        return subprocess.run(command, env={**os.environ, "TEST_IMAGE": "1"}, check=False).returncode


if __name__ == "__main__":
    main(sys.argv[1:])
