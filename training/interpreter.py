"""Decide how a user's program is started: by Python, by the interpreter in its "#!" line, or directly.

The portal applies these rules when an upload is submitted, and the launcher when it starts the ranks, as a repository
is only fetched there.
"""

from __future__ import annotations

from pathlib import PurePosixPath

HEAD_BYTES = 256  # of a file's beginning, in which Linux looks for the interpreter (BINPRM_BUF_SIZE)
PYTHON = ("",)
"""The job's own Python, as [script] python chooses it."""
ITSELF: tuple[str, ...] = ()

_SOURCES = frozenset({".py", ".pyw", ".pyc", ".pyz"})
_ELF = b"\x7fELF"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class NotAProgram(Exception):
    """A file that nothing says how to run. The message names the file and the fix."""


def interpreter_of(name: str, head: bytes, *, is_executable: bool) -> tuple[str, ...]:
    """Return what to put before the file on the command line: PYTHON, ITSELF, or an interpreter and its argument.

    `head`: the first HEAD_BYTES of the file. Raise NotAProgram where neither a shebang, the name nor the executable bit
    says what runs it. An executable text without a shebang is a script of /bin/sh, as in a shell.
    """
    is_source = PurePosixPath(name).suffix.lower() in _SOURCES
    if head.startswith(b"#!"):
        words = _words_of(name, head, is_source=is_source)
        return PYTHON if is_source or _is_python(words) else words
    if is_source:
        return PYTHON
    if head.startswith(_BYTE_ORDER_MARK + b"#!"):
        raise NotAProgram(
            f'"{name}" begins with a byte order mark, which hides its "#!" line. Save it as UTF-8 without one.'
        )
    if head.startswith(_ELF):
        if not is_executable:
            raise NotAProgram(f'"{name}" is a binary that is not executable. Run chmod +x {name} before you send it.')
        return ITSELF
    if is_executable:
        return ("/bin/sh",)
    raise NotAProgram(
        f'"{name}" is not a Python file, and nothing says what runs it. Begin it with a line such as #!/bin/bash,'
        " make it executable (chmod +x), or name a file that ends in .py."
    )


def _words_of(name: str, head: bytes, *, is_source: bool) -> tuple[str, ...]:
    """Return the interpreter of a "#!" line and its one argument, split as Linux does."""
    line, _, _ = head[2:].partition(b"\n")
    text = line.decode(errors="replace")
    if text.endswith("\r") and not is_source:
        raise NotAProgram(
            f'"{name}" has Windows line endings, so no interpreter is called {text.strip()}\\r. Convert it: dos2unix'
            f" {name}, or sed -i 's/\\r$//' {name}."
        )
    words = tuple(text.strip().split(maxsplit=1))
    if not is_source and (not words or not words[0].startswith("/")):
        raise NotAProgram(
            f'"{name}" begins with #!{text.strip()}, which is not an absolute path. Write #!/bin/bash or'
            " #!/usr/bin/env NAME."
        )
    return words


def _is_python(words: tuple[str, ...]) -> bool:
    """Return whether a "#!" line asks for Python, be it by way of env."""
    program, arguments = words[0], words[1].split() if len(words) > 1 else []
    if PurePosixPath(program).name == "env":
        program = next((word for word in arguments if not word.startswith("-") and "=" not in word), "")
    name = PurePosixPath(program).name
    return name.rstrip("0123456789.") in {"python", "pypy"}
