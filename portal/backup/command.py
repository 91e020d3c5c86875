"""What `vigil backup` and `vigil restore` do for the command line: settings in, plain answers out."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from portal import preflight
from portal.backup.make import backup as make
from portal.backup.restore import restore as take
from portal.client import Trouble


def backup(path: Path, *, force: bool) -> dict[str, Any]:
    try:
        made = make(_settings(), path, force=force)
    except preflight.Refused as error:
        raise Trouble(str(error)) from None
    return {"file": str(made.path), "bytes": made.bytes, "seconds": made.seconds, **msgspec.to_builtins(made.manifest)}


def restore(path: Path, *, force: bool) -> dict[str, Any]:
    try:
        restored = take(_settings(), path, force=force)
    except preflight.Refused as error:
        raise Trouble(str(error)) from None
    return {**msgspec.to_builtins(restored.manifest), "kept": restored.kept, "notes": restored.notes}


def _settings() -> ModuleType:
    os.umask(0o027)  # as `vigil up` does
    try:
        return preflight.load_settings(int(os.environ.get("VIGIL_PORT") or "8000"))
    except preflight.Refused as error:
        raise Trouble(str(error)) from None
