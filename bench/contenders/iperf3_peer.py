"""iperf3, one stream over loopback with its default windows: what TCP itself reaches here. Checks no content.

Its server lives as long as the target; its client cannot be kept, so each repetition starts one. iperf3 times the
stream itself, so the start is not in the figure.
"""

from __future__ import annotations

import json
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from contenders.base import Measurement, Peer, run_peer
from harness import Blocks, Side

START_TIMEOUT_S = 5.0


class Iperf3Peer(Peer):
    """At the target the server, at the initiator whoever starts a client."""

    def __init__(self, *, side: Side, name: str, pool_nbytes: int) -> None:
        super().__init__()
        self._server: subprocess.Popen[bytes] | None = None
        if side == "target":
            self._port = _find_free_port()
            command = ["iperf3", "--server", "--bind", "127.0.0.1", "--port", str(self._port)]
            bound_to_us = ["setpriv", "--pdeathsig", "KILL", *command]  # util-linux: it ends when this process does
            self._server = subprocess.Popen(bound_to_us, stdout=subprocess.DEVNULL)
            self._wait_for_server()

    def card(self) -> int | None:
        return self._port if self._server else None

    def connect(self, card: int | None) -> None:
        if card is not None:
            self._port = card

    def prepare(self, blocks: Blocks) -> None:
        return None

    def measure(self, blocks: Blocks, prepared: Any, *, is_latency: bool, pids: list[int]) -> Measurement:
        """Send as many bytes as the batch has, from the initiator, or with --reverse to it.

        The CPU time is iperf3's own account of both of its processes.
        """
        command = ["iperf3", "--json", "--client", "127.0.0.1", "--port", str(self._port)]
        command += ["--bytes", str(blocks.nbytes)]
        if blocks.operation == "read":
            command.append("--reverse")
        report = json.loads(subprocess.run(command, capture_output=True, check=False).stdout)
        if "error" in report:
            raise RuntimeError(f"iperf3: {report['error']}")
        received, cpu = report["end"]["sum_received"], report["end"]["cpu_utilization_percent"]
        cpu_s = (cpu["host_total"] + cpu["remote_total"]) / 100 * received["seconds"]
        return Measurement([received["seconds"]], received["bytes"], cpu_s)

    def transfer(self, blocks: Blocks, prepared: Any) -> float:
        raise NotImplementedError("measure() does it")

    def transfer_each(self, blocks: Blocks) -> list[float]:
        raise NotImplementedError("iperf3 measures throughput only")

    def close(self) -> None:
        if self._server:
            self._server.terminate()
            self._server.wait()

    def _wait_for_server(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if f":{self._port:04X} 00000000:0000 0A" in Path("/proc/net/tcp").read_text():  # 0A: listening
                return
            time.sleep(0.02)
        raise RuntimeError(f"iperf3 did not listen on port {self._port} within {START_TIMEOUT_S:g} s")


def _find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    run_peer(Iperf3Peer)
