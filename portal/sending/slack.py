"""Format messages for Slack's incoming webhooks, and for Mattermost and others that read the same `text`."""

from __future__ import annotations

import json
from typing import Any

from portal.models import Delivery
from portal.sending.escaping import for_slack

MAX_NOTICES = 20  # of a digest: Slack accepts 50 blocks of at most 3,000 characters
MAX_TEXT = 2_800


def message(delivery: Delivery) -> tuple[bytes, dict[str, str]]:
    """Return the body and headers."""
    content = delivery.content or {}
    notices = content.get("notices") or []
    blocks = [_plain(content["title"])] if notices else _blocks(content)
    lines = [for_slack(content["title"])] if notices else [_line(content)]
    for notice in notices[:MAX_NOTICES]:
        blocks += _blocks(notice, short=True)
        lines.append(f"• {_line(notice)}")
    if (more := len(notices) + content.get("more", 0) - min(len(notices), MAX_NOTICES)) > 0:
        blocks.append(_plain(f"and {more} more"))
        lines.append(f"and {more} more")
    body = {"text": "\n".join(lines)[:MAX_TEXT], "mrkdwn": False, "unfurl_links": False, "blocks": blocks}
    return json.dumps(body).encode(), {"Content-Type": "application/json", "User-Agent": "Vigil"}


def _blocks(notice: dict[str, Any], *, short: bool = False) -> list[dict[str, Any]]:
    """Return the blocks; everything but our own link is plain text, which Slack shows unchanged."""
    words = notice["title"] if short or not notice["detail"] else f"{notice['title']}\n{notice['detail']}"
    block = _plain(words)
    if notice["facts"] and not short:
        block["fields"] = [
            {"type": "plain_text", "text": f"{name}: {text}"[:2000], "emoji": False}
            for name, text in notice["facts"][:10]
        ]
    if not notice["link"]:
        return [block]
    link = {"type": "mrkdwn", "text": f"<{notice['link']}|Open in Vigil>"}
    return [block, {"type": "context", "elements": [link]}]


def _plain(text: str) -> dict[str, Any]:
    return {"type": "section", "text": {"type": "plain_text", "text": text[:MAX_TEXT], "emoji": False}}


def _line(notice: dict[str, Any]) -> str:
    link = f" <{notice['link']}|Open in Vigil>" if notice["link"] else ""
    return f"{for_slack(notice['title'])} {for_slack(notice['detail'])}".strip() + link
