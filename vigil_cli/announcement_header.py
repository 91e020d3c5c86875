"""Print the announcements that come with a response, as `vigil: announcement (warning): …`. No Django."""

from __future__ import annotations

from urllib.parse import unquote

from vigil_cli.terminal import echo

LEVELS = frozenset({"info", "warning", "critical"})
MAX_ANNOUNCEMENTS, MAX_CHARACTERS = 5, 400


def show(header: str) -> None:
    """Print them on stderr, so that stdout stays parseable. The header is `level;text`, quoted, by commas."""
    for part in header.split(",")[:MAX_ANNOUNCEMENTS]:
        level, _, quoted = part.partition(";")
        text = "".join(letter for letter in unquote(quoted)[:MAX_CHARACTERS] if letter.isprintable())
        if text and level in LEVELS:
            echo(f"vigil: announcement{'' if level == 'info' else f' ({level})'}: {text}", err=True)
