"""Explain what is wrong with invalid TOML: the line, its text, and a plain guess at the cause."""

from __future__ import annotations

import re
import tomllib

_PLACE = re.compile(r"\(at line (\d+), column (\d+)\)\Z")
_KEY = re.compile(r"[A-Za-z0-9_.-]{1,80}\Z")
_TABLE = re.compile(r"\s*\[")
_WORDS = {"true": "true", "false": "false", "yes": "true", "no": "false", "on": "true", "off": "false"}
_NOTHING = {"none", "null", "nil"}
_MAX_QUOTED = 80  # characters of a line


def explain(text: str, error: Exception) -> str:
    """Return a text such as `Line 3: a text needs quotes. Write name = "mira". It reads: name = mira`."""
    if isinstance(error, RecursionError):
        return "The specification nests too deeply. A spec has tables one or two deep."
    if not isinstance(error, tomllib.TOMLDecodeError):
        return "A whole number has thousands of digits. Shorten it, or write it as a text in quotes."
    number = _place(text, str(error))
    lines = _lines(text)
    line = lines[number - 1][:1_000] if number <= len(lines) else ""
    hidden = sorted({f"U+{ord(c):04X}" for c in line if not c.isprintable() and c != "\t"})
    if hidden:
        guess = f"it contains invisible characters ({', '.join(hidden[:3])}). Remove them."
    elif line.lstrip().startswith("{"):
        guess = 'this looks like JSON. A specification is TOML, one value per line, such as name = "probe".'
    else:
        guess = _guess(lines, number, line, str(error))
    shown = _short("".join(c for c in line.strip() if c.isprintable()))
    return f"Line {number}: {guess} It reads: {shown}" if shown else f"Line {number}: {guess}"


def _lines(text: str) -> list[str]:
    """Return the lines of a text as tomllib counts them: other line ends than these do not end a line for it."""
    return text.replace("\r\n", "\n").split("\n")


def _short(text: str) -> str:
    return text if len(text) <= _MAX_QUOTED else f"{text[:_MAX_QUOTED]}…"


def _place(text: str, message: str) -> int:
    """Return the number of the line to blame, from 1."""
    if match := _PLACE.search(message):
        number = int(match[1])
        # A list that was left open is noticed only at what follows it.
        return _opened(_lines(text), number) if message.startswith("Unclosed array") else number
    return _unclosed(text)


def _guess(lines: list[str], number: int, line: str, message: str) -> str:
    """Return what is wrong with this line, and the fix."""
    key, equals, value = (part.strip() for part in line.partition("="))
    if "“" in line or "”" in line or "‘" in line:
        return 'the quotes are typographic. Write plain ones: "…".'
    if message.startswith(("Cannot overwrite", "Duplicate inline", "Cannot declare", "Cannot mutate")):
        return _duplicate(lines, number, line, message)
    if message.startswith("Expected '=' after a key"):
        return _no_equals(line)
    if message.startswith("Unclosed array"):
        return 'the list is not closed, or a comma is missing in it. Write it like ["a", "b"].'
    if message.startswith("Unclosed inline table"):
        return "the table in braces must be on one line and end with }. Or write a table of its own, like [run]."
    if _TABLE.match(line):
        return "a table's name is written in brackets, like [run], alone on its line."
    if message.startswith(("Illegal character '\\n'", "Unterminated string", 'Expected "\'"', 'Expected "\'"')):
        return "its text is not closed. Write the closing quote."
    if "\\" in line and message.startswith(("Unescaped", "Invalid hex")):
        return "in double quotes \\ begins an escape. Write \\\\, or use single quotes: '…'."
    if not equals or not _KEY.match(key):
        return "this is neither a table, like [run], nor a value, like steps = 200. A comment begins with #."
    return _value(key, value, message)


def _value(key: str, value: str, message: str) -> str:
    """Return what is wrong with the text after the equals sign."""
    bare = value.split("#")[0].strip()[:_MAX_QUOTED]
    if not bare:
        return f"the value is missing. Write it after the =, or remove {key}."
    if bare.endswith((";", ",")) and _is_value(bare[:-1]):
        return f"a line has no comma or semicolon at its end. Write {key} = {bare[:-1]}."
    if bare.lower() in _NOTHING:
        return f"TOML has no null value. Remove {key}."
    if bare.lower() in _WORDS:
        return f"write {key} = {_WORDS[bare.lower()]}."
    if re.fullmatch(r"[+-]?\d{1,3}(,\d{3})+", bare):
        return f"numbers are written without commas. Write {key} = {bare.replace(',', '')}."
    if re.fullmatch(r"[+-]?\.\d+|[+-]?\d+\.", bare):
        return f"a number has digits on both sides of its point. Write {key} = {float(bare):g}."
    if re.fullmatch(r"0\d+", bare):
        return f"a number may not begin with 0. Write {key} = {bare.lstrip('0') or '0'}."
    if bare[0] in "[{":
        return 'a text in it needs quotes, or a bracket is missing. Write a list like ["a", "b"].'
    if bare[0] in "\"'":
        return 'there is text after the closing quote. Remove it, or write \\" for a quote inside the text.'
    if message.startswith(("Invalid value", "Expected newline")):
        quoted = bare.replace("\\", "\\\\").replace('"', '\\"')
        what = "this is not a number, and text needs quotes" if bare[0].isdigit() else "a text needs quotes"
        return f'{what}. Write {key} = "{quoted}".'
    return f"this is not TOML ({_PLACE.sub('', message).strip()})."


def _no_equals(line: str) -> str:
    """Return what is wrong with a line without an equals sign after its first word."""
    key, colon, value = (part.strip() for part in line.partition(":"))
    if not (colon and value and _KEY.match(key)):
        key, _, value = (part.strip() for part in line.strip().partition(" "))
    if "=" in line and not _is_value(value):
        return "a key is one word, such as time_limit, or is in quotes."
    if not re.match(r"[A-Za-z]", key) or not _KEY.match(key):
        return "this is neither a table, like [run], nor a value, like steps = 200. A comment begins with #."
    if not value:
        return f"there is no = and no value. Write {key} = …"
    return (
        f"there is no =. Write {key} = {_short(value)}." if _is_value(value) else f'there is no =. Write {key} = "…".'
    )


def _duplicate(lines: list[str], number: int, line: str, message: str) -> str:
    """Return what is given twice, and where it was first, if it is written the same there."""
    if _TABLE.match(line):
        name = line.split("#")[0].strip()
        first = next((n for n, other in enumerate(lines[: number - 1], 1) if other.split("#")[0].strip() == name), None)
        before = f", first in line {first}" if first else ""
        return f"{_short(name)} is given twice{before}. Put all of it in one place."
    key = line.partition("=")[0].strip()
    if match := re.match(r"Duplicate inline table key '(.{1,80})'", message):
        return f"{match[1]} is given twice in the braces. Keep one of them."
    first = next((n for n in range(number - 1, 0, -1) if lines[n - 1].partition("=")[0].strip() == key), None)
    before = f", first in line {first}" if first else ""
    return f"{_short(key)} is given twice{before}. Keep one of them."


def _is_value(text: str) -> bool:
    try:
        tomllib.loads(f"x = {text}")
    except (ValueError, RecursionError):
        return False
    return True


def _opened(lines: list[str], number: int) -> int:
    """Return the line that opened the list which line `number` shows to be open."""
    for n in range(min(number, len(lines)), 0, -1):
        if re.match(r"[^=#]{1,200}=\s*\[", lines[n - 1]):
            return n
    return number


def _unclosed(text: str) -> int:
    """Return the line of a string that is never closed: the first from which on nothing can be parsed."""
    lines = _lines(text)
    low, high = 1, len(lines)  # the first line with which it breaks off
    while low < high:
        middle = (low + high) // 2
        if _breaks_off("\n".join(lines[:middle])):
            high = middle
        else:
            low = middle + 1
    return low


def _breaks_off(text: str) -> bool:
    try:
        tomllib.loads(text + "\n")
    except tomllib.TOMLDecodeError as error:
        return "at end of document" in str(error)
    except (ValueError, RecursionError):
        return False
    return False
