"""Messages for Slack's incoming webhooks, and for Mattermost and others that read the same `text`."""

from __future__ import annotations

import json
from typing import Any

from portal.models import Delivery
from portal.sending.escaping import for_slack

MOST_NOTICES = 20  # of a digest: Slack takes 50 blocks and 3,000 characters in one
MOST_TEXT = 2_800


def message(delivery: Delivery) -> tuple[bytes, dict[str, str]]:
    """Body and headers."""
    told = delivery.content or {}
    notices = told.get("notices") or []
    blocks = [_plain(told["title"])] if notices else _blocks(told)
    lines = [for_slack(told["title"])] if notices else [_line(told)]
    for one in notices[:MOST_NOTICES]:
        blocks += _blocks(one, short=True)
        lines.append(f"• {_line(one)}")
    if (more := len(notices) + told.get("more", 0) - min(len(notices), MOST_NOTICES)) > 0:
        blocks.append(_plain(f"and {more} more"))
        lines.append(f"and {more} more")
    body = {"text": "\n".join(lines)[:MOST_TEXT], "mrkdwn": False, "unfurl_links": False, "blocks": blocks}
    return json.dumps(body).encode(), {"Content-Type": "application/json", "User-Agent": "Vigil"}


def _blocks(told: dict[str, Any], *, short: bool = False) -> list[dict[str, Any]]:
    """Everything but our own link as plain text, which Slack shows as it is."""
    words = told["title"] if short or not told["detail"] else f"{told['title']}\n{told['detail']}"
    block = _plain(words)
    if told["facts"] and not short:
        block["fields"] = [
            {"type": "plain_text", "text": f"{name}: {text}"[:2000], "emoji": False}
            for name, text in told["facts"][:10]
        ]
    if not told["link"]:
        return [block]
    link = {"type": "mrkdwn", "text": f"<{told['link']}|Open in Vigil>"}
    return [block, {"type": "context", "elements": [link]}]


def _plain(text: str) -> dict[str, Any]:
    return {"type": "section", "text": {"type": "plain_text", "text": text[:MOST_TEXT], "emoji": False}}


def _line(told: dict[str, Any]) -> str:
    link = f" <{told['link']}|Open in Vigil>" if told["link"] else ""
    return f"{for_slack(told['title'])} {for_slack(told['detail'])}".strip() + link
