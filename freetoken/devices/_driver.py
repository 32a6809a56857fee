"""The CUDA driver, opened at run time: virtual memory, registered host memory, nothing else.

Owns the ctypes surface; torch owns context, streams and kernels. Nothing here is linked: a machine
without a driver imports this file and learns so from `open_driver`. Every call's result is checked.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from ctypes import byref, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p

from freetoken.core.errors import CapacityError, DeviceError

OUT_OF_MEMORY = 2
_REGISTER_PORTABLE_MAPPED = 1 | 2
_PINNED, _ON_DEVICE, _READ_WRITE = 1, 1, 3


class Location(ctypes.Structure):
    _fields_ = [("type", c_int), ("id", c_int)]


class AllocationProp(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("type", c_int),
        ("handle_types", c_int),
        ("location", Location),
        ("win32_handle", c_void_p),
        ("flags", c_ubyte * 8),
    ]


class AccessDesc(ctypes.Structure):
    _fields_ = [("location", Location), ("flags", c_int)]


class Driver:
    """Calls on the context that is current in the calling thread; sizes in bytes, addresses as ints."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._lib = library

    def granularity(self, device: int) -> int:
        size = c_size_t()
        self._call("cuMemGetAllocationGranularity", byref(size), byref(_prop(device)), c_int(0))
        return size.value

    def reserve(self, num_bytes: int) -> int:
        """Address space without memory behind it."""
        address = c_uint64()
        self._call(
            "cuMemAddressReserve", byref(address), c_size_t(num_bytes), c_size_t(0), c_uint64(0), c_uint64(0)
        )
        return address.value

    def unreserve(self, address: int, num_bytes: int) -> None:
        self._call("cuMemAddressFree", c_uint64(address), c_size_t(num_bytes))

    def map(self, address: int, num_bytes: int, device: int) -> int:
        """Put new memory behind a reserved range; returns its handle. CapacityError if there is none."""
        handle = c_uint64()
        self._call("cuMemCreate", byref(handle), c_size_t(num_bytes), byref(_prop(device)), c_uint64(0))
        with contextlib.ExitStack() as undo:
            undo.callback(self._call, "cuMemRelease", handle)
            where = c_uint64(address), c_size_t(num_bytes)
            self._call("cuMemMap", *where, c_size_t(0), handle, c_uint64(0))
            undo.callback(self._call, "cuMemUnmap", *where)
            access = AccessDesc(Location(_ON_DEVICE, device), _READ_WRITE)
            self._call("cuMemSetAccess", *where, byref(access), c_size_t(1))
            undo.pop_all()
        return handle.value

    def unmap(self, address: int, num_bytes: int, handle: int) -> None:
        self._call("cuMemUnmap", c_uint64(address), c_size_t(num_bytes))
        self._call("cuMemRelease", c_uint64(handle))

    def register(self, address: int, num_bytes: int) -> int:
        """Lock host memory and map it into the device; returns its device address."""
        self._call(
            "cuMemHostRegister_v2",
            c_void_p(address),
            c_size_t(num_bytes),
            c_uint(_REGISTER_PORTABLE_MAPPED),
        )
        there = c_uint64()
        self._call("cuMemHostGetDevicePointer_v2", byref(there), c_void_p(address), c_uint(0))
        return there.value

    def unregister(self, address: int) -> None:
        self._call("cuMemHostUnregister", c_void_p(address))

    def _call(self, name: str, *arguments: object) -> None:
        result = getattr(self._lib, name)(*arguments)
        if result == OUT_OF_MEMORY:
            raise CapacityError(
                "The GPU has no memory left for this.",
                code="out_of_device_memory",
                hint="Close other programs that use the GPU, or lower --gpu-memory.",
            )
        if result:
            raise DeviceError(
                f"{name} failed with CUDA error {result} ({self._describe(result)}).",
                code="cuda_error",
                hint="Run ft doctor; a driver update often helps.",
            )

    def _describe(self, result: int) -> str:
        text = ctypes.c_char_p()
        self._lib.cuGetErrorName(c_int(result), byref(text))
        return (text.value or b"unknown").decode()


def _prop(device: int) -> AllocationProp:
    return AllocationProp(type=_PINNED, handle_types=0, location=Location(_ON_DEVICE, device))


@functools.cache
def open_driver() -> Driver | None:
    """The driver's library, or None where there is none."""
    try:
        library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None
    return Driver(library)
