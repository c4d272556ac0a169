"""The attributes of several engines beside each other, and which a device would refuse."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvxfer.cli.checks_peer import draw_attributes
from kvxfer.cli.peer_attributes import ENGINES, AttributeRow, compare_attributes
from kvxfer.transports.rdma_ladder import QueuePairAttributes
from kvxfer.verbs.device import list_devices
from kvxfer.verbs.enums import Mtu
from tests.support.fake_verbs import FakeFabric, FakeLibrary, FakeNic, connectx, erdma, infiniband, ionic, irdma, rxe

KVXFER = QueuePairAttributes(path_mtu=4096, read_depth=16)


def rows_of(
    nic: FakeNic, root: Path, attributes: QueuePairAttributes = KVXFER, *, mtu_there: int | None = None
) -> dict[str, AttributeRow]:
    (device,) = list_devices(FakeLibrary(FakeFabric(), nic), root=root)
    with device.open() as context:
        rows = compare_attributes(context.limits, context.ports()[0], attributes, active_mtu_there=mtu_there)
    return {row.name: row for row in rows}


def refused(rows: dict[str, AttributeRow]) -> set[tuple[str, str]]:
    return {
        (engine, row.name)
        for row in rows.values()
        for engine, cell in zip(ENGINES, row.cells, strict=True)
        if cell.refusal
    }


def test_connectx_takes_what_every_engine_asks(tmp_path: Path) -> None:
    rows = rows_of(connectx(), tmp_path)

    assert refused(rows) == set()
    assert all(len(row.cells) == len(ENGINES) for row in rows.values())
    assert [cell.value for cell in rows["timeout"].cells] == ["18", "14", "20", "18", "14"]
    assert [cell.value for cell in rows["hop_limit"].cells] == ["64", "255", "255", "255", "16"]


def test_read_depths_above_the_limits_are_refused_and_named(tmp_path: Path) -> None:
    rows = rows_of(connectx(max_qp_rd_atom=1, max_qp_init_rd_atom=2), tmp_path, QueuePairAttributes(4096, 1))

    assert refused(rows) == {("Mooncake", "max_dest_rd_atomic"), ("Mooncake", "max_rd_atomic")}
    assert rows["max_rd_atomic"].cells[-1].refusal == "max_qp_init_rd_atom is 2"


def test_pieces_and_requests_above_the_limits_are_refused(tmp_path: Path) -> None:
    rows = rows_of(connectx(max_sge=2, max_qp_wr=200), tmp_path, QueuePairAttributes(4096, 16, send_depth=200))

    assert refused(rows) == {
        ("UCX", "max_send_sge"),
        ("Mooncake", "max_send_sge"),
        ("NCCL", "max_send_wr"),
        ("UCX", "max_send_wr"),
        ("Mooncake", "max_send_wr"),
    }


def test_reset_to_reset_is_refused_by_irdma_only(tmp_path: Path) -> None:
    assert ("Mooncake", "RESET first") in refused(rows_of(irdma(), tmp_path))
    assert ("Mooncake", "RESET first") not in refused(rows_of(erdma(), tmp_path))


def test_budget_of_the_whole_device_is_a_remark(tmp_path: Path) -> None:
    cells = rows_of(ionic(), tmp_path, QueuePairAttributes(4096, 1))["max_dest_rd_atomic"].cells

    remarks = dict(zip(ENGINES, (cell.remark for cell in cells), strict=True))
    assert "max_res_rd_atom is 16" in remarks["UCX"]
    assert "max_res_rd_atom is 16" in remarks["Mooncake"]
    assert remarks["kvxfer"] == remarks["NCCL"] == ""


def test_retry_count_7_is_for_ever_on_soft_roce(tmp_path: Path) -> None:
    cells = rows_of(rxe(), tmp_path)["retry_cnt"].cells

    assert [bool(cell.remark) for cell in cells] == [False, True, True, True, True]
    assert not any(cell.remark for cell in rows_of(connectx(), tmp_path)["retry_cnt"].cells)


def test_mtu_of_the_peer_is_a_remark_for_who_does_not_ask_for_it(tmp_path: Path) -> None:
    cells = rows_of(connectx(), tmp_path, QueuePairAttributes(1024, 16), mtu_there=1024)["path_mtu"].cells

    assert [cell.value for cell in cells] == ["1024", "1024", "1024", "1024", "4096"]
    assert "1024" in cells[-1].remark


def test_mtu_above_the_active_one_would_be_refused(tmp_path: Path) -> None:
    nic = connectx()
    nic.ports[0].active_mtu = Mtu.MTU_1024

    assert refused(rows_of(nic, tmp_path)) == {("kvxfer", "path_mtu")}  # a setting that the ladder would lower


@pytest.mark.parametrize("nic", [connectx(), infiniband(), rxe(), irdma(), ionic(), erdma()], ids=lambda nic: nic.name)
def test_what_is_refused_or_remarked_has_one_note_with_all_engines(nic: FakeNic, tmp_path: Path) -> None:
    rows = tuple(rows_of(nic, tmp_path).values())

    table, notes = draw_attributes(rows)

    marked = sum(bool(cell.refusal or cell.remark) for row in rows for cell in row.cells)
    assert table.count("!") + table.count("*") == marked
    assert len(notes) == len(set(notes)) <= marked
    assert bool(notes) == bool(marked)
