"""Length-capped JSON frames: any message, cut anywhere, comes out as it went in; a bad frame is an
error at once.
"""

import asyncio
import math
import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.refusals import refuses

from freight.serve.processes import frames
from freight.serve.processes.frames import Decoder, FrameError, encode

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@given(st.lists(JSON, max_size=5), st.data())
def test_messages_survive_any_cutting(sent, data):
    stream = b"".join(map(encode, sent))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    decoder = Decoder()
    received = []
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        received += decoder.feed(stream[begin:end])
    decoder.finish()
    assert received == sent


def test_byte_by_byte():
    decoder = Decoder()
    stream = encode({"a": "ü"}) + encode([])
    assert [message for byte in stream for message in decoder.feed(bytes([byte]))] == [
        {"a": "ü"},
        [],
    ]


def test_what_json_has_not_but_the_engine_says():
    (numbers, text) = Decoder().feed(encode([math.nan, -math.inf]) + encode("a\ud800"))
    assert math.isnan(numbers[0])
    assert numbers[1] == -math.inf
    assert text == "a\ud800"


def test_a_frame_beyond_the_cap_is_refused_by_its_header():
    with refuses(FrameError, "frame", "11 bytes", "10"):
        Decoder(cap=10).feed((11).to_bytes(4, "big"))
    with refuses(FrameError, "frame", "12 bytes", "10"):
        encode("0123456789", cap=10)
    assert Decoder(cap=12).feed(encode("0123456789", cap=12)) == ["0123456789"]


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 100_000, b"9" * 10_000])
def test_what_is_not_json_is_a_frame_error(body):
    with pytest.raises(FrameError, match="is not JSON"):
        Decoder().feed(len(body).to_bytes(4, "big") + body)


def test_an_end_within_a_frame_is_an_error():
    decoder = Decoder()
    decoder.feed(encode("abc")[:-1])
    with pytest.raises(FrameError, match="ended 8 bytes into a frame"):
        decoder.finish()


def test_over_a_socket():
    ours, theirs = socket.socketpair()
    sent = [{"text": "x" * 300_000}, None, 7]

    def write():
        with ours:
            for message in sent:
                frames.send(ours, message)

    writer = threading.Thread(target=write)
    writer.start()
    with theirs:
        assert list(frames.receive(theirs)) == sent
    writer.join()


def test_over_asyncio():
    async def read():
        reader = asyncio.StreamReader()
        reader.feed_data(encode([1]) + encode("two")[:3])
        reader.feed_data(encode("two")[3:])
        reader.feed_eof()
        return [message async for message in frames.messages(reader)]

    assert asyncio.run(read()) == [[1], "two"]
