"""Every name that Mooncake's module has is there; and how kvxfer comes into its place."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import threading

import pytest

from kvxfer import errors
from kvxfer.compat import mooncake, shim_path
from kvxfer.compat.mooncake.codes import Code, code_of
from tests.support.peer import ROOT

NAMES = {
    "CoroRPCInterface", "InnerTransferEngine", "Read", "ReceivedData", "ReceivedTensor", "RpcInterface", "SUPPORT_CUDA",
    "SUPPORT_EFA", "SUPPORT_HIP", "SUPPORT_INTRA_NVLINK", "SUPPORT_MNNVL", "SUPPORT_MUSA", "SharedSegment",
    "TransferEngine", "TransferNotify", "TransferOpcode", "Write", "create_rpc_client", "create_rpc_server",
}  # fmt: skip
METHODS = {
    "allocate_managed_buffer", "batch_register_memory", "batch_transfer_async", "batch_transfer_async_read",
    "batch_transfer_async_write", "batch_transfer_sync", "batch_transfer_sync_read", "batch_transfer_sync_write",
    "batch_unregister_memory", "free_managed_buffer", "get_batch_transfer_status", "get_engine", "get_engine_ptr",
    "get_first_buffer_address", "get_local_topology", "get_notifies", "get_rpc_port", "initialize", "initialize_ext",
    "read_bytes_from_buffer", "register_memory", "send_probe", "transfer_check_status", "transfer_submit_write",
    "transfer_sync", "transfer_sync_read", "transfer_sync_write", "unregister_memory", "warmup_efa_segment",
    "write_bytes_to_buffer",
}  # fmt: skip


def run_python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": os.environ["PATH"], **environment},
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_names_are_mooncakes_and_one_more() -> None:
    assert set(mooncake.__all__) == NAMES | {"last_error"}


def test_methods_are_mooncakes() -> None:
    methods = {name for name, value in vars(mooncake.TransferEngine).items() if inspect.isfunction(value)}

    assert {name for name in methods if not name.startswith("_")} == METHODS


def test_what_is_not_here_says_so() -> None:
    assert mooncake.SharedSegment.supported() is False
    for make in (mooncake.create_rpc_client, mooncake.create_rpc_server, mooncake.RpcInterface, mooncake.ReceivedData):
        with pytest.raises(errors.UnsupportedError, match="is not on kvxfer"):
            make()


@pytest.mark.slow
def test_shim_path_makes_mooncake_kvxfers() -> None:
    found = run_python(
        "import mooncake.engine as m, kvxfer.compat.mooncake as k; print(m.TransferEngine is k.TransferEngine, "
        "set(k.__all__) <= set(dir(m)))",
        PYTHONPATH=f"{shim_path()}{os.pathsep}{ROOT}",
    )

    assert found == "True True"


@pytest.mark.slow
def test_command_prints_the_folder() -> None:
    assert run_python("from kvxfer.cli import main; main(['shim-path'])") == str(shim_path())
    assert (shim_path() / "mooncake" / "engine.py").exists()


@pytest.mark.slow
def test_install_makes_mooncake_kvxfers() -> None:
    found = run_python(
        "import kvxfer.compat as c; c.install(); c.install(); from mooncake.engine import TransferEngine, last_error; "
        "print(TransferEngine.__module__)"
    )

    assert found == "kvxfer.compat.mooncake.engine"


@pytest.mark.slow
def test_install_after_another_mooncake_is_refused() -> None:
    found = run_python(
        "import sys, types; sys.modules['mooncake'] = types.ModuleType('mooncake'); "
        "sys.modules['mooncake.engine'] = types.ModuleType('mooncake.engine')\n"
        "import kvxfer.compat\n"
        "try: kvxfer.compat.install()\n"
        "except ImportError as error: print(error)"
    )

    assert "imported already" in found


# Codes.


@pytest.mark.parametrize("name", [name for name in errors.__all__ if name != "KvxferError"])
def test_every_error_has_a_negative_code(name: str) -> None:
    assert code_of(getattr(errors, name)("it failed.")) < 0


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.RegionOverlapError("x"), Code.ADDRESS_OVERLAPPED),
        (errors.NotRegisteredError("x"), Code.ADDRESS_NOT_REGISTERED),
        (errors.PeerUnreachableError("x"), Code.SOCKET),
        (errors.PeerUnreachableError("x", mooncake_code=Code.DNS), Code.DNS),
        (errors.TransferTimeoutError("x"), Code.TIMED_OUT),
        (errors.DeviceNotFoundError("x"), Code.DEVICE_NOT_FOUND),
        (errors.SegmentNotFoundError("x"), Code.METADATA),
        (errors.ForkedError("x"), Code.INVALID_ARGUMENT),
        (ZeroDivisionError(), Code.INVALID_ARGUMENT),
    ],
    ids=lambda value: type(value).__name__,
)
def test_codes(error: Exception, code: Code) -> None:
    assert code_of(error) is code


def test_last_error_is_the_threads_own() -> None:
    engine = mooncake.TransferEngine()
    found: list[BaseException | None] = []

    assert engine.register_memory(1, 1) == -1
    thread = threading.Thread(target=lambda: found.append(mooncake.last_error()))
    thread.start()
    thread.join()

    assert isinstance(mooncake.last_error(), errors.UsageError)
    assert found == [None]


def test_a_bug_is_a_code_and_a_trace_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    from kvxfer.compat.mooncake.codes import answer

    assert answer("call", None, lambda: 1 // 0) == -1

    assert isinstance(mooncake.last_error(), ZeroDivisionError)
    assert "ZeroDivisionError" in caplog.text
    assert "Traceback" in caplog.text
