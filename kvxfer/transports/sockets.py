"""What is done to sockets at more than one place."""

from __future__ import annotations

import contextlib
import socket
import struct

__all__ = ["close_with_reset"]

_AT_ONCE = struct.pack("ii", 1, 0)
"""SO_LINGER with 0 seconds: close sends RST (socket(7))."""


def close_with_reset(connection: socket.socket) -> None:
    """Close so that the peer finds an error before anything that is still queued, not the end of a stream."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
    connection.close()
