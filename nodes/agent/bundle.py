"""Build the agent as one file for a node's own disk, so that a hanging shared file system cannot block it."""

from __future__ import annotations

import importlib.util
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("nodes/agent", "gpus")
PYTHON = (3, 11)
_DATE = (1980, 1, 1, 0, 0, 0)
_MAIN = f"""\
import os
import sys

if sys.version_info < {PYTHON}:
    sys.exit("The agent needs Python {PYTHON[0]}.{PYTHON[1]} or newer, and this is " + sys.version.split()[0] + ".")

from nodes.agent.__main__ import main

code = main(sys.argv[1:])
sys.stdout.flush()
os._exit(code)
"""


class BundleError(Exception):
    """The bundle cannot be built; the message says why."""


def write_bundle(file: Path) -> int:
    """Write the bundle atomically and return its size. The same code gives the same file."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as out:
            out.write(b"#!/usr/bin/env python3\n")
            with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
                for name, text in _contents():
                    archive.writestr(zipfile.ZipInfo(name, _DATE), text, zipfile.ZIP_DEFLATED)
        os.chmod(temporary, 0o755)
        os.replace(temporary, file)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise BundleError(f"{file} cannot be written: {error.strerror}.") from error
    return file.stat().st_size


def _contents() -> Iterator[tuple[str, bytes]]:
    yield "__main__.py", _MAIN.encode()
    yield "nodes/__init__.py", b""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), path.read_bytes()
    yield "pynvml.py", _pynvml().read_bytes()


def _pynvml() -> Path:
    """Return NVIDIA's bindings, a single module; they load the driver's library on the node."""
    found = importlib.util.find_spec("pynvml")
    if found is None or not found.origin:
        raise BundleError("nvidia-ml-py is not installed. Install it with `pip install nvidia-ml-py`.")
    return Path(found.origin)
