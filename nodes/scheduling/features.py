"""Parse Slurm's expressions of node features: "h100&nvlink", "a|b", "[rack1|rack2]", "graphics*4". Pure.

As observed with Slurm 22.05: from left to right, without precedence of "&" over "|"; in brackets "|" means the same
feature on all nodes. A counted feature ("graphics*4") is needed on that many nodes, a plain one on each; with counted
ones in brackets every node must have one of them. Plain and counted ones together are not parsed: Slurm then ignores
the plain ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

Test = frozenset[frozenset[str]]  # any of these sets of features, all of its members
ANY: Test = frozenset({frozenset()})
MAX_WAYS = 32
_TOKEN = re.compile(r"\s*([&|*()\[\]]|[^\s&|*()\[\],]+)")


@dataclass(frozen=True)
class FeatureSet:
    """One way to satisfy an expression: every node has `every`, and a number of nodes has each of `counted`."""

    every: Test = ANY
    counted: tuple[tuple[Test, int], ...] = ()


@lru_cache(maxsize=512)
def read(expression: str) -> tuple[FeatureSet, ...] | None:
    """Return the ways to satisfy the expression, one for an empty expression; None if it cannot be parsed."""
    if not expression.strip():
        return (FeatureSet(),)
    tokens = _TOKEN.findall(expression)
    if "".join(tokens) != re.sub(r"\s", "", expression):
        return None
    try:
        ways, rest = _series(tokens, "")
    except (ValueError, IndexError):
        return None
    return ways if not rest else None


def holds(test: Test, features: Iterable[str]) -> bool:
    """Return whether a node with these features satisfies it."""
    return any(wanted <= set(features) for wanted in test)


def size_of(way: FeatureSet, chosen: Iterable[tuple[str, ...]]) -> int:
    """Return how many nodes the counted features need in addition to those already chosen."""
    return sum(count for _, count in way.counted) - _served(way, list(chosen))


def is_served(way: FeatureSet, nodes: Iterable[tuple[str, ...]]) -> bool:
    """Return whether these nodes can be divided among all counted features, each node once."""
    return not way.counted or size_of(way, nodes) == 0


def _served(way: FeatureSet, nodes: list[tuple[str, ...]]) -> int:
    """Return how many counted places these nodes can fill, each node once (König: the size of a maximum matching)."""
    if not way.counted:
        return 0
    kinds: dict[tuple[str, ...], int] = {}
    for features in nodes:
        kinds[features] = kinds.get(features, 0) + 1
    parts = range(len(way.counted))
    able = {kind: {i for i in parts if holds(way.counted[i][0], kind)} for kind in kinds}
    chosen = (set(some) for many in range(len(parts) + 1) for some in combinations(parts, many))
    return min(_bound(way, some, able, kinds) for some in chosen)


def _bound(
    way: FeatureSet, some: set[int], able: Mapping[tuple[str, ...], set[int]], kinds: Mapping[tuple[str, ...], int]
) -> int:
    """Return an upper bound: every node that serves one of `some`, plus the places of all others."""
    nodes = sum(number for kind, number in kinds.items() if able[kind] & some)
    return nodes + sum(count for i, (_, count) in enumerate(way.counted) if i not in some)


def _series(tokens: list[str], closing: str) -> tuple[tuple[FeatureSet, ...], list[str]]:
    """Parse parts joined by & and |, up to the closing bracket or the end."""
    ways, rest = _part(tokens)
    joined: set[str] = set()
    while rest and rest[0] != closing:
        sign = rest[0]
        joined.add(sign)
        more, rest = _part(rest[1:])
        ways = _join(ways, sign, more, same=closing == "]")
    if closing:
        if not rest or (closing == "]" and len(joined) > 1):
            raise ValueError("unbalanced, or & and | in one bracket")
        rest = rest[1:]
    return ways, rest


def _part(tokens: list[str]) -> tuple[tuple[FeatureSet, ...], list[str]]:
    """Parse a name, a group in parentheses, or one in brackets, perhaps counted."""
    token, rest = tokens[0], tokens[1:]
    if token == "[":
        ways, rest = _series(rest, "]")
        return tuple(_only(way) for way in ways), rest
    if token == "(":
        ways, rest = _series(rest, ")")
    elif token in "&|*)]":
        raise ValueError(f"{token} where a feature belongs")
    else:
        ways = (FeatureSet(frozenset({frozenset({token})})),)
    if not rest or rest[0] != "*":
        return ways, rest
    number = int(rest[1])
    if number < 1 or len(ways) != 1 or ways[0].counted:
        raise ValueError("counted twice")
    return (FeatureSet(ANY, ((ways[0].every, number),)),), rest[2:]


def _join(
    left: tuple[FeatureSet, ...], sign: str, right: tuple[FeatureSet, ...], *, same: bool
) -> tuple[FeatureSet, ...]:
    plain = any(way.every != ANY for way in (*left, *right))
    if plain and any(way.counted for way in (*left, *right)):
        raise ValueError("plain and counted")
    if sign == "&":
        found = tuple(FeatureSet(_both(a.every, b.every), a.counted + b.counted) for a in left for b in right)
    elif sign == "|" and same:
        found = left + right
    elif sign == "|" and len(left) == len(right) == 1 and not left[0].counted and not right[0].counted:
        found = (FeatureSet(left[0].every | right[0].every),)
    else:
        raise ValueError("not an expression that we understand")
    if len(found) > MAX_WAYS or any(len(way.counted) > 6 or len(way.every) > 64 for way in found):
        raise ValueError("too many ways")
    return found


def _only(way: FeatureSet) -> FeatureSet:
    """Return the way for counted features in brackets: every node has one of them."""
    return FeatureSet(frozenset().union(*(test for test, _ in way.counted)), way.counted) if way.counted else way


def _both(left: Test, right: Test) -> Test:
    return frozenset(a | b for a in left for b in right)
