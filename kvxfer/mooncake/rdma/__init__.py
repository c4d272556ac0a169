"""RDMA with processes that run the real Mooncake: their handshake, their keys, our queue pairs.

`peer.py` reads and writes such a process; `answer.py` lets it read and write our memory. What both do is in
`handshake.py`, and what either end tells of its memory in `descriptor.py`. Everything behind a connected queue pair is
the rdma transport's.
"""

from kvxfer.mooncake.rdma.answer import MooncakeRdmaAnswer
from kvxfer.mooncake.rdma.descriptor import rdma_buffers, rdma_devices
from kvxfer.mooncake.rdma.peer import MooncakeRdmaPeer

__all__ = ["MooncakeRdmaAnswer", "MooncakeRdmaPeer", "rdma_buffers", "rdma_devices"]
