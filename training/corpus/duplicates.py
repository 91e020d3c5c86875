"""Detect documents that occurred before: the same text except for white space and Unicode composition."""

from __future__ import annotations

import hashlib
import unicodedata

import numpy as np

RECENT = 2**20


def digest(text: str) -> int:
    """Return 64 bits of the normalised text: NFC, each run of white space one space; never 0."""
    normal = " ".join(unicodedata.normalize("NFC", text).split())
    return int.from_bytes(hashlib.blake2b(normal.encode(), digest_size=8).digest(), "big") or 1


class DigestSet:
    """A set of digests with 8 bytes each, so that a hundred million documents fit in a gigabyte.

    Recent ones are in a set; when that is full it is merged into a sorted array. By chance two of n texts share a
    digest once in 2⁶⁵ / n² corpora: with 10 million documents, once in 400,000.
    """

    def __init__(self) -> None:
        self._recent: set[int] = set()
        self._older: np.ndarray = np.empty(0, dtype=np.uint64)

    def add(self, digest: int) -> bool:
        """Add a digest; return whether it is new."""
        if digest in self._recent or self._is_older(digest):
            return False
        self._recent.add(digest)
        if len(self._recent) >= RECENT:
            recent = np.fromiter(self._recent, dtype=np.uint64, count=len(self._recent))
            self._older = np.sort(np.concatenate([self._older, recent]), kind="stable")
            self._recent.clear()
        return True

    def _is_older(self, digest: int) -> bool:
        index = int(self._older.searchsorted(np.uint64(digest)))
        return index < len(self._older) and int(self._older[index]) == digest
