"""What each topology is meant to be: its devices, and the pair of GIDs over which data flows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class End:
    """One end of a working pair: a device and the address of its GID."""

    device: str
    address: str


@dataclass(frozen=True)
class Guest:
    """active_mtu: of each device, by name, in bytes. down: devices whose port is down. pairs: what can talk."""

    active_mtu: dict[str, int]
    pairs: tuple[tuple[End, End], ...]
    down: tuple[str, ...] = ()


def _devices(*names: str) -> dict[str, int]:
    return dict.fromkeys(names, 4096)


GUESTS = {
    "wire": Guest(
        _devices("rxa0", "rxa1", "rxb0", "rxb1"),
        ((End("rxa0", "10.10.0.1"), End("rxb0", "10.10.0.2")), (End("rxa1", "10.10.1.1"), End("rxb1", "10.10.1.2"))),
    ),
    "simple": Guest(
        _devices("rxa0", "rxa1"),
        ((End("rxa0", "10.10.0.1"), End("rxa0", "10.10.0.1")), (End("rxa1", "10.10.1.1"), End("rxa1", "10.10.1.1"))),
    ),
    "ipv6": Guest(
        _devices("rxa0", "rxa1", "rxb0", "rxb1"),
        (
            (End("rxa0", "fd00:10::1"), End("rxb0", "fd00:10::2")),
            (End("rxa1", "fd00:10:1::1"), End("rxb1", "fd00:10:1::2")),
        ),
    ),
    "mtu": Guest({"rxa0": 1024, "rxb0": 4096}, ((End("rxa0", "10.10.0.1"), End("rxb0", "10.10.0.2")),)),
    "gids": Guest(_devices("rxa0", "rxb0"), ((End("rxa0", "10.10.0.1"), End("rxb0", "10.10.0.2")),)),
    "port-down": Guest(
        _devices("rxa0", "rxa1", "rxb0", "rxb1"),
        ((End("rxa1", "10.10.0.1"), End("rxb0", "10.10.0.2")),),
        down=("rxa0",),
    ),
    "split": Guest(
        _devices("rxa0", "rxa1", "rxb0", "rxb1"),
        ((End("rxa0", "10.10.0.1"), End("rxb1", "10.10.0.2")), (End("rxa1", "10.20.0.1"), End("rxb0", "10.20.0.2"))),
    ),
}
