"""Parse Slurm's notations: numbers that may be unset, state words, host lists, GPUs, TRES. Pure.

Every parser accepts both families of forms: plain values up to REST v0.0.39, lists and {set, infinite, number} since
v0.0.40. A missing value, or one of an unexpected type, parses as "not reported": fields come and go between versions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress

from vigil_core import host_expression

UNSET = frozenset({0xFFFFFFFE, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFE, 0xFFFFFFFFFFFFFFFF})
MAX_HOSTS = 100_000
MAX_GPUS = 1_024  # in one range of indices
LATEST = 253_402_300_799  # the end of the year 9999: no calendar goes further
_NOTHING = frozenset({"(null)", "N/A", "None", "None assigned"})
_UNITS = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2, "P": 1024**3}  # memory in MiB
_GRES = re.compile(r"(?:gres[:/])?gpu(?::(?P<type>[^:=(]+?))?[:=](?P<count>\d+)(?:\((?P<more>[^)]*)\))?\Z")


def number(value: object) -> float | None:
    """Parse 7, "7" and {"set": true, "number": 7} as 7; unset, infinite and Slurm's markers for both as None."""
    if isinstance(value, dict):
        return number(value.get("number")) if value.get("set") and not value.get("infinite") else None
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value or abs(value) == float("inf"):
        return None
    return None if value in UNSET or not 0 <= value < 2**64 else value


def integer(value: object, default: int = 0) -> int:
    """Parse a whole number like number(); `default` if there is none."""
    found = number(value)
    return default if found is None else int(found)


def moment(value: object) -> float | None:
    """Parse Unix seconds; 0 is Slurm's "never" and becomes None."""
    found = number(value)
    return found if found and found <= LATEST else None


def text(value: object) -> str:
    """Parse a string; Slurm writes missing ones as null, (null) or N/A. Lone surrogates become "?"."""
    if not isinstance(value, str) or value in _NOTHING:
        return ""
    if not value.isascii():
        value = value.encode(errors="replace").decode()
    return value.replace("\0", "").strip()


def words(value: object) -> tuple[str, ...]:
    """Parse a list of words, one word, or comma-separated words."""
    if isinstance(value, str):
        return tuple(word.strip() for word in text(value).split(",") if word.strip())
    if isinstance(value, list | tuple):
        return tuple(word for item in value if (word := text(item)))
    return ()


def mapping(value: object) -> Mapping[str, object]:
    """Return the value if it is a JSON object, else an empty one."""
    return value if isinstance(value, dict) else {}


def objects(value: object) -> list[Mapping[str, object]]:
    """Return the JSON objects of a list."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list | tuple) else []


def at(value: object, *path: str) -> object:
    """Return the value at a path of keys, or None."""
    for key in path:
        value = mapping(value).get(key)
    return value


def hosts(value: object) -> tuple[str, ...]:
    """Expand "dgx[01-03,07],login" to dgx01 dgx02 dgx03 dgx07 login, or a list of such; () for malformed input."""
    lines = value if isinstance(value, list | tuple) else [value]
    return host_expression.expand_reported([text(line) for line in lines], MAX_HOSTS)


def gpus(value: object) -> dict[str, int]:
    """Return GPUs by type: "gpu:h100:8(S:0-1),gpu:a100:2" is {"h100": 8, "a100": 2}; "" is the type of untyped ones."""
    found: dict[str, int] = {}
    for part in _split_gres(value):
        if match := _GRES.match(part):
            kind = match["type"] or ""
            found[kind] = found.get(kind, 0) + int(match["count"])
    return found


def gpu_indices(value: object) -> tuple[int, ...]:
    """Return the indices in use, from "gpu:h100:3(IDX:0-1,5)"."""
    found: list[int] = []
    for part in _split_gres(value):
        match = _GRES.match(part)
        more = match["more"] if match else None
        if more and more.startswith("IDX:"):
            for piece in more.removeprefix("IDX:").split(","):
                with suppress(ValueError):
                    found += map(int, host_expression.expand_numbers(piece, MAX_GPUS))
    return tuple(sorted(set(found)))


def _split_gres(value: object) -> Iterator[str]:
    """Split at commas outside of parentheses."""
    line = ",".join(words(value)) if isinstance(value, list | tuple) else text(value)
    depth = start = 0
    for place, letter in enumerate(line):
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            yield line[start:place]
            start = place + 1
    if line[start:]:
        yield line[start:]


def main_type(by_type: Mapping[str, int]) -> str:
    """Return the most frequent type."""
    typed = {kind: count for kind, count in by_type.items() if kind}
    return max(typed, key=lambda kind: typed[kind]) if typed else ""


def tres(value: object) -> dict[str, int]:
    """Parse "cpu=4,mem=2G,gres/gpu:h100=2" or [{"type": "gres", "name": "gpu", "count": 2}] by name; memory in MiB."""
    if isinstance(value, list | tuple):
        return dict(_tres_of(item) for item in objects(value) if number(item.get("count")) is not None)
    found = {}
    for part in words(value):
        name, _, amount = part.partition("=")
        if (size := _amount(name, amount)) is not None:
            found[name] = size
    return found


def _tres_of(item: Mapping[str, object]) -> tuple[str, int]:
    kind, name = text(item.get("type")), text(item.get("name"))
    return (f"{kind}/{name}" if name else kind), integer(item.get("count"))


def _amount(name: str, amount: str) -> int | None:
    unit = amount[-1:].upper()
    factor = _UNITS.get(unit, 1.0) if name == "mem" else 1.0
    digits = amount[:-1] if unit in _UNITS else amount
    try:
        return round(float(digits) * factor)
    except (ValueError, OverflowError):
        return None


def gpus_of_tres(counted: Mapping[str, int]) -> tuple[int, str]:
    """Return how many GPUs, and the most frequent type."""
    typed = gpu_types_of_tres(counted)
    return counted.get("gres/gpu", sum(typed.values())), main_type(typed)


def gpu_types_of_tres(counted: Mapping[str, int]) -> dict[str, int]:
    """Return how many GPUs of each type; empty if only their sum is counted."""
    return {name.partition(":")[2]: count for name, count in counted.items() if name.startswith("gres/gpu:")}


def name_of(raw: Mapping[str, object], key: str = "name") -> str:
    """Return the name of a record; raise ValueError if it has none."""
    if not (found := text(raw.get(key))):
        raise ValueError(f"a record without {key}")
    return found
