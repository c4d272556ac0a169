"""kvxfer's verbs layer against two that know libibverbs independently: pyverbs and `ibv_devinfo -v`.

What they say of the devices equals what kvxfer says, field by field; a queue pair of kvxfer's talks with one of
pyverbs', both ways.
"""

from __future__ import annotations

import dataclasses
import hashlib
import ipaddress
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvxfer.verbs.device import Context, Device, DeviceLimits, Port, list_devices
from kvxfer.verbs.enums import CompletionOpcode, CompletionStatus, Mtu, SendFlags, WorkOpcode
from kvxfer.verbs.gid import format_gid
from tests.lab.devinfo import DeviceInfo, as_number, run_devinfo
from tests.lab.guests import GUESTS
from tests.lab.oracle import PyverbsPeer, pattern, pyverbs_facts
from tests.lab.verbs_end import VerbsEnd, wait_completion

pytestmark = pytest.mark.rdma
everywhere = pytest.mark.topology(*GUESTS)
on_the_wire = pytest.mark.topology("wire")

NBYTES = 1 << 16
OTHER_NAMES_IN_PYVERBS = {"fw_ver": "fw_version"}
OTHER_NAMES_IN_DEVINFO = {"lid": "port_lid", "lmc": "port_lmc"}
GUIDS = {"node_guid", "sys_image_guid"}
TEXTS = {"fw_ver", "node_guid", "sys_image_guid"}
NEWER_THAN_THE_ORACLES = {"active_speed_ex"}  # rdma-core 62; 0 where the library does not have it
NOT_PRINTED = {"flags"}


@pytest.fixture
def contexts() -> Iterator[dict[str, Context]]:
    opened = {device.name: device.open() for device in list_devices()}
    yield opened
    for context in opened.values():
        context.close()


def guid_text(value: int, *, is_big_endian: bool) -> str:
    """Return a GUID as ibv_devinfo prints it. is_big_endian: `value` is the bytes of the C struct read as a number."""
    data = value.to_bytes(8, sys.byteorder if is_big_endian else "big")
    return ":".join(data[at : at + 2].hex() for at in range(0, 8, 2))


# ---- the facts -------------------------------------------------------------


@everywhere
def test_devices_are_those_that_pyverbs_lists() -> None:
    def facts_of(device: Device) -> dict[str, Any]:
        return {
            "guid": device.guid,
            "node_type": int(device.node_type),
            "transport_type": int(device.transport_type),
            "index": device.index,
        }

    expected = {
        name: {**{key: facts[key] for key in ("node_type", "transport_type", "index")},
               "guid": guid_text(facts["guid"], is_big_endian=False)}
        for name, facts in pyverbs_facts().items()
    }  # fmt: skip

    assert {device.name: facts_of(device) for device in list_devices()} == expected


@everywhere
def test_limits_equal_what_pyverbs_says(contexts: dict[str, Context]) -> None:
    for name, context in contexts.items():
        said = pyverbs_facts()[name]["attributes"]
        expected = {}
        for field in dataclasses.fields(DeviceLimits):
            value = said[OTHER_NAMES_IN_PYVERBS.get(field.name, field.name)]
            expected[field.name] = guid_text(value, is_big_endian=True) if field.name in GUIDS else value

        assert dataclasses.asdict(context.limits) == expected


@everywhere
def test_limits_equal_what_ibv_devinfo_prints(contexts: dict[str, Context]) -> None:
    printed = run_devinfo()
    for name, context in contexts.items():
        facts = printed[name].facts
        expected = {
            field.name: facts[field.name] if field.name in TEXTS else as_number(facts[field.name])
            for field in dataclasses.fields(DeviceLimits)
        }

        assert dataclasses.asdict(context.limits) == expected


def port_facts(port: Port) -> dict[str, Any]:
    """Return a port's facts by the names of <infiniband/verbs.h>, enumerations as numbers."""
    facts = {field.name: getattr(port, field.name) for field in dataclasses.fields(Port)}
    return {name: int(value) for name, value in facts.items() if name not in ("device", "number")}


@everywhere
def test_ports_equal_what_pyverbs_says(contexts: dict[str, Context]) -> None:
    for name, context in contexts.items():
        for port, said in zip(context.ports(), pyverbs_facts()[name]["ports"], strict=True):
            ours = port_facts(port)
            expected = {fact: said.get(fact, 0 if fact in NEWER_THAN_THE_ORACLES else None) for fact in ours}

            assert (port.number, ours) == (said["port_num"], expected)


@everywhere
def test_ports_equal_what_ibv_devinfo_prints(contexts: dict[str, Context]) -> None:
    printed = run_devinfo()
    for name, context in contexts.items():
        for port, info in zip(context.ports(), printed[name].ports, strict=True):
            ours = {fact: value for fact, value in port_facts(port).items() if fact not in NOT_PRINTED}
            del ours["link_layer"]
            expected = {
                fact: 0 if fact in NEWER_THAN_THE_ORACLES
                else as_number(info.facts[OTHER_NAMES_IN_DEVINFO.get(fact, fact)])
                for fact in ours
            }  # fmt: skip

            assert ours == expected
            assert (port.number, str(port.link_layer)) == (info.number, info.facts["link_layer"])


@everywhere
def test_gid_tables_equal_what_pyverbs_says(contexts: dict[str, Context]) -> None:
    for name, context in contexts.items():
        rows = [
            (entry.index, ipaddress.IPv6Address(entry.value).exploded, int(entry.type), entry.netdev)
            for entry in context.query_gid_table(1)
        ]

        said = pyverbs_facts()[name]["gids"]

        assert rows == [(row["gid_index"], row["gid"], row["gid_type"], row["netdev"]) for row in said]


@everywhere
def test_gid_tables_equal_what_ibv_devinfo_prints(contexts: dict[str, Context]) -> None:
    printed: dict[str, DeviceInfo] = run_devinfo()
    for name, context in contexts.items():
        rows = [(entry.index, format_gid(entry.value), str(entry.type)) for entry in context.query_gid_table(1)]

        assert rows == [(row.index, row.gid, row.type) for row in printed[name].ports[0].gids]


# ---- queue pairs -----------------------------------------------------------


@pytest.fixture
def ends() -> Iterator[tuple[VerbsEnd, PyverbsPeer]]:
    """Return rxa0 as kvxfer has it and rxb0 as pyverbs has it, connected."""
    with VerbsEnd("rxa0", gid_index=1, nbytes=NBYTES) as ours, PyverbsPeer("rxb0", gid_index=1, nbytes=NBYTES) as peer:
        path_mtu = Mtu(min(ours.card["active_mtu"], peer.card["active_mtu"]))
        peer.connect(qp_num=ours.card["qp_num"], psn=ours.card["psn"], gid=ours.card["gid"], path_mtu=int(path_mtu))
        ours.connect(qp_num=peer.card["qp_num"], psn=peer.card["psn"], gid=peer.card["gid"], path_mtu=path_mtu)
        yield ours, peer


SIZES = (1, 4095, 4096, 4097, NBYTES)  # around one packet


def target_of(card: dict[str, Any]) -> dict[str, int]:
    return {"remote_addr": card["addr"], "rkey": card["rkey"]}


def sha256(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


@on_the_wire
def test_our_writes_arrive_at_a_pyverbs_peer(ends: tuple[VerbsEnd, PyverbsPeer]) -> None:
    ours, peer = ends
    for seed, nbytes in enumerate(SIZES):
        ours.memory[:] = np.frombuffer(pattern(seed, NBYTES), np.uint8)

        status = ours.transfer(WorkOpcode.RDMA_WRITE, **target_of(peer.card), nbytes=nbytes)

        assert status == CompletionStatus.SUCCESS
        assert peer.sha256(nbytes=nbytes) == sha256(ours.memory[:nbytes].data)


@on_the_wire
def test_our_reads_bring_what_a_pyverbs_peer_has(ends: tuple[VerbsEnd, PyverbsPeer]) -> None:
    ours, peer = ends
    for seed, nbytes in enumerate(SIZES):
        peer.ask("fill", seed=seed)
        ours.memory[:] = 0

        status = ours.transfer(WorkOpcode.RDMA_READ, **target_of(peer.card), nbytes=nbytes)

        assert status == CompletionStatus.SUCCESS
        assert ours.memory[:nbytes].tobytes() == pattern(seed, NBYTES)[:nbytes]
        assert not ours.memory[nbytes:].any()


@on_the_wire
def test_a_chain_of_writes_and_its_notice_arrive_at_a_pyverbs_peer(ends: tuple[VerbsEnd, PyverbsPeer]) -> None:
    ours, peer = ends
    ours.memory[:] = np.frombuffer(pattern(1, NBYTES), np.uint8)
    peer.ask("post_receive")
    rows = np.arange(16) * 4096

    ours.batch.fill(
        WorkOpcode.RDMA_WRITE,
        local_addr=ours.card["addr"] + rows,
        lkey=ours.region.lkey,
        remote_addr=peer.card["addr"] + rows[::-1],
        rkey=peer.card["rkey"],
        nbytes=4096,
    )
    ours.queue_pair.post_send(ours.batch)
    assert wait_completion(ours.send_cq)["status"] == CompletionStatus.SUCCESS
    ours.batch.clear()
    ours.batch.append_notice(0xA1B2C3D4, wr_id=7, send_flags=SendFlags.SIGNALED)
    ours.queue_pair.post_send(ours.batch)
    sent = wait_completion(ours.send_cq)
    received = peer.ask("wait_receive")

    assert (sent["status"], sent["wr_id"]) == (CompletionStatus.SUCCESS, 7)
    assert (received["status"], received["imm"], received["byte_len"]) == (0, 0xA1B2C3D4, 0)
    assert received["opcode"] == CompletionOpcode.RECV_RDMA_WITH_IMM
    blocks = ours.memory.reshape(16, 4096)[::-1]
    assert peer.sha256() == sha256(blocks.tobytes())


@on_the_wire
def test_a_pyverbs_peer_writes_and_reads_our_memory(ends: tuple[VerbsEnd, PyverbsPeer]) -> None:
    ours, peer = ends
    for seed, nbytes in enumerate(SIZES):
        peer.ask("fill", seed=seed)
        ours.memory[:] = 0
        assert peer.transfer("write", **target_of(ours.card), nbytes=nbytes) == CompletionStatus.SUCCESS
        assert ours.memory[:nbytes].tobytes() == pattern(seed, NBYTES)[:nbytes]
        assert not ours.memory[nbytes:].any()

        ours.memory[:] = np.frombuffer(pattern(100 + seed, NBYTES), np.uint8)
        assert peer.transfer("read", **target_of(ours.card), nbytes=nbytes) == CompletionStatus.SUCCESS
        assert peer.sha256(nbytes=nbytes) == sha256(ours.memory[:nbytes].data)


@on_the_wire
def test_a_pyverbs_peers_immediate_reaches_us_after_its_data(ends: tuple[VerbsEnd, PyverbsPeer]) -> None:
    ours, peer = ends
    ours.queue_pair.post_receives(1)
    peer.ask("fill", seed=5)

    status = peer.transfer("write_with_imm", imm=0xA1B2C3D4, **target_of(ours.card), nbytes=NBYTES)
    received = wait_completion(ours.recv_cq)

    assert status == CompletionStatus.SUCCESS
    assert (received["status"], received["imm_data"]) == (CompletionStatus.SUCCESS, 0xA1B2C3D4)
    assert (received["opcode"], received["byte_len"]) == (CompletionOpcode.RECV_RDMA_WITH_IMM, NBYTES)
    assert received["qp_num"] == ours.queue_pair.number
    assert ours.memory.tobytes() == pattern(5, NBYTES)


@on_the_wire
def test_a_wrong_key_is_refused_by_either_side(ends: tuple[VerbsEnd, PyverbsPeer]) -> None:
    ours, peer = ends
    wrong = {"remote_addr": peer.card["addr"], "rkey": peer.card["rkey"] ^ 0xFF}

    status = ours.transfer(WorkOpcode.RDMA_WRITE, **wrong, nbytes=64)

    assert status == CompletionStatus.REM_ACCESS_ERR
    assert ours.queue_pair.query()["qp_state"].name == "ERR"
