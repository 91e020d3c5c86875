"""Test messages: the bytes sent are those counted, and decoding returns what was sent or a refusal with its reason."""

from __future__ import annotations

import hashlib
import json
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.training.federated.in_process import DIGITS, RecordingReporter, run
from training.federated.client_tasks import ClientTask, ClientUpdates
from training.federated.controller import Controller
from training.federated.messages import HEADER_BYTES, MessageError, MessageLayout, Traffic
from training.federated.round_report import RoundReport
from training.federated.rounds import Rounds

TENSORS = {
    "delta": torch.tensor([1.5, -2.0, float("nan")]),
    "delta.topk.places": torch.tensor([0, 4, 7], dtype=torch.int32),
    "half": torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16),
    "steps": torch.tensor(3.0, dtype=torch.float64),
    "none": torch.zeros(0, 5, dtype=torch.int8),
}
DESCRIPTION = MessageLayout.of(TENSORS)
SENDER: dict[str, Any] = {"round_": 12, "client": 345, "samples": 67}
ENCODED = DESCRIPTION.encode(TENSORS, **SENDER)


def changed(change: Callable[[dict[str, Any]], object], body: bytes | None = None) -> bytes:
    """The message with another header, and a digest that is right."""
    (length,) = struct.unpack_from("<I", ENCODED)
    header = json.loads(ENCODED[4 : 4 + length])
    body = ENCODED[4 + length :] if body is None else body
    header["sha256"] = hashlib.sha256(body).hexdigest()
    change(header)
    written = json.dumps(header).encode()
    return struct.pack("<I", len(written)) + written + body


def refusal(data: bytes, **sender: Any) -> str:
    with pytest.raises(MessageError) as refused:
        DESCRIPTION.decode(data, **{**SENDER, **sender})
    return str(refused.value)


class TestTheSame:
    def test_comes_back(self) -> None:
        message = DESCRIPTION.decode(ENCODED, **SENDER)
        assert message.samples == 67
        assert list(message.tensors) == list(TENSORS)
        for name, value in TENSORS.items():
            assert message.tensors[name].dtype == value.dtype
            torch.testing.assert_close(message.tensors[name], value, rtol=0, atol=0, equal_nan=True)

    def test_of_the_server(self) -> None:
        encoded = DESCRIPTION.encode(TENSORS, round_=1, client=None, samples=None)
        assert DESCRIPTION.decode(encoded, round_=1, client=None, samples=None).samples is None
        assert len(encoded) == DESCRIPTION.size(round_=1, client=None, samples=None)

    def test_from_memory_that_lies_otherwise(self) -> None:
        rows = torch.arange(12.0).view(3, 4).t()
        description = MessageLayout.of({"rows": rows})
        encoded = description.encode({"rows": rows}, round_=1, client=0, samples=1)
        decoded = description.decode(memoryview(encoded), round_=1, client=0, samples=1)
        assert torch.equal(decoded.tensors["rows"], rows)

    @given(
        st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 10**9)), max_size=5), st.integers(1, 10**6)
    )  # digits of the header's numbers
    def test_takes_what_was_counted(self, senders: list[tuple[int, int]], round_: int) -> None:
        clients, samples = [client for client, _ in senders], [count for _, count in senders]
        sizes = DESCRIPTION.sizes(round_, clients, samples)
        for size, (client, count) in zip(sizes.tolist(), senders, strict=True):
            assert size == len(DESCRIPTION.encode(TENSORS, round_=round_, client=client, samples=count))
            assert size == DESCRIPTION.size(round_=round_, client=client, samples=count)


class TestRefused:
    @pytest.mark.parametrize(
        ("change", "text"),
        [
            (lambda header: header.update(round=11), "is for round 11, not 12"),
            (lambda header: header.update(round=True), "is for round true, not 12"),
            (lambda header: header.update(client=None), "is for client null, not 345"),
            (lambda header: header.update(samples=68), "claims 68 samples; its client has 67"),
            (lambda header: header.update(samples=1_000_000), "claims 1000000 samples; its client has 67"),
            (lambda header: header.update(samples=0), "claims 0 samples; a whole number of at least 1"),
            (lambda header: header.update(samples=6.0), "claims 6.0 samples; a whole number of at least 1"),
            (lambda header: header.update(samples=None), "claims null samples, not 67"),
            (lambda header: header.update(more=1), "must contain exactly"),
            (lambda header: header.pop("sha256"), "must contain exactly round, client"),
            (lambda header: header.update(sha256="0" * 64), "its digest is that of other bytes"),
            (lambda header: header.update(tensors={}), "does not name its tensors"),
            (lambda header: header["tensors"].pop(2), 'has no tensor "half"'),
            (lambda header: header["tensors"].append({"name": "x"}), 'has a tensor "x", which was not requested'),
            (lambda header: header["tensors"].reverse(), 'tensor "delta": its name is "none", not "delta"'),
            (lambda header: header["tensors"][0].update(shape=[2**40]), "its shape is [1099511627776], not [3]"),
            (lambda header: header["tensors"][2].update(dtype="float16"), 'its dtype is "float16", not "bfloat16"'),
            (lambda header: header["tensors"][2].update(more=1), "differently than requested"),
        ],
    )
    def test_another_header(self, change: Callable[[dict[str, Any]], object], text: str) -> None:
        assert text in refusal(changed(change))

    def test_more_or_fewer_bytes(self) -> None:
        assert "has 49 bytes of tensors, not 36" in refusal(changed(lambda header: None, bytes(49)))
        assert "too few for a message" in refusal(b"abc")
        assert "its digest is that of other bytes" in refusal(ENCODED[:-1] + b"?")

    def test_a_header_that_is_too_long_or_not_there(self) -> None:
        assert "claims a header of 65,537 bytes" in refusal(struct.pack("<I", HEADER_BYTES + 1) + bytes(2**17))
        assert "it must be complete" in refusal(struct.pack("<I", 100) + b"{}")

    def test_a_header_of_nothing_but_brackets(self) -> None:
        for text in (b"[" * 60_000, b"[" * 900 + b"]" * 900, b"9" * 60_000, b"\xff" * 9, b'"\\ud800"'):
            refusal(struct.pack("<I", len(text)) + text)
        deep = json.loads("[" * 900 + "]" * 900)
        assert "is for round" in refusal(changed(lambda header: header.update(round=deep)))

    def test_of_the_server_with_samples(self) -> None:
        encoded = DESCRIPTION.encode(TENSORS, round_=12, client=345, samples=67)
        assert "claims 67 samples, not None" in refusal(encoded, samples=None)

    def test_what_was_not_described_is_not_sent(self) -> None:
        with pytest.raises(MessageError, match=r'tensor "delta": its shape is \[2\], not \[3\]'):
            DESCRIPTION.encode({**TENSORS, "delta": torch.zeros(2)}, **SENDER)
        many = {f"layers.{n}.attention.weight": torch.zeros(1) for n in range(2000)}
        with pytest.raises(MessageError, match="too many tensors"):
            MessageLayout.of(many).encode(many, **SENDER)


HEADERS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
)


class TestWild:
    @settings(max_examples=300)
    @given(st.binary(max_size=400))
    @example(ENCODED[:40])
    def test_bytes_are_refused(self, data: bytes) -> None:
        refusal(data)

    @given(st.fixed_dictionaries(dict.fromkeys(("round", "client", "samples", "sha256", "tensors"), HEADERS)))
    def test_headers_are_refused(self, header: dict[str, Any]) -> None:
        written = json.dumps(header).encode()
        refusal(struct.pack("<I", len(written)) + written)

    @given(st.integers(0, len(ENCODED) - 1), st.integers(0, 255))
    def test_a_changed_byte_changes_nothing_but_what_is_claimed(self, place: int, byte: int) -> None:
        data = bytearray(ENCODED)
        data[place] = byte
        try:
            message = DESCRIPTION.decode(bytes(data), **SENDER)
        except MessageError:
            return
        assert 1 <= (message.samples or 0) <= 67
        assert message.tensors["delta"].tolist()[:2] == [1.5, -2.0]

    def test_nothing_is_made_room_for_that_did_not_come(self) -> None:
        """A description of 4 GB, and a header that promises them."""
        large = MessageLayout({"delta": ((2**30,), torch.float32)})
        header = large._header(1, 0, 1, "0" * 64)
        tracemalloc.start()
        with pytest.raises(MessageError, match=r"has 0 bytes of tensors, not 4,294,967,296"):
            large.decode(struct.pack("<I", len(header)) + header, round_=1, client=0, samples=1)
        assert tracemalloc.get_traced_memory()[1] < HEADER_BYTES
        tracemalloc.stop()


@pytest.mark.parametrize("filters", [[], ["topk", "int8"], ["sketch", "fp16"], ["delta"]], ids=str)
def test_counted_is_what_each_client_s_message_takes(
    filters: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rounds: every message that would be sent is encoded, and decoded again."""
    up: dict[tuple[int, int], int] = {}
    down: list[int] = []
    result: list[RoundReport] = []
    summed, play_round = Controller._partial_sums, Rounds._round

    def encoded(controller: Controller, question: ClientTask, sizes: Any, sent: ClientUpdates, local: Any) -> Any:
        described = controller._work.messages_of(question, controller.server).up
        samples = controller.samples_of(sent.clients).tolist()
        for place, client in enumerate(sent.clients.tolist()):
            tensors = {name: value[place] for name, value in sent.wire.items()}
            sender = {"round_": controller.round, "client": client, "samples": samples[place]}
            message = described.encode(tensors, **sender)
            up[controller.round, client] = len(message)
            decoded = described.decode(message, **sender).tensors
            assert all(torch.equal(decoded[name], value) for name, value in tensors.items())
        return summed(controller, question, sizes, sent, local)

    def played(loop: Rounds, round_: int) -> RoundReport:
        model = loop.federation.model.weights.tensors(loop.server.weights)
        described = loop.work.messages_of(loop.work.training_task, loop.server).down
        down.append(len(described.encode(model, round_=round_, client=None, samples=None)))
        result.append(play_round(loop, round_))
        return result[-1]

    monkeypatch.setattr(Controller, "_partial_sums", encoded)
    monkeypatch.setattr(Rounds, "_round", played)
    series = RecordingReporter()
    run(tmp_path, {**DIGITS, "rounds": 3, "per_round": 9, "filters": filters}, reporter=series)
    assert len(result) == 3
    for round_, (item, size) in enumerate(zip(result, down, strict=True), start=1):
        assert item.traffic.clients.tolist() == sorted(item.clients.tolist())
        assert item.traffic.up.tolist() == [up[round_, client] for client in item.traffic.clients.tolist()]
        assert item.traffic.down.tolist() == [size] * 9
    assert sum(series.series["mib_up"].values()) * 2**20 == pytest.approx(sum(up.values()))


def test_traffic_of_several_questions_is_added_up_by_client() -> None:
    first = Traffic(np.array([5, 2]), np.array([10, 20]), np.array([1, 1]))
    both = Traffic.empty() + first + Traffic(np.array([2, 9]), np.array([3, 4]), np.array([2, 2]))
    assert (both.clients.tolist(), both.up.tolist(), both.down.tolist()) == ([2, 5, 9], [23, 10, 4], [3, 1, 2])
    assert (both.bytes_up, both.bytes_down) == (37, 6)
