"""A long random run outside CI: attacks on serving engines and clients, kills and stops, until the time is up.

    python tests/fuzz/run.py --seconds 60 --seed N

Each round draws one attack from its own seed (`--seed` and its number), which is printed when it fails; run it alone
with `--seed N --round K`. Ends with 0 if nothing was found.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvxfer.handshake.frames import HEADER, MAGIC, SESSION_KINDS, encode_json
from kvxfer.handshake.frames import FrameKind as Kind
from kvxfer.handshake.machine import Role
from tests.faults import test_final, test_hostile_bytes
from tests.support.fault_peer import (
    FAKE_ADDRESS,
    FakePeer,
    RawClient,
    make_machine,
    mutate,
    read_request,
    respond,
    response,
    write_request,
)
from tests.support.peer import Peer

hostile = test_hostile_bytes
MEDIA = ("tcp", "shm", "shm-any")


class Field:
    """The processes that rounds are played with; made when first needed, and anew after a failure."""

    def __init__(self) -> None:
        self.target = hostile.Target()
        self.client = Peer(handshake_timeout_s=1.0, connect_timeout_s=1.0, transports=("shm", "tcp"))
        self._benches: dict[str, test_final.Bench] = {}

    def bench(self, medium: str) -> test_final.Bench:
        if medium not in self._benches:
            self._benches[medium] = test_final.Bench(medium)
        return self._benches[medium]

    def close(self) -> None:
        for bench in self._benches.values():
            bench.close()
        self.client.close()
        self.target.close()


def attack_control_port(field: Field, rng: random.Random) -> None:
    for _ in range(20):
        attach = MAGIC + encode_json(Kind.ATTACH, {"token": "0" * 32, "target": "0" * 32})
        hostile.knock(field.target, mutate(rng.choice((make_machine(Role.INITIATOR).data_to_send(), attach)), rng))
    field.target.check()


def attack_session(field: Field, rng: random.Random) -> None:
    with RawClient(field.target.server.address) as raw:
        for _ in range(rng.randrange(1, 30)):
            body = rng.choice((b'{"number": 1, "ids": [1], "connection": 5}', rng.randbytes(12), b"", b"[" * 500))
            frame = HEADER.pack(len(body), rng.choice(sorted(SESSION_KINDS)), 0, 0) + body
            raw.send(frame if rng.random() < 0.5 else mutate(frame, rng))
    field.target.check()


def attack_data_port(field: Field, rng: random.Random) -> None:
    target = field.target
    with RawClient(target.server.address) as raw:
        for _ in range(10):
            with raw.attach() as stream, contextlib.suppress(OSError):
                where = rng.choice((target.read_only.address, target.no_rights_address, target.address - 16))
                whole = rng.choice((write_request(where, b"M" * 32), read_request(where, 32)))
                for _ in range(rng.choice((1, 5))):
                    stream.sendall(mutate(whole, rng))
                if rng.random() < 0.3:
                    stream.settimeout(0.05)
                    hostile.receive_rest_quietly(stream)
    target.check(may_have_become_valid=True)


def attack_client(field: Field, rng: random.Random) -> None:
    settings = {"address": "", "n": 64, "there": FAKE_ADDRESS, "opcode": rng.choice((1, 2)), "notify": None}
    kinds = [rng.choice(sorted(SESSION_KINDS)) for _ in range(3)]
    frames = b"".join(mutate(HEADER.pack(13, kind, 0, 0) + b'{"number": 1}', rng) for kind in kinds)
    lies = rng.choice(
        (
            {"raw": mutate(make_machine(Role.RESPONDER).data_to_send(), rng)},
            {"attached": mutate(MAGIC + encode_json(Kind.ATTACHED, {"number": 7}), rng)},
            {"data": respond(mutate(response(0, 1, 64) + b"x" * 64, rng), then=lambda _: None)},
            {"frames": frames, "data": respond(response(0, 1, 0), then=lambda _: None)},
        )
    )
    with FakePeer(**lies) as fake, contextlib.suppress(*hostile.TYPED, hostile.NotRegisteredError):  # type: ignore[arg-type]
        field.client.run(hostile.MOVE, **(settings | {"address": fake.address}))


def stop_in_mid_transfer(field: Field, rng: random.Random) -> None:
    bench, opcode, timeout_s = field.bench(rng.choice(MEDIA)), rng.choice(("write", "read")), rng.uniform(0.05, 0.25)
    assert test_final.stop_in_round(bench, opcode, rng.uniform(0.0, timeout_s), timeout_s)


def stop_before_transfer(field: Field, rng: random.Random) -> None:
    assert test_final.stop_first_round(field.bench("tcp"), rng.choice((1, 2, 16, 200)))


def end_in_mid_transfer(field: Field, rng: random.Random) -> None:
    bench, opcode = field.bench(rng.choice(MEDIA)), rng.choice(("write", "read"))
    segment = bench.segment
    end = rng.choice((test_final.TransferBatch.cancel, lambda _: segment.close()))
    test_final.end_in_mid_transfer(bench, opcode, rng.uniform(0.0, 0.05), end)
    bench.reopen()


ROUNDS: tuple[Callable[[Field, random.Random], None], ...] = (
    attack_control_port,
    attack_session,
    attack_data_port,
    attack_client,
    stop_in_mid_transfer,
    stop_before_transfer,
    end_in_mid_transfer,
)


def play(seed: int, number: int, field: Field) -> str:
    """Play one round; its name. Raises what it found."""
    rng = random.Random(f"{seed} {number}")
    chosen = rng.choice(ROUNDS)
    try:
        chosen(field, rng)
    except BaseException:
        print(f"failed: {chosen.__name__}, --seed {seed} --round {number}", flush=True)
        raise
    return chosen.__name__


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--round", type=int, default=None, help="play this one only")
    arguments = parser.parse_args()
    seed = random.randrange(2**32) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    end = time.monotonic() + arguments.seconds
    played: Counter[str] = Counter()
    failures = 0
    number = arguments.round or 0
    field = Field()
    try:
        while (arguments.round is None and time.monotonic() < end) or number == arguments.round:
            try:
                played[play(seed, number, field)] += 1
            except Exception:
                traceback.print_exc()
                failures += 1
                field.close()
                field = Field()
            number += 1
        field.target.check_end()
    finally:
        field.close()
    print(f"{sum(played.values())} rounds were good, {failures} failed: {dict(played)}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
