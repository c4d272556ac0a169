"""Find the address and size of memory that the caller owns: numpy, bytes-like, mmap, torch, DLPack, (address, nbytes).

Never copies, never touches the bytes, never imports torch: a tensor is recognised through `sys.modules`. What is not
one plain block of host memory is refused here, before any system call. Read next: `regions.RegionTable.reserve`.
"""

from __future__ import annotations

import mmap
import sys
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from kvxfer.errors import MemoryArgumentError
from kvxfer.text import show
from kvxfer.types import ADDRESS_MAX, as_whole_number

__all__ = ["BufferView", "buffer_view"]

_HOST_DEVICES = {1: "cpu", 3: "cuda_host", 11: "rocm_host"}  # DLDeviceType of dlpack.h: memory the CPU may address
_OTHER_DEVICES = {2: "cuda", 4: "opencl", 7: "vulkan", 8: "metal", 10: "rocm", 13: "cuda_managed", 14: "oneapi"}


@dataclass(frozen=True)
class BufferView:
    """One contiguous range of host memory, and what keeps it there.

    owner: kept as long as the view lives. For an object with the buffer protocol it is a memoryview, so that a
    bytearray cannot be resized and a mmap cannot be closed meanwhile. None for a plain address: the caller promises.
    read_only: a write to it would fault or break a promise of its owner. False for a plain address and for torch, which
    cannot say.
    kind: "numpy", "buffer", "mmap", "torch", "array-interface", "dlpack" or "address".
    """

    address: int
    nbytes: int
    read_only: bool
    owner: object = field(repr=False, compare=False)
    kind: str

    @property
    def end(self) -> int:
        """The address one past the last byte."""
        return self.address + self.nbytes


def buffer_view(obj: object) -> BufferView:
    """Return where the memory of `obj` is, without a copy.

    obj: a numpy array, a bytes-like object, a mmap, a CPU torch tensor, an object with `__array_interface__` or DLPack
    on the CPU, or a tuple `(address, nbytes)`. Only C-contiguous memory is accepted: a transposed array is one block
    as well, but its bytes are not in the order of its elements, so equal offsets on two sides would be other elements.

    Raises MemoryArgumentError (a ValueError and a TypeError) for all else: empty, strided, Python objects, on a GPU.
    """
    if isinstance(obj, BufferView):
        return obj
    if isinstance(obj, tuple):
        return _from_address(obj)
    if isinstance(obj, np.ndarray):
        return _from_array(obj, obj, "numpy")
    if _is_torch_tensor(obj):
        return _from_torch(obj)
    _refuse_gpu(obj)
    if isinstance(obj, (str, np.generic)):
        _refuse(obj, "is a value, not memory", "Pass a numpy array, a bytearray or a mmap.")
    try:
        exported = memoryview(obj)  # type: ignore[arg-type]
    except TypeError:
        pass
    except (BufferError, ValueError) as exc:
        _refuse(obj, f"does not give out its memory ({exc})", "Pass an open object with one plain block.", cause=exc)
    else:
        return _from_memoryview(obj, exported)
    if hasattr(obj, "__array_interface__"):
        return _from_array_interface(obj)
    if hasattr(obj, "__dlpack__"):
        return _from_dlpack(obj)
    _refuse(
        obj,
        "has no memory of its own: neither the buffer protocol, __array_interface__ nor DLPack",
        "Pass a numpy array, a bytearray, a mmap, a CPU tensor or (address, nbytes).",
    )


def _refuse(obj: object, reason: str, remedy: str, *, cause: BaseException | None = None, **values: Any) -> NoReturn:
    kind = type(obj)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    raise MemoryArgumentError(
        f"this {name} cannot be registered: it {reason}.", remedy=remedy, object_type=name, **values
    ) from cause


def _checked(obj: object, view: BufferView) -> BufferView:
    """Return `view` if it is a range of at least one byte that an int64 can address."""
    address, nbytes = view.address, view.nbytes
    if nbytes < 1:
        _refuse(obj, f"has {nbytes} bytes", "Register at least one byte.", address=address, nbytes=nbytes)
    if not 0 < address <= ADDRESS_MAX - nbytes:
        _refuse(
            obj,
            f"has the address {address:#x} and {nbytes} bytes, outside [1, 2**63)",
            "Pass the address of mapped memory of this process.",
            address=address,
            nbytes=nbytes,
        )
    return view


def _refuse_strided(obj: object, shape: tuple[int, ...], strides: tuple[int, ...] | None) -> NoReturn:
    _refuse(
        obj,
        f"is not C-contiguous (shape {shape}, strides {strides} bytes), so it is not one block in the order of its "
        "elements",
        "Register the array it is a view of, or a contiguous copy that you keep; kvxfer never copies for you.",
        shape=shape,
        strides=strides,
    )


def _from_address(pair: tuple[Any, ...]) -> BufferView:
    remedy = "Pass (address, nbytes), two ints."
    if len(pair) != 2:
        _refuse(pair, f"has {len(pair)} items", remedy)
    numbers = []
    for name, value in zip(("address", "nbytes"), pair, strict=True):
        number = as_whole_number(value)
        if number is None:
            _refuse(pair, f"has {show(value)} as {name}, which is no int", remedy)
        numbers.append(number)
    return _checked(pair, BufferView(numbers[0], numbers[1], read_only=False, owner=None, kind="address"))


def _from_array(obj: object, array: np.ndarray[Any, Any], kind: str) -> BufferView:
    if array.dtype.hasobject:
        _refuse(obj, f"holds Python objects (dtype {array.dtype})", "Use a dtype of plain bytes.")
    if not array.flags.c_contiguous:
        _refuse_strided(obj, array.shape, array.strides)
    address = int(array.__array_interface__["data"][0])
    read_only = not array.flags.writeable
    return _checked(obj, BufferView(address, array.nbytes, read_only=read_only, owner=array, kind=kind))


def _from_memoryview(obj: object, exported: memoryview) -> BufferView:
    kind = "mmap" if isinstance(obj, mmap.mmap) else "buffer"
    if exported.nbytes < 1:
        _refuse(obj, "has 0 bytes", "Register at least one byte.", nbytes=0)
    if not exported.c_contiguous:
        _refuse_strided(obj, exported.shape or (), exported.strides)
    if "O" in exported.format:
        _refuse(obj, f"holds Python objects (format {exported.format!r})", "Use a format of plain bytes.")
    address = int(np.frombuffer(exported, np.uint8).__array_interface__["data"][0])
    return _checked(obj, BufferView(address, exported.nbytes, read_only=exported.readonly, owner=exported, kind=kind))


class _InterfaceHolder:
    """Shows numpy the array interface of an object and nothing else, so that numpy cannot fall back to a copy."""

    def __init__(self, obj: object, interface: object) -> None:
        self.obj = obj
        self.__array_interface__ = interface


def _from_array_interface(obj: Any) -> BufferView:
    try:
        interface = obj.__array_interface__
        array = np.asarray(_InterfaceHolder(obj, interface))
        data = interface["data"]  # (address, read_only), or an object with the buffer protocol
        described = int(data[0]) if isinstance(data, tuple) else None
    except Exception as exc:  # whatever a foreign object raises, the answer is the same
        _refuse(obj, f"has an unusable __array_interface__ ({exc})", "Pass it as a numpy array.", cause=exc)
    view = _from_array(obj, array, "array-interface")
    if described is not None and view.address != described:
        _refuse(obj, f"gives memory at {described:#x} that numpy would have to copy", "Pass it as a numpy array.")
    return view


def _is_torch_tensor(obj: object) -> bool:
    tensor_type = getattr(sys.modules.get("torch"), "Tensor", None)
    return isinstance(tensor_type, type) and isinstance(obj, tensor_type)


def _from_torch(tensor: Any) -> BufferView:
    device = str(tensor.device)
    if tensor.device.type != "cpu":
        _refuse_device(tensor, device)
    layout = str(tensor.layout)
    if layout != "torch.strided":
        _refuse(tensor, f"has the layout {layout}, not one block", "Register its values and indices one by one.")
    if not tensor.is_contiguous():
        item = tensor.element_size()
        _refuse_strided(tensor, tuple(tensor.shape), tuple(item * step for step in tensor.stride()))
    if tensor.is_conj() or tensor.is_neg():
        _refuse(tensor, "is a lazily conjugated or negated view", "Register the tensor it is a view of.")
    nbytes = int(tensor.numel()) * int(tensor.element_size())
    return _checked(tensor, BufferView(int(tensor.data_ptr()), nbytes, read_only=False, owner=tensor, kind="torch"))


def _refuse_gpu(obj: Any) -> None:
    if hasattr(obj, "__cuda_array_interface__"):
        _refuse_device(obj, "cuda")
    if hasattr(obj, "__dlpack_device__"):
        device_type, device_id = obj.__dlpack_device__()
        if int(device_type) not in _HOST_DEVICES:
            _refuse_device(obj, f"{_OTHER_DEVICES.get(int(device_type), f'DLPack device {device_type}')}:{device_id}")


def _refuse_device(obj: object, device: str) -> NoReturn:
    _refuse(
        obj,
        f"is on {device}, and no transport here reaches device memory",
        "Copy it to host memory (torch: tensor.cpu(), cupy: cupy.asnumpy) and register that buffer.",
        device=device,
    )


_NO_COPY: dict[str, Any] = {"copy": False} if np.lib.NumpyVersion(np.__version__) >= "2.1.0" else {}
"""numpy before 2.1 has no such argument, and never copies."""


def _from_dlpack(obj: Any) -> BufferView:
    try:
        array = np.from_dlpack(obj, **_NO_COPY)
    except Exception as exc:  # whatever a foreign object raises, the answer is the same
        _refuse(obj, f"gives no CPU memory through DLPack ({exc})", "Pass it as a numpy array.", cause=exc)
    return _from_array(obj, array, "dlpack")
