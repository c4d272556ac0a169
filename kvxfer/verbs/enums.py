"""The enumerations of <infiniband/verbs.h> under their own names.

A number that a newer driver or library knows and this file does not keeps its value and is called UNKNOWN_<number>:
it never stops a healthy transfer. tests/house/test_verbs_layout.py compares the values with the header.
"""

from __future__ import annotations

import enum

__all__ = [
    "Access",
    "CompletionOpcode",
    "CompletionStatus",
    "EventType",
    "ForkStatus",
    "GidType",
    "LinkLayer",
    "Mtu",
    "NodeType",
    "PortState",
    "QueuePairMask",
    "QueuePairState",
    "QueuePairType",
    "SendFlags",
    "TransportType",
    "WorkOpcode",
]


class _Enum(enum.IntEnum):
    """An enumeration that lets unknown numbers live."""

    @classmethod
    def _missing_(cls, value: object) -> _Enum | None:
        if not isinstance(value, int):
            return None
        member = int.__new__(cls, value)
        member._name_ = f"UNKNOWN_{value}"
        member._value_ = value
        return member

    def __str__(self) -> str:
        return self.name


class NodeType(_Enum):
    """What kind of device it is."""

    UNKNOWN = -1
    CA = 1
    SWITCH = 2
    ROUTER = 3
    RNIC = 4
    USNIC = 5
    USNIC_UDP = 6
    UNSPECIFIED = 7


class TransportType(_Enum):
    """What its queue pairs speak."""

    UNKNOWN = -1
    IB = 0
    IWARP = 1
    USNIC = 2
    USNIC_UDP = 3
    UNSPECIFIED = 4


class GidType(_Enum):
    """The kind of a row of the GID table: a RoCE v1 row and a v2 row with the same value are two."""

    IB = 0
    ROCE_V1 = 1
    ROCE_V2 = 2

    def __str__(self) -> str:
        return {0: "InfiniBand", 1: "RoCE v1", 2: "RoCE v2"}.get(int(self), self.name)


class Mtu(_Enum):
    """The path MTU, as a code."""

    MTU_256 = 1
    MTU_512 = 2
    MTU_1024 = 3
    MTU_2048 = 4
    MTU_4096 = 5

    @property
    def nbytes(self) -> int:
        """The payload of one packet, in bytes; 0 for a code that is none."""
        return 128 << self if 1 <= self <= 5 else 0

    @classmethod
    def of_nbytes(cls, nbytes: int) -> Mtu:
        """Return the code of 256, 512, 1024, 2048 or 4096 bytes."""
        for mtu in cls:
            if mtu.nbytes == nbytes:
                return mtu
        raise ValueError(f"{nbytes} is no MTU; there are {', '.join(str(mtu.nbytes) for mtu in cls)}")

    def __str__(self) -> str:
        return str(self.nbytes) if self.nbytes else self.name


class PortState(_Enum):
    """Whether a port carries data: only ACTIVE does."""

    NOP = 0
    DOWN = 1
    INIT = 2
    ARMED = 3
    ACTIVE = 4
    ACTIVE_DEFER = 5


class LinkLayer(_Enum):
    """What is under the port."""

    UNSPECIFIED = 0
    INFINIBAND = 1
    ETHERNET = 2

    def __str__(self) -> str:
        return {0: "unspecified", 1: "InfiniBand", 2: "Ethernet"}.get(int(self), self.name)


class QueuePairType(_Enum):
    """The service of a queue pair; kvxfer uses RC."""

    RC = 2
    UC = 3
    UD = 4
    RAW_PACKET = 8
    XRC_SEND = 9
    XRC_RECV = 10
    DRIVER = 0xFF


class QueuePairState(_Enum):
    """The states of a queue pair; `qp_states.py` knows the ways between them."""

    RESET = 0
    INIT = 1
    RTR = 2
    RTS = 3
    SQD = 4
    SQE = 5
    ERR = 6
    UNKNOWN = 7


class Access(enum.IntFlag):
    """What a memory region, or a queue pair, lets be done."""

    NONE = 0
    LOCAL_WRITE = 1
    REMOTE_WRITE = 2
    REMOTE_READ = 4
    REMOTE_ATOMIC = 8
    MW_BIND = 16
    ZERO_BASED = 32
    ON_DEMAND = 64
    HUGETLB = 128
    FLUSH_GLOBAL = 256
    FLUSH_PERSISTENT = 512
    RELAXED_ORDERING = 1 << 20

    def __str__(self) -> str:
        return "|".join(str(flag.name) for flag in type(self) if flag and flag in self) or "NONE"


OPTIONAL_ACCESS = 0x3FF00000
"""The access bits that a device may ignore: 20 to 29 (IBV_ACCESS_OPTIONAL_RANGE)."""


class QueuePairMask(enum.IntFlag):
    """Which fields of ibv_qp_attr a call means."""

    STATE = 1 << 0
    CUR_STATE = 1 << 1
    EN_SQD_ASYNC_NOTIFY = 1 << 2
    ACCESS_FLAGS = 1 << 3
    PKEY_INDEX = 1 << 4
    PORT = 1 << 5
    QKEY = 1 << 6
    AV = 1 << 7
    PATH_MTU = 1 << 8
    TIMEOUT = 1 << 9
    RETRY_CNT = 1 << 10
    RNR_RETRY = 1 << 11
    RQ_PSN = 1 << 12
    MAX_QP_RD_ATOMIC = 1 << 13
    ALT_PATH = 1 << 14
    MIN_RNR_TIMER = 1 << 15
    SQ_PSN = 1 << 16
    MAX_DEST_RD_ATOMIC = 1 << 17
    PATH_MIG_STATE = 1 << 18
    CAP = 1 << 19
    DEST_QPN = 1 << 20
    RATE_LIMIT = 1 << 25


class WorkOpcode(_Enum):
    """What a work request of a send queue does."""

    RDMA_WRITE = 0
    RDMA_WRITE_WITH_IMM = 1
    SEND = 2
    SEND_WITH_IMM = 3
    RDMA_READ = 4
    ATOMIC_CMP_AND_SWP = 5
    ATOMIC_FETCH_AND_ADD = 6


class SendFlags(enum.IntFlag):
    """How a work request of a send queue is done."""

    NONE = 0
    FENCE = 1
    SIGNALED = 2
    SOLICITED = 4
    INLINE = 8
    IP_CSUM = 16


class CompletionOpcode(_Enum):
    """What a successful completion completes; not to be read of a failed one."""

    SEND = 0
    RDMA_WRITE = 1
    RDMA_READ = 2
    COMP_SWAP = 3
    FETCH_ADD = 4
    BIND_MW = 5
    LOCAL_INV = 6
    RECV = 128
    RECV_RDMA_WITH_IMM = 129


class CompletionStatus(_Enum):
    """How a work request ended; `meaning` says what usually stands behind it."""

    SUCCESS = 0
    LOC_LEN_ERR = 1
    LOC_QP_OP_ERR = 2
    LOC_EEC_OP_ERR = 3
    LOC_PROT_ERR = 4
    WR_FLUSH_ERR = 5
    MW_BIND_ERR = 6
    BAD_RESP_ERR = 7
    LOC_ACCESS_ERR = 8
    REM_INV_REQ_ERR = 9
    REM_ACCESS_ERR = 10
    REM_OP_ERR = 11
    RETRY_EXC_ERR = 12
    RNR_RETRY_EXC_ERR = 13
    LOC_RDD_VIOL_ERR = 14
    REM_INV_RD_REQ_ERR = 15
    REM_ABORT_ERR = 16
    INV_EECN_ERR = 17
    INV_EEC_STATE_ERR = 18
    FATAL_ERR = 19
    RESP_TIMEOUT_ERR = 20
    GENERAL_ERR = 21
    TM_ERR = 22
    TM_RNDV_INCOMPLETE = 23

    @property
    def meaning(self) -> str:
        """The usual cause, for a message."""
        return _MEANINGS.get(int(self), "the device gives no reason that is known here")


_MEANINGS = {
    0: "done",
    1: "a message longer than the receiver's buffer or the device's max_msg_sz",
    2: "the local queue pair cannot do this operation, or its port went down",
    4: "a local key does not cover the local memory of the request",
    5: "flushed, because the queue pair was already in the error state",
    8: "the peer's data did not fit the local memory that a key covers",
    9: "the peer's device refused the request: too long, or more reads at once than it allows",
    10: "the remote key does not cover the remote memory, or does not allow this; a peer that restarted or "
    "unregistered the memory gives the same",
    11: "the peer's device could not finish the request",
    12: "no acknowledgement after all retries: the peer died, its queue pair is gone, a link is down, the path MTU "
    "does not fit, or the GIDs do not reach each other",
    13: "the peer had no receive posted",
    19: "the device failed",
    20: "the device got no response",
    21: "the device reports a general error",
}


class EventType(_Enum):
    """What an asynchronous event tells."""

    CQ_ERR = 0
    QP_FATAL = 1
    QP_REQ_ERR = 2
    QP_ACCESS_ERR = 3
    COMM_EST = 4
    SQ_DRAINED = 5
    PATH_MIG = 6
    PATH_MIG_ERR = 7
    DEVICE_FATAL = 8
    PORT_ACTIVE = 9
    PORT_ERR = 10
    LID_CHANGE = 11
    PKEY_CHANGE = 12
    SM_CHANGE = 13
    SRQ_ERR = 14
    SRQ_LIMIT_REACHED = 15
    QP_LAST_WQE_REACHED = 16
    CLIENT_REREGISTER = 17
    GID_CHANGE = 18
    WQ_FATAL = 19
    SPEED_CHANGE = 20

    @property
    def is_of_port(self) -> bool:
        """Whether the event's element is a port number."""
        return self in _PORT_EVENTS

    @property
    def is_of_queue_pair(self) -> bool:
        """Whether the event's element is a queue pair."""
        return self in _QUEUE_PAIR_EVENTS


_PORT_EVENTS = frozenset({9, 10, 11, 12, 13, 17, 18, 20})
_QUEUE_PAIR_EVENTS = frozenset({1, 2, 3, 4, 5, 6, 7, 16})


class ForkStatus(_Enum):
    """Whether registered memory survives a fork of this process."""

    DISABLED = 0
    ENABLED = 1
    UNNEEDED = 2
