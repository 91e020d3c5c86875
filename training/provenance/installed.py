"""Which Python this is and what is installed in it, as JSON: run as a file, `-I -S`, by the interpreter in question.

Nothing of what is installed is imported or run: names and versions are read off the names of folders, so a broken
package, a .pth file or a sitecustomize.py of somebody's does nothing here. Arguments are further folders to look in
(a PYTHONPATH). Standard library only, and nothing newer than Python 3.7.
"""

from __future__ import annotations

import glob
import json
import os
import re
import site
import sys

MOST_FOLDERS = 64
MOST_ENTRIES = 50000
_INFO = re.compile(r"(?P<name>.+)-(?P<version>[^-]+)\.dist-info$|(?P<egg>.+?)-(?P<of_egg>[^-]+)(-py\d.*)?\.egg-info$")
_BUILT_FOR = re.compile(r"^(cuda|hip|xpu)\b[^=\n]*= *['\"]([^'\"\n]{1,40})['\"]", re.MULTILINE)
_WORDS = {"cuda": "CUDA", "hip": "ROCm", "xpu": "XPU"}


def folders(extra: list[str]) -> list[str]:
    """Where this interpreter finds packages, in its own order. `-S` leaves its virtual environment to us."""
    venv = _virtual_environment()
    found = list(extra)
    if venv:
        pattern = f"python{sys.version_info[0]}.{sys.version_info[1]}*"
        found += sorted(glob.glob(os.path.join(glob.escape(venv), "lib*", pattern, "site-packages")))
    if not venv or _sees_the_system(venv):
        if not os.environ.get("PYTHONNOUSERSITE"):
            found.append(site.getusersitepackages())
        found += site.getsitepackages([sys.base_prefix, sys.base_exec_prefix])
    return list(dict.fromkeys(os.path.realpath(folder) for folder in found if os.path.isdir(folder)))[:MOST_FOLDERS]


def packages(places: list[str]) -> dict[str, str]:
    """Name → version; what comes first on the path is what is imported."""
    found: dict[str, str] = {}
    for place in places:
        try:
            names = sorted(os.listdir(place))[:MOST_ENTRIES]
        except OSError:
            continue
        for name in names:
            match = _INFO.match(name)
            if match:
                project = re.sub(r"[-_.]+", "-", match.group("name") or match.group("egg")).lower()
                found.setdefault(project, match.group("version") or match.group("of_egg"))
    return found


def torch_for(places: list[str]) -> str:
    """What the torch that would be imported was built for: "CPU", "CUDA 12.8"; "" where there is none."""
    for place in places:
        try:
            with open(os.path.join(place, "torch", "version.py")) as file:
                match = _BUILT_FOR.search(file.read(65536))
        except (OSError, ValueError):
            continue
        return f"{_WORDS[match.group(1)]} {match.group(2)}" if match else "CPU"
    return ""


def _virtual_environment() -> str:
    here = os.path.dirname(os.path.abspath(sys.executable))  # not resolved: the link's place is what counts
    for folder in (os.path.dirname(here), here):
        if os.path.isfile(os.path.join(folder, "pyvenv.cfg")):
            return folder
    return ""


def _sees_the_system(venv: str) -> bool:
    with open(os.path.join(venv, "pyvenv.cfg"), encoding="utf-8") as file:
        return bool(re.search(r"(?im)^include-system-site-packages\s*=\s*true", file.read(65536)))


if __name__ == "__main__":
    places = folders(sys.argv[1:])
    told = {
        "python": ".".join(str(part) for part in sys.version_info[:3]),
        "implementation": sys.implementation.name,
        "executable": sys.executable,
        "packages": packages(places),
        "torch_for": torch_for(places),
    }
    sys.stdout.write(json.dumps(told))
