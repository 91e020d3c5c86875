"""Track which clients have ever counted in a federation: those left out by a deadline are in no loss or accuracy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from training.federation.tables import COVERAGE_NAMED, Coverage


class CoverageError(RuntimeError):
    """Too small a part of all samples belongs to clients that counted for the federation to complete."""


class CoverageLog:
    """Records by round which clients were selected and which counted; stored in checkpoints."""

    def __init__(self, samples: NDArray[np.int64]) -> None:
        """`samples`: of each client."""
        self._samples = samples
        self._selected = np.zeros(len(samples), dtype=bool)
        self._counted = np.zeros(len(samples), dtype=bool)
        self._is_whole = True
        """Whether all rounds are recorded: checkpoints of older versions do not have theirs."""

    def record(self, selected: NDArray[np.int64], counted: NDArray[np.int64]) -> None:
        self._selected[selected] = True
        self._counted[counted] = True

    @property
    def coverage(self) -> Coverage | None:
        """The coverage so far; None if not all rounds are recorded."""
        if not self._is_whole:
            return None
        never = np.flatnonzero(~self._counted)
        largest = never[np.argsort(-self._samples[never], kind="stable")][:COVERAGE_NAMED]
        return Coverage(
            clients=len(self._samples),
            never=len(never),
            excluded=int((self._selected & ~self._counted).sum()),
            samples=int(self._samples.sum()),
            never_samples=int(self._samples[never].sum()),
            foremost=tuple(largest.tolist()),
        )

    def check(self, least_share: float) -> None:
        """Raise CoverageError where less than this share of all samples belongs to clients that counted."""
        found = self.coverage
        if found is not None and 1 - found.never_share < least_share:
            raise CoverageError(
                f"{found.text} This site requires {100 * least_share:g} % of all samples to have counted."
            )

    def state_dict(self) -> dict[str, Any]:
        return {name: np.packbits(flags).tobytes().hex() for name, flags in self._flags().items() if self._is_whole}

    def load_state_dict(self, stored: Mapping[str, Any]) -> None:
        self._is_whole = set(stored) >= set(self._flags())
        for name, flags in self._flags().items():
            if self._is_whole:
                bits = np.unpackbits(np.frombuffer(bytes.fromhex(stored[name]), dtype=np.uint8))
                flags[:] = bits[: len(flags)].astype(bool)

    def _flags(self) -> dict[str, NDArray[np.bool_]]:
        return {"asked": self._selected, "counted": self._counted}
