"""Every setting says what it takes; a value that cannot be meant is told with its name, source and range."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import numpy as np
import pytest

from kvxfer import config as config_module
from kvxfer.config import EngineConfig, closest_variable
from kvxfer.errors import ConfigError
from kvxfer.setting import Setting

ROWS = EngineConfig.settings()
NUMBERS = [row for row in ROWS if row.parse in (int, float)]


def resolve(environment: dict[str, str] | None = None, **arguments: Any) -> EngineConfig:
    return EngineConfig.resolve(environment=environment or {}, **arguments)


def test_defaults_are_those_of_the_table() -> None:
    config = resolve()

    assert {row.name: row.default for row in ROWS} == {row.name: getattr(config, row.name) for row in ROWS}
    assert [row.name for row in ROWS] == [field.name for field in dataclasses.fields(EngineConfig)]


def test_every_row_has_unit_meaning_and_source() -> None:
    for row in ROWS:
        assert row.unit, row.name
        assert row.meaning, row.name
        assert row.source, row.name
        assert row.allowed, row.name
        assert row.variable == f"KVXFER_{row.name.upper()}"


def test_argument_beats_environment_beats_default() -> None:
    environment = {"KVXFER_PORT": "1234", "KVXFER_HOST": "192.0.2.1"}

    config = resolve(environment, port=5678)

    assert (config.host, config.port, config.spin_s) == ("192.0.2.1", 5678, 50e-6)


def test_argument_that_is_none_is_the_default_where_none_is_one() -> None:
    assert resolve({"KVXFER_NAME": "a"}, name=None).name is None


@pytest.mark.parametrize("row", NUMBERS, ids=lambda row: row.name)
def test_out_of_range_names_setting_value_range_and_source(row: Setting) -> None:
    for value in (row.low - 1, row.high + 1):
        with pytest.raises(ConfigError) as as_argument:
            resolve(**{row.name: row.parse(value)})
        assert f"{row.name} was given as an argument" in str(as_argument.value)

        with pytest.raises(ConfigError) as as_variable:
            resolve({row.variable: str(row.parse(value))})
        assert row.variable in str(as_variable.value)

        for caught in (as_argument, as_variable):
            assert row.name in str(caught.value)
            assert row.allowed in str(caught.value)
            assert str(row.parse(value)) in str(caught.value)
            assert caught.value.values["setting"] == row.name


@pytest.mark.parametrize("row", NUMBERS, ids=lambda row: row.name)
@pytest.mark.parametrize(
    "value", ["x", "", "nan", "inf", "1,5", None, True, [1], "0x10", 1j, np.True_, np.array([1, 2]), 10**400]
)
def test_what_is_no_number_is_refused(row: Setting, value: Any) -> None:
    if value is None and row.default is None:
        assert getattr(resolve(**{row.name: None}), row.name) is None  # as if it were not given
        return
    with pytest.raises(ConfigError, match=row.name):
        resolve(**{row.name: value})
    if isinstance(value, str):
        with pytest.raises(ConfigError, match=row.variable):
            resolve({row.variable: value})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0, 0.0, -1.0])
def test_timeouts_are_positive_and_finite(value: float) -> None:
    for row in ROWS:
        if row.name.endswith("_timeout_s"):
            with pytest.raises(ConfigError, match=row.name):
                resolve(**{row.name: value})


def test_numpy_numbers_become_plain_ones() -> None:
    config = resolve(port=np.uint16(7777), spin_s=np.float32(0.0), connect_timeout_s=np.int64(3))

    assert [type(value) for value in (config.port, config.spin_s, config.connect_timeout_s)] == [int, float, float]


@pytest.mark.parametrize("text", ["shm,tcp", "shm, tcp,,", " shm , tcp ", ",shm,tcp"])
def test_list_of_transports_tolerates_blanks_and_empty_items(text: str) -> None:
    assert resolve({"KVXFER_TRANSPORTS": text}).transports == ("shm", "tcp")
    assert resolve(transports=text).transports == ("shm", "tcp")
    assert resolve(transports=["shm", "tcp"]).transports == ("shm", "tcp")


@pytest.mark.parametrize("value", ["", " , ", "efa", "shm,efa", "tcp,tcp", "SHM"])
def test_transports_that_cannot_be_meant_list_the_available_ones(value: str) -> None:
    with pytest.raises(ConfigError, match="shm, rdma, tcp") as by_variable:
        resolve({"KVXFER_TRANSPORTS": value})
    assert "KVXFER_TRANSPORTS" in str(by_variable.value)

    with pytest.raises(ConfigError, match=r"shm, rdma, tcp.*transports was given as an argument"):
        resolve(transports=value.split(","))


@pytest.mark.parametrize("value", [7, None, [None], [["shm"]]])
def test_transports_of_another_type_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="available: shm, rdma, tcp"):
        resolve(transports=value)


def test_key_is_never_shown() -> None:
    config = resolve({"KVXFER_KEY": "correct horse"})

    assert config.key == b"correct horse"
    assert "horse" not in repr(config)
    assert "key=" not in repr(config)


@pytest.mark.parametrize("key", ["", "2short", b"2short", 12345678, ["secretsecret"]])
def test_key_that_is_refused_is_never_shown(key: Any) -> None:
    with pytest.raises(ConfigError, match="key") as caught:
        resolve(key=key)

    assert "short" not in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "12345678" not in str(caught.value)


def test_empty_key_in_the_environment_does_not_mean_no_authentication() -> None:
    with pytest.raises(ConfigError, match="KVXFER_KEY"):
        resolve({"KVXFER_KEY": ""})


def test_key_of_undecodable_bytes_is_kept_byte_for_byte() -> None:
    assert resolve({"KVXFER_KEY": "\udcff" * 8}).key == b"\xff" * 8


def test_keepalive_timeout_tells_where_both_values_came_from() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve({"KVXFER_KEEPALIVE_INTERVAL_S": "20"})

    assert "keepalive_timeout_s is the default" in str(caught.value)
    assert "environment variable KVXFER_KEEPALIVE_INTERVAL_S" in str(caught.value)
    assert caught.value.values["variable"] == "KVXFER_KEEPALIVE_INTERVAL_S"


def test_unknown_argument_gives_the_closest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean transfer_timeout_s"):
        resolve(transfer_timeouts=3)


def test_unknown_argument_that_is_a_word_of_names_gives_them_all() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(timeout=7)

    assert "did you mean " in str(caught.value)
    for name in ("connect_timeout_s", "transfer_timeout_s", "unregister_timeout_s"):
        assert name in str(caught.value)


def test_unknown_variable_is_reported_once_with_the_closest_name(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_module, "_reported", set())
    environment = {"KVXFER_TRANSPORT": "tcp", "KVXFER_TRACEBACK": "1", "OTHER": "x"}

    with caplog.at_level(logging.WARNING, "kvxfer"):
        resolve(environment)
        resolve(environment)

    (told,) = caplog.messages
    assert "KVXFER_TRANSPORT'" in told
    assert "did you mean KVXFER_TRANSPORTS?" in told


def test_a_name_like_no_other_gets_no_hint(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_module, "_reported", set())

    with caplog.at_level(logging.WARNING, "kvxfer"):
        resolve({"KVXFER_FOO": "1"})
    with pytest.raises(ConfigError) as caught:
        resolve(foo=1)

    assert "did you mean" not in caplog.text + str(caught.value)
    assert closest_variable("KVXFER_PROT") == "KVXFER_PORT"


@pytest.mark.parametrize("host", ["0.0.0.0:4000", "name.example:4000", "[::1]:4000"])
def test_host_with_a_port_in_it_is_told_where_the_port_belongs(host: str) -> None:
    with pytest.raises(ConfigError, match=r"^host is .*it has a port in it, which is the setting port \(KVXFER_PORT\)"):
        resolve(host=host)
    with pytest.raises(ConfigError, match=r"variable KVXFER_HOST is .*it has a port in it"):
        resolve({"KVXFER_HOST": host})


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("host", "[::1]", "host is '[::1]': leave out the brackets; it takes an address or a name, without a port"),
        ("host", "a b", "host is 'a b': it has ' ' in it; it takes an address or a name, without a port"),
        ("host", "http://a", "host is 'http://a': it is a URL; leave out http://; it takes"),
        ("host", "1::2::3", "host is '1::2::3': it has colons and is no IPv6 address; it takes"),
        ("host", None, "host is None: it is None, not text; it takes"),
        ("advertise_host", "::", "advertise_host is '::': it means all addresses, and no peer can open them; it takes"),
        ("port", "80", "port is '80': it is a str, not a whole number; it takes 0 to 65535"),
        ("port", 1.5, "port is 1.5: it is a float, not a whole number; it takes 0 to 65535"),
        ("spin_s", float("nan"), "spin_s is nan: it is a float, not a finite number; it takes 0 to 0.01 s"),
        ("name", " ", "name is ' ': it is empty; it takes text"),
        ("name", b"a", "name is b'a': it is bytes, not text; it takes text"),
        ("transports", 5, "transports is an int, not names; available: shm, rdma, tcp"),
        ("transports", "tcp,tcp", "transports is 'tcp,tcp', which names one twice; available: shm, rdma, tcp"),
        ("key", b"a", "key has 1 byte; it takes at least 8"),
        (
            "gid_interface",
            "",
            "gid_interface is '': it is no name of an interface; it takes an interface, such",
        ),
        ("rdma_devices", 5, "rdma_devices is 5: it is neither text nor a list; it takes devices, such as"),
    ],
)
def test_value_that_cannot_be_meant_is_told_in_a_sentence(name: str, value: Any, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(**{name: value})

    assert caught.value.message.startswith(told)
    assert caught.value.message.endswith(f"({name} was given as an argument).")


def test_default_that_is_none_is_told_by_what_is_done_without() -> None:
    with pytest.raises(ConfigError, match=r"the default is None \(derived from host and the routes\)\.$"):
        resolve(advertise_host="")
    with pytest.raises(ConfigError, match=r"is 'x': it is not a whole number; .* unset it: the default is 0\.$"):
        resolve({"KVXFER_PORT": "x"})


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "::1", "fe80::1%eth0", "name.example"])
def test_host_without_a_port_is_taken_as_it_is(host: str) -> None:
    assert resolve(host=host).host == host


@pytest.mark.parametrize("name", ["KVXFER_UML_KERNEL", "KVXFER_CI_INTEROP", "KVXFER_CI_OTHER_PYTHONS"])
def test_variables_of_the_projects_own_tests_are_known(name: str) -> None:
    assert EngineConfig.unknown_variables({name: "1"}) == []


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("port", "0 to 65535"),
        ("rdma_timeout", "1 to 31"),
        ("tcp_socket_buffer_nbytes", "0 to 1 GiB"),
        ("rdma_chunk_nbytes_max", "64 KiB to 4 EiB"),
        ("tcp_connections_max", "1 to 1048576 connections"),
        ("spin_s", "0 to 0.01 s"),
        ("path_mtu_nbytes_max", "256, 512, 1024, 2048 or 4096 bytes"),
    ],
)
def test_range_is_told_in_whole_numbers_with_its_unit_once(name: str, allowed: str) -> None:
    (row,) = [row for row in EngineConfig.settings() if row.name == name]

    assert row.allowed == allowed


@pytest.mark.parametrize("value", ["", " ", 5, b"host", "a\0b"])
def test_host_that_cannot_be_meant_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="host is"):
        resolve(host=value)


def test_configuration_cannot_be_changed() -> None:
    config = EngineConfig()

    with pytest.raises(dataclasses.FrozenInstanceError):
        config.port = 1  # type: ignore[misc]
