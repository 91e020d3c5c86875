"""List this Python's version and installed packages as JSON: run as a file, `-I -S`, by the interpreter in question.

Nothing that is installed is imported or run: names and versions are read from folder names, so a broken package, a
.pth file or a sitecustomize.py has no effect. Arguments are further folders to search (a PYTHONPATH). Standard library
only, and nothing newer than Python 3.7.
"""

from __future__ import annotations

import glob
import json
import os
import re
import site
import sys

MAX_FOLDERS = 64
MAX_ENTRIES = 50000
_INFO = re.compile(r"(?P<name>.+)-(?P<version>[^-]+)\.dist-info$|(?P<egg>.+?)-(?P<of_egg>[^-]+)(-py\d.*)?\.egg-info$")
_BUILT_FOR = re.compile(r"^(cuda|hip|xpu)\b[^=\n]*= *['\"]([^'\"\n]{1,40})['\"]", re.MULTILINE)
_WORDS = {"cuda": "CUDA", "hip": "ROCm", "xpu": "XPU"}


def folders(extra: list[str]) -> list[str]:
    """Return where this interpreter finds packages, in order. With `-S` it does not handle its virtual environment."""
    venv = _virtual_environment()
    paths = list(extra)
    if venv:
        pattern = f"python{sys.version_info[0]}.{sys.version_info[1]}*"
        paths += sorted(glob.glob(os.path.join(glob.escape(venv), "lib*", pattern, "site-packages")))
    if not venv or _has_system_packages(venv):
        if not os.environ.get("PYTHONNOUSERSITE"):
            paths.append(site.getusersitepackages())
        paths += site.getsitepackages([sys.base_prefix, sys.base_exec_prefix])
    return list(dict.fromkeys(os.path.realpath(folder) for folder in paths if os.path.isdir(folder)))[:MAX_FOLDERS]


def packages(paths: list[str]) -> dict[str, str]:
    """Map names to versions; the first on the path counts, as for imports."""
    versions: dict[str, str] = {}
    for path in paths:
        try:
            names = sorted(os.listdir(path))[:MAX_ENTRIES]
        except OSError:
            continue
        for name in names:
            match = _INFO.match(name)
            if match:
                project = re.sub(r"[-_.]+", "-", match.group("name") or match.group("egg")).lower()
                versions.setdefault(project, match.group("version") or match.group("of_egg"))
    return versions


def torch_for(paths: list[str]) -> str:
    """Return what the torch that would be imported was built for: "CPU", "CUDA 12.8"; "" without torch."""
    for path in paths:
        try:
            with open(os.path.join(path, "torch", "version.py")) as file:
                match = _BUILT_FOR.search(file.read(65536))
        except (OSError, ValueError):
            continue
        return f"{_WORDS[match.group(1)]} {match.group(2)}" if match else "CPU"
    return ""


def _virtual_environment() -> str:
    here = os.path.dirname(os.path.abspath(sys.executable))  # not resolved: the link's location counts
    for folder in (os.path.dirname(here), here):
        if os.path.isfile(os.path.join(folder, "pyvenv.cfg")):
            return folder
    return ""


def _has_system_packages(venv: str) -> bool:
    with open(os.path.join(venv, "pyvenv.cfg"), encoding="utf-8") as file:
        return bool(re.search(r"(?im)^include-system-site-packages\s*=\s*true", file.read(65536)))


if __name__ == "__main__":
    places = folders(sys.argv[1:])
    installation = {
        "python": ".".join(str(part) for part in sys.version_info[:3]),
        "implementation": sys.implementation.name,
        "executable": sys.executable,
        "packages": packages(places),
        "torch_for": torch_for(places),
    }
    sys.stdout.write(json.dumps(installation))
