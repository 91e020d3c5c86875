"""The trial job of `vigil check slurm`: inspects its node as any job could, and writes down the result.

It is run as a file, by whatever Python jobs have. Standard library only, besides torch, which is one of the things that
it tries.
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
MIN_VERSION = (3, 11)
ProbeResult = dict[str, Any]


def main() -> int:
    root = sys.argv[1]
    sys.path.pop(0)  # training/, whose files have names of their own
    result: ProbeResult = {
        "user": _try(getpass.getuser),
        "node": os.environ.get("SLURMD_NODENAME") or platform.node(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "seen": _try(lambda: sorted(os.listdir(root))),
        "clock": time.time(),
    }
    request = _try(lambda: _read_json(os.path.join(root, "portal", "check.json")))
    result["asked"] = isinstance(request, dict)
    request = request if isinstance(request, dict) else {}
    if request.get("foreign"):
        result["refused"] = {name: _reach(path) for name, path in request["foreign"].items()}
    else:
        result["token"] = _try(lambda: sorted(_read_json(os.path.join(root, "portal", "token"))))
        result["torch"] = _torch()
        result["lacks"] = [name for name in NEEDED if importlib.util.find_spec(name) is None]
        result["old"] = sys.version_info[:2] < MIN_VERSION
        result["gpus"] = os.environ.get("CUDA_VISIBLE_DEVICES") or os.environ.get("SLURM_JOB_GPUS") or ""
        result["report"] = _post(root) if request.get("report") else {}
        result["scontrol"] = _scontrol()
    # Renamed, so that it is complete when it is read.
    path = os.path.join(root, "job", "check.json")
    with open(path + ".new", "w") as file:
        json.dump(result, file)
    os.replace(path + ".new", path)
    return 0


def _torch() -> ProbeResult:
    began = time.monotonic()
    try:
        import torch  # type: ignore[import-not-found,unused-ignore]
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda or "",
        "seen": count,
        "names": [torch.cuda.get_device_name(i) for i in range(count)],
        "computes": float(torch.ones(2, device="cuda" if count else "cpu").sum()) == 2.0,
        "seconds": round(time.monotonic() - began, 1),
    }


def _post(root: str) -> ProbeResult:
    """Send a request to the address for reports with an invalid token: Vigil answers 401 in its own format."""
    token = _read_json(os.path.join(root, "portal", "token"))
    url = token["url"] + "/api/v1/attempts/0/reports"
    headers = {"Authorization": "Bearer " + token["token"], "Content-Type": "application/json"}
    request = urllib.request.Request(url, data=b"{}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return {"status": response.status, "kind": response.headers.get("Content-Type", "")}
    except urllib.error.HTTPError as error:
        return {"status": error.code, "kind": error.headers.get("Content-Type", "")}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _scontrol() -> ProbeResult:
    command = shutil.which("scontrol")
    if command is None:
        return {}
    try:
        done = subprocess.run([command, "show", "config"], capture_output=True, timeout=20)
    except Exception as error:
        return {"path": command, "error": str(error)}
    return {"path": command, "code": done.returncode, "config": done.stdout.decode(errors="replace")[:CONF_BYTES]}


def _reach(path: str) -> str:
    """Return how another user's file or folder can be accessed; "" if not at all."""
    attempts: tuple[tuple[str, Callable[[str], object]], ...] = (
        ("list", os.listdir),
        ("read", _read_character),
        ("enter", os.chdir),
    )
    for name, act in attempts:
        try:
            act(path)
        except OSError:
            continue
        return name
    return ""


def _read_character(path: str) -> str:
    with open(path) as file:
        return file.read(1)


def _read_json(path: str) -> ProbeResult:
    with open(path) as file:
        found: ProbeResult = json.load(file)
    return found


def _try(act: Callable[[], Any]) -> Any:
    try:
        return act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    sys.exit(main())
