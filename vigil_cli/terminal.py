"""What others wrote, on somebody's terminal: words, and nothing that a terminal does. No Django here.

A title, a link, the clipboard, the cursor, which way a line is read: letters of a note or a log could have a terminal
change all of these. Such letters are written out instead, as `\\x1b`.
"""

from __future__ import annotations

import re
import sys

import click

_DOING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
"""Controls but for a line's end and a tab, what turns a line's direction or hides in it, and halves of pairs."""
_COLOUR = re.compile("\x1b\\[[0-9;]{0,40}m")
_END_OF_COLOUR = "\x1b[0m"


def plain(text: str) -> str:
    """The text, its lines and tabs, with whatever else a terminal would obey written out."""
    return _DOING.sub(lambda found: ascii(found[0])[1:-1], text.replace("\r\n", "\n"))


def echo(text: str, *, err: bool = False) -> None:
    """Print a message."""
    click.echo(plain(text), err=err)


def echo_whole(text: str, *, end: str = "\n") -> None:
    """Print what is to arrive as it is where it goes into a file or to a program; on a terminal as `echo`."""
    click.echo((plain(text) if sys.stdout.isatty() else text) + end, nl=False)


def echo_log(line: str) -> None:
    """Print a line of a log: on a terminal with its colours, which end with it, and nothing written over."""
    if not sys.stdout.isatty():
        click.echo(line)
        return
    line = line.replace("\r", "\n")
    shown = "".join(
        plain(part) if n % 2 == 0 else part for n, part in enumerate(re.split(f"({_COLOUR.pattern})", line))
    )
    click.echo(shown + (_END_OF_COLOUR if _COLOUR.search(line) else ""))
