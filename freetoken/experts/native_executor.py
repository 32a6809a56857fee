"""The host executor behind the ABI page, by the native library: the fast twin of `cpu_executor`.

Owns the translation of layouts, formats and activations, and a handle. Results don't depend on threads or
schedule; against the torch executor they are bounded, not equal (class 2), so a simulated device, whose
own part is torch, keeps torch on both sides.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from freetoken.core.errors import DeviceError
from freetoken.core.interfaces import Routing
from freetoken.core.model_config import Activation
from freetoken.core.weights import WeightFormat
from freetoken.experts.abi import DTYPES, OK, POISONED, IoBlock
from freetoken.experts.bank import ExpertBank
from freetoken.experts.record import RecordLayout
from freetoken.experts.setup import ExpertSetup
from freetoken.native.library import GELU, GELU_TANH, RELU, SWIGLU, Layer, library
from freetoken.native.ops import Experts, Moe

DEADLINE_S = 10.0
"""A worker that answers nothing for so long is stuck: a chunk takes milliseconds."""
_ACTIVATIONS: Mapping[str, int] = {
    "silu": SWIGLU,
    "swish": SWIGLU,
    "gelu": GELU,
    "gelu_pytorch_tanh": GELU_TANH,
    "relu": RELU,
}


def native_layers(setup: ExpertSetup) -> list[Layer]:
    """Every layer as the library reads it; empty if it can't or shouldn't compute one of them."""
    device, lib = setup.device, library()
    simulated = device.owns_memory and device.in_host_memory
    if lib is None or not setup.native or simulated or setup.numerics.exact or setup.math is not None:
        return []
    assert setup.config.moe is not None
    act = setup.config.moe.activation
    int8 = setup.numerics.int8
    layers = [describe(setup.bank, layer, act, int8=int8) for layer in range(setup.bank.num_layers)]
    return [one for one in layers if one is not None] if all(layers) else []


def knows(layouts: Sequence[RecordLayout], formats: Sequence[WeightFormat], act: Activation) -> bool:
    """Whether the library is there and reads every layer of these."""
    lib = library()
    if lib is None or act.name not in _ACTIVATIONS:
        return False
    sizes = {
        (f.name, one.tile_width, one.hidden, one.code_bytes) for one, f in zip(layouts, formats, strict=True)
    }
    return all(lib.tile_bytes(name, width, hidden) == size for name, width, hidden, size in sizes)


def describe(
    bank: ExpertBank,
    layer: int,
    act: Activation = Activation(),  # noqa: B008 - frozen
    *,
    int8: bool = False,
) -> Layer | None:
    """The library's view of a layer's records; None if it doesn't know format, shape or activation."""
    lib, one, name = library(), bank.layouts[layer], bank.formats[layer].name
    if lib is None or lib.tile_bytes(name, one.tile_width, one.hidden) != one.code_bytes:
        return None
    if act.name not in _ACTIVATIONS:
        return None
    return Layer(
        format=lib.format_index(name, int8=int8),
        activation=_ACTIVATIONS[act.name],
        hidden=one.hidden,
        tile_width=one.tile_width,
        num_tiles=one.num_tiles,
        num_experts=bank.num_experts,
        tile_bytes=one.tile_bytes,
        tiles_offset=one.tiles_offset,
        record_bytes=one.record_bytes,
        records=bank.layer(layer).data_ptr(),
        alpha=act.alpha,
        limit=act.limit,
        up_offset=act.up_offset,
        bias_offset=one.bias_offset if one.biased else 0,
    )


class NativeExecutor:
    """Runs one request at a time on the process's pool of `threads` threads, the caller among them."""

    def __init__(self, bank: ExpertBank, layers: list[Layer], threads: int = 1, tier: str = "") -> None:
        lib = library()
        assert lib is not None
        self._lib, self._bank = lib, bank  # the bank's memory must outlive the handle
        self.threads = max(1, threads)
        lib.start(self.threads)
        self._handle = lib.new_executor(layers, tier)
        assert self._handle
        self._served = 0
        self.deadline_s = DEADLINE_S

    def serve(self, io: IoBlock, out: Tensor) -> bool:
        """Answer the request in `io`; `out` float32 [out_rows, H] receives the results.

        Returns False if no new request is visible or the block is poisoned. DeviceError if a worker doesn't
        finish in time: the block is poisoned then, and `out` must not be reused before the worker is back.
        """
        head = io.header
        if head.request.sequence <= self._served:
            return False
        self._served = head.request.sequence
        deadline_ms = int(self.deadline_s * 1000)
        status = self._lib.serve(self._handle, io.bytes.data_ptr(), out.data_ptr(), deadline_ms)
        head.reply.status = status
        if status == POISONED:
            return False
        if status != OK:
            head.poison.word = 1
            raise self._too_late()
        head.reply.done = self._served
        return True

    def run_layer(self, layer: int, x: Tensor, routing: Routing) -> tuple[Tensor, Moe]:
        """All routed experts of a layer: float32 [T, H], and the job, which says how many were visited.

        Errors as `serve`.
        """
        x, ids, weights = x.contiguous(), routing.ids.contiguous(), routing.weights.contiguous()
        y = torch.empty(x.shape, dtype=torch.float32)
        addresses = (t.data_ptr() for t in (x, ids, weights, y))
        job = Moe(*addresses, layer, DTYPES[x.dtype], *ids.shape)
        whole = Experts(self._handle, ctypes.pointer(job), int(self.deadline_s * 1000))
        self._lib.run(whole, self._too_late)
        return y, job

    def _too_late(self) -> DeviceError:
        return DeviceError(
            f"The CPU's workers did not finish a layer within {self.deadline_s:g} s.",
            code="device_deadline",
            hint="Look for a process that takes the cores, then restart the engine.",
        )

    def close(self) -> None:
        handle, self._handle = self._handle, 0
        if handle:
            self._lib.free_executor(handle)
