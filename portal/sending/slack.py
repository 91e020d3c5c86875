"""Format messages for Slack's incoming webhooks, and for Mattermost and others that read the same `text`."""

from __future__ import annotations

import json
from typing import Any

from portal.models import Delivery
from portal.outbox.filling import raised_text
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
    below: list[dict[str, Any]] = []
    if raised := raised_text(notice):
        below.append({"type": "plain_text", "text": raised, "emoji": False})
    if notice["link"]:
        below.append({"type": "mrkdwn", "text": f"<{notice['link']}|Open in Vigil>"})
    return [block, {"type": "context", "elements": below}] if below else [block]


def _plain(text: str) -> dict[str, Any]:
    return {"type": "section", "text": {"type": "plain_text", "text": text[:MAX_TEXT], "emoji": False}}


def _line(notice: dict[str, Any]) -> str:
    raised = raised_text(notice)
    link = f"<{notice['link']}|Open in Vigil>" if notice["link"] else ""
    parts = [for_slack(notice["title"]), for_slack(notice["detail"]), f"{raised}." if raised else "", link]
    return " ".join(part for part in parts if part)
