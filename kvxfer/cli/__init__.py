"""The command line: `kvxfer demo`, `serve`, `bench`, `devices`, `doctor`, `mesh`.

This file is the parser and what holds for every command: how errors are told, exit statuses, interrupts. Each command
is a module of its own and is imported when it is run, so that `kvxfer --help` answers at once.

Exit status: 0 done, 1 it did not work, 2 the command line is wrong, 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from kvxfer import __version__
from kvxfer.cli import arguments as types
from kvxfer.cli.keys import remedy_of
from kvxfer.errors import KvxferError, UsageError

__all__ = ["main"]

STATUS_FAILED = 1
STATUS_USAGE = 2
STATUS_INTERRUPTED = 130  # 128 + SIGINT, as shells have it
STATUS_BROKEN_PIPE = 141  # 128 + SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. Reads `sys.argv` by default."""
    _open_missing_streams()
    try:
        return _run(argv)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return STATUS_INTERRUPTED
    except BrokenPipeError:
        _close_output()
        return STATUS_BROKEN_PIPE
    except KvxferError as error:
        if os.environ.get("KVXFER_TRACEBACK") == "1":
            raise
        print(f"kvxfer: {' '.join(filter(None, (error.message, remedy_of(error))))}", file=sys.stderr)
        return STATUS_USAGE if isinstance(error, UsageError) else STATUS_FAILED
    except OSError as error:  # the output cannot be written: a full disk, a terminal that is gone
        if os.environ.get("KVXFER_TRACEBACK") == "1":
            raise
        with contextlib.suppress(OSError):
            print(f"kvxfer: {error.filename or 'the output'}: {error.strerror or error}.", file=sys.stderr)
        _close_output()
        return STATUS_FAILED


def _run(argv: Sequence[str] | None) -> int:
    parser = build_parser()
    chosen, unknown = parser.parse_known_args(argv)
    if unknown:  # told by the parser of the command, which knows where its help is
        what = "there is no option" if unknown[0].startswith("-") else "unexpected argument"
        getattr(chosen, "parser", parser).error(f"{what} {unknown[0]}")
    if chosen.command is None:
        parser.print_help()
        return STATUS_USAGE
    module = importlib.import_module(f"kvxfer.cli.{chosen.command.replace('-', '_')}")
    try:
        status = int(module.run(chosen))
    except KvxferError as error:
        if getattr(chosen, "json", False):  # whoever reads objects gets one, and a person the line on stderr
            print(json.dumps({"error": error.message, "remedy": remedy_of(error)}), flush=True)
        raise
    sys.stdout.flush()  # a reader that has gone is noticed here, not by the interpreter on its way out
    return status


def _open_missing_streams() -> None:
    """Let what was closed for us (`>&-`) be /dev/null: else a socket would get the number of standard output."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free: this one
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def _close_output() -> None:
    """Let the interpreter flush into nothing (docs.python.org, "Note on SIGPIPE")."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, with the way to help."""

    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ")
        self.exit(STATUS_USAGE, f"{self.prog}: {message}. See `{self.prog} --help`.\n")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser: argparse.ArgumentParser = _Parser(
        prog="kvxfer",
        description="Move KV-cache blocks between processes and machines.",
        epilog=_examples(
            """
            kvxfer doctor                        what this machine can do, and what to change
            kvxfer devices                       RDMA devices, and which of their addresses are used, and why
            kvxfer demo                          two processes, every transport, every byte checked
            kvxfer serve --host 192.0.2.7        on one machine: memory that others may bench against
            kvxfer bench --peer 192.0.2.7:7777   on another: how fast is the way to it?
            kvxfer mesh hosts.txt                every RDMA rail between many hosts, in one matrix

            `kvxfer COMMAND --help` tells more about each.
            KVXFER_TRACEBACK=1 shows where an error came from.
            """
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"kvxfer {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    _add_demo(commands)
    _add_serve(commands)
    _add_bench(commands)
    _add_devices(commands)
    _add_doctor(commands)
    _add_mesh(commands)
    _add_shim_path(commands)
    return parser


Commands = argparse._SubParsersAction  # argparse gives its type no public name


def _add_demo(commands: Commands[argparse.ArgumentParser]) -> None:
    demo = _add_command(
        commands,
        "demo",
        "move blocks between two processes over every transport and check every byte",
        """
        Starts a second process, moves scattered blocks both ways over each transport that works here, compares every
        byte, and shows the speed beside that of a plain memory copy of the same blocks in the same run.
        Exit status 0: every usable transport moved every byte right, and at least one ran.
        """,
        """
        kvxfer demo
        kvxfer demo --transports tcp --block-size 4KiB --blocks 16384
        kvxfer demo --json | jq -r 'select(.verified) | "\\(.transport) \\(.write_gbps) GB/s"'
        """,
    )
    demo.add_argument(
        "--transports",
        "--transport",
        type=types.listed(types.transport),
        default=types.TRANSPORT_NAMES,
        metavar="LIST",
        help="which to show, of shm,rdma,tcp (default: all)",
    )
    demo.add_argument("--blocks", type=types.positive, default=1024, metavar="N", help="blocks a batch (default: 1024)")
    demo.add_argument(
        "--block-size", type=types.size, default=64 << 10, metavar="SIZE", help="bytes a block (default: 64KiB)"
    )
    demo.add_argument(
        "--pool-size",
        type=types.size,
        metavar="SIZE",
        help="memory the blocks are scattered over; there are four to six of it (default: twice the blocks)",
    )
    demo.add_argument("--rounds", type=types.positive, default=7, metavar="N", help="rounds measured (default: 7)")
    demo.add_argument("--json", action="store_true", help="print one JSON object a line, one per transport")


def _add_serve(commands: Commands[argparse.ArgumentParser]) -> None:
    serve = _add_command(
        commands,
        "serve",
        "offer memory for others to bench against",
        """
        Runs an engine with a pool named kvxfer.serve, which any peer may read and write, until Ctrl-C or SIGTERM.
        Prints the address to give to `kvxfer bench --peer` and `kvxfer doctor --peer`, and each peer that comes and
        goes. Bench from one place at a time: two would overwrite each other's blocks. For `kvxfer mesh` it also opens
        the engines that it is asked to: use a key where not everybody may have that done.
        """,
        """
        kvxfer serve
        kvxfer serve --host 192.0.2.7 --port 7777 --size 4GiB
        KEY=$(openssl rand -hex 32) kvxfer serve --key-env KEY
        """,
    )
    serve.add_argument("--host", metavar="HOST", help="address to listen on (default: the engine's)")
    serve.add_argument("--port", type=types.port, default=None, metavar="PORT", help="port (default: any free one)")
    serve.add_argument("--size", type=types.size, default=1 << 30, metavar="SIZE", help="bytes offered (default: 1GiB)")
    serve.add_argument(
        "--transport",
        "--transports",
        type=types.listed(types.transport),
        metavar="LIST",
        help="which to offer, of shm,rdma,tcp (default: the engine's)",
    )
    _add_key(serve)
    serve.add_argument("--json", action="store_true", help="print one JSON object a line, one per event")


def _add_bench(commands: Commands[argparse.ArgumentParser]) -> None:
    bench = _add_command(
        commands,
        "bench",
        "measure transfers over block sizes and counts",
        """
        Moves batches of scattered blocks and shows the speed of each block size, beside that of a plain memory copy of
        the same blocks in the same rounds. Without --peer it starts a second process here, which looks at its memory
        itself; with --peer what was written is read back and compared.
        """,
        """
        kvxfer bench
        kvxfer bench --transport tcp --op write --sizes 4KiB,16KiB,64KiB,256KiB,1MiB --plot tcp.svg
        kvxfer bench --sizes 4KiB --blocks 1,8,64,512 --rounds 50
        kvxfer bench --peer 192.0.2.7:7777 --json > results.jsonl
        """,
    )
    bench.add_argument(
        "--peer", type=types.peer, metavar="HOST:PORT", help="measure against a `kvxfer serve` there (default: here)"
    )
    bench.add_argument("--host", metavar="HOST", help="address of this side (default: the engine's)")
    bench.add_argument(
        "--transport",
        "--transports",
        type=types.listed(types.transport),
        metavar="LIST",
        help="which to measure, of shm,rdma,tcp (default: all that work here; with --peer the one the engine chooses)",
    )
    bench.add_argument(
        "--op",
        type=types.listed(types.operation),
        default=types.OPERATIONS,
        metavar="LIST",
        help="which to measure, of write,read (default: both)",
    )
    bench.add_argument(
        "--sizes",
        type=types.listed(types.size),
        default=(4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20),
        metavar="LIST",
        help="block sizes (default: 4KiB,16KiB,64KiB,256KiB,1MiB)",
    )
    amount = bench.add_mutually_exclusive_group()
    amount.add_argument(
        "--bytes-per-batch",
        type=types.size,
        default=64 << 20,
        metavar="SIZE",
        help="bytes of a batch, from which the number of blocks follows (default: 64MiB)",
    )
    amount.add_argument("--blocks", type=types.listed(types.positive), metavar="LIST", help="blocks a batch")
    bench.add_argument("--rounds", type=types.positive, default=7, metavar="N", help="rounds measured (default: 7)")
    bench.add_argument(
        "--memory",
        choices=("allocated", "registered"),
        default="allocated",
        help="pools from the engine's allocate(), or plain memory given to register() (default: allocated)",
    )
    _add_key(bench)
    bench.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the result too: a .png or .svg (needs matplotlib)"
    )
    bench.add_argument("--json", action="store_true", help="print one JSON object a line, one per row")


def _add_devices(commands: Commands[argparse.ArgumentParser]) -> None:
    devices = _add_command(
        commands,
        "devices",
        "show the RDMA devices of this machine and what kvxfer would use of them",
        """
        Shows each port with its state, link, speed and MTU, the limits kvxfer keeps to, and every row of its GID table
        with the reason for or against it. The settings that fix a choice (KVXFER_RDMA_DEVICES, KVXFER_GID_INDEX ...)
        are taken into account. Exit status 1: no port can be used.
        """,
        """
        kvxfer devices
        kvxfer devices mlx5_0 mlx5_1:2
        kvxfer devices --to 192.0.2.9        is there a route from each address to this one?
        kvxfer devices --json | jq -r '.ports[] | select(.usable) | .gid_index'
        """,
    )
    devices.add_argument("names", nargs="*", metavar="NAME", help="devices or ports to show (default: all)")
    devices.add_argument("--to", type=types.address, metavar="ADDRESS", help="also look for routes to this IP address")
    devices.add_argument("--json", action="store_true", help="print one JSON object a line, one per device")


def _add_doctor(commands: Commands[argparse.ArgumentParser]) -> None:
    doctor = _add_command(
        commands,
        "doctor",
        "check this machine and say what to change",
        """
        Looks at everything kvxfer depends on: packages, limits, memory, addresses, what one process may do to another,
        and each transport. With --peer it opens that engine and says which transport carries, and why the others were
        passed over; where both have RDMA it tries each rail, through the pool of a `kvxfer serve` if it is one, and
        shows the attributes of queue pairs beside those of other engines. Exit status 1: a check failed.
        """,
        """
        kvxfer doctor
        kvxfer doctor --peer gpu-node-3:7777
        kvxfer doctor --json | jq 'select(.status | IN("warn", "fail"))'
        """,
    )
    doctor.add_argument("--peer", type=types.peer, metavar="HOST:PORT", help="also try to open the engine there")
    _add_key(doctor)
    doctor.add_argument("--json", action="store_true", help="print one JSON object a line, one per check")


def _add_mesh(commands: Commands[argparse.ArgumentParser]) -> None:
    mesh = _add_command(
        commands,
        "mesh",
        "try every RDMA rail between many engines, from one host",
        """
        HOSTFILE has one HOST:PORT a line, each of a `kvxfer serve` (or of any engine, which is then tried by the
        others); # begins a comment, - is standard input. Each serve connects its ports with the ports of every other
        engine, writes a little, reads it back, compares it and tells the result. It writes to the pools of the serves:
        do not bench meanwhile. Ports that have no path to each other, such as rails in separate subnets, are shown as -
        and are no failure. Exit status 1: a rail that should work does not, an engine did not answer, or two engines
        have no rail at all.
        """,
        """
        kvxfer serve --host 0.0.0.0 --port 7777          on each host
        kvxfer mesh hosts.txt                            on any one
        kvxfer mesh hosts.txt --parallel 1               one rail at a time: slower, steadier rates
        kvxfer mesh hosts.txt --json | jq 'select(.status == "failed")'
        """,
    )
    mesh.add_argument("hostfile", type=Path, metavar="HOSTFILE", help="one HOST:PORT of an engine a line; - is stdin")
    mesh.add_argument(
        "--timeout", type=types.seconds, default=120.0, metavar="SECONDS", help="time for all of it (default: 120)"
    )
    mesh.add_argument(
        "--parallel",
        type=types.parallel,
        default=4,
        metavar="N",
        help="rails that each engine tries at once (default: 4)",
    )
    _add_key(mesh)
    mesh.add_argument("--json", action="store_true", help="print one JSON object a line: the engines, then the rails")


def _add_shim_path(commands: Commands[argparse.ArgumentParser]) -> None:
    _add_command(
        commands,
        "shim-path",
        "print the folder that puts kvxfer in Mooncake's place",
        """
        Prints a folder for PYTHONPATH. A program that is started with it, and that imports mooncake.engine, gets
        kvxfer's: the same calls, with shared memory between the processes of one host. Calls return Mooncake's
        integers; the log has one line for each that failed, and kvxfer.compat.mooncake.last_error() the exception
        behind it. initialize with "rdma" returns -6 where no RDMA device can carry data: KVXFER_ALLOW_FALLBACK=1 goes
        on over tcp then, MC_FORCE_TCP=1 asks for tcp. MC_LOG_LEVEL=INFO shows what carries to each peer. All
        differences, and what becomes of Mooncake's variables, are in docs/mooncake.md of the source.
        """,
        """
        PYTHONPATH=$(kvxfer shim-path) vllm serve ...
        export PYTHONPATH=$(kvxfer shim-path)${PYTHONPATH:+:$PYTHONPATH}
        python -c 'import mooncake.engine as e; print(e.__file__)'
        """,
    )


def _add_command(
    commands: Commands[argparse.ArgumentParser], name: str, summary: str, description: str, examples: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=summary,
        description=textwrap.fill(" ".join(description.split()), 90),
        epilog=_examples(examples),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(parser=parser)
    return parser


def _add_key(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--key-env",
        metavar="NAME",
        help="environment variable that holds the pre-shared key; both sides need the same",
    )


def _examples(text: str) -> str:
    return "examples:\n" + textwrap.indent(textwrap.dedent(text).strip(), "  ")
