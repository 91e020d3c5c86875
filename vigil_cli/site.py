"""Refuse commands that need the site where only the command line is installed (the vigil-client distribution)."""

from __future__ import annotations

from importlib.util import find_spec

from vigil_cli.portal import CliError


def needs_site(command: str) -> None:
    """Raise CliError unless the whole of Vigil is installed here."""
    if find_spec("console") is None:
        raise CliError(
            f"`vigil {command}` needs the whole of Vigil, and this is vigil-client. Run it on the portal's machine, or"
            " install the vigil wheel (docs/how-to/install.md)."
        )
