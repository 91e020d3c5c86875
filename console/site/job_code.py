"""Manage the folder that jobs import our trainer from if Vigil is installed as a wheel.

A job runs with a Python of its own. With site-packages on its path it would import the site's numpy and torch instead
of its own, so it gets a folder that has links to our packages and nothing else.
"""

from __future__ import annotations

import os

from django.conf import settings

from vigil_core import installation

PACKAGES = ("training", "gpus", "vigil_report.py")


def link() -> None:
    """Point the folder's links to this installation. Does nothing in a checkout, which jobs import from directly."""
    if installation.IS_CHECKOUT:
        return
    settings.JOB_CODE.mkdir(mode=0o755, exist_ok=True)
    for name in PACKAGES:
        source, place = installation.ROOT / name, settings.JOB_CODE / name
        if place.is_symlink() and os.readlink(place) == str(source):
            continue
        temporary = place.with_name(f".{name}.{os.getpid()}")
        temporary.symlink_to(source)
        temporary.replace(place)  # a job that starts meanwhile finds the old one or the new one
