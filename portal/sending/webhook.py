"""Format messages as JSON, signed as in Standard Webhooks (standardwebhooks.com), which many languages can verify."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time

from django.utils.crypto import salted_hmac

from portal.models import Channel, Delivery

PREFIX = "whsec_"
_SALT = "portal.sending.webhook"


def secret_of(channel: Channel) -> str:
    """Return the signing secret. It is derived from the site's key and the channel's salt, so no table stores it."""
    return PREFIX + base64.b64encode(_key(channel)).decode()


def message(delivery: Delivery, at: float | None = None) -> tuple[bytes, dict[str, str]]:
    """Return the body and headers. `webhook-id` is the same at each attempt."""
    stamp, content = str(int(at or time.time())), delivery.content or {}
    body = json.dumps(
        {"type": f"notice.{delivery.kind}", "timestamp": content.get("raised_at"), "data": content}, sort_keys=True
    ).encode()
    signed = b".".join((str(delivery.uid).encode(), stamp.encode(), body))
    signature = base64.b64encode(hmac.new(_key(delivery.channel), signed, hashlib.sha256).digest()).decode()
    return body, {
        "Content-Type": "application/json",
        "User-Agent": "Vigil",
        "Idempotency-Key": str(delivery.uid),
        "webhook-id": str(delivery.uid),
        "webhook-timestamp": stamp,
        "webhook-signature": f"v1,{signature}",
    }


def _key(channel: Channel) -> bytes:
    return salted_hmac(_SALT, f"{channel.pk}.{channel.salt}", algorithm="sha256").digest()
