"""What nodes out of service cost: GPU-hours an hour, and money where the site has set a price."""

from __future__ import annotations

from django.conf import settings

from vigil_core import formatting


def hourly(gpus: int) -> float | None:
    """Return what these idle GPUs cost an hour; None without VIGIL_GPU_HOUR_PRICE."""
    price = settings.VIGIL_GPU_HOUR_PRICE
    return gpus * price if price else None


def hourly_text(gpus: int) -> str:
    """Return "€16.80 an hour", or "8 GPU-hours an hour" where no price is set; "" without idle GPUs."""
    if not gpus:
        return ""
    cost = hourly(gpus)
    amount = formatting.plural(gpus, "GPU-hour") if cost is None else formatting.money(cost, settings.VIGIL_CURRENCY)
    return f"{amount} an hour"
