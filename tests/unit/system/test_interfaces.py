"""The interfaces of this machine: loopback is the one that every machine has."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path

import pytest

from kvxfer import interfaces as engine_interfaces
from kvxfer.system import interfaces
from kvxfer.system.interfaces import Interface, InterfaceAddress, list_interfaces


def loopback(root: Path = Path("/")) -> Interface:
    return next(one for one in list_interfaces(root) if one.is_loopback)


def test_loopback_is_described() -> None:
    found = loopback()

    assert found.name == "lo"
    assert found.index == socket.if_nametoindex("lo")
    assert found.is_up
    assert found.is_usable
    assert not found.is_vlan
    assert InterfaceAddress(ipaddress.ip_address("127.0.0.1"), 8) in found.addresses


def test_every_interface_is_listed_once_even_without_an_address() -> None:
    names = [one.name for one in list_interfaces()]

    assert sorted(names) == sorted(name for _, name in socket.if_nameindex())


def test_kind_and_mtu_come_from_sysfs(tmp_path: Path) -> None:
    folder = tmp_path / "sys/class/net/lo"
    folder.mkdir(parents=True)
    (folder / "mtu").write_text("9000\n")
    (folder / "uevent").write_text("DEVTYPE=vlan\nINTERFACE=lo\n")

    found = loopback(tmp_path)

    assert (found.mtu, found.kind, found.is_vlan) == (9000, "vlan", True)
    bare = loopback(tmp_path / "nowhere")
    assert (bare.mtu, bare.kind) == (None, "")


def test_interface_without_carrier_is_not_usable() -> None:
    assert not Interface("eth0", is_running=False).is_usable
    assert not Interface("eth0", is_up=False).is_usable


def test_engine_gets_pairs_and_none_where_the_kernel_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ("lo", "127.0.0.1") in engine_interfaces.list_interfaces()

    def refuse() -> None:
        raise OSError(13, "Permission denied")

    monkeypatch.setattr(interfaces, "list_interfaces", refuse)

    assert engine_interfaces.list_interfaces() == []
