"""The C declarations of the libc calls that kvxfer makes, and the generator of `abi.py`.

`python -m kvxfer.system.cdef` writes `abi.py` anew: a pure-Python module that cffi loads in 2 ms, where parsing these
lines at import would take ten times as long. tests/house/test_abi_fresh.py proves that the two agree.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

# struct iovec: readv(2); the pointer is declared as an integer so that numpy columns can be laid over it.
# struct msghdr, mmsghdr: recvmmsg(2). ABI of 64-bit Linux (x86_64 and aarch64 agree).
# syscall: with the arguments of move_pages(2), the only call that is made by it.
# struct ifaddrs: getifaddrs(3). Its addresses are sockaddrs of several families; `interfaces.py` takes them apart.
SOURCE = """
struct iovec { uintptr_t base; size_t nbytes; };
struct msghdr {
    void *name; unsigned int name_nbytes;
    struct iovec *iov; size_t iov_count;
    void *control; size_t control_nbytes;
    int flags;
};
struct mmsghdr { struct msghdr header; unsigned int nbytes; };
struct sockaddr { unsigned short family; unsigned char data[14]; };
struct ifaddrs {
    struct ifaddrs *next; char *name; unsigned int flags;
    struct sockaddr *address; struct sockaddr *netmask;
    void *other_address; void *data;
};

int recvmmsg(int fd, struct mmsghdr *messages, unsigned int count, int flags, void *timeout);
ssize_t sendmsg(int fd, struct msghdr *message, int flags);
ssize_t process_vm_readv(int pid, struct iovec *local, unsigned long local_count,
                         struct iovec *remote, unsigned long remote_count, unsigned long flags);
ssize_t process_vm_writev(int pid, struct iovec *local, unsigned long local_count,
                          struct iovec *remote, unsigned long remote_count, unsigned long flags);
int getifaddrs(struct ifaddrs **list);
void freeifaddrs(struct ifaddrs *list);
int prctl(int option, unsigned long value, unsigned long, unsigned long, unsigned long);
long syscall(long number, int pid, unsigned long count, void **pages, int *nodes, int *status, int flags);
"""


def generate() -> str:
    """Return the text of `abi.py` for `SOURCE`."""
    from cffi import FFI

    builder = FFI()
    builder.set_source("kvxfer.system.abi", None)
    builder.cdef(SOURCE)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "abi.py"
        builder.emit_python_code(str(path))
        return path.read_text()


if __name__ == "__main__":
    Path(__file__).with_name("abi.py").write_text(generate())
