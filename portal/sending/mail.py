"""Send messages as e-mail: plain text with an HTML alternative, using Django's e-mail settings."""

from __future__ import annotations

from email.utils import parseaddr
from smtplib import SMTPRecipientsRefused, SMTPResponseException

from django.conf import settings
from django.core.mail import EmailMultiAlternatives
from django.template.loader import render_to_string

from portal.models import Delivery
from portal.outbox.filling import raised_text
from vigil_core.untrusted import line

MAX_SUBJECT = 160


def is_set_up() -> bool:
    return bool(settings.EMAIL_HOST) or not settings.EMAIL_BACKEND.endswith("smtp.EmailBackend")


def send(delivery: Delivery) -> None:
    """Hand the message to the mail server. Raises OSError or SMTPException if it is not accepted."""
    content = delivery.content or {}
    about = {
        "content": content,
        "notices": [(notice, raised_text(notice)) for notice in content.get("notices") or [content]],
        "is_digest": bool(content.get("notices")),
        "site": settings.VIGIL_PUBLIC_URL,
    }
    subject = line(f"[Vigil] {content['title']}", MAX_SUBJECT)
    letter = EmailMultiAlternatives(
        subject, render_to_string("mail/notice.txt", about), settings.DEFAULT_FROM_EMAIL, [delivery.channel.address]
    )
    domain = parseaddr(settings.DEFAULT_FROM_EMAIL)[1].partition("@")[2] or "localhost"
    # The same id at each attempt: mail programs show duplicates only once.
    letter.extra_headers = {"Message-ID": f"<{delivery.uid}@{domain}>", "Auto-Submitted": "auto-generated"}
    letter.attach_alternative(render_to_string("mail/notice.html", about), "text/html")
    letter.send()


def is_for_good(error: Exception) -> bool:
    """Return whether the mail server refused permanently: a code of 500 or more.

    Codes 530 to 538 are about the site's credentials, which a sysadmin can fix.
    """
    if isinstance(error, SMTPRecipientsRefused):
        codes = [code for code, _ in error.recipients.values()]
    else:
        codes = [error.smtp_code] if isinstance(error, SMTPResponseException) else [0]
    return all(code >= 500 and not 530 <= code <= 538 for code in codes)


def error_message(error: Exception) -> str:
    if isinstance(error, SMTPRecipientsRefused):
        code, reply = next(iter(error.recipients.values()))
        return f"The mail server refused the address: {code} {_text(reply)}"
    if isinstance(error, SMTPResponseException):
        return f"The mail server answered {error.smtp_code} {_text(error.smtp_error)}"
    return f"The mail server cannot be reached: {error}"


def _text(reply: bytes | str) -> str:
    return reply.decode(errors="replace") if isinstance(reply, bytes) else reply
