"""What a trial job does on its node: looks around as any job would, and writes down what it saw.

`vigil check slurm` has it run as a file, by whatever Python jobs have. Standard library only, besides torch, which it
is here to try.
"""

from __future__ import annotations

import getpass
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

CONF_BYTES = 65_536
NEEDED = ("numpy", "psutil", "pydantic")  # besides torch
LEAST = (3, 11)
Told = dict[str, Any]


def main() -> int:
    root = sys.argv[1]
    sys.path.pop(0)  # training/, whose files have names of their own
    told: Told = {
        "user": _tried(getpass.getuser),
        "node": os.environ.get("SLURMD_NODENAME") or platform.node(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "seen": _tried(lambda: sorted(os.listdir(root))),
        "clock": time.time(),
    }
    asked = _tried(lambda: _read_json(os.path.join(root, "portal", "check.json")))
    told["asked"] = isinstance(asked, dict)
    asked = asked if isinstance(asked, dict) else {}
    if asked.get("foreign"):
        told["refused"] = {name: _reach(path) for name, path in asked["foreign"].items()}
    else:
        told["token"] = _tried(lambda: sorted(_read_json(os.path.join(root, "portal", "token"))))
        told["torch"] = _torch()
        told["lacks"] = [name for name in NEEDED if importlib.util.find_spec(name) is None]
        told["old"] = sys.version_info[:2] < LEAST
        told["gpus"] = os.environ.get("CUDA_VISIBLE_DEVICES") or os.environ.get("SLURM_JOB_GPUS") or ""
        told["report"] = _post(root) if asked.get("report") else {}
        told["scontrol"] = _conf()
    # Renamed, so that whoever reads it finds it whole.
    path = os.path.join(root, "job", "check.json")
    with open(path + ".new", "w") as file:
        json.dump(told, file)
    os.replace(path + ".new", path)
    return 0


def _torch() -> Told:
    began = time.monotonic()
    try:
        import torch  # type: ignore[import-not-found,unused-ignore]
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda or "",
        "seen": seen,
        "names": [torch.cuda.get_device_name(i) for i in range(seen)],
        "computes": float(torch.ones(2, device="cuda" if seen else "cpu").sum()) == 2.0,
        "seconds": round(time.monotonic() - began, 1),
    }


def _post(root: str) -> Told:
    """Knocks at the very door of reports, with a token that is nobody's: Vigil says 401 in its own way."""
    token = _read_json(os.path.join(root, "portal", "token"))
    url = token["url"] + "/api/v1/attempts/0/reports"
    headers = {"Authorization": "Bearer " + token["token"], "Content-Type": "application/json"}
    request = urllib.request.Request(url, data=b"{}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return {"status": answer.status, "kind": answer.headers.get("Content-Type", "")}
    except urllib.error.HTTPError as error:
        return {"status": error.code, "kind": error.headers.get("Content-Type", "")}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _conf() -> Told:
    command = shutil.which("scontrol")
    if command is None:
        return {}
    try:
        done = subprocess.run([command, "show", "config"], capture_output=True, timeout=20)
    except Exception as error:
        return {"path": command, "error": str(error)}
    return {"path": command, "code": done.returncode, "config": done.stdout.decode(errors="replace")[:CONF_BYTES]}


def _reach(path: str) -> str:
    """How somebody else's file or folder can be got at; "" not at all."""
    ways: tuple[tuple[str, Callable[[str], object]], ...] = (
        ("list", os.listdir),
        ("read", _first),
        ("enter", os.chdir),
    )
    for way, act in ways:
        try:
            act(path)
        except OSError:
            continue
        return way
    return ""


def _first(path: str) -> str:
    with open(path) as file:
        return file.read(1)


def _read_json(path: str) -> Told:
    with open(path) as file:
        found: Told = json.load(file)
    return found


def _tried(act: Callable[[], Any]) -> Any:
    try:
        return act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    sys.exit(main())
