"""The tests' end of `pyverbs_oracle.py`: its facts, and queue pairs made by pyverbs in processes of their own."""

from __future__ import annotations

import functools
import json
import random
import select
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

PYTHON = "/usr/bin/python3"  # what Debian's python3-pyverbs is made for, whatever runs the tests
SCRIPT = Path(__file__).with_name("pyverbs_oracle.py")
ANSWER_WAIT_S = 120  # more than the peer itself waits for a completion, on an emulated machine
WC_SUCCESS = 0


@functools.cache
def pyverbs_facts() -> dict[str, dict[str, Any]]:
    """Return what pyverbs says of each device, by name. Read once: devices that come later are not in it."""
    done = subprocess.run([PYTHON, SCRIPT, "facts"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"pyverbs_oracle.py facts failed:\n{done.stderr}"
    return {device["name"]: device for device in json.loads(done.stdout)["devices"]}


def pattern(seed: int, nbytes: int) -> bytes:
    """Return the bytes that a peer's `fill` makes from `seed`."""
    return random.Random(seed).randbytes(nbytes)


class PyverbsPeer:
    """A process that holds one RC queue pair and one buffer, made by pyverbs.

    `card` is what the other side must know of it: qp_num, psn, gid, active_mtu, addr, rkey, nbytes.
    """

    def __init__(self, device: str, *, gid_index: int, nbytes: int = 1 << 16, buffer: str = "mmap") -> None:
        self._process = subprocess.Popen(
            [PYTHON, SCRIPT, "peer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        try:
            self.card = self.ask("open", device=device, gid_index=gid_index, nbytes=nbytes, buffer=buffer)
        except BaseException:
            self.close()
            raise

    def try_ask(self, do: str, **values: Any) -> dict[str, Any]:
        """Send one request, return the answer, good or bad."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": do, **values}) + "\n")
        ready, _, _ = select.select([self._process.stdout], [], [], ANSWER_WAIT_S)
        line = self._process.stdout.readline() if ready else ""
        assert line, f"pyverbs peer gave no answer to {do} {values}; its status is {self._process.poll()}"
        return dict(json.loads(line))

    def ask(self, do: str, **values: Any) -> dict[str, Any]:
        """Send one request, return its answer; a refusal fails the test."""
        answer = self.try_ask(do, **values)
        assert answer.pop("ok"), f"pyverbs peer: {do} {values}: {answer['error']}"
        return answer

    def connect(self, *, qp_num: int, psn: int, gid: str, path_mtu: int) -> None:
        """Take the queue pair to RTS towards another."""
        self.ask("connect", qp_num=qp_num, psn=psn, gid=gid, path_mtu=path_mtu)

    def transfer(self, do: str, *, remote_addr: int, rkey: int, nbytes: int, local_offset: int = 0, **more: Any) -> int:
        """Carry out "write", "read" or "write_with_imm" (and imm=); return the completion's status."""
        done = self.ask(do, local_offset=local_offset, remote_addr=remote_addr, rkey=rkey, nbytes=nbytes, **more)
        return int(done["status"])

    def sha256(self, *, offset: int = 0, nbytes: int | None = None) -> str:
        """Return the digest of its buffer or of a part."""
        return str(self.ask("sha256", offset=offset, nbytes=nbytes)["sha256"])

    def close(self) -> None:
        """Let the process end."""
        try:
            self._process.communicate('{"do": "quit"}\n', timeout=ANSWER_WAIT_S)
        finally:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> PyverbsPeer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def join(left: PyverbsPeer, right: PyverbsPeer) -> None:
    """Connect two peers with each other, with the smaller MTU of the two."""
    path_mtu = min(left.card["active_mtu"], right.card["active_mtu"])
    for here, there in ((left, right), (right, left)):
        here.connect(qp_num=there.card["qp_num"], psn=there.card["psn"], gid=there.card["gid"], path_mtu=path_mtu)
