"""Tell the air inlet's sensor from others by its name, as BMCs list it over IPMI and Redfish."""

from __future__ import annotations

import re

_INLET = re.compile(r"inlet|ambient|intake|front.?panel", re.IGNORECASE)
_OTHER = re.compile(r"psu|p/s|power.?suppl|\bps\d|exhaust|outlet|gpu|\bnic|\bssd|dimm", re.IGNORECASE)


def sounds_like_inlet(name: str) -> bool:
    """Return whether the name says inlet, ambient, intake or front panel."""
    return _INLET.search(name) is not None


def is_of_other_part(name: str) -> bool:
    """Return whether the sensor belongs to a part with an inlet of its own, such as a power supply."""
    return _OTHER.search(name) is not None
