"""Print the announcements that come with a response, as `vigil: announcement (warning): …`. No Django."""

from __future__ import annotations

from urllib.parse import unquote

from vigil_cli.terminal import echo

LEVELS = frozenset({"info", "warning", "critical"})
MOST, MOST_CHARACTERS = 5, 400


def show(header: str) -> None:
    """Print them on stderr, so that stdout stays parseable. The header is `level;text`, quoted, by commas."""
    for part in header.split(",")[:MOST]:
        level, _, quoted = part.partition(";")
        text = "".join(letter for letter in unquote(quoted)[:MOST_CHARACTERS] if letter.isprintable())
        if text and level in LEVELS:
            echo(f"vigil: announcement{'' if level == 'info' else f' ({level})'}: {text}", err=True)
