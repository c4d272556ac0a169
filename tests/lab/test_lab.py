"""The lab is what it says: its devices, its wires, and pyverbs talking with pyverbs over them. Nothing of kvxfer."""

from __future__ import annotations

import ipaddress
import subprocess
from pathlib import Path

import pytest

from tests.lab.devinfo import as_number, run_devinfo
from tests.lab.guests import GUESTS, End, Guest
from tests.lab.oracle import WC_SUCCESS, PyverbsPeer, join, pyverbs_facts

NBYTES = 1 << 16
PING_NBYTES = 1400  # more than the kernel sends by itself meanwhile; fits every MTU
MTU_CODES = {1024: 3, 2048: 4, 4096: 5}  # enum ibv_mtu
PORT_DOWN, PORT_ACTIVE = 1, 4  # enum ibv_port_state
ROCE_V2 = 2  # enum ibv_gid_type_sysfs

pytestmark = pytest.mark.rdma
everywhere = pytest.mark.topology(*GUESTS)


@pytest.fixture
def guest(topology: str) -> Guest:
    return GUESTS[topology]


def as_gid(address: str) -> str:
    """Return the GID of an IP address in the long form of sysfs."""
    ip = ipaddress.ip_address(address)
    return ipaddress.ip_address(f"::ffff:{ip}" if ip.version == 4 else address).exploded


def find_gid_index(end: End) -> int:
    """Return the index of the row that has an end's address."""
    rows = pyverbs_facts()[end.device]["gids"]
    found = [row["gid_index"] for row in rows if row["gid"] == as_gid(end.address)]
    assert found, f"{end.device} has no GID {as_gid(end.address)}: {rows}"
    return int(found[0])


def open_peer(end: End) -> PyverbsPeer:
    return PyverbsPeer(end.device, gid_index=find_gid_index(end), nbytes=NBYTES)


def sent_nbytes(netdev: str) -> int:
    return int(Path(f"/sys/class/net/{netdev}/statistics/tx_bytes").read_text())


def ping(netdev: str, address: str, *, payload_nbytes: int = 56, wait_s: int = 30) -> bool:
    family = ["-6"] if ":" in address else []
    size = ["-s", str(payload_nbytes)]
    command = ["busybox", "ping", *family, *size, "-c", "1", "-W", str(wait_s), "-I", netdev, address]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@everywhere
def test_guest_has_the_devices_of_its_topology(guest: Guest) -> None:
    expected = {
        name: (PORT_DOWN if name in guest.down else PORT_ACTIVE, MTU_CODES[mtu])
        for name, mtu in guest.active_mtu.items()
    }

    by_pyverbs = {name: (d["ports"][0]["state"], d["ports"][0]["active_mtu"]) for name, d in pyverbs_facts().items()}
    by_devinfo = {
        name: (as_number(device.ports[0].facts["state"]), as_number(device.ports[0].facts["active_mtu"]))
        for name, device in run_devinfo().items()
    }

    assert by_pyverbs == expected
    assert by_devinfo == expected


@everywhere
def test_every_pair_has_its_gids_as_roce_v2(guest: Guest) -> None:
    for end in {end for pair in guest.pairs for end in pair}:
        row = pyverbs_facts()[end.device]["gids"]
        types = {found["gid_type"] for found in row if found["gid"] == as_gid(end.address)}
        assert types == {ROCE_V2}, end


@pytest.mark.topology("wire", "ipv6", "mtu", "gids", "port-down", "split")
def test_ping_crosses_each_wire_both_ways(guest: Guest) -> None:
    for left, right in guest.pairs:
        for here, there in ((left, right), (right, left)):
            netdev = here.device.replace("rx", "v")
            before = sent_nbytes(netdev)

            assert ping(netdev, there.address, payload_nbytes=PING_NBYTES), f"no answer from {there} to {here}"
            assert sent_nbytes(netdev) - before >= PING_NBYTES, f"what {here} sent to {there} took another way"


@pytest.mark.topology("split")
def test_the_other_network_is_out_of_reach() -> None:
    assert not ping("va0", "10.20.0.2", wait_s=2)


@everywhere
def test_write_and_read_arrive_at_a_pyverbs_peer(guest: Guest) -> None:
    for left_end, right_end in guest.pairs:
        with open_peer(left_end) as left, open_peer(right_end) as right:
            join(left, right)
            left.ask("fill", seed=1)

            target = {"remote_addr": right.card["addr"], "rkey": right.card["rkey"], "nbytes": NBYTES}
            assert left.transfer("write", **target) == WC_SUCCESS
            assert right.sha256() == left.sha256()

            right.ask("fill", seed=2)
            assert left.transfer("read", **target) == WC_SUCCESS
            assert left.sha256() == right.sha256()


@pytest.mark.topology("wire")
def test_write_with_immediate_wakes_a_pyverbs_peer() -> None:
    left_end, right_end = GUESTS["wire"].pairs[0]
    with open_peer(left_end) as left, open_peer(right_end) as right:
        join(left, right)
        left.ask("fill", seed=3)
        right.ask("post_receive")

        range_ = {"remote_addr": right.card["addr"] + 64, "rkey": right.card["rkey"], "nbytes": 4096}
        status = left.transfer("write_with_imm", imm=0xA1B2C3D4, **range_)
        received = right.ask("wait_receive")

        assert status == WC_SUCCESS
        assert (received["status"], received["imm"], received["byte_len"]) == (WC_SUCCESS, 0xA1B2C3D4, 4096)
        assert right.sha256(offset=64, nbytes=4096) == left.sha256(offset=0, nbytes=4096)


@pytest.mark.topology("wire")
def test_data_crosses_the_wire() -> None:
    left_end, right_end = GUESTS["wire"].pairs[0]
    with open_peer(left_end) as left, open_peer(right_end) as right:
        join(left, right)
        before = {netdev: sent_nbytes(netdev) for netdev in ("va0", "va1")}

        left.transfer("write", remote_addr=right.card["addr"], rkey=right.card["rkey"], nbytes=NBYTES)

        assert sent_nbytes("va0") - before["va0"] >= NBYTES
        assert sent_nbytes("va1") - before["va1"] < NBYTES  # the kernel greets routers and multicast groups there


@pytest.mark.topology("wire")
def test_a_wrong_key_is_refused_by_a_pyverbs_peer() -> None:
    left_end, right_end = GUESTS["wire"].pairs[0]
    with open_peer(left_end) as left, open_peer(right_end) as right:
        join(left, right)

        status = left.transfer("write", remote_addr=right.card["addr"], rkey=right.card["rkey"] ^ 0xFF, nbytes=64)

        assert status == 10  # IBV_WC_REM_ACCESS_ERR


@pytest.mark.topology("gids")
def test_gid_tables_have_holes_and_differ_between_the_hosts(guest: Guest) -> None:
    left, right = guest.pairs[0]
    for name in ("rxa0", "rxb0"):
        indices = [row["gid_index"] for row in pyverbs_facts()[name]["gids"]]
        assert set(range(max(indices))) - set(indices), f"{name} has no hole: {indices}"
        assert len(indices) >= 8

    assert find_gid_index(left) != find_gid_index(right)


@pytest.mark.topology("gids", machine="qemu")  # User-Mode Linux kernels have no 8021q
def test_gid_tables_have_rows_of_a_vlan() -> None:
    netdevs = {row["gid"]: row["netdev"] for row in pyverbs_facts()["rxa0"]["gids"]}

    assert netdevs[as_gid("10.10.0.3")] == "va0.100"
