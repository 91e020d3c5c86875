"""Which clients have ever counted in a federation: who is left out by a deadline is in no round's loss or accuracy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from training.federation.tables import COVERAGE_NAMED, Coverage


class CoverageError(RuntimeError):
    """The data of those that counted are less than the site asks of a completed federation."""


class CoverageLog:
    """Notes round by round who was asked and who counted; it lies in checkpoints."""

    def __init__(self, samples: NDArray[np.int64]) -> None:
        """`samples`: that each client trains on."""
        self._samples = samples
        self._asked = np.zeros(len(samples), dtype=bool)
        self._counted = np.zeros(len(samples), dtype=bool)
        self._is_whole = True
        """Whether it knows of all rounds: checkpoints of older versions say nothing of theirs."""

    def note(self, asked: NDArray[np.int64], counted: NDArray[np.int64]) -> None:
        self._asked[asked] = True
        self._counted[counted] = True

    @property
    def coverage(self) -> Coverage | None:
        """None: not all rounds are known."""
        if not self._is_whole:
            return None
        never = np.flatnonzero(~self._counted)
        foremost = never[np.argsort(-self._samples[never], kind="stable")][:COVERAGE_NAMED]
        return Coverage(
            clients=len(self._samples),
            never=len(never),
            excluded=int((self._asked & ~self._counted).sum()),
            samples=int(self._samples.sum()),
            never_samples=int(self._samples[never].sum()),
            foremost=tuple(foremost.tolist()),
        )

    def check(self, least_share: float) -> None:
        """Raise CoverageError where less than this share of all samples belongs to clients that counted."""
        found = self.coverage
        if found is not None and 1 - found.never_share < least_share:
            raise CoverageError(
                f"{found.text} This site takes a federation for completed from {100 * least_share:g} % of all samples "
                "on."
            )

    def remember(self) -> dict[str, Any]:
        return {name: np.packbits(flags).tobytes().hex() for name, flags in self._flags().items() if self._is_whole}

    def recall(self, told: Mapping[str, Any]) -> None:
        self._is_whole = set(told) >= set(self._flags())
        for name, flags in self._flags().items():
            if self._is_whole:
                bits = np.unpackbits(np.frombuffer(bytes.fromhex(told[name]), dtype=np.uint8))
                flags[:] = bits[: len(flags)].astype(bool)

    def _flags(self) -> dict[str, NDArray[np.bool_]]:
        return {"asked": self._asked, "counted": self._counted}
