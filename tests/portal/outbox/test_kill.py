"""Test a sender that is killed -9 between delivery and noting it: the message is sent again, with its id."""

from __future__ import annotations

import os
import signal
import subprocess
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from tests.portal.outbox import receiving
from tests.stack import Stack
from tests.waiting import until

SET_UP = """
import sys, django
django.setup()
from portal import notify
from portal.models import Channel, User
user = User.objects.get()
Channel.objects.create(user=user, kind="webhook", address=sys.argv[1])
notify.raise_notice("incident:1", kind="incident", to=user, title="wren died.")
"""
SEND = """
import sys, time, django
from datetime import timedelta
django.setup()
from portal.models import Delivery
from portal.sending import due
due.LEASE = timedelta(seconds=float(sys.argv[1]))
while not Delivery.objects.filter(state="sent").exists():
    due.send_due(5)
    time.sleep(0.05)
print(Delivery.objects.get().tries)
"""


@pytest.mark.slow
def test_it_is_sent_again_under_the_same_id(prepared_home: Path) -> None:
    with receiving.web() as web:
        stack = Stack(prepared_home, VIGIL_WEBHOOK_ALLOW="127.0.0.1/32")
        environment = {**stack.environment, "DJANGO_SETTINGS_MODULE": "portal.settings"}

        def start(code: str, *arguments: str) -> subprocess.Popen[str]:
            command = stack.command("-c", code, *arguments)
            return subprocess.Popen(command, cwd=stack.checkout, env=environment, stdout=subprocess.PIPE, text=True)

        senders: list[subprocess.Popen[str]] = []
        try:
            set_up = start(SET_UP, web.url)
            set_up.communicate()
            assert set_up.returncode == 0

            def kill(handler: BaseHTTPRequestHandler) -> None:
                os.kill(senders[0].pid, signal.SIGKILL)
                senders[0].wait()

            web.answers = [kill]
            senders.append(start(SEND, "1"))  # so soon the others may take it; they have it as long as they want
            until(lambda: web.got and senders[0].poll() is not None)
            assert senders[0].communicate()[0] == ""
            assert senders[0].returncode == -signal.SIGKILL
            senders += [start(SEND, "600"), start(SEND, "600")]
            texts = [sender.communicate(timeout=60)[0] for sender in senders[1:]]
            assert texts == ["2\n", "2\n"]
            assert len(web.got) == 2
            assert len({post.headers["webhook-id"] for post in web.got}) == 1
            assert web.got[0].body == web.got[1].body
        finally:
            for sender in senders:
                sender.kill()
                sender.wait()
            stack.close()
