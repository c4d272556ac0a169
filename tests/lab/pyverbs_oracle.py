#!/usr/bin/env python3
"""What pyverbs, an independent user of libibverbs, says of the devices, and a peer that it plays.

Runs on the python3 that Debian's python3-pyverbs is made for, as a process of its own; imports nothing of kvxfer.

    pyverbs_oracle.py facts    prints one JSON object: all devices, ports and GID rows
    pyverbs_oracle.py peer     answers requests on standard input, one JSON object a line; `Peer` lists them

The names in the JSON are those of <infiniband/verbs.h>. `oracle.py` is the other end, for tests.
"""

import ctypes
import hashlib
import json
import mmap
import random
import socket
import sys
import time

import pyverbs.enums as e
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context, get_device_list
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

ACCESS = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ | e.IBV_ACCESS_REMOTE_ATOMIC
ACK_TIMEOUT_EXPONENT = 18  # 4.096 us * 2**18 = 1.07 s a try: a busy host stops an emulated CPU for as long
RETRY_COUNT = 6  # 7 makes soft-RoCE try for ever
OPCODES = {
    "write": e.IBV_WR_RDMA_WRITE,
    "read": e.IBV_WR_RDMA_READ,
    "write_with_imm": e.IBV_WR_RDMA_WRITE_WITH_IMM,
}


def public_facts(attributes):
    """Return what a pyverbs object of attributes holds, by name."""
    found = {name: getattr(attributes, name) for name in dir(attributes) if not name.startswith("_")}
    return {
        name: value.decode() if isinstance(value, bytes) else value
        for name, value in found.items()
        if isinstance(value, (int, str, bytes))
    }


def device_facts(device):
    """Return all that pyverbs knows of one device."""
    name = device.name.decode()
    with Context(name=name) as context:
        attributes = public_facts(context.query_device())
        numbers = range(1, attributes["phys_port_cnt"] + 1)
        ports = [{"port_num": number, **public_facts(context.query_port(number))} for number in numbers]
        rows = context.query_gid_table(sum(port["gid_tbl_len"] for port in ports))
        return {
            "name": name,
            "guid": device.guid,
            "node_type": device.node_type,
            "transport_type": device.transport_type,
            "index": device.index,
            "attributes": attributes,
            "ports": ports,
            "gids": [gid_facts(row) for row in rows],
        }


def gid_facts(row):
    """Return one row of the GID table; the GID in the long form of sysfs."""
    return {
        "port_num": row.port_num,
        "gid_index": row.gid_index,
        "gid": row.gid_str(),
        "gid_type": row.gid_type,
        "ndev_ifindex": row.ndev_ifindex,
        "netdev": socket.if_indextoname(row.ndev_ifindex) if row.ndev_ifindex else "",
    }


def pattern(seed, nbytes):
    """Return bytes that another process makes from the same seed."""
    return random.Random(seed).randbytes(nbytes)


class Peer:
    """One RC queue pair over one buffer. Each public method answers the request that has its name as "do"."""

    def open(self, device, gid_index, nbytes, port=1, buffer="mmap"):
        """Make everything up to a queue pair in INIT; returns what the other side must know."""
        self.context = Context(name=device)
        self.port, self.gid_index = port, gid_index
        self.memory = mmap.mmap(-1, nbytes) if buffer == "mmap" else bytearray(nbytes)
        addr = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.protection_domain = PD(self.context)
        self.memory_region = MR(self.protection_domain, nbytes, ACCESS, address=addr)
        self.send_queue, self.receive_queue = CQ(self.context, 64), CQ(self.context, 64)
        capabilities = QPCap(max_send_wr=32, max_recv_wr=32, max_send_sge=1, max_recv_sge=1)
        self.queue_pair = QP(
            self.protection_domain,
            QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self.send_queue, rcq=self.receive_queue, cap=capabilities),
        )
        attributes = QPAttr(port_num=port)
        attributes.qp_access_flags = ACCESS
        self.queue_pair.to_init(attributes)
        self.psn = random.getrandbits(24)
        state = self.context.query_port(port)
        return {
            "qp_num": self.queue_pair.qp_num,
            "psn": self.psn,
            "gid": self.context.query_gid(port, gid_index).gid,
            "lid": state.lid,
            "active_mtu": state.active_mtu,
            "addr": addr,
            "rkey": self.memory_region.rkey,
            "nbytes": nbytes,
        }

    def connect(self, qp_num, psn, gid, path_mtu, read_depth=16):
        """Go to RTR and RTS towards the other side; path_mtu is a number of enum ibv_mtu."""
        attributes = QPAttr(port_num=self.port)
        route = GlobalRoute(dgid=GID(gid), sgid_index=self.gid_index, hop_limit=64)
        attributes.ah_attr = AHAttr(gr=route, is_global=1, port_num=self.port)
        attributes.path_mtu = path_mtu
        attributes.dest_qp_num = qp_num
        attributes.rq_psn, attributes.sq_psn = psn, self.psn
        attributes.max_rd_atomic = attributes.max_dest_rd_atomic = read_depth
        attributes.min_rnr_timer = 12
        attributes.timeout = ACK_TIMEOUT_EXPONENT
        attributes.retry_cnt = attributes.rnr_retry = RETRY_COUNT
        self.queue_pair.to_rts(attributes)
        return {"qp_state": self.queue_pair.qp_state}

    def write(self, **range_):
        """Post a WRITE and wait for its completion: local_offset, remote_addr, rkey, nbytes."""
        return self._post("write", **range_)

    def read(self, **range_):
        """Post a READ and wait for its completion: as for write."""
        return self._post("read", **range_)

    def write_with_imm(self, imm, **range_):
        """Post a WRITE_WITH_IMM and wait for its completion: as for write, and the immediate as a number."""
        return self._post("write_with_imm", imm=imm, **range_)

    def _post(self, operation, local_offset, remote_addr, rkey, nbytes, imm=0, wait_s=30):
        element = SGE(self._address() + local_offset, nbytes, self.memory_region.lkey)
        request = SendWR(
            wr_id=1,
            opcode=OPCODES[operation],
            num_sge=1,
            sg=[element],
            imm_data=socket.htonl(imm),
            send_flags=e.IBV_SEND_SIGNALED,
        )
        request.set_wr_rdma(rkey, remote_addr)
        self.queue_pair.post_send(request)
        return self._completion(self.send_queue, wait_s)

    def post_receive(self):
        """Post a receive for a WRITE_WITH_IMM. pyverbs wants a range with it, which such a write leaves alone."""
        element = SGE(self._address(), 1, self.memory_region.lkey)
        self.queue_pair.post_recv(RecvWR(wr_id=2, num_sge=1, sg=[element]))
        return {}

    def wait_receive(self, wait_s=30):
        """Wait for a receive's completion; `imm` is the immediate as a number."""
        return self._completion(self.receive_queue, wait_s)

    def _completion(self, queue, wait_s):
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            count, completions = queue.poll()
            if count:
                done = completions[0]
                return {
                    "wr_id": done.wr_id,
                    "status": done.status,
                    "opcode": done.opcode,
                    "byte_len": done.byte_len,
                    "wc_flags": done.wc_flags,
                    "imm": socket.ntohl(done.imm_data),
                }
            time.sleep(0.0002)
        raise TimeoutError(f"no completion within {wait_s} s")

    def fill(self, seed, offset=0, nbytes=None):
        """Fill the buffer, or a part of it, with `pattern(seed)`."""
        nbytes = len(self.memory) - offset if nbytes is None else nbytes
        self.memory[offset : offset + nbytes] = pattern(seed, nbytes)
        return {}

    def sha256(self, offset=0, nbytes=None):
        """Return the digest of the buffer, or of a part of it."""
        end = len(self.memory) if nbytes is None else offset + nbytes
        return {"sha256": hashlib.sha256(self.memory[offset:end]).hexdigest()}

    def close(self):
        """Give everything back, the newest first."""
        made = ("queue_pair", "send_queue", "receive_queue", "memory_region", "protection_domain", "context")
        for name in made:
            if hasattr(self, name):
                getattr(self, name).close()
        return {}

    def _address(self):
        return ctypes.addressof(ctypes.c_char.from_buffer(self.memory))


def serve():
    """Answer requests until "quit" or the end of standard input."""
    peer = Peer()
    for line in sys.stdin:
        request = json.loads(line)
        name = request.pop("do")
        if name == "quit":
            break
        try:
            if name.startswith("_"):
                raise ValueError(f"no request {name}")
            answer = {"ok": True, **getattr(peer, name)(**request)}
        except Exception as exc:  # whatever pyverbs raises is the test's to judge
            answer = {"ok": False, "error": f"{type(exc).__name__}: {exc}"}
        print(json.dumps(answer), flush=True)
    peer.close()


if __name__ == "__main__":
    if sys.argv[1:] == ["facts"]:
        print(json.dumps({"devices": [device_facts(device) for device in get_device_list()]}))
    elif sys.argv[1:] == ["peer"]:
        serve()
    else:
        sys.exit(__doc__)
