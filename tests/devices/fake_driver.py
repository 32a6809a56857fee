"""A CUDA driver's memory calls over the system's own pages, with failures on demand. Linux only."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

GRAIN = 2 << 20
_NONE, _BOTH, _DONT_NEED = 0, 3, 4


class FakeLibrary:
    """fail_in   the n-th creating or mapping call from now on fails, 0 = none; room: bytes of the card"""

    def __init__(self, room: int = 1 << 30) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self.fail_in, self.room = 0, room
        self.handles: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        self.reserved: dict[int, int] = {}
        self._next = 1

    def _fails(self) -> bool:
        self.fail_in -= 1
        return self.fail_in == 0

    def cuGetErrorName(self, code: Any, text: Any) -> int:
        text._obj.value = b"CUDA_ERROR_INJECTED"
        return 0

    def cuMemGetAllocationGranularity(self, out: Any, prop: Any, option: Any) -> int:
        out._obj.value = GRAIN
        return 0

    def cuMemAddressReserve(self, out: Any, size: Any, *rest: Any) -> int:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        address = self._libc.mmap(None, size, _NONE, flags, -1, ctypes.c_long(0))
        out._obj.value = address
        self.reserved[address] = size.value
        return 0

    def cuMemAddressFree(self, address: Any, size: Any) -> int:
        assert self.reserved.pop(address.value) == size.value
        self._libc.munmap(ctypes.c_void_p(address.value), size)
        return 0

    def cuMemCreate(self, out: Any, size: Any, prop: Any, flags: Any) -> int:
        if self._fails():
            return 2
        if sum(self.handles.values()) + size.value > self.room:
            return 2
        out._obj.value, self._next = self._next, self._next + 1
        self.handles[out._obj.value] = size.value
        return 0

    def cuMemMap(self, address: Any, size: Any, offset: Any, handle: Any, flags: Any) -> int:
        if self._fails():
            return 1
        assert handle.value in self.handles and address.value not in self.mapped
        self.mapped[address.value] = handle.value
        return 0

    def cuMemSetAccess(self, address: Any, size: Any, access: Any, count: Any) -> int:
        if self._fails():
            return 1
        failed = int(self._libc.mprotect(ctypes.c_void_p(address.value), size, _BOTH))
        ctypes.memset(address.value, 0xAB, size.value)  # memory is new, not clean
        return failed

    def cuMemUnmap(self, address: Any, size: Any) -> int:
        self.mapped.pop(address.value)
        place = ctypes.c_void_p(address.value)
        self._libc.madvise(place, size, _DONT_NEED)
        return int(self._libc.mprotect(place, size, _NONE))

    def cuMemRelease(self, handle: Any) -> int:
        del self.handles[handle.value]
        return 0
