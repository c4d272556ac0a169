"""The control protocol without I/O: frames, the handshake machine, keepalive. `session.py` owns the sockets."""
