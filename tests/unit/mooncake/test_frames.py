"""A length that cannot be is told as what it mostly is: the text of another protocol."""

from __future__ import annotations

import pytest

from kvxfer.errors import RemoteProtocolError
from kvxfer.mooncake.wire.frames import MessageDecoder


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n", "looks like an HTTP server: its first bytes are b'HTTP/1.1'"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "looks like an SSH server"),
        (b"\x93kvxfer\n", "looks like a kvxfer engine"),
        (b"hello you there", "does not speak Mooncake's protocol: its first bytes are b'hello yo'"),
        (b"\xff" * 8, "a message announces 18446744073709551615 bytes"),
        (b"\0" * 8, "a message announces 0 bytes"),
    ],
)
def test_length_that_cannot_be_is_told_as_what_it_is(data: bytes, told: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        MessageDecoder().feed(data)

    assert told in str(caught.value)
    assert "host and port" in caught.value.remedy
    assert caught.value.values["first_bytes"] == data[:8].hex()
