"""Test the thread that posts, with a portal that accepts, loses, refuses, forgets and hangs."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nodes.agent.reporting import sending
from nodes.agent.reporting.buffer import Buffer, with_log_position
from nodes.agent.reporting.enrolment import AgentTokens
from nodes.agent.reporting.posting import ReportClient, fitting
from nodes.agent.reporting.sending import BatchSender, RetryDelays
from nodes.agent.version import VERSION
from tests.nodes.agent.portal import TOKEN, PortalStandIn
from tests.waiting import until


def batch(number: int, **more: Any) -> bytes:
    return json.dumps({"at": number, "period": 1, "n": 10, "gpus": [], "events": [], **more}).encode()


class Node:
    """A buffer and who sends it, in this process."""

    def __init__(self, folder: Path, portal: PortalStandIn, *, url: str = "") -> None:
        self.folder, self.portal, self.url = folder, portal, url or portal.url
        self.token_file = folder / "token"
        self.token_file.write_text(portal.token)
        self.buffer = Buffer(folder / "state")
        self.refused: list[bytes] = []
        self.sender: BatchSender | None = None

    def send(self) -> None:
        """Begin, as an agent that has just started."""
        tokens = AgentTokens(self.token_file, self.folder / "state", "node01")
        self.sender = BatchSender(
            ReportClient(self.url, "node01", timeout=2.0),
            tokens,
            self.buffer,
            node="node01",
            boot_id="boot",
            on_rejected=self.refused.append,
            on_plant=lambda request: None,
            waits=RetryDelays(0.02, 0.1),
        )
        self.sender.start()

    def append(self, count: int, *, boot_id: str = "boot", **more: Any) -> None:
        for _ in range(count):
            self.buffer.append(with_log_position(batch(self.buffer.next, **more), boot_id, -1), is_sync=False)
        if self.sender is not None:
            self.sender.notify()

    def all_taken(self) -> list[int]:
        """Return the batches that the portal accepted, once it has all of them."""
        until(lambda: self.portal.cursors.get(self.buffer.stream) == self.buffer.next)
        assert [item.number for item in self.portal.taken if item.batch["at"] != item.number] == []
        return [item.number for item in self.portal.taken]

    def end(self) -> None:
        if self.sender is not None:
            self.sender.finish(0.0)
            self.sender.join(5.0)
        self.buffer.close()


@pytest.fixture
def node(tmp_path: Path, portal_stand_in: PortalStandIn) -> Iterator[Node]:
    item = Node(tmp_path, portal_stand_in)
    yield item
    item.portal.hold.clear()
    item.end()


def stderr_text(capfd: pytest.CaptureFixture[str]) -> str:
    return capfd.readouterr().err


def test_a_backlog_goes_in_few_posts_and_news_at_once(node: Node) -> None:
    node.append(150)
    node.send()
    assert node.all_taken() == list(range(150))
    assert [len(post["batches"]) for post in node.portal.posts] == [0, 60, 60, 30], "the first one asks where to begin"
    node.append(1)
    assert node.all_taken() == list(range(151))
    assert {post["agent"] for post in node.portal.posts} == {VERSION}


def test_an_answer_that_is_lost_doubles_nothing(node: Node) -> None:
    node.send()
    node.append(3)
    node.all_taken()
    node.portal.loses_answers = True
    node.append(5)
    until(lambda: len(node.portal.taken) == 8)
    node.portal.loses_answers = False
    assert node.all_taken() == list(range(8))


def test_a_portal_that_forgot_gets_it_again(node: Node) -> None:
    """It was restored from its backup."""
    node.send()
    node.append(100)
    node.all_taken()
    node.portal.cursors[node.buffer.stream] = 30
    node.append(1)
    assert node.all_taken() == [*range(100), *range(30, 101)]


def test_a_portal_that_is_ahead_is_obeyed(node: Node) -> None:
    node.append(10)
    node.buffer.close()
    node.buffer = Buffer(node.folder / "state")
    node.portal.cursors[node.buffer.stream] = 6
    node.send()
    assert node.all_taken() == [6, 7, 8, 9]


def test_dropped_numbers_are_reported(node: Node) -> None:
    node.append(130)
    given = _given_up(node.buffer)
    node.buffer.drop(given)
    node.send()
    assert node.all_taken() == list(range(60, 130))
    assert node.portal.given_up == [(0, 60)]


def _given_up(buffer: Buffer) -> Any:
    buffer._limit = 1
    given = buffer.surplus()
    assert given is not None
    return given


def test_a_post_belongs_to_a_single_boot(node: Node) -> None:
    node.append(3, boot_id="before")
    node.append(2, boot_id="after")
    node.send()
    node.all_taken()
    assert [(item.number, item.boot_id) for item in node.portal.taken] == [
        *((number, "before") for number in range(3)),
        *((number, "after") for number in (3, 4)),
    ]


def test_a_portal_that_is_away_is_found_again(node: Node, capfd: pytest.CaptureFixture[str]) -> None:
    node.portal.stop()
    node.append(5)
    node.send()
    until(lambda: "cannot be reached" in stderr_text(capfd))
    node.portal.start()
    assert node.all_taken() == list(range(5))
    until(lambda: "The portal accepts node01's reports" in stderr_text(capfd))


@pytest.mark.parametrize("status", [429, 500, 503])
def test_posting_is_retried_while_the_portal_accepts_nothing(node: Node, status: int) -> None:
    left = [3]

    def refuse(post: dict[str, Any]) -> Any:
        left[0] -= 1
        return (status, {"detail": "not now"}) if left[0] >= 0 else None

    node.portal.refuse = refuse
    node.append(5)
    node.send()
    assert node.all_taken() == list(range(5))
    assert node.refused == []


def test_a_refused_token_is_reported_once_and_reread(node: Node, capfd: pytest.CaptureFixture[str]) -> None:
    node.token_file.write_text("vga_another")
    node.append(5)
    node.send()
    until(lambda: node.portal.wrong_tokens >= 3)
    assert stderr_text(capfd).count("The portal rejects this token (401). A sysadmin creates a new one") == 1
    node.token_file.write_text(TOKEN)
    assert node.all_taken() == list(range(5))


def test_too_much_at_once_is_halved(node: Node) -> None:
    node.portal.refuse = lambda post: (413, {"detail": "too much"}) if len(post["batches"]) > 7 else None
    node.append(40)
    node.send()
    assert node.all_taken() == list(range(40))


def test_a_bad_batch_holds_up_no_other(node: Node) -> None:
    node.portal.refuse = lambda post: (422, {"detail": "bad"}) if any(b["at"] == 17 for b in post["batches"]) else None
    node.append(40)
    node.send()
    assert node.all_taken() == [number for number in range(40) if number != 17]
    assert [json.loads(item)["at"] for item in node.refused] == [17]
    assert node.portal.given_up == [(17, 18)]


def test_a_portal_that_refuses_all_loses_little(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A portal of another release may refuse today what it accepts once it is upgraded."""
    node.portal.refuse = lambda post: (422, {"detail": "bad"}) if post["batches"] else None
    node.append(40)
    node.send()
    until(lambda: len(node.refused) == 3)
    began = time.monotonic()
    until(lambda: len(node.refused) == 5)
    assert time.monotonic() - began > 0.1, "each further one waits"
    node.portal.refuse = lambda post: None
    taken = node.all_taken()
    assert len(taken) == 40 - len(node.refused)


def test_a_server_that_is_no_portal_is_reported(node: Node, capfd: pytest.CaptureFixture[str]) -> None:
    node.portal.refuse = lambda post: (200, {"hello": "world"})
    node.append(1)
    node.send()
    until(lambda: "is not a Vigil portal" in stderr_text(capfd))


def test_an_unknown_node_is_reported(node: Node, capfd: pytest.CaptureFixture[str]) -> None:
    node.portal.refuse = lambda post: (404, {"detail": "no such node"})
    node.append(1)
    node.send()
    until(lambda: "Set VIGIL_AGENT_NODE" in stderr_text(capfd))


def test_a_portal_that_hangs_is_left_after_a_while(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "MAX_POST_SECONDS", 0.1)
    node.portal.hold.set()
    node.append(3)
    node.send()
    assert node.sender is not None
    sender = node.sender
    until(lambda: sender._portal.began is not None and time.monotonic() - sender._portal.began > 0.1)
    sender.check_timeout()
    until(lambda: sender._wait > 0)
    node.portal.hold.clear()
    assert node.all_taken() == [0, 1, 2]


def test_an_enrolment_secret_gets_a_token_for_this_node_alone(node: Node, capfd: pytest.CaptureFixture[str]) -> None:
    node.token_file.write_text("vge_shared")
    node.append(2)
    node.send()
    assert node.all_taken() == [0, 1]
    assert node.portal.enrolled == [("node01", "vge_shared", {"boot_id": "boot"})]
    path = node.folder / "state" / "token"
    assert path.stat().st_mode & 0o777 == 0o600
    node.end()
    node.buffer = Buffer(node.folder / "state")
    node.send()
    node.append(1)
    assert node.all_taken() == [0, 1, 2]
    assert len(node.portal.enrolled) == 1, "a secret is for the first time alone"
    assert "vge_" not in (log := stderr_text(capfd))
    assert "vga_" not in log


def test_a_name_that_is_enrolled_already_is_reported(node: Node, capfd: pytest.CaptureFixture[str]) -> None:
    node.token_file.write_text("vge_shared")
    node.portal.enrol = lambda secret: (409, {"detail": "enrolled"})
    node.append(1)
    node.send()
    until(lambda: "node01 is already enrolled" in stderr_text(capfd))
    node.token_file.write_text(TOKEN)
    assert node.all_taken() == [0]


@pytest.mark.parametrize(
    ("contents", "sentence"),
    [("", "has no token"), ("two words", "has no token"), ("\x00", "has no token"), (None, "cannot be read")],
)
def test_a_token_file_without_a_token(
    node: Node, capfd: pytest.CaptureFixture[str], contents: str | None, sentence: str
) -> None:
    if contents is None:
        node.token_file.unlink()
    else:
        node.token_file.write_text(contents)
    node.append(1)
    node.send()
    until(lambda: sentence in stderr_text(capfd))
    node.token_file.write_text(TOKEN)
    assert node.all_taken() == [0]


def test_a_port_where_nobody_speaks_http(node: Node, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        node.url = f"http://127.0.0.1:{server.getsockname()[1]}"
        node.append(1)
        node.send()
        connection, _ = server.accept()
        connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
        connection.close()
        until(lambda: "cannot be reached" in stderr_text(capfd))


def test_how_much_fits_into_a_post() -> None:
    gpus = [f"GPU-{number}" for number in range(8)]
    full = json.dumps({"at": 0, "period": 1, "n": 10, "gpus": gpus, "columns": {}}, separators=(",", ":")).encode()
    assert fitting([full] * 60) == 52, "50,000 values"
    assert fitting([b"{}"] * 100) == 60
    events = json.dumps({"events": [{"kind": "xid"}] * 300}, separators=(",", ":")).encode()
    assert fitting([events] * 20) == 6
    assert fitting([b"x" * 20_000_000]) == 1
