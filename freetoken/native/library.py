"""The native library as Python sees it: found, checked and loaded through ctypes, or absent.

Owns the mirror of `api.h` and the choice of the instruction-set tier. Doesn't know tensors: addresses go
in as integers. Absent or refused, it is None everywhere, torch computes, and one warning says so.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from freetoken.core import env
from freetoken.core.errors import ConfigError, nearest
from freetoken.core.log import logger
from freetoken.native import ops
from freetoken.native.program import Program, Tape, beyond
from freetoken.native.topology import default_threads, memory_nodes, worker_cpus

_log = logger("native")
API_VERSION = 6
FEW_ROWS = 32
OFF = "off"
SWIGLU, GELU, GELU_TANH, RELU = range(4)
_U32, _U64, _I64, _F32, _PTR = (
    ctypes.c_uint32,
    ctypes.c_uint64,
    ctypes.c_int64,
    ctypes.c_float,
    ctypes.c_void_p,
)


class Layer(ctypes.Structure):
    """`ft_layer`: how the records of one MoE layer lie, and what they compute."""

    _fields_ = [
        ("format", _U32),
        ("activation", _U32),
        ("hidden", _U32),
        ("tile_width", _U32),
        ("num_tiles", _U32),
        ("num_experts", _U32),
        ("tile_bytes", _U64),
        ("tiles_offset", _U64),
        ("record_bytes", _U64),
        ("records", _U64),
        ("alpha", _F32),
        ("limit", _F32),
        ("up_offset", _F32),
        ("bias_offset", _U32),
    ]


class DeviceBlock(ctypes.Structure):
    """`ft_device_block`: memory that a device writes and a poller watches."""

    _fields_ = [
        ("data", _PTR),
        ("items_offset", _U64),
        ("ids_offset", _U64),
        ("x_offset", _U64),
        ("out_offset", _U64),
        ("hidden", _U32),
        ("x_dtype", _U32),
        ("max_rows", _U32),
        ("top_k", _U32),
        ("num_experts", _U32),
        ("deadline_ms", _U32),
    ]


class Library:
    """The loaded library with one tier chosen. Every call releases the interpreter's lock."""

    def __init__(self, path: Path, wanted: str) -> None:
        self._lib = ctypes.CDLL(str(path))
        _declare(self._lib)
        if self._lib.ft_api_version() != API_VERSION:
            raise OSError(f"{path.name} is of another version; install FreeToken again")
        self.tiers: tuple[str, ...] = tuple(self._lib.ft_tiers().decode().split())
        self.formats: tuple[str, ...] = tuple(self._lib.ft_formats().decode().split())
        if wanted and wanted not in self.tiers:
            raise ConfigError(
                f"FREETOKEN_NATIVE_TIER is {wanted!r}; this machine runs: {', '.join(self.tiers)}, {OFF}.",
                code="unknown_choice",
                hint=nearest(wanted, self.tiers),
            )
        self.tier = wanted or self.tiers[-1]
        self._at = self.tiers.index(self.tier)
        self._jobs = {job: getattr(self._lib, name) for job, name in ops.JOBS.items()}
        self._started = False
        self._local = threading.local()

    @property
    def threads(self) -> int:
        return int(self._lib.ft_pool_threads())

    def start(self, threads: int, cpus: list[int] | None = None) -> None:
        """Give the process's pool `threads` threads, the caller being one; idempotent."""
        self._started = True
        some = worker_cpus() if cpus is None else cpus
        self._lib.ft_pool_start(threads, (ctypes.c_int * len(some))(*some), len(some))

    def limit(self, threads: int) -> None:
        """Let at most `threads` of the pool's threads work, until told otherwise or started anew."""
        self._lib.ft_pool_limit(threads)

    def tile_bytes(self, format: str, tile_width: int, hidden: int) -> int:
        """Bytes of a tile as the library reads it; 0 if it doesn't know the format or the shape."""
        if format not in self.formats:
            return 0
        return int(self._lib.ft_tile_bytes(self.formats.index(format), tile_width, hidden))

    def new_executor(self, layers: list[Layer], tier: str = "") -> int:
        """Handle of an executor; 0 if it can't compute these layers."""
        array = (Layer * len(layers))(*layers)
        return int(self._lib.ft_executor_new(self._index(tier), array, len(layers)) or 0)

    def serve(self, executor: int, io: int, out: int, deadline_ms: int) -> int:
        """Answer the request in the IO block at `io`; a status of abi.h."""
        self._unrecorded("an IO block")
        return int(self._lib.ft_executor_serve(executor, io, out, deadline_ms))

    def free_executor(self, executor: int) -> None:
        self._lib.ft_executor_free(executor)

    def new_poller(self, executor: int, block: DeviceBlock) -> int:
        """Handle of a thread that answers the block's requests with the executor."""
        return int(self._lib.ft_poller_new(executor, ctypes.byref(block)) or 0)

    def wake_poller(self, poller: int) -> None:
        self._lib.ft_poller_wake(poller)

    def rest_poller(self, poller: int, everything: bool) -> None:
        self._lib.ft_poller_rest(poller, everything)

    def free_poller(self, poller: int) -> None:
        self._lib.ft_poller_free(poller)

    def run(self, job: ctypes.Structure, failure: Callable[[], Exception] = beyond) -> None:
        """Run a job of native/ops.py, and write it down if this thread records; raises `failure()`."""
        self._ready()
        call = self._jobs[type(job)]
        if call(self._at, ctypes.byref(job)):
            raise failure()
        if self.tape is not None:
            self.tape.add(call, job, failure)

    @property
    def tape(self) -> Tape | None:
        """What this thread's jobs are written to."""
        found: Tape | None = getattr(self._local, "tape", None)
        return found

    @contextmanager
    def recording(self, tape: Tape) -> Iterator[None]:
        """Write this thread's jobs to `tape`."""
        self._local.tape = tape
        try:
            yield
        finally:
            self._local.tape = None

    def play(self, program: Program) -> None:
        """Run all of a program's jobs in one call."""
        self._ready()
        at = self._lib.ft_program_run(self._at, program.steps, len(program.steps))
        if at >= 0:
            raise program.failures[at]()

    def timed(self, program: Program, clock: Callable[[], float]) -> list[tuple[str, float]]:
        """Run a program job by job, for measuring: the operation and the seconds of each."""
        found = []
        for run, job, _ in program.jobs:
            began = clock()
            run(self._at, ctypes.byref(job))
            found.append((type(job).__name__, clock() - began))
        return found

    def _unrecorded(self, what: str) -> None:
        if self.tape is not None:
            self.tape.refuse(what)

    def _ready(self) -> None:
        """Nobody having said how many threads, the default ones."""
        if not self._started:
            self.start(default_threads())

    def format_index(self, format: str, *, int8: bool = False) -> int:
        """What the library calls a format; int8: the same codes for activations as int8, if it has that."""
        index = self.formats.index(format)
        return index + len(self.formats) + 1 if int8 and self.has_int8(format) else index

    def has_int8(self, format: str) -> bool:
        """True if products with the format's codes may take x as int8."""
        if format not in self.formats:
            return False
        return bool(self._lib.ft_tile_bytes(self.formats.index(format) + len(self.formats) + 1, 256, 256))

    def matrix_bytes(self, format: str, rows: int, columns: int) -> int:
        """Bytes of a coded matrix as the library multiplies with it; 0 if it can't."""
        if format not in self.formats:
            return 0
        return int(self._lib.ft_matrix_bytes(self.formats.index(format), rows, columns))

    def coded_linear(
        self,
        kind: tuple[str, int],
        places: tuple[int, int, int, int],
        shape: tuple[int, int, int],
        *,
        int8: bool = False,
    ) -> None:
        """y = x W^T + bias for a coded W.

        kind     (W's format, dtype of x, bias and y)
        places   addresses of x [rows, k], W, bias [n] or 0, y [rows, n]
        shape    (rows, n, k); at most 32 rows unless `takes_any_rows`
        int8     x becomes int8 first, if the format has that
        """
        format, dtype = kind
        index = self.format_index(format, int8=int8)
        self.run(ops.CodedProduct(*places, *shape, index, dtype))

    def takes_any_rows(self, kind: tuple[str, int], *, int8: bool = False) -> bool:
        """True if `coded_linear` takes any number of rows of this kind, else it takes 32."""
        format, dtype = kind
        index = self.format_index(format, int8=int8)
        return int(self._lib.ft_coded_rows(self._at, index, dtype)) > FEW_ROWS

    def coded_numbers(
        self, format: str, places: tuple[int, int], shape: tuple[int, int], rows: tuple[int, int]
    ) -> None:
        """Rows [first, last) of a coded matrix as float32; places: addresses of W [n, k] and of the first."""
        self._unrecorded("decoded rows")
        self._ready()
        if self._lib.ft_coded_numbers(self._at, self.formats.index(format), *places, *shape, *rows):
            raise ValueError(f"rows {rows} of {format} {shape} can't be decoded")

    def unblock(
        self, blocks: object, lying: tuple[int, int, int, int, int], streams: object, step: int, down: bool
    ) -> bool:
        """Cut blocks into the streams of tiles (native/unblock.py); False if a factor isn't a number."""
        return int(self._lib.ft_unblock_tiles(blocks, *lying, streams, step, int(down))) == 0

    def lay(
        self, steps: ctypes.Array[Any], tensors: object, shape: object, tiles: tuple[int, int, int]
    ) -> bool:
        """Lay stored tensors into tiles (native/stored.py); False if a number is none."""
        return int(self._lib.ft_lay(steps, len(steps), tensors, shape, *tiles)) < 0

    def read_spans(self, spans: bytes, count: int, first_cached: bool) -> bool:
        """Read spans of files (native/stored.py); False if one is cut short."""
        return int(self._lib.ft_read_spans(spans, count, first_cached)) < 0

    def read(self, data: int, num_bytes: int, tier: str = "") -> int:
        """Read memory with all threads, for measuring."""
        return int(self._lib.ft_read(self._index(tier), data, num_bytes))

    def ping(self, count: int) -> None:
        """Wake all threads `count` times for nothing, for measuring."""
        self._lib.ft_pool_ping(count)

    def fault(self, worker: int, *, slow: float = 1.0, stall_s: float = 0.0) -> None:
        """Slow a worker by a factor, or stall it once."""
        self._lib.ft_pool_fault(worker, int(slow * 100), int(stall_s * 1000))

    def advise_huge(self, data: int, num_bytes: int) -> bool:
        """Ask for huge pages under a range; True if the system agreed."""
        return int(self._lib.ft_advise_huge(data, num_bytes)) == 0

    def spread(self, data: int, num_bytes: int, nodes: list[int] | None = None) -> bool:
        """Have memory not yet touched from memory nodes by turns; True if it will be.

        nodes   None: those of the workers, if there are several
        """
        some = memory_nodes(worker_cpus()) if nodes is None else nodes
        if nodes is None and len(some) < 2:
            return False
        return (
            int(self._lib.ft_interleave(data, num_bytes, (ctypes.c_int * len(some))(*some), len(some))) == 0
        )

    def collapse(self, data: int, num_bytes: int) -> bool:
        """Gather memory in use in huge pages, in place; True if all of it lies in them."""
        return int(self._lib.ft_collapse(data, num_bytes)) == 0

    def populate(self, data: int, num_bytes: int) -> bool:
        """Have the memory of a range now, whoever uses it meanwhile; True if all of it is there."""
        return int(self._lib.ft_populate(data, num_bytes)) == 0

    def crc32(self, data: int, num_bytes: int, crc: int = 0) -> int:
        """zlib's CRC-32 of memory, continued from `crc`."""
        return int(self._lib.ft_crc32(crc, data, num_bytes))

    def transpose(
        self, item_bytes: int, src: int, dst: int, shape: tuple[int, int], steps: tuple[int, int]
    ) -> None:
        """dst[c][r] = src[r][c]; shape is (rows, columns) of src, steps are bytes between rows of each."""
        self._lib.ft_transpose(item_bytes, src, steps[0], dst, steps[1], *shape)

    def pack_plain(
        self, item_bytes: int, matrices: tuple[int, int, int], tiles: int, shape: tuple[int, int, int, int]
    ) -> None:
        """Cut gate, up [I, H] and down [H, I] into tiles; shape is (H, I, tile width, tile bytes)."""
        self._lib.ft_pack_plain(item_bytes, *matrices, tiles, (_U64 * 4)(*shape))

    def _index(self, tier: str) -> int:
        return self.tiers.index(tier or self.tier)


def _declare(lib: ctypes.CDLL) -> None:
    c_int = ctypes.c_int
    signatures: dict[str, tuple[object, list[object]]] = {
        "ft_api_version": (c_int, []),
        "ft_tiers": (ctypes.c_char_p, []),
        "ft_formats": (ctypes.c_char_p, []),
        "ft_tile_bytes": (_U64, [c_int, _U32, _U32]),
        "ft_pool_start": (c_int, [c_int, ctypes.POINTER(c_int), c_int]),
        "ft_pool_limit": (None, [c_int]),
        "ft_pool_threads": (c_int, []),
        "ft_pool_fault": (None, [c_int, c_int, c_int]),
        "ft_pool_ping": (c_int, [c_int]),
        "ft_executor_new": (_PTR, [c_int, ctypes.POINTER(Layer), c_int]),
        "ft_executor_serve": (c_int, [_PTR, _PTR, _PTR, _U32]),
        "ft_executor_free": (None, [_PTR]),
        "ft_poller_new": (_PTR, [_PTR, _PTR]),
        "ft_poller_wake": (None, [_PTR]),
        "ft_poller_rest": (None, [_PTR, c_int]),
        "ft_poller_free": (None, [_PTR]),
        "ft_matrix_bytes": (_U64, [c_int, _I64, _I64]),
        "ft_coded_linear": (c_int, [c_int, c_int, c_int, _PTR, _PTR, _PTR, _PTR, _I64, _I64, _I64]),
        "ft_coded_rows": (_I64, [c_int, c_int, c_int]),
        "ft_coded_numbers": (c_int, [c_int, c_int, _PTR, _PTR, _I64, _I64, _I64, _I64]),
        "ft_unblock_tiles": (c_int, [_PTR, _PTR, *[_I64] * 4, _PTR, _I64, c_int]),
        "ft_lay": (c_int, [_PTR, c_int, _PTR, _PTR, _PTR, _I64, _I64]),
        "ft_read_spans": (c_int, [_PTR, c_int, c_int]),
        "ft_linear": (c_int, [c_int, c_int, _PTR, _PTR, _F32, *[_PTR] * 4, *[_I64] * 3]),
        "ft_read": (_U64, [c_int, _PTR, _U64]),
        "ft_advise_huge": (c_int, [_PTR, _U64]),
        "ft_collapse": (c_int, [_PTR, _U64]),
        "ft_populate": (c_int, [_PTR, _U64]),
        "ft_interleave": (c_int, [_PTR, _U64, ctypes.POINTER(c_int), c_int]),
        "ft_crc32": (_U32, [_U32, _PTR, _U64]),
        "ft_transpose": (c_int, [c_int, _PTR, _U64, _PTR, _U64, _I64, _I64]),
        "ft_pack_plain": (c_int, [c_int, _PTR, _PTR, _PTR, _PTR, ctypes.POINTER(_U64)]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    ops.declare(lib)


def file_name() -> str:
    suffix = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")
    return f"libfreetoken{suffix}"


@functools.cache
def library() -> Library | None:
    """The process's native library, or None: looked for once, a failure is one warning."""
    wanted = env.native_tier()
    if wanted == OFF:
        return None
    path = Path(__file__).parent / file_name()
    try:
        found = Library(path, wanted)
    except (OSError, AttributeError) as error:
        why = "is not built" if not path.exists() else f"can't be used ({error})"
        _log.warning("the native library %s, torch computes instead: slower, the same answers", why)
        return None
    _log.debug("native library: %s of %s", found.tier, ", ".join(found.tiers))
    return found
