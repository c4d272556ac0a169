"""`kvxfer serve`: an engine with a pool that others may bench against, until Ctrl-C or SIGTERM.

Everything a peer does happens in the engine; this file only waits, and prints who comes and goes. That it learns from
the engine's log events, as any program can that configures structlog. What `kvxfer mesh` asks is done in
`mesh_agent.py`.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, MutableMapping
from types import FrameType
from typing import Any

from kvxfer.cli.checks_network import is_exposed
from kvxfer.cli.environment import given
from kvxfer.cli.keys import key_settings
from kvxfer.cli.mesh_agent import MeshAgent
from kvxfer.cli.rail_check import REGION_NAME
from kvxfer.cli.table import Style, format_size, wrap
from kvxfer.engine import TransferEngine
from kvxfer.runtime import KEY_REMEDY, WITHOUT_KEY
from kvxfer.text import guess_protocol

__all__ = ["REGION_NAME", "run", "to_words"]

TURN_S = 0.5
"""How often notifications are fetched, so that they do not pile up; a signal or an event ends the turn early."""
SHOWN_PREFIXES = ("peer.", "listener.")

Event = Mapping[str, Any]


class Stop(Exception):  # noqa: N818  not an error: the way out of the loop
    """A signal asked for the end."""


def run(arguments: Namespace) -> int:
    """Serve until told to stop; 0 then."""
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    settings = given(host=arguments.host, port=arguments.port, transports=arguments.transport)
    show = _Printer(is_json=arguments.json)
    agent: MeshAgent | None = None
    _on_signals(_raise_stop)
    try:
        observe_log(events)
        with TransferEngine(**settings, **key_settings(arguments.key_env)) as engine:
            region = engine.allocate(arguments.size, name=REGION_NAME)
            agent = MeshAgent(engine, events.put)
            show.ready(engine.address, region.nbytes, engine.transports, is_exposed=is_exposed(engine.config))
            while True:
                _show_until(events, show, time.monotonic() + TURN_S)
                for note in engine.notifications():
                    if not agent.take(note.peer, note.payload):
                        show.event({"event": "notification", "peer": note.peer, "nbytes": len(note.payload)})
    except Stop:
        if agent is not None:
            agent.close()
        show.stopped()
        _on_signals(signal.SIG_IGN)  # one that comes now, on the way out, must not change the exit status
        return 0


def observe_log(events: queue.SimpleQueue[Event]) -> None:
    """Have the engine's log events put into `events` instead of printed."""
    import structlog

    def keep(logger: object, method: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
        del logger, method
        if str(event.get("event", "")).startswith(SHOWN_PREFIXES):
            events.put(dict(event))
        raise structlog.DropEvent

    structlog.configure(processors=[keep], cache_logger_on_first_use=False)


def _on_signals(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


def _raise_stop(number: int, frame: FrameType | None) -> None:
    del number, frame
    _on_signals(lambda *_: None)  # once is enough: a second one must not cut the goodbye short
    raise Stop


def _show_until(events: queue.SimpleQueue[Event], show: _Printer, deadline: float) -> None:
    while (left := deadline - time.monotonic()) > 0:
        try:
            show.event(events.get(timeout=left))
        except queue.Empty:
            return


def to_words(event: Event) -> str:
    """Return what is told of an event, after the name of the peer. One that is not known here is told as it is."""
    name = str(event["event"])
    tell = _WORDS.get(name)
    if tell is not None:
        return tell(event)
    rest = ", ".join(f"{key} {value}" for key, value in event.items() if key not in ("event", "peer", "label"))
    return name.removeprefix("peer.").replace(".", " ") + (f": {rest}" if rest else "")


def _stranger(event: Event) -> str:
    first_bytes = bytes.fromhex(str(event.get("first_bytes", "")))
    guess = guess_protocol(first_bytes)
    return f"is not a kvxfer peer ({f'looks like {guess}' if guess else f'its first bytes are {first_bytes!r}'})"


def _silent(event: Event) -> str:
    received = event.get("received_nbytes", 0)
    said = f"sent {received} bytes and then nothing more" if received else "connected and said nothing"
    return f"{said} in time; the connection was closed"


def _mesh_answered(event: Event) -> str:
    counts = [f"{count} {key}" for key, count in event.items() if key not in ("event", "peer", "label")]
    return f"has its answer for the mesh: {', '.join(counts) or 'no'} rails"


_WORDS: dict[str, Callable[[Event], str]] = {
    "peer.connected": lambda event: f"connected over {event.get('transport')}",
    "peer.disconnected": lambda event: "disconnected",
    "peer.refused": lambda event: f"was refused: {event.get('reason')}",
    "listener.stranger": _stranger,
    "listener.silent": _silent,
    "listener.full": lambda event: (
        f"was refused: connections_max ({event.get('connections_max')}) connections are open already"
    ),
    "listener.accept_failed": lambda event: (
        f"a connection could not be taken: {event.get('error')}; it is tried again. Is the limit on open files too low?"
    ),
    "mesh.asked": lambda event: f"asks for a mesh; engines to try: {event.get('targets')}",
    "mesh.refused": lambda event: f"asked for a mesh and was refused: {event.get('reason')}",
    "mesh.answered": _mesh_answered,
    "notification": lambda event: f"sent a notification of {event.get('nbytes')} bytes",
}


class _Printer:
    """Prints what happens, for a person or as one JSON object a line."""

    def __init__(self, *, is_json: bool) -> None:
        self._is_json = is_json
        self._style = Style.of(sys.stdout)

    def ready(self, address: str, nbytes: int, transports: tuple[str, ...], *, is_exposed: bool) -> None:
        """Say where to connect, and whether everybody may."""
        warning = f"{WITHOUT_KEY}. {KEY_REMEDY}" if is_exposed else ""
        if self._is_json:
            self._print_json(
                event="ready",
                address=address,
                region=REGION_NAME,
                nbytes=nbytes,
                transports=list(transports),
                pid=os.getpid(),
                warning=warning,
            )
            return
        style = self._style
        print(
            f"ready: {style.paint(address, 'bold', 'green')} offers {format_size(nbytes)} over {', '.join(transports)}"
        )
        print(style.paint(f"       measure it with: kvxfer bench --peer {address}", "dim"))
        print(style.paint("       stop with Ctrl-C", "dim"), flush=True)
        if warning:
            print(style.paint(wrap(warning, style, indent="       "), "yellow"), flush=True)

    def event(self, event: Event) -> None:
        """Say what happened."""
        if self._is_json:
            self._print_json(**event)
            return
        peer = str(event.get("label") or event.get("peer", ""))
        clock = self._style.paint(time.strftime("%H:%M:%S"), "dim")
        who = f"{self._style.paint(peer, 'cyan')} " if peer else ""
        print(f"{clock}  {who}{to_words(event)}", flush=True)

    def stopped(self) -> None:
        """Say goodbye."""
        if self._is_json:
            self._print_json(event="stopped")
        else:
            print("stopped", flush=True)

    def _print_json(self, **fields: Any) -> None:
        print(json.dumps(fields, default=str), flush=True)
