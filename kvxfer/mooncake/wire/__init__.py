"""What Mooncake's Transfer Engine says on the wire: control messages, segment descriptors, frames of its tcp data port.

Pure: bytes and JSON values in, dataclasses out, and back; no socket, thread or clock. All that comes from a peer or a
metadata server is checked here, and what cannot be is a RemoteProtocolError.
"""
