"""The files by which SGLang, vLLM, LMCache and checkpoint-engine call Mooncake, unchanged, on the engine that is found.

Run as `callers.py NAME WHEEL`, with PYTHONPATH saying whose `mooncake.engine` it is; prints one JSON object of what was
seen. Used by test_callers.py.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from wheel_modules import WheelFinder

HOST = "127.0.0.1"
MIB = 1 << 20
IS_REAL = os.environ.get("CALLERS_ENGINE") == "mooncake"


def free_port() -> int:
    with socket.create_server((HOST, 0)) as listener:
        return int(listener.getsockname()[1])


def dead_session() -> str:
    """The name of a peer that is not there."""
    return f"{HOST}:{free_port()}"


def failure(work: Callable[[], Any]) -> str:
    try:
        work()
    except Exception as exc:
        return f"{type(exc).__name__}: {exc}"
    return "none"


class Setting:
    """SGLang's way to an environment variable."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def get(self) -> Any:
        return self.value


def run_sglang(wheel: Path) -> dict[str, Any]:
    protocol = Setting("tcp")
    envs = SimpleNamespace(
        ENABLE_ASCEND_TRANSFER_WITH_MOONCAKE=Setting(False),
        MOONCAKE_PROTOCOL=protocol,
        SGLANG_DISAGGREGATION_ENGINE_INIT_TIMEOUT=Setting(60),
    )
    name = "sglang.srt.distributed.device_communicators.mooncake_transfer_engine"
    WheelFinder(
        wheel,
        real=[name, "sglang.srt.utils.network"],
        packages=["sglang", "psutil"],
        values={
            "sglang.srt.environ": {"envs": envs},
            "sglang.srt.utils.common": {"run_with_deadline": lambda work, **_: work()},
        },
    ).install()
    module = importlib.import_module(name)
    one, other = module.MooncakeTransferEngine(HOST), module.MooncakeTransferEngine(HOST, gpu_id=1, ib_device="mlx5_0")
    source, target = torch.arange(MIB, dtype=torch.uint8), torch.zeros(MIB, dtype=torch.uint8)
    seen: dict[str, Any] = {"session": one.get_session_id() == f"{HOST}:{one.engine.get_rpc_port()}"}
    seen["ib_device"] = other.get_ib_device()
    seen["register"] = one.batch_register([source.data_ptr()], [MIB])
    other.register(target.data_ptr(), MIB)
    seen["register_again"] = failure(lambda: other.register(target.data_ptr(), MIB))
    seen["batch_register_again"] = one.batch_register([source.data_ptr()], [MIB])

    blocks = range(0, MIB, 4096)
    session = other.get_session_id()
    addresses = [[tensor.data_ptr() + at for at in blocks] for tensor in (source, target)]
    seen["batch_write"] = one.batch_transfer_sync(session, *addresses, [4096] * len(blocks))
    seen["arrived"] = torch.equal(source, target)
    with ThreadPoolExecutor(8) as pool:  # one per layer, on one engine and session
        work = [pool.submit(one.transfer_sync, session, source.data_ptr(), target.data_ptr(), 4096) for _ in range(64)]
        seen["threads"] = sorted({one_of.result() for one_of in work})
    seen["read"] = other.engine.batch_transfer_sync_read(
        one.get_session_id(), [target.data_ptr()], [source.data_ptr()], [64]
    )
    seen["probe"] = [one.send_probe(session), one.send_probe(dead_session()) < 0]
    seen["dead"] = one.batch_transfer_sync(dead_session(), [source.data_ptr()], [target.data_ptr()], [64]) < 0
    seen["outside"] = one.transfer_sync(session, source.data_ptr(), target.data_ptr() + MIB - 8, 64) < 0
    seen["after_failure"] = one.transfer_sync(session, source.data_ptr(), target.data_ptr(), 64)
    seen["engine"] = one.get_engine() is not None
    seen["deregister"] = one.batch_deregister([source.data_ptr()])
    other.deregister(target.data_ptr())
    seen["deregister_again"] = failure(lambda: other.deregister(target.data_ptr()))
    protocol.value = "rdma"
    seen["rdma"] = failure(lambda: module.MooncakeTransferEngine(HOST, ib_device="mlx5_0"))
    return seen


def run_checkpoint_engine(wheel: Path) -> dict[str, Any]:
    name = "checkpoint_engine.p2p_store"
    WheelFinder(
        wheel,
        real=[name],
        packages=["checkpoint_engine", "loguru"],
        values={"checkpoint_engine.device_utils": {"get_ip": lambda: HOST}},
    ).install()
    module = importlib.import_module(name)
    os.environ["RANK"] = "3"
    manager = SimpleNamespace(
        device_module=SimpleNamespace(device_count=lambda: 2),
        rdma_device=lambda rank: "",
        transfer_engine_protocol="tcp",
    )
    one, other = module.P2PStore(manager), module.P2PStore(manager)
    weights = {f"layer{row}": torch.full((1000, row + 1), float(row)) for row in range(20)}
    targets = {name: torch.empty_like(tensor) for name, tensor in weights.items()}
    seen: dict[str, Any] = {"addresses_differ": one.addr != other.addr}
    one.register_named_tensors(weights)
    other.register_named_tensors(targets)
    pointers = [[tensor.data_ptr() for tensor in side.values()] for side in (targets, weights)]
    sizes = [tensor.nbytes for tensor in weights.values()]
    other.batch_transfer_sync_read(one.addr, *pointers, sizes)
    seen["arrived"] = all(torch.equal(weights[name], targets[name]) for name in weights)
    seen["dead"] = failure(lambda: other.batch_transfer_sync_read(dead_session(), *pointers, sizes))
    seen["twice"] = failure(lambda: one.register_named_tensors(weights))
    seen["unregistered"] = other.unregister_named_tensors(list(targets))
    seen["after_failure"] = failure(lambda: other.batch_transfer_sync_read(one.addr, *pointers, sizes))
    return seen


def run_lmcache(wheel: Path) -> dict[str, Any]:
    base = "lmcache.v1.distributed.transfer_channel"
    name = f"{base}.impl.mooncake_te_impl"
    WheelFinder(
        wheel,
        real=[name, f"{base}.abstract", f"{base}.api", f"{base}.factory"],
        packages=["lmcache"],
        values={"lmcache.v1.mp_observability.errors": {"LMCacheTimeoutError": TimeoutError}},
    ).install()
    module = importlib.import_module(name)
    tensors = [torch.arange(MIB, dtype=torch.uint8), torch.zeros(MIB, dtype=torch.uint8)]
    urls = [f"{HOST}:{free_port()}" for _ in tensors]
    contexts = [
        module.create_mooncake_te_transfer_channel_context(SimpleNamespace(ptr=tensor.data_ptr(), size=MIB), url, url)
        for tensor, url in zip(tensors, urls, strict=True)
    ]
    seen: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.callback(context.close)
        reader = contexts[1]
        client = reader.get_transfer_channel_client(urls[0])
        places = [(at, 4096) for at in range(0, MIB, 4096)]
        seen["read"] = finish(client, reader, places, places)
        seen["arrived"] = torch.equal(*tensors)
        seen["outside"] = failure(lambda: reader.get_transfer_channel_address([(MIB - 8, 64)]))
        client._remote_buffer_ptr += MIB // 2  # what the peer never registered
        seen["refused"] = finish(client, reader, places[-1:], places[-1:])
        client._remote_buffer_ptr -= MIB // 2
        seen["after_failure"] = finish(client, reader, places[:3], places[:3])
        dead = module.MooncakeTeTransferChannelClient(reader, dead_session(), 4096)
        seen["dead"] = failure(lambda: finish(dead, reader, places[:1], places[:1]))
        if not IS_REAL:  # it crashes
            seen["unknown_id"] = reader.mooncake_te_engine.transfer_check_status(1 << 40) < 0
    return seen


def finish(client: Any, context: Any, local: list[tuple[int, int]], remote: list[tuple[int, int]]) -> list[bool]:
    """Submit a read and poll it to its end, as LMCache does; returns whether all and whether any came."""
    addresses = context.get_transfer_channel_address
    task = client.submit_read(addresses(local), addresses(remote))
    limit = time.monotonic() + 30
    while not (result := client.query_read_status(task)).finished:
        assert time.monotonic() < limit
        time.sleep(0)
    return [all(result.succeeded_mask), any(result.succeeded_mask)]


def run_vllm_ec(wheel: Path) -> dict[str, Any]:
    name = "vllm.distributed.ec_transfer.ec_connector.mooncake.transfer"
    WheelFinder(wheel, real=[name], packages=["vllm"], values={}).install()
    module = importlib.import_module(name)
    module.ensure_mooncake_available()
    one, other = module.MooncakeTransfer(HOST, "tcp"), module.MooncakeTransfer(HOST, "tcp")
    one.ensure_ready()
    whole = torch.arange(MIB, dtype=torch.uint8)
    views = list(whole.split(MIB // 4))  # siblings that touch each other
    target = torch.zeros(MIB, dtype=torch.uint8)
    seen: dict[str, Any] = {"register": other.register_memory(target)}
    acquired = one.acquire_sources(views)
    seen["acquired"] = len(acquired)
    seen["acquired_again"] = len(one.acquire_sources(views[:2]))
    session = other.local_session()
    pointers = [target.data_ptr() + row * (MIB // 4) for row in range(4)]
    one.write(session, [view.data_ptr() for view in views], pointers, [MIB // 4] * 4)
    seen["arrived"] = torch.equal(whole, target)
    seen["dead"] = failure(lambda: one.write(dead_session(), acquired[:1], pointers[:1], [64]))
    seen["uneven"] = failure(lambda: one.write(session, acquired, pointers, [64]))
    seen["released"] = one.release_sources(acquired)
    seen["unregistered"] = other.unregister_memory(target)
    seen["unregistered_again"] = other.unregister_memory(target)
    one.close()
    seen["rdma"] = failure(module.MooncakeTransfer(HOST, "rdma").ensure_ready)
    return seen


@contextlib.contextmanager
def vllm_worker(module: Any, role: str, protocol: str = "tcp") -> Iterator[Any]:
    """One MooncakeConnectorWorker of vLLM, made by its own __init__ from a configuration of stubs."""
    extra = {"mooncake_protocol": protocol, "num_workers": 10, "bootstrap_server_address": f"{HOST}:1"}
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_role=role, kv_connector_extra_config=extra, get_from_extra_config=extra.get
        ),
        parallel_config=SimpleNamespace(
            data_parallel_index=0, data_parallel_rank_local=0, local_engines_only=True, pipeline_parallel_size=1
        ),
        cache_config=SimpleNamespace(block_size=16),
        model_config=SimpleNamespace(use_mla=False, get_total_num_kv_heads=lambda: 8),
    )

    class Spec(module.FullAttentionSpec):  # type: ignore[misc, name-defined]
        page_size_bytes = 4096

    layers = [f"model.layers.{row}.attn" for row in range(4)]
    group = SimpleNamespace(kv_cache_spec=Spec(), layer_names=layers)
    caches = SimpleNamespace(
        kv_cache_groups=[group],
        transfer_groups=[group],
        transfer_group_index_by_layer=dict.fromkeys(layers, 0),
        has_mamba_layers=False,
        num_blocks=64,
    )
    worker = module.MooncakeConnectorWorker(config, f"engine-{role}", caches)
    try:
        yield worker
    finally:
        worker.shutdown()
        module.MooncakeConnectorWorker.__del__ = lambda self: None  # once is enough


def run_vllm(wheel: Path) -> dict[str, Any]:
    base = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake"
    WheelFinder(
        wheel,
        real=[f"{base}.mooncake_connector"],
        packages=["vllm", "huggingface_hub"],
        values={
            "vllm.utils.network_utils": {"get_ip": lambda: HOST, "make_zmq_path": lambda *parts: str(parts)},
            "vllm.distributed.parallel_state": {
                "get_tensor_model_parallel_rank": lambda: 0,
                "get_tensor_model_parallel_world_size": lambda: 1,
                "get_pp_group": lambda: SimpleNamespace(rank_in_group=0),
            },
            "vllm.distributed.kv_transfer.kv_connector.utils": {
                "get_current_attn_backends": lambda config: [],
                "get_current_attn_backends_and_specs": lambda config, caches, backends: ([], []),
            },
            "vllm.v1.worker.utils": {"select_common_block_size": lambda size, *_: size},
            "vllm.utils.torch_utils": {"is_non_overlapping_and_dense": lambda tensor: tensor.is_contiguous()},
            "vllm.model_executor.models.utils": {"extract_layer_index": lambda name: int(name.split(".")[2])},
        },
    ).install()
    torch.accelerator = SimpleNamespace(current_device_index=lambda: 0)  # type: ignore[assignment]
    module = importlib.import_module(f"{base}.mooncake_connector")
    seen: dict[str, Any] = {"engine": module.TransferEngine is not None}

    def caches(value: int) -> dict[str, torch.Tensor]:
        return {f"model.layers.{row}.attn": torch.full((64, 4096), value, dtype=torch.uint8) for row in range(4)}

    with vllm_worker(module, "kv_consumer") as decode, vllm_worker(module, "kv_producer") as prefill:
        there, here = caches(0), caches(7)
        decode.register_kv_caches(there)
        prefill.is_kv_consumer = True  # its listener needs a bootstrap server; the registration does not
        prefill.register_kv_caches(here)
        prefill.is_kv_consumer = False
        seen["regions"] = len(prefill.kv_caches_base_addr)
        session = f"{HOST}:{decode.rpc_port}"
        rows = [row for row in range(64) if row % 2]
        columns = [
            [base + row * 4096 for base in side.kv_caches_base_addr for row in rows] for side in (prefill, decode)
        ]
        lengths = [4096] * len(columns[0])
        futures = [prefill._sender_executor.submit(prefill._send_blocks, session, *columns, lengths) for _ in range(40)]
        seen["sends"] = sorted({future.result() for future in futures})
        seen["arrived"] = all((tensor[1::2] == 7).all() and not tensor[::2].any() for tensor in there.values())
        seen["dead"] = prefill._send_blocks(dead_session(), *columns, lengths)
        seen["outside"] = prefill._send_blocks(session, columns[0][:1], [columns[1][0] + (1 << 40)], [64])
        seen["after_failure"] = prefill._send_blocks(session, *columns, lengths)
        decode.unregister_kv_caches()  # sleep
        seen["asleep"] = prefill._send_blocks(session, *columns, lengths)
        decode.restore_kv_caches()
        seen["awake"] = prefill._send_blocks(session, *columns, lengths)
        seen["registered_twice"] = failure(lambda: prefill.register_kv_caches(here))
    seen["rdma"] = failure(lambda: vllm_worker(module, "kv_producer", "rdma").__enter__())
    return seen


if __name__ == "__main__":
    found = globals()[f"run_{sys.argv[1]}"](Path(sys.argv[2]))
    json.dump(found, sys.stdout)
    sys.stdout.flush()
    os._exit(0)  # threads of the callers that nobody ends
