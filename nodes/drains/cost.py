"""What nodes out of service cost: idle GPUs, and money where the site has set a price."""

from __future__ import annotations

from django.conf import settings

from vigil_core import formatting


def hourly(gpus: int) -> float | None:
    """Return what these idle GPUs cost an hour; None without VIGIL_GPU_HOUR_PRICE."""
    price = settings.VIGIL_GPU_HOUR_PRICE
    return gpus * price if price else None


def idle_text(gpus: int) -> str:
    """Return "€16.80 an hour", or "8 idle GPUs" where no price is set; "" without idle GPUs."""
    if not gpus:
        return ""
    cost = hourly(gpus)
    if cost is None:
        return f"{formatting.plural(gpus, 'idle GPU')}"
    return f"{formatting.money(cost, settings.VIGIL_CURRENCY)} an hour"
