"""Write the price of GPU-hours."""

from __future__ import annotations

from django.conf import settings

from vigil_core import formatting


def price_text(gpu_hours: float) -> str:
    """Return the cost of these GPU-hours; "" if the site has not set VIGIL_GPU_HOUR_PRICE."""
    price = settings.VIGIL_GPU_HOUR_PRICE
    return formatting.money(gpu_hours * price, settings.VIGIL_CURRENCY) if price else ""
