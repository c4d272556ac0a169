#!/usr/bin/env python3
"""How fast is kvxfer in Mooncake's place, beside the real Mooncake, under the very same calls?

One program, contenders/mooncake_peer.py, runs on the real engine, and on kvxfer by the shim, with shared memory
(`drop-in`) and by tcp alone (`drop-in-tcp`). It passes Python lists to `batch_transfer_sync_write` and `_read`, 1,024
rows at a time, which is what Mooncake takes; the memory is numpy's own, registered by address. The `-async` contenders
are the same by `batch_transfer_async_write` and `_read`. Rounds are interleaved and every byte is checked, as in
peers.py. Prints JSON lines: the contenders, then the ratios.
"""

from __future__ import annotations

import argparse
import json
import sys

import report
from harness import POOL_NBYTES, WORKLOADS
from peers import Tournament, say
from processes import machine_words
from roster import DROP_INS


def main() -> int:
    """Measure and print; the exit status is 0 only where every contender ran and every byte was right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, metavar="N", help="rounds to measure (default 10)")
    parser.add_argument("--only", metavar="NAME,...", help=f"only these contenders; there are: {', '.join(DROP_INS)}")
    parser.add_argument("--table", action="store_true", help="tables instead of JSON lines")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    names = options.only.split(",") if options.only else list(DROP_INS)
    if unknown := [name for name in names if name not in DROP_INS]:
        parser.error(f"no such contender: {', '.join(unknown)}")
    with Tournament(list(WORKLOADS.values()), POOL_NBYTES) as tournament:
        for name in names:
            tournament.admit(DROP_INS[name])
        for round_ in range(options.rounds):
            tournament.play_round(round_)
            say(f"round {round_ + 1} of {options.rounds} done")
    if tournament.samples and options.table:
        print(report.tables(tournament.samples, machine_words()))
    elif tournament.samples:
        for row in report.json_rows(tournament.samples, machine_words()):
            print(json.dumps(row))
    for failure in tournament.failures:
        say(f"FAILED: {failure}")
    return 1 if tournament.failures else 0


if __name__ == "__main__":
    sys.exit(main())
