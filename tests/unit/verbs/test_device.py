"""Devices: listed, opened, asked; and each way in which there are none has its own error."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from kvxfer.errors import (
    DeviceNotFoundError,
    VerbsDeviceFilesError,
    VerbsError,
    VerbsKernelError,
    VerbsLayoutError,
    VerbsProviderError,
)
from kvxfer.verbs.device import Port, list_devices, open_device
from kvxfer.verbs.enums import EventType, LinkLayer, Mtu, NodeType, PortState
from tests.support.fake_sysfs import write_sysfs
from tests.support.fake_verbs import FakeLibrary, connectx, infiniband, rxe


def test_devices_are_listed_by_name() -> None:
    library = FakeLibrary(None, connectx(name="mlx5_1"), connectx(name="mlx5_0"), name="a")

    devices = list_devices(library)

    assert [device.name for device in devices] == ["mlx5_0", "mlx5_1"]
    assert devices[0].node_type is NodeType.CA
    assert len(devices[0].guid) == 19


def test_kernel_without_rdma_is_told() -> None:
    library = FakeLibrary(None, name="a")
    library.fail("ibv_get_device_list", errno.ENOSYS)

    with pytest.raises(VerbsKernelError, match="this kernel has no RDMA"):
        list_devices(library)


def test_other_failure_of_the_list_keeps_its_errno() -> None:
    library = FakeLibrary(None, name="a")
    library.fail("ibv_get_device_list", errno.EPERM)

    with pytest.raises(VerbsError, match="EPERM") as caught:
        list_devices(library)
    assert caught.value.errno == errno.EPERM


def test_no_device_at_all_is_an_empty_list(tmp_path: Path) -> None:
    assert list_devices(FakeLibrary(None, name="a"), root=tmp_path) == []


def test_container_without_device_files_is_told_what_to_start_it_with(tmp_path: Path) -> None:  # B23
    write_sysfs(tmp_path, FakeLibrary(None, connectx(), name="a"), with_device_files=False)

    with pytest.raises(VerbsDeviceFilesError, match="mlx5_0") as caught:
        list_devices(FakeLibrary(None, name="b"), root=tmp_path)
    assert "--device=/dev/infiniband" in caught.value.remedy


def test_missing_driver_library_is_told(tmp_path: Path) -> None:
    write_sysfs(tmp_path, FakeLibrary(None, connectx(), name="a"), with_device_files=True)

    with pytest.raises(VerbsProviderError, match="lists no device") as caught:
        list_devices(FakeLibrary(None, name="b"), root=tmp_path)
    assert "ibverbs-providers" in caught.value.remedy
    assert "rdma dev set DEVICE netns" in caught.value.remedy


def test_device_that_is_not_there_names_those_that_are() -> None:
    library = FakeLibrary(None, connectx(name="mlx5_0"), name="a")

    with pytest.raises(DeviceNotFoundError, match=r"no RDMA device 'mlx5_9'; there is mlx5_0"):
        open_device("mlx5_9", library)


def test_open_without_its_file_names_the_file(tmp_path: Path) -> None:
    library = FakeLibrary(None, connectx(), name="a")
    library.fail("ibv_open_device", errno.ENOENT)

    with pytest.raises(VerbsDeviceFilesError, match=r"there is no .*dev/infiniband/uverbs"):
        list_devices(library, root=tmp_path)[0].open()


def test_open_that_is_forbidden_says_who_must_allow_it(tmp_path: Path) -> None:
    library = FakeLibrary(None, connectx(), name="a")
    write_sysfs(tmp_path, library, with_device_files=True)
    library.fail("ibv_open_device", errno.EACCES)

    with pytest.raises(VerbsDeviceFilesError, match="EACCES"):
        list_devices(library, root=tmp_path)[0].open()


def test_library_of_another_layout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeLibrary(None, connectx(), name="a")
    monkeypatch.setattr(library, "check_layout", lambda context: "verbs_context.sz is 7")

    with pytest.raises(VerbsLayoutError, match=r"verbs_context.sz is 7") as caught:
        list_devices(library)[0].open()
    assert caught.value.check == "verbs_context.sz is 7"


def test_limits_and_ports_are_those_of_the_device() -> None:
    library = FakeLibrary(None, connectx(max_mr_size=1 << 40), name="a")

    with open_device("mlx5_0", library) as context:
        assert context.limits.max_mr_size == 1 << 40
        assert isinstance(context.limits.fw_ver, str)
        (port,) = context.ports()
        assert (port.number, port.state, port.link_layer) == (1, PortState.ACTIVE, LinkLayer.ETHERNET)
        assert port.active_mtu.nbytes in (1024, 2048, 4096)
        assert port.needs_grh
        assert context.query_port(1) == port
        assert context.query_pkey(1, 0) & 0x7FFF == 0x7FFF


def test_infiniband_port_has_a_lid_and_needs_no_global_route() -> None:
    library = FakeLibrary(None, infiniband(), name="a")

    with open_device(list_devices(library)[0].name, library) as context:
        port = context.query_port(1)
        assert port.link_layer is LinkLayer.INFINIBAND
        assert port.lid > 0
        assert not port.needs_grh


@pytest.mark.parametrize(
    ("width", "speed", "gbps"), [(2, 32, 100.0), (2, 64, 200.0), (1, 8, 10.0), (8, 16, 168.75), (99, 32, 0.0)]
)
def test_speed_follows_from_width_and_rate_of_a_lane(width: int, speed: int, gbps: float) -> None:
    port = make_port(active_width=width, active_speed=speed)

    assert port.gbps == gbps


def test_speed_that_the_library_tells_holds() -> None:
    assert make_port(active_width=2, active_speed=32, active_speed_ex=800_000).gbps == 800.0


def test_events_of_a_port_name_it_and_are_acknowledged() -> None:
    library = FakeLibrary(None, rxe(), name="a")
    with list_devices(library)[0].open() as context:
        assert context.get_async_event() is None

        library.set_port(context.name, 1, PortState.DOWN)
        event = context.get_async_event()

        assert event is not None
        assert (event.type, event.port) == (EventType.PORT_ERR, 1)
        assert context.get_async_event() is None
    assert not library.leaks


def test_device_that_does_not_tell_its_limits_is_closed_again() -> None:
    library = FakeLibrary(None, connectx(), name="a")
    library.fail("ibv_query_device", errno.EIO)

    with pytest.raises(VerbsError, match="ibv_query_device"):
        list_devices(library)[0].open()

    assert not library.leaks


def test_failing_query_names_verb_and_port() -> None:
    library = FakeLibrary(None, rxe(), name="a")
    with list_devices(library)[0].open() as context:
        library.fail("ibv_query_port", errno.ENODEV)
        with pytest.raises(VerbsError, match=r"ibv_query_port\(.*port 1\) failed: ENODEV") as caught:
            context.query_port(1)
    assert (caught.value.verb, caught.value.errno, caught.value.values["port"]) == ("ibv_query_port", errno.ENODEV, 1)


def make_port(**changes: int) -> Port:
    values = dict.fromkeys(Port.__dataclass_fields__, 0)
    values |= {
        "device": "x",
        "number": 1,
        "state": PortState.ACTIVE,
        "max_mtu": Mtu.MTU_4096,
        "active_mtu": Mtu.MTU_4096,
        "link_layer": LinkLayer.ETHERNET,
    }
    return Port(**{**values, **changes})  # type: ignore[arg-type]
