"""Implement `vigil backup` and `vigil restore`: load the settings, run the action, return plain data."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from portal.backup.make import backup as make
from portal.backup.make import give_home_to_owner
from portal.backup.restore import restore as put_in_place
from portal.run import preflight
from vigil_cli.portal import CliError
from vigil_core.environment import whole


def backup(path: Path, *, force: bool) -> dict[str, Any]:
    with _settings() as settings:
        made = make(settings, path, force=force)
    return {"file": str(made.path), "bytes": made.bytes, "seconds": made.seconds, **msgspec.to_builtins(made.manifest)}


def restore(path: Path, *, force: bool) -> dict[str, Any]:
    with _settings() as settings:
        restored = put_in_place(settings, path, force=force)
    previous = {"previous_data": restored.set_aside, "kept": restored.set_aside}  # `kept` is deprecated
    return {**msgspec.to_builtins(restored.manifest), **previous, "notes": restored.notes}


@contextmanager
def _settings() -> Iterator[ModuleType]:
    """Yield the portal's settings; on exit hand new files to the owner of VIGIL_HOME. Refusals become CliError."""
    os.umask(0o027)  # as `vigil up` does
    try:
        settings = preflight.load_settings(whole("VIGIL_PORT", 8000, 1, 65_535))
        try:
            yield settings
        finally:
            give_home_to_owner(settings)
    except preflight.StartRefused as error:
        raise CliError(str(error)) from None
