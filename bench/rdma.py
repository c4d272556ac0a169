"""How fast is kvxfer over RDMA beside perftest (and Mooncake), on the same two devices, in one interleaved run?

    python3 bench/rdma.py --here rxa0 --there rxb0         # both on this host: the soft-RoCE lab, or two ports of a NIC
    python3 bench/rdma.py --mooncake --second rxa1,rxb1    # Mooncake as well, and two rails beside one

Two kvxfer rows: `raw` is a loop of post and poll on a queue pair of kvxfer's verbs layer, what `ib_write_bw` is in C;
`engine` is a batch through TransferEngine, every byte checked, with the CPU time that both processes took for it (what
the kernel does by itself is no process's), and the first transfer to a process that was just started. With `--second` a
large batch goes over two rails and over one, each wire held to `--rate` by tc, so that it is the limit and not the CPU;
that needs root, and netdevs that may be shaped. perftest comes from Debian's package of that name;
Mooncake from `make peers`, and is left out where it is not installed; with it comes `drop-in`, kvxfer in its place by
the very same calls with Python lists, in batches of 1,024 rows. Each round runs every contender once, in turn; the
figure is the median of the rounds' ratios. One JSON line for each question at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

import kvxfer
from kvxfer.verbs.device import open_device
from kvxfer.verbs.enums import Access, Mtu, WorkOpcode
from kvxfer.verbs.gid_choice import rank_gid_pairs
from kvxfer.verbs.queue_pair import QueuePairCapabilities
from kvxfer.verbs.work_request import WorkRequestBatch
from processes import cpu_time_s, machine_words

BENCH = Path(__file__).parent
REAL_MOONCAKE: tuple[str, dict[str, str]] = (str(BENCH / ".peers/mooncake/bin/python"), {})
_PATH = os.pathsep.join(str(folder) for folder in (BENCH.parent / "kvxfer/compat/shim", BENCH.parent))
DROP_IN: tuple[str, dict[str, str]] = (sys.executable, {"PYTHONPATH": _PATH, "KVXFER_TRANSPORTS": "rdma"})
RIVALS = ("perftest", "mooncake", "one-rail")
DEPTH = 128
SIZES = (4 << 10, 64 << 10, 1 << 20)
PERFTEST_PORT = 18515
POOL_NBYTES = 256 << 20
MOONCAKE_ROWS_MAX = 1024
ASKED_RAW = {4 << 10: 0.8, 64 << 10: 0.95, 1 << 20: 0.95}
ASKED_BATCH = {"64KiBx1024": 0.9, "4KiBx16384": 0.75}
ASKED_TWO_RAILS = 1.6
IDLE_ASKED = 0.1
FIRST_NBYTES = 64 << 10
SIGNAL_EVERY = 32
LATENCY_GROUP = 20


def run(arguments: argparse.Namespace) -> int:
    """Run all rounds and print the table and the JSON lines."""
    contenders = make_contenders(arguments)
    found: dict[str, list[float]] = {}
    for _ in range(arguments.rounds):
        for name, measure in contenders.items():
            value = measure()
            if value is not None:
                found.setdefault(name, []).append(value)
            print(f"{name:<38} {value if value is not None else float('nan'):10.2f}", flush=True)
    return report(found, arguments)


def report(found: dict[str, list[float]], arguments: argparse.Namespace) -> int:
    """Print one JSON line for each figure that has a baseline."""
    missed = 0
    for name, values in found.items():
        unit = "us" if "latency" in name else "CPU s/GiB" if "CPU" in name else "MiB/s"
        who, _, what = name.partition(" ")
        if who in RIVALS:
            continue
        for rival in RIVALS:
            baseline = find_baseline(found, rival, what)
            if baseline is None:
                continue
            pairs = list(zip(values, baseline, strict=False))
            ratio = statistics.median(mine / theirs for mine, theirs in pairs if theirs)
            asked = asked_for(who, what, rival)
            met = asked is None or (ratio <= asked if unit != "MiB/s" else ratio >= asked)
            missed += not met
            row = {
                "bench": "rdma",
                "question": f"{who} {what} beside {rival}",
                "value": round(statistics.median(values), 3),
                "unit": unit,
                "baseline": round(statistics.median(baseline), 3),
                "ratio": round(ratio, 3),
                "asked": asked,
                "met": met,
                "rounds": len(pairs),
                "devices": f"{arguments.here} {arguments.there}",
                "machine": machine_words(),
            }
            print(json.dumps(row))
    return 0


def find_baseline(found: dict[str, list[float]], rival: str, what: str) -> list[float] | None:
    """Return the rival's figures for the same thing; a batch of blocks is compared with the rival's blocks of that
    size."""
    if f"{rival} {what}" in found:
        return found[f"{rival} {what}"]
    is_plain = rival == "perftest" and "CPU" not in what and "wire" not in what
    return found.get(f"{rival} {what.partition('x')[0]}") if is_plain else None


def asked_for(who: str, what: str, rival: str) -> float | None:
    """Return the ratio that kvxfer sets itself."""
    if rival == "one-rail":
        return ASKED_TWO_RAILS
    if "CPU" in what or (who == "drop-in" and rival == "perftest"):
        return None
    if "latency" in what:
        return 1.3 if who == "raw" else 1.0
    if rival == "mooncake":
        return 1.0
    size = what.split()[1]
    if who == "raw":
        return ASKED_RAW[to_nbytes(size)]
    return ASKED_BATCH.get(size, 0.95)


def to_nbytes(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(KiB|MiB)", text.partition("x")[0]).groups()  # type: ignore[union-attr]
    return int(number) << {"KiB": 10, "MiB": 20}[unit]


def to_text(nbytes: int) -> str:
    return f"{nbytes >> 20}MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10}KiB"


def make_contenders(arguments: argparse.Namespace) -> dict[str, Callable[[], float | None]]:
    """Return what each round runs, in order."""
    raw = RawPair(arguments.here, arguments.there)
    engine = EnginePair(arguments.here, arguments.there)
    index = raw.gid_index
    contenders: dict[str, Callable[[], float | None]] = {}
    for size in SIZES:
        count = max(64, arguments.nbytes // size)
        for operation in ("write", "read"):
            label = f"{operation} {to_text(size)}"
            contenders[f"perftest {label}"] = lambda s=size, n=count, o=operation: perftest(  # type: ignore[misc]
                f"ib_{o}_bw", arguments, index, s, n
            )
            contenders[f"raw {label}"] = lambda s=size, n=count, o=operation: raw.bandwidth(o, s, n)  # type: ignore[misc]
    for size, count in ((1 << 20, 128), (64 << 10, 1024), (4 << 10, 16384)):
        for operation in ("write", "read"):
            label = f"{operation} {to_text(size)}x{count}"
            contenders[f"engine {label}"] = lambda s=size, n=count, o=operation: engine.batch(o, s, n)  # type: ignore[misc]
            contenders[f"engine {label} CPU"] = lambda: engine.cpu_s_per_gib
    contenders["perftest read latency"] = lambda: perftest("ib_read_lat", arguments, index, 8, 1000)
    contenders["raw read latency"] = lambda: raw.read_latency(8, 1000)
    contenders["engine first transfer latency"] = lambda: engine.first_transfer(arguments.there)
    if arguments.mooncake:
        real, ours = MooncakePair(arguments, *REAL_MOONCAKE), MooncakePair(arguments, *DROP_IN)
        for size, count in ((1 << 20, 128), (64 << 10, 1024), (4 << 10, 16384)):
            for operation in ("write", "read"):
                label = f"{operation} {to_text(size)}x{count}"
                for who, pair in (("mooncake", real), ("drop-in", ours)):
                    contenders[f"{who} {label}"] = lambda p=pair, s=size, n=count, o=operation: p.batch(o, s, n)  # type: ignore[misc]
                    contenders[f"{who} {label} CPU"] = lambda p=pair: p.cpu_s_per_gib  # type: ignore[misc]
        contenders["mooncake first transfer latency"] = real.first_transfer
        contenders["drop-in first transfer latency"] = ours.first_transfer
    if arguments.second:
        second = arguments.second.split(",")
        both = EnginePair(f"{arguments.here},{second[0]}", f"{arguments.there},{second[1]}")
        both.batch("write", 1 << 20, 64)  # connects the second rail
        devices = [arguments.here, arguments.there, *second]
        for operation in ("write", "read"):
            label = f"{operation} 1MiBx64, each wire {arguments.rate}"
            for who, pair in (("one-rail", engine), ("two-rails", both)):
                contenders[f"{who} {label}"] = lambda p=pair, o=operation: shaped_batch(p, o, devices, arguments.rate)  # type: ignore[misc]
    return {name: measure for name, measure in contenders.items() if arguments.only in name}


def perftest(program: str, arguments: argparse.Namespace, gid_index: int, size: int, count: int) -> float | None:
    """Return perftest's average MiB/s, or its typical latency in us; None where it gave none (it prints 0 or inf now
    and then)."""
    options = ["-x", str(gid_index), "-F", "-s", str(size), "-n", str(count)]
    if program.endswith("_bw"):
        options += ["-t", str(DEPTH)]
    server = subprocess.Popen(
        [program, "-d", arguments.there, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_for_listener(PERFTEST_PORT)
        done = subprocess.run(
            [program, "-d", arguments.here, *options, "127.0.0.1"],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        server.wait(20)
    finally:
        server.kill()
        server.wait()
    rows = [line.split() for line in done.stdout.splitlines() if re.match(rf"\s*{size}\s", line)]
    if done.returncode or not rows:
        print(done.stdout[-500:], done.stderr[-500:], file=sys.stderr)
        return None
    # bw: bytes, iterations, peak, average; lat: bytes, iterations, min, max, typical
    value = float(rows[-1][3 if program.endswith("_bw") else 4])
    return value if 0.0 < value < 1e7 else None


def wait_for_listener(port: int) -> None:
    """Wait until somebody listens."""
    wanted = f":{port:04X}"
    for _ in range(200):
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[1].endswith(wanted) and fields[3] == "0A":
                    return
        time.sleep(0.02)


class RawPair:
    """Two connected queue pairs of the verbs layer, and memory of both ends: what a perftest run has."""

    def __init__(self, here: str, there: str) -> None:
        self.memory = [np.zeros(max(SIZES), np.uint8) for _ in range(2)]
        self.contexts = [open_device(name) for name in (here, there)]
        ports = [context.query_port(1) for context in self.contexts]
        from kvxfer.system.interfaces import list_interfaces
        from kvxfer.verbs.gid_candidate import find_candidates
        from kvxfer.verbs.port import AddressVector

        interfaces = list_interfaces()
        candidates = [find_candidates(context.query_gid_table(1), interfaces) for context in self.contexts]
        pair = rank_gid_pairs(*candidates)[0]
        gids = (pair.local, pair.remote)
        self.gid_index = int(pair.local.index or 0)
        domains = [context.alloc_pd() for context in self.contexts]
        self.regions = [
            domain.register(
                memory.ctypes.data, memory.nbytes, Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_READ
            )
            for domain, memory in zip(domains, self.memory, strict=True)
        ]
        self.queues = [context.create_cq(DEPTH + 1) for context in self.contexts]
        capabilities = QueuePairCapabilities(max_send_wr=DEPTH)
        self.pairs = [
            domain.create_qp(queue, capabilities=capabilities)
            for domain, queue in zip(domains, self.queues, strict=True)
        ]
        mtu = min(port.active_mtu for port in ports)
        for at, queue_pair in enumerate(self.pairs):
            queue_pair.to_init(port=1)
            other = self.pairs[1 - at]
            address = AddressVector(1, True, gids[1 - at].value, int(gids[at].index or 0), hop_limit=64)
            queue_pair.to_rtr(
                address=address, dest_qp_num=other.number, path_mtu=Mtu(mtu), rq_psn=0, max_dest_rd_atomic=16
            )
        for queue_pair in self.pairs:
            queue_pair.to_rts(sq_psn=0, max_rd_atomic=16, retry_cnt=6)
        self.requests = WorkRequestBatch(DEPTH)
        self.local = np.full(DEPTH, self.regions[0].address)
        self.remote = np.full(DEPTH, self.regions[1].address)

    def _fill(self, operation: str, size: int, count: int, number: int) -> None:
        self.requests.fill(
            WorkOpcode.RDMA_WRITE if operation == "write" else WorkOpcode.RDMA_READ,
            local_addr=self.local[:count],
            lkey=self.regions[0].lkey,
            remote_addr=self.remote[:count],
            rkey=self.regions[1].rkey,
            nbytes=size,
            wr_id=number + 1,
            signal_every=SIGNAL_EVERY,
        )

    def bandwidth(self, operation: str, size: int, count: int) -> float:
        """Return MiB/s with DEPTH requests in flight."""
        source, target = (0, 1) if operation == "write" else (1, 0)
        self.memory[source][:size] = np.random.default_rng().integers(1, 256, size, dtype=np.uint8)
        self.memory[target][:size] = 0
        posted = done = 0
        started = time.perf_counter()
        while done < count:
            room = min(DEPTH - (posted - done), count - posted)
            if room >= min(SIGNAL_EVERY, count - posted) and room:
                self._fill(operation, size, room, posted)
                self.pairs[0].post_send(self.requests)
                posted += room
            rows = self.queues[0].poll()
            if len(rows):
                assert not rows["status"].any(), rows["status"]
                done = int(rows["wr_id"][-1])
        took = time.perf_counter() - started
        assert np.array_equal(self.memory[0][:size], self.memory[1][:size])
        return count * size / took / (1 << 20)

    def read_latency(self, size: int, count: int) -> float:
        """Return the median time of one read, in us, of groups of 20 one after the other: the clock is a system call in
        a User-Mode Linux guest, where perftest reads the counter of the CPU."""
        queue, pair, requests = self.queues[0], self.pairs[0], self.requests
        local, remote = self.regions[0], self.regions[1]
        times = []
        for _ in range(max(1, count // LATENCY_GROUP)):
            started = time.perf_counter()
            for _ in range(LATENCY_GROUP):
                requests.clear()
                requests.append(
                    WorkOpcode.RDMA_READ,
                    local_addr=local.address,
                    lkey=local.lkey,
                    remote_addr=remote.address,
                    rkey=remote.rkey,
                    nbytes=size,
                )
                pair.post_send(requests)
                while not len(queue.poll()):
                    pass
            times.append((time.perf_counter() - started) / LATENCY_GROUP)
        return statistics.median(times) * 1e6


class EnginePair:
    """An engine here, one in another process; both with pools of their own."""

    def __init__(self, here: str, there: str) -> None:
        self.engine = kvxfer.TransferEngine(transports=("rdma",), rdma_devices=here)
        self.pool = np.zeros(POOL_NBYTES, np.uint8)
        self.region = self.engine.register(self.pool)
        self.child, self.connection = start_server(there)
        address, self.remote, self.nbytes = self.connection.recv()
        self.segment = self.engine.open_segment(address)
        self.cpu_s_per_gib = 0.0
        """What both processes took for the last batch."""
        self.idle = 1.0
        """The part of the time of the last batch for which the CPUs of this machine were idle."""

    def batch(self, operation: str, size: int, count: int) -> float:
        """Return MiB/s of one batch of scattered blocks; raises where a byte is wrong."""
        slots = POOL_NBYTES // size
        order = np.random.default_rng()
        mine = order.permutation(slots)[:count] * size
        theirs = order.permutation(slots)[:count] * size
        self.ask("fill", theirs, size, 0 if operation == "write" else 7)
        data = order.integers(1, 256, size, dtype=np.uint8)
        for offset in mine:
            self.pool[offset : offset + size] = data if operation == "write" else 0
        move = self.engine.write if operation == "write" else self.engine.read
        pids = (os.getpid(), self.child.pid)
        cpu_before, idle_before, started = cpu_time_s(*pids), idle_s(), time.perf_counter()
        move(self.segment, self.region.address + mine, self.remote + theirs, size)
        took = time.perf_counter() - started
        self.idle = (idle_s() - idle_before) / took / (os.cpu_count() or 1)
        self.cpu_s_per_gib = (cpu_time_s(*pids) - cpu_before) * (1 << 30) / (count * size)
        if operation == "write":
            assert self.ask("check", theirs, size, data.tobytes())
        else:
            assert all((self.pool[offset : offset + size] == 7).all() for offset in mine)
        return count * size / took / (1 << 20)

    def first_transfer(self, there: str) -> float:
        """Return how long it takes to open a process that was just started and to write to it, in us."""
        child, connection = start_server(there, FIRST_NBYTES)
        try:
            address, remote, _ = connection.recv()
            started = time.perf_counter()
            segment = self.engine.open_segment(address)
            self.engine.write(segment, self.region.address, remote, FIRST_NBYTES)
            took = time.perf_counter() - started
            segment.close()
        finally:
            connection.close()
            child.wait(30)
        return took * 1e6

    def ask(self, *command: Any) -> Any:
        self.connection.send(command)
        return self.connection.recv()


def start_server(device: str, pool_nbytes: int = POOL_NBYTES) -> tuple[subprocess.Popen[bytes], Any]:
    """Start the other process; returns it and the connection on which it tells its memory and takes commands."""
    with Listener(("127.0.0.1", 0)) as listener:
        where = [device, str(listener.address[1]), str(pool_nbytes)]
        child = subprocess.Popen([sys.executable, __file__, "--serve", *where])
        return child, listener.accept()


def shaped_batch(pair: EnginePair, operation: str, devices: list[str], rate: str) -> float:
    """Return MiB/s of a large batch while what leaves these devices is held to a rate; says so where the CPUs, and not
    the wires, were the limit."""
    with shaped(devices, rate):
        value = pair.batch(operation, 1 << 20, 64)
    if pair.idle < IDLE_ASKED:
        print(
            f"    only {pair.idle:.0%} of the CPUs idle: they are the limit, not the wires. Lower --rate.", flush=True
        )
    return value


def idle_s() -> float:
    """Return for how long the CPUs of this machine have been idle, all together."""
    return int(Path("/proc/stat").read_text().split(maxsplit=5)[4]) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def shaped(devices: list[str], rate: str) -> Iterator[None]:
    """Have tc hold what leaves the netdevs of these devices to a rate."""
    netdevs = [Path(f"/sys/class/infiniband/{name}/ports/1/gid_attrs/ndevs/0").read_text().strip() for name in devices]
    try:
        for netdev in netdevs:
            subprocess.run(
                ["tc", "qdisc", "add", "dev", netdev, "root", "netem", "limit", "20000", "rate", rate], check=True
            )
        yield
    finally:
        for netdev in netdevs:
            subprocess.run(["tc", "qdisc", "del", "dev", netdev, "root"], check=False)


class MooncakePair:
    """Two engines with Mooncake's API, each in a process of its own (contenders/mooncake_rdma.py): the real one or
    the drop-in, as the interpreter and the environment have it."""

    def __init__(self, arguments: argparse.Namespace, python: str, environment: dict[str, str]) -> None:
        self._python, self._environment = python, environment
        self._there = (arguments.there, arguments.there_address)
        self.source, _ = self._start(arguments.here, arguments.here_address)
        self.target, self.told = self._start(*self._there)
        self.cpu_s_per_gib = 0.0

    def _start(
        self, device: str, address: str, pool_nbytes: int = POOL_NBYTES
    ) -> tuple[subprocess.Popen[str], dict[str, Any]]:
        process = subprocess.Popen(
            [self._python, BENCH / "contenders/mooncake_rdma.py", device, address, str(pool_nbytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **self._environment},
        )
        return process, _answer(process)

    def batch(self, operation: str, size: int, count: int) -> float | None:
        """Return MiB/s of one batch of scattered blocks, in calls of at most 1,024 rows; None where it fails."""
        slots = POOL_NBYTES // size
        order = np.random.default_rng()
        mine = (order.permutation(slots)[:count] * size).tolist()
        theirs = (order.permutation(slots)[:count] * size).tolist()
        value = int(order.integers(1, 256))
        is_write = operation == "write"
        _ask(self.source, "fill", mine, size, value if is_write else 0)
        _ask(self.target, "fill", theirs, size, 0 if is_write else value)
        remote = [self.told["address"] + offset for offset in theirs]
        pids = (self.source.pid, self.target.pid)
        cpu_before = cpu_time_s(*pids)
        moved = _ask(self.source, "move", operation, self.told["target"], mine, remote, size)
        self.cpu_s_per_gib = (cpu_time_s(*pids) - cpu_before) * (1 << 30) / (count * size)
        checked = _ask(*((self.target, "check", theirs) if is_write else (self.source, "check", mine)), size, value)
        return count * size / moved["seconds"] / (1 << 20) if moved["ok"] and checked["ok"] else None

    def first_transfer(self) -> float | None:
        """Return how long the first write to a process that was just started takes, in us."""
        target, told = self._start(*self._there, FIRST_NBYTES)
        try:
            moved = _ask(self.source, "move", "write", told["target"], [0], [told["address"]], FIRST_NBYTES)
        finally:
            target.kill()
            target.wait()
        return moved["seconds"] * 1e6 if moved["ok"] else None


def _ask(process: subprocess.Popen[str], *command: Any) -> dict[str, Any]:
    assert process.stdin is not None
    print(json.dumps(command), file=process.stdin, flush=True)
    return _answer(process)


def _answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = next(line for line in process.stdout if line.startswith("{"))
    answer: dict[str, Any] = json.loads(line)
    return answer


def serve(device: str, port: str, pool_nbytes: str) -> None:
    """The other process: a pool, and commands to fill and to check it."""
    connection = Client(("127.0.0.1", int(port)))
    pool = np.zeros(int(pool_nbytes), np.uint8)
    with kvxfer.TransferEngine(transports=("rdma",), rdma_devices=device) as engine:
        region = engine.register(pool)
        connection.send((engine.address, region.address, region.nbytes))
        while True:
            try:
                what, offsets, size, data = connection.recv()
            except EOFError:
                return
            if what == "fill":
                for offset in offsets:
                    pool[offset : offset + size] = data
                connection.send(True)
            else:
                wanted = np.frombuffer(data, np.uint8)
                connection.send(all((pool[offset : offset + size] == wanted).all() for offset in offsets))


def main() -> int:
    """Parse the command line and run."""
    if sys.argv[1:2] == ["--serve"]:
        serve(*sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--here", default="rxa0", help="device of the initiator (default: rxa0, as in the lab)")
    parser.add_argument("--there", default="rxb0", help="device of the target (default: rxb0)")
    parser.add_argument("--here-address", default="10.10.0.1", help="for Mooncake: an address of this side")
    parser.add_argument("--there-address", default="10.10.0.2", help="for Mooncake: an address of the other side")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--nbytes", type=int, default=64 << 20, help="bytes of one measurement (default: 64 MiB)")
    parser.add_argument("--second", help="devices of a second rail, as rxa1,rxb1: two rails beside one")
    parser.add_argument("--rate", default="400mbit", help="what tc holds each wire to then (default: 400mbit)")
    parser.add_argument("--mooncake", action="store_true", help="compare with Mooncake as well (make peers)")
    parser.add_argument("--only", default="", metavar="WORDS", help="only what has these words in its name: first")
    arguments = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
