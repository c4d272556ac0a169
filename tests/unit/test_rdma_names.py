"""How settings name devices, ports and GID rows, and what is refused with which words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvxfer.config import EngineConfig
from kvxfer.errors import ConfigError
from kvxfer.rdma_names import ATTRIBUTE_SETTINGS, DevicePort, GidIndex, parse_devices, parse_gid_index


def resolve(environment: dict[str, str] | None = None, **arguments: Any) -> EngineConfig:
    return EngineConfig.resolve(environment=environment or {}, **arguments)


def test_devices_and_ports_are_listed() -> None:
    expected = (DevicePort("mlx5_0", 2), DevicePort("mlx5_1"))

    assert parse_devices("mlx5_0:2, mlx5_1,") == expected
    assert parse_devices(["mlx5_0:2", "mlx5_1"]) == expected
    assert parse_devices(expected) == expected
    assert ",".join(map(str, expected)) == "mlx5_0:2,mlx5_1"


@pytest.mark.parametrize(
    "value", ["", ",", "mlx5_0,mlx5_0", "mlx5_0:", "mlx5_0:0", "mlx5_0:256", "a b", ":1", 5, [5], [""]]
)
def test_devices_that_cannot_be_meant_are_refused(value: Any) -> None:
    with pytest.raises(ValueError):
        parse_devices(value)
    with pytest.raises(ConfigError, match="rdma_devices is"):
        resolve(rdma_devices=value)


def test_gid_index_is_one_for_all_or_one_for_each_device() -> None:
    """B09."""
    each = parse_gid_index("mlx5_1:3, mlx5_2:6")
    assert each is not None
    assert [each.of(name) for name in ("mlx5_1", "mlx5_2", "mlx5_3")] == [3, 6, None]
    assert parse_gid_index({"mlx5_1": 3, "mlx5_2": np.int64(6)}) == each
    assert parse_gid_index("3") == parse_gid_index(3) == parse_gid_index(np.uint8(3)) == GidIndex(3)
    mixed = parse_gid_index("3,mlx5_2:-1")
    assert mixed is not None
    assert (mixed.of("mlx5_1"), mixed.of("mlx5_2"), str(mixed)) == (3, None, "3,mlx5_2:-1")
    assert parse_gid_index(mixed) == mixed


@pytest.mark.parametrize("value", [-1, "-1"])
def test_minus_one_leaves_the_choice_to_kvxfer(value: Any) -> None:
    assert parse_gid_index(value) is None
    assert resolve(gid_index=value).gid_index is None


@pytest.mark.parametrize(
    "value", [True, 256, -2, "256", "x", "3,4", "a:1,a:2", "", "a:", "a b:3", 1.5, {"a": "x"}, "9" * 99]
)
def test_gid_index_that_cannot_be_meant_is_refused(value: Any) -> None:
    with pytest.raises(ValueError):
        parse_gid_index(value)
    with pytest.raises(ConfigError, match=r"gid_index is .*0 to 255"):
        resolve(gid_index=value)


def test_variable_of_mooncake_sets_what_kvxfer_s_own_does_not() -> None:
    environment = {"MC_GID_INDEX": "3", "MC_PKEY_INDEX": "1", "MC_MTU": "2048", "MC_TE_FILTERS": "mlx5_0,mlx5_1"}

    config = resolve(environment)

    assert (config.gid_index, config.pkey_index, config.path_mtu_nbytes_max) == (GidIndex(3), 1, 2048)
    assert config.rdma_devices == (DevicePort("mlx5_0"), DevicePort("mlx5_1"))
    assert config.source_of("gid_index") == "MC_GID_INDEX"
    own = resolve({**environment, "KVXFER_GID_INDEX": "5"})
    assert (own.gid_index, own.source_of("gid_index")) == (GidIndex(5), "KVXFER_GID_INDEX")
    given = resolve(environment, gid_index=7)
    assert (given.gid_index, given.source_of("gid_index")) == (GidIndex(7), "gid_index")


def test_error_names_the_variable_that_was_read() -> None:
    with pytest.raises(ConfigError, match="environment variable MC_GID_INDEX is 'many': 'many' is no row") as caught:
        resolve({"MC_GID_INDEX": "many"})

    assert caught.value.values["variable"] == "MC_GID_INDEX"
    with pytest.raises(
        ConfigError, match="MC_MTU is '1500'; path_mtu_nbytes_max takes 256, 512, 1024, 2048 or 4096 bytes"
    ):
        resolve({"MC_MTU": "1500"})


@pytest.mark.parametrize("name", ["gid_interface", "gid_subnet"])
def test_preference_that_cannot_be_meant_is_refused(name: str) -> None:
    for value in ("", "a/b/c", "interface-name-too-long", [1]):
        with pytest.raises(ConfigError, match=name):
            resolve(**{name: value})


def test_preferences_are_read() -> None:
    config = resolve({"KVXFER_GID_SUBNET": "192.0.2.0/24", "KVXFER_GID_INTERFACE": "eth2.10"})

    assert (str(config.gid_subnet), config.gid_interface) == ("192.0.2.0/24", "eth2.10")


def test_attributes_are_those_of_the_port_then_of_its_device_then_of_all() -> None:
    config = resolve({"KVXFER_RDMA_ATTRIBUTES": "mlx5_0:read_depth=4, mlx5_0:2:read_depth=1,mlx5_1:path_mtu=1024"})

    depths = [config.rdma_attribute("read_depth", *port) for port in (("mlx5_0", 1), ("mlx5_0", 2), ("mlx5_1", 1))]
    assert depths == [4, 1, 16]
    assert config.rdma_attribute("path_mtu", "mlx5_1", 1) == 1024
    assert str(config.rdma_attributes) == "mlx5_0:read_depth=4,mlx5_0:2:read_depth=1,mlx5_1:path_mtu=1024"
    assert resolve(rdma_attributes=["mlx5_1:timeout=20"]).rdma_attribute("timeout", "mlx5_1", 1) == 20
    assert resolve(rdma_attributes=config.rdma_attributes).rdma_attributes == config.rdma_attributes


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("mlx5_0:depth=1", "there is no attribute 'depth'; there is path_mtu, read_depth"),
        ("mlx5_0:read_depth=x", "'x' is no number"),
        ("read_depth=1", "no DEVICE:ATTRIBUTE=VALUE"),
        ("mlx5_0:read_depth", "no DEVICE:ATTRIBUTE=VALUE"),
        ("mlx5_0:0:read_depth=1", "'0' is no port"),
        ("mlx5_0:timeout=1,mlx5_0:timeout=2", "it gives mlx5_0:timeout twice"),
        ("", "it is empty"),
        ("mlx5_0:read_depth=0", "read_depth takes 1 to 255"),
        ("mlx5_0:2:path_mtu=1500", "path_mtu takes 256, 512, 1024, 2048 or 4096 bytes"),
        ("mlx5_0:timeout=32", "timeout takes 1 to 31"),
    ],
)
def test_attributes_that_cannot_be_meant_are_refused(value: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(rdma_attributes=value)

    assert told in str(caught.value)


def test_every_attribute_of_a_device_has_a_setting_for_all() -> None:
    names = {row.name for row in EngineConfig.settings()}

    assert set(ATTRIBUTE_SETTINGS.values()) <= names
