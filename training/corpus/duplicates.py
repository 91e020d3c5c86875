"""Which documents have been seen before: the same text but for blanks, line ends and how letters are composed."""

from __future__ import annotations

import hashlib
import unicodedata

import numpy as np

RECENT = 2**20


def digest(text: str) -> int:
    """64 bits of the normalised text: NFC, each run of blanks one space; 0 is nobody's."""
    normal = " ".join(unicodedata.normalize("NFC", text).split())
    return int.from_bytes(hashlib.blake2b(normal.encode(), digest_size=8).digest(), "big") or 1


class Seen:
    """A set of digests in 8 bytes each, so that a hundred million documents fit in a gigabyte.

    Newer ones are in a set; when that is full it is merged into a sorted array. By chance two of n texts share a digest
    once in 2⁶⁵ / n² corpora: of 10 million documents, once in 400,000.
    """

    def __init__(self) -> None:
        self._recent: set[int] = set()
        self._older: np.ndarray = np.empty(0, dtype=np.uint64)

    def add(self, found: int) -> bool:
        """True if it is new."""
        if found in self._recent or self._is_older(found):
            return False
        self._recent.add(found)
        if len(self._recent) >= RECENT:
            recent = np.fromiter(self._recent, dtype=np.uint64, count=len(self._recent))
            self._older = np.sort(np.concatenate([self._older, recent]), kind="stable")
            self._recent.clear()
        return True

    def _is_older(self, found: int) -> bool:
        at = int(self._older.searchsorted(np.uint64(found)))
        return at < len(self._older) and int(self._older[at]) == found
