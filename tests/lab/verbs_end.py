"""One end of a connection, made of kvxfer's verbs objects: device, protection domain, memory region, queue pair.

The counterpart of `oracle.PyverbsPeer`, in this process, with the same `card`. No engine, no handshake: a test tells
each end of the other.
"""

from __future__ import annotations

import ipaddress
import random
import time
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import numpy as np

from kvxfer.verbs.completion_queue import CompletionQueue
from kvxfer.verbs.device import open_device
from kvxfer.verbs.enums import Access, Mtu, SendFlags, WorkOpcode
from kvxfer.verbs.port import AddressVector
from kvxfer.verbs.queue_pair import QueuePairCapabilities
from kvxfer.verbs.work_request import WorkRequestBatch

ACCESS = Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_READ
HOP_LIMIT = 64
READ_DEPTH = 16  # as the pyverbs peer has it
RETRY_COUNT = 6  # 7 makes soft-RoCE try for ever
ACK_TIMEOUT_EXPONENT = 18  # 4.096 us * 2**18 = 1.07 s a try: a busy host stops an emulated CPU for as long
COMPLETION_WAIT_S = 60  # an emulated machine may need seconds


class VerbsEnd:
    """An RC queue pair over one buffer, `memory`. card: what the other side must know of it."""

    def __init__(self, device: str, *, gid_index: int, nbytes: int = 1 << 16, port: int = 1) -> None:
        self.memory = np.zeros(nbytes, np.uint8)
        self.port, self.gid_index = port, gid_index
        self._owned = ExitStack()
        try:
            self._open(device)
        except BaseException:
            self._owned.close()
            raise

    def _open(self, device: str) -> None:
        self.context = self._owned.enter_context(open_device(device))
        domain = self._owned.enter_context(self.context.alloc_pd())
        address = self.memory.ctypes.data
        self.region = self._owned.enter_context(domain.register(address, self.memory.nbytes, ACCESS))
        self.send_cq = self._owned.enter_context(self.context.create_cq(64))
        self.recv_cq = self._owned.enter_context(self.context.create_cq(64))
        capabilities = QueuePairCapabilities(max_send_wr=32, max_recv_wr=32)
        self.queue_pair = self._owned.enter_context(
            domain.create_qp(self.send_cq, self.recv_cq, capabilities=capabilities)
        )
        self.queue_pair.to_init(port=self.port, access=Access.REMOTE_WRITE | Access.REMOTE_READ)
        self.batch = WorkRequestBatch(32)
        gid = self.context.query_gid_table(self.port).find(self.gid_index)
        assert gid is not None, f"{device} has no GID {self.gid_index}"
        self.psn = random.getrandbits(24)
        self.card: dict[str, Any] = {
            "qp_num": self.queue_pair.number,
            "psn": self.psn,
            "gid": ipaddress.IPv6Address(gid.value).exploded,
            "active_mtu": int(self.context.query_port(self.port).active_mtu),
            "addr": address,
            "rkey": self.region.rkey,
            "nbytes": self.memory.nbytes,
        }

    def connect(self, *, qp_num: int, psn: int, gid: str, path_mtu: Mtu) -> None:
        """Take the queue pair to RTS towards another."""
        dgid = ipaddress.IPv6Address(gid).packed
        address = AddressVector(
            port=self.port, is_global=True, dgid=dgid, sgid_index=self.gid_index, hop_limit=HOP_LIMIT
        )
        self.connect_by(address, qp_num=qp_num, psn=psn, path_mtu=path_mtu)

    def connect_by(self, address: AddressVector, *, qp_num: int, psn: int, path_mtu: Mtu) -> None:
        """Take the queue pair to RTS by an address vector that was built elsewhere."""
        self.queue_pair.to_rtr(
            address=address, dest_qp_num=qp_num, path_mtu=path_mtu, rq_psn=psn, max_dest_rd_atomic=READ_DEPTH
        )
        self.queue_pair.to_rts(
            sq_psn=self.psn, max_rd_atomic=READ_DEPTH, timeout=ACK_TIMEOUT_EXPONENT, retry_cnt=RETRY_COUNT
        )

    def transfer(
        self, opcode: WorkOpcode, *, remote_addr: int, rkey: int, nbytes: int, local_offset: int = 0, wr_id: int = 1
    ) -> int:
        """Carry out one WRITE or READ; return the completion's status."""
        self.batch.clear()
        self.batch.append(
            opcode,
            local_addr=self.card["addr"] + local_offset,
            lkey=self.region.lkey,
            remote_addr=remote_addr,
            rkey=rkey,
            nbytes=nbytes,
            wr_id=wr_id,
            send_flags=SendFlags.SIGNALED,
        )
        self.queue_pair.post_send(self.batch)
        done = wait_completion(self.send_cq)
        assert done["wr_id"] == wr_id
        return int(done["status"])

    def close(self) -> None:
        """Give everything back."""
        self._owned.close()

    def __enter__(self) -> VerbsEnd:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def wait_completion(queue: CompletionQueue) -> np.void:
    """Return the one completion that a queue gets."""
    deadline = time.monotonic() + COMPLETION_WAIT_S
    while time.monotonic() < deadline:
        rows = queue.poll()
        if len(rows):
            assert len(rows) == 1, rows
            return rows[0].copy()
        time.sleep(0.0002)  # the device's work may need this very CPU
    raise AssertionError(f"no completion within {COMPLETION_WAIT_S} s: {queue!r}")
