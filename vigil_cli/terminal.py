r"""Print untrusted text safely on a terminal. No Django here.

Escape sequences in a note or a log could change the window title, a link, the clipboard, the cursor or the direction
of text. Such characters are written out instead, as `\x1b`.
"""

from __future__ import annotations

import re
import sys

import click

from vigil_core import formatting

_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
"""Control characters except newline and tab, invisible and direction-changing characters, and lone surrogates."""
_COLOUR = re.compile("\x1b\\[[0-9;]{0,40}m")
_END_OF_COLOUR = "\x1b[0m"


def plain(text: str) -> str:
    """Return the text with its lines and tabs, and every other control character written out."""
    return _UNSAFE.sub(lambda found: ascii(found[0])[1:-1], text.replace("\r\n", "\n"))


def echo(text: str, *, err: bool = False) -> None:
    """Print a message, with ordinary spaces between numbers and their units."""
    click.echo(plain(formatting.plain_spaces(text)), err=err)


def echo_whole(text: str, *, end: str = "\n") -> None:
    """Print unchanged into a file or pipe; on a terminal escape it as `echo` does."""
    click.echo((plain(text) if sys.stdout.isatty() else text) + end, nl=False)


def echo_log(line: str) -> None:
    """Print a line of a log: on a terminal with its colours, which are reset at its end, and without overwriting."""
    if not sys.stdout.isatty():
        click.echo(line)
        return
    line = line.replace("\r", "\n")
    shown = "".join(
        plain(part) if n % 2 == 0 else part for n, part in enumerate(re.split(f"({_COLOUR.pattern})", line))
    )
    click.echo(shown + (_END_OF_COLOUR if _COLOUR.search(line) else ""))
