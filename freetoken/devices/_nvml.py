"""What the driver's management library says of the cards' memory: the one view that counts everything.

torch and our pools know what they asked for; contexts, kernels' code and other programs they don't see.
Opened at run time, needs no context, and is absent on some systems: `open_nvml` then says None.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from ctypes import byref, c_uint, c_ulonglong, c_void_p

NAMES = ("nvml.dll",) if sys.platform == "win32" else ("libnvidia-ml.so.1", "libnvidia-ml.so")
_UUID_BYTES = 96


class _Memory(ctypes.Structure):
    _fields_ = [("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong)]


class Nvml:
    """library   anything with the `nvml*` functions; a call that fails ends the answer, never raises"""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._lib = library

    def used_bytes(self) -> dict[str, int]:
        """Bytes in use on each card, by UUID ("GPU-..."), whoever uses them."""
        count, out = c_uint(), {}
        if self._lib.nvmlDeviceGetCount_v2(byref(count)):
            return {}
        for index in range(count.value):
            handle, memory = c_void_p(), _Memory()
            uuid = ctypes.create_string_buffer(_UUID_BYTES)
            if (
                self._lib.nvmlDeviceGetHandleByIndex_v2(c_uint(index), byref(handle))
                or self._lib.nvmlDeviceGetUUID(handle, uuid, c_uint(_UUID_BYTES))
                or self._lib.nvmlDeviceGetMemoryInfo(handle, byref(memory))
            ):
                continue
            out[uuid.value.decode()] = int(memory.used)
        return out


@functools.cache
def open_nvml() -> Nvml | None:
    for name in NAMES:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        if not library.nvmlInit_v2():
            return Nvml(library)
    return None
