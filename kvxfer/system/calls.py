"""The libc calls themselves, with errno turned into a negative return value: no exception on the way of bytes.

Every function here takes addresses on trust. Callers (the transports) have checked each row against the region tables.
"""

from __future__ import annotations

import errno
import os
import socket
from typing import Any

from kvxfer.system.abi import ffi

CData = Any

libc = ffi.dlopen(None)

MSG_DONTWAIT = int(socket.MSG_DONTWAIT)
MSG_NOSIGNAL = int(socket.MSG_NOSIGNAL)
MSG_WAITALL = int(socket.MSG_WAITALL)
PR_SET_PTRACER, PR_SET_PTRACER_ANY = 0x59616D61, 2**64 - 1  # linux/prctl.h


class Messenger:
    """The message headers of one thread's calls on one socket, made once.

    Not for two threads at a time.
    """

    __slots__ = ("_received", "_received_header", "_sent")

    def __init__(self) -> None:
        self._received = ffi.new("struct mmsghdr *")
        self._received_header = self._received.header
        self._sent = ffi.new("struct msghdr *")

    def send(self, fd: int, iov: CData, count: int, flags: int) -> int:
        """sendmsg(2) without SIGPIPE: the bytes taken, or -errno."""
        self._sent.iov = iov
        self._sent.iov_count = count
        sent = libc.sendmsg(fd, self._sent, flags | MSG_NOSIGNAL)
        return int(sent) if sent >= 0 else -int(ffi.errno)

    def receive(self, fd: int, iov: CData, count: int, flags: int) -> int:
        """Receive into `count` iovecs: the bytes placed, 0 at the end of the stream, or -errno.

        recvmmsg(2) with one message, because it looks at the socket's pending error before it copies anything, in the
        same system call. recv(2) would hand out what is still queued after the peer has reset the connection, and a
        process stopped between a check and the call would write memory after the peer reported a failure.
        """
        self._received_header.iov = iov
        self._received_header.iov_count = count
        if libc.recvmmsg(fd, self._received, 1, flags, ffi.NULL) >= 0:
            return int(self._received.nbytes)
        return -int(ffi.errno)


def permit_ptrace() -> int:
    """Let every process of this user trace this one, and so reach its memory, under Yama's ptrace_scope 1 (prctl(2),
    PR_SET_PTRACER): 0, or -errno."""
    failed = libc.prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0)
    return -int(ffi.errno) if failed else 0


def is_readable(address: int) -> bool:
    """Whether a byte of this process can be read: the kernel looks, so that no signal comes of it. True where the call
    is forbidden and nobody can tell."""
    rows = ffi.new("struct iovec[2]", [(int(ffi.cast("uintptr_t", _one_byte)), 1), (address, 1)])
    return process_vm_read(os.getpid(), rows, rows + 1, 1) != -errno.EFAULT


_one_byte = ffi.new("char *")


def process_vm_write(pid: int, local: CData, remote: CData, count: int) -> int:
    """process_vm_writev(2): the bytes written, or -errno."""
    done = libc.process_vm_writev(pid, local, count, remote, count, 0)
    return int(done) if done >= 0 else -int(ffi.errno)


def process_vm_read(pid: int, local: CData, remote: CData, count: int) -> int:
    """process_vm_readv(2): the bytes read, or -errno."""
    done = libc.process_vm_readv(pid, local, count, remote, count, 0)
    return int(done) if done >= 0 else -int(ffi.errno)
