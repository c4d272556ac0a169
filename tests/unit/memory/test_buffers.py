"""buffer_view: where memory is, whose it is, and what is refused before anything happens."""

from __future__ import annotations

import array
import ctypes
import gc
import mmap
import sys
import types
import weakref
from typing import Any

import numpy as np
import pytest

from kvxfer.errors import MemoryArgumentError
from kvxfer.memory import BufferView, buffer_view


def address_of(arr: np.ndarray[Any, Any]) -> int:
    return int(arr.ctypes.data)


class FakeDevice:
    """A torch.device: `type` without the number, `str()` with it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.type = name.split(":", maxsplit=1)[0]

    def __str__(self) -> str:
        return self.name


class FakeTensor:
    """What kvxfer asks of a torch.Tensor, over a numpy array."""

    def __init__(self, arr: np.ndarray[Any, Any], device: str = "cpu", layout: str = "torch.strided") -> None:
        self.arr = arr
        self.device = FakeDevice(device)
        self.layout = layout
        self.shape = arr.shape
        self.conjugated = False

    def is_contiguous(self) -> bool:
        return self.arr.flags.c_contiguous

    def is_conj(self) -> bool:
        return self.conjugated

    def is_neg(self) -> bool:
        return False

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.arr.itemsize for step in self.arr.strides)

    def numel(self) -> int:
        return self.arr.size

    def element_size(self) -> int:
        return self.arr.itemsize

    def data_ptr(self) -> int:
        return address_of(self.arr) if self.device.type == "cpu" else 0x7_0000_0000

    def __dlpack__(self) -> object:
        raise AssertionError("a tensor is asked directly")

    def __array__(self, *_: object) -> object:
        raise AssertionError("a tensor is never converted")


@pytest.fixture
def fake_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(Tensor=FakeTensor))


class DlpackOnly:
    """An object that offers DLPack and nothing else."""

    def __init__(self, arr: np.ndarray[Any, Any], device: tuple[int, int] = (1, 0)) -> None:
        self.arr = arr
        self.device = device

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **options: Any) -> object:
        return self.arr.__dlpack__(**options)


class InterfaceOnly:
    """An object that offers __array_interface__ and a copying __array__."""

    def __init__(self, interface: dict[str, Any]) -> None:
        self.__array_interface__ = interface

    def __array__(self, *_: object, **__: object) -> np.ndarray[Any, Any]:
        raise AssertionError("a copy was asked for")


def test_numpy_array_gives_its_own_memory() -> None:
    arr = np.arange(16, dtype=np.int32)

    view = buffer_view(arr)

    assert view == BufferView(address_of(arr), 64, read_only=False, owner=view.owner, kind="numpy")
    assert view.owner is arr
    assert view.end == view.address + 64


def test_view_of_a_view_is_itself() -> None:
    view = buffer_view(bytearray(8))

    assert buffer_view(view) is view


@pytest.mark.parametrize("shape", [(), (1,), (3, 1, 2)])
def test_any_c_contiguous_shape_is_accepted(shape: tuple[int, ...]) -> None:
    arr = np.zeros(shape)

    assert buffer_view(arr).nbytes == arr.nbytes


def test_contiguous_rows_of_a_matrix_are_accepted() -> None:  # B86
    arr = np.arange(16).reshape(4, 4)

    view = buffer_view(arr[1:3])

    assert (view.address, view.nbytes) == (address_of(arr) + 32, 64)


@pytest.mark.parametrize(
    "strided",
    [
        np.arange(16).reshape(4, 4)[:, 1],
        np.arange(16)[::2],
        np.arange(16).reshape(4, 4).T,
        np.lib.stride_tricks.as_strided(np.arange(4), (4, 4), (0, 8)),
        np.broadcast_to(np.arange(1), (4,)),
        np.arange(16)[::-1],
    ],
    ids=["column", "every second", "transposed", "stride 0", "broadcast", "reversed"],
)
def test_memory_that_is_not_one_block_is_refused(strided: np.ndarray[Any, Any]) -> None:  # B86
    with pytest.raises(ValueError, match=r"not C-contiguous \(shape .* strides .* never copies") as caught:
        buffer_view(strided)

    assert isinstance(caught.value, MemoryArgumentError)
    assert caught.value.values["strides"] == strided.strides


def test_strided_destination_is_refused_and_stays_as_it_was() -> None:  # B87
    arr = np.arange(16).reshape(4, 4)

    with pytest.raises(ValueError, match="not C-contiguous"):
        buffer_view(arr[:, ::2])

    assert arr.tolist() == np.arange(16).reshape(4, 4).tolist()


def test_strided_memoryview_is_refused() -> None:  # B86
    with pytest.raises(MemoryArgumentError, match=r"shape \(4,\), strides \(2,\)"):
        buffer_view(memoryview(bytearray(8))[::2])


def test_array_of_objects_is_refused() -> None:
    with pytest.raises(MemoryArgumentError, match="Python objects"):
        buffer_view(np.array([object()]))


@pytest.mark.parametrize(
    "empty", [b"", bytearray(), np.empty(0), np.empty((4, 0)), (0x1000, 0), (0x1000, -1)], ids=lambda e: repr(e)[:20]
)
def test_empty_memory_is_refused(empty: object) -> None:
    with pytest.raises(MemoryArgumentError, match=r"has -?\d bytes.*at least one byte"):
        buffer_view(empty)


@pytest.mark.parametrize(
    "make",
    [
        bytearray,
        lambda n: array.array("q", bytes(n)),
        lambda n: (ctypes.c_char * n)(),
        lambda n: memoryview(bytearray(n)),
    ],
    ids=["bytearray", "array", "ctypes", "memoryview"],
)
def test_writeable_buffers_give_their_own_memory(make: Any) -> None:
    obj = make(64)

    view = buffer_view(obj)

    assert (view.nbytes, view.read_only, view.kind) == (64, False, "buffer")
    ctypes.memset(view.address, 7, 1)
    assert bytes(memoryview(obj).cast("B"))[0] == 7


def test_registered_bytearray_cannot_be_resized_until_the_view_is_gone() -> None:  # B88
    buffer = bytearray(4096)

    view = buffer_view(buffer)

    with pytest.raises(BufferError):
        buffer.extend(b"x")
    assert len(buffer) == view.nbytes
    del view
    buffer.extend(b"x")


def test_view_keeps_a_temporary_array_alive() -> None:  # B88
    view = buffer_view(np.arange(64)[::2].copy())
    alive = weakref.ref(view.owner)

    gc.collect()

    assert alive() is view.owner
    assert ctypes.string_at(view.address, view.nbytes) == np.arange(0, 64, 2).tobytes()
    del view
    gc.collect()
    assert alive() is None


def test_registered_numpy_array_cannot_be_resized_in_place() -> None:  # B88
    arr = np.zeros(8)

    view = buffer_view(arr)

    with pytest.raises(ValueError, match="resize"):
        arr.resize(1 << 20)
    assert view.nbytes == 64


def frozen_array() -> np.ndarray[Any, Any]:
    arr = np.zeros(8)
    arr.flags.writeable = False
    return arr


@pytest.mark.parametrize(
    "make",
    [
        lambda: b"0123",
        frozen_array,
        lambda: memoryview(bytearray(4)).toreadonly(),
        lambda: DlpackOnly(frozen_array()),
        lambda: InterfaceOnly(frozen_array().__array_interface__),
    ],
    ids=["bytes", "numpy", "memoryview", "dlpack", "array-interface"],
)
def test_read_only_memory_says_so(make: Any) -> None:  # B90
    assert buffer_view(make()).read_only


@pytest.mark.parametrize(
    ("options", "read_only"),
    [
        ({"prot": mmap.PROT_READ}, True),
        ({"access": mmap.ACCESS_READ}, True),
        ({"access": mmap.ACCESS_WRITE}, False),
        ({"prot": mmap.PROT_READ | mmap.PROT_WRITE}, False),
    ],
    ids=repr,
)
def test_mapping_of_a_file_says_whether_it_is_read_only(tmp_path: Any, options: Any, read_only: bool) -> None:  # B90
    path = tmp_path / "file"
    path.write_bytes(bytes(4096))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 4096, **options) as mapping:
        view = buffer_view(mapping)

        assert (view.kind, view.nbytes, view.read_only) == ("mmap", 4096, read_only)
        assert view.address % mmap.PAGESIZE == 0
        del view


def test_registered_mapping_cannot_be_closed() -> None:  # B88
    mapping = mmap.mmap(-1, 4096)
    view = buffer_view(mapping)

    with pytest.raises(BufferError):
        mapping.close()
    del view
    mapping.close()


def test_closed_mapping_is_refused() -> None:
    mapping = mmap.mmap(-1, 4096)
    mapping.close()

    with pytest.raises(MemoryArgumentError, match="does not give out its memory"):
        buffer_view(mapping)


def test_torch_tensor_is_found_without_an_import(fake_torch: None) -> None:
    tensor = FakeTensor(np.zeros((4, 4), np.float16))

    view = buffer_view(tensor)

    assert view == BufferView(address_of(tensor.arr), 32, read_only=False, owner=view.owner, kind="torch")
    assert view.owner is tensor


def test_buffers_never_imports_torch() -> None:
    if "torch" in sys.modules:
        pytest.skip("another test imported torch")

    buffer_view(bytearray(8))

    assert "torch" not in sys.modules


def test_strided_tensor_is_refused(fake_torch: None) -> None:  # B86
    tensor = FakeTensor(np.zeros((4, 4), np.float16)[:, ::2])

    with pytest.raises(MemoryArgumentError, match=r"shape \(4, 2\), strides \(8, 4\) bytes"):
        buffer_view(tensor)


def test_tensor_on_a_gpu_is_refused_with_device_and_remedy(fake_torch: None) -> None:  # B91
    with pytest.raises(TypeError, match=r"on cuda:0.*tensor\.cpu\(\)") as caught:
        buffer_view(FakeTensor(np.zeros(4), device="cuda:0"))

    assert caught.value.device == "cuda:0"  # type: ignore[attr-defined]


def test_sparse_tensor_is_refused(fake_torch: None) -> None:
    with pytest.raises(MemoryArgumentError, match=r"torch\.sparse_coo"):
        buffer_view(FakeTensor(np.zeros(4), layout="torch.sparse_coo"))


def test_lazily_conjugated_tensor_is_refused(fake_torch: None) -> None:
    tensor = FakeTensor(np.zeros(4))
    tensor.conjugated = True

    with pytest.raises(MemoryArgumentError, match="conjugated"):
        buffer_view(tensor)


def test_empty_tensor_is_refused(fake_torch: None) -> None:
    with pytest.raises(MemoryArgumentError, match="0 bytes"):
        buffer_view(FakeTensor(np.empty(0)))


@pytest.mark.slow  # importing torch takes 1.3 s
def test_real_torch_tensors_follow_the_same_rules() -> None:  # B86, B88, B91
    torch = pytest.importorskip("torch")
    tensor = torch.arange(16, dtype=torch.bfloat16).reshape(4, 4)

    view = buffer_view(tensor[1:3])

    assert (view.address, view.nbytes, view.kind) == (tensor.data_ptr() + 8, 16, "torch")
    assert buffer_view(torch.nn.Parameter(tensor)).address == tensor.data_ptr()
    for refused in (tensor.T, tensor[:, 1], torch.empty(4, device="meta"), torch.zeros(4).to_sparse()):
        with pytest.raises(MemoryArgumentError):
            buffer_view(refused)
    for refused in (torch.zeros(1).expand(4), torch.empty(0), torch.zeros(2, dtype=torch.complex64).conj()):
        with pytest.raises(MemoryArgumentError):
            buffer_view(refused)


def test_object_with_cuda_array_interface_is_refused_before_any_use() -> None:  # B91
    class OnGpu:
        def __init__(self) -> None:
            self.__cuda_array_interface__ = {"shape": (4,), "typestr": "|u1", "data": (0x7000, False), "version": 3}

        def __dlpack__(self) -> object:
            raise AssertionError("it was asked for its memory")

    with pytest.raises(TypeError, match=r"is on cuda.*host memory"):
        buffer_view(OnGpu())


@pytest.mark.parametrize(("device", "name"), [((2, 1), "cuda:1"), ((10, 0), "rocm:0"), ((99, 0), "DLPack device 99")])
def test_dlpack_on_another_device_is_refused(device: tuple[int, int], name: str) -> None:  # B91
    with pytest.raises(TypeError, match=f"is on {name}"):
        buffer_view(DlpackOnly(np.zeros(4), device))


def test_dlpack_on_the_cpu_gives_its_own_memory() -> None:
    arr = np.zeros(8)

    view = buffer_view(DlpackOnly(arr))

    assert (view.address, view.nbytes, view.kind, view.read_only) == (address_of(arr), 64, "dlpack", False)


def test_strided_dlpack_is_refused() -> None:  # B86
    with pytest.raises(MemoryArgumentError, match="not C-contiguous"):
        buffer_view(DlpackOnly(np.zeros(8)[::2]))


def test_failing_dlpack_is_refused_with_its_reason() -> None:
    class Broken:
        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

        def __dlpack__(self, **_: object) -> object:
            raise BufferError("out of order")

    with pytest.raises(MemoryArgumentError, match="out of order"):
        buffer_view(Broken())


def test_array_interface_gives_its_own_memory_and_keeps_the_object() -> None:
    arr = np.zeros(8)
    obj = InterfaceOnly(arr.__array_interface__)
    alive = weakref.ref(obj)

    view = buffer_view(obj)
    del obj
    gc.collect()

    assert (view.address, view.nbytes, view.kind) == (address_of(arr), 64, "array-interface")
    assert alive() is not None


@pytest.mark.parametrize(
    "interface",
    [None, {}, {"version": 3, "shape": (4,), "typestr": "|u1", "data": None}],
    ids=["none", "empty", "no data"],
)
def test_unusable_array_interface_is_refused(interface: Any) -> None:
    with pytest.raises(MemoryArgumentError, match="__array_interface__"):
        buffer_view(InterfaceOnly(interface))


def test_address_and_size_are_taken_as_they_are() -> None:
    view = buffer_view((np.int64(0x7000_0000_0000), 4096))

    assert view == BufferView(0x7000_0000_0000, 4096, read_only=False, owner=None, kind="address")
    assert type(view.address) is int


@pytest.mark.parametrize("pair", [(0, 8), (-8, 8), (2**63, 8), (2**63 - 8, 8), (2**64 - 16, 32)], ids=repr)
def test_impossible_address_is_refused(pair: tuple[int, int]) -> None:
    with pytest.raises(MemoryArgumentError, match=r"outside \[1, 2\*\*63\)"):
        buffer_view(pair)


@pytest.mark.parametrize(
    "pair", [(True, 8), (8, np.True_), (8.0, 8), (8, np.float64(8)), ("8", 8), (None, 8)], ids=repr
)
def test_address_that_is_no_int_is_refused(pair: tuple[Any, Any]) -> None:
    with pytest.raises(MemoryArgumentError, match="no int"):
        buffer_view(pair)


@pytest.mark.parametrize("items", [(), (1,), (1, 2, 3)], ids=repr)
def test_tuple_that_is_no_pair_is_refused(items: tuple[int, ...]) -> None:
    with pytest.raises(MemoryArgumentError, match="two ints"):
        buffer_view(items)


@pytest.mark.parametrize("obj", ["text", np.float64(1.0), None, 7, [1, 2], object()], ids=repr)
def test_object_without_memory_is_refused(obj: object) -> None:
    with pytest.raises(TypeError, match=r"cannot be registered.*Pass"):
        buffer_view(obj)
