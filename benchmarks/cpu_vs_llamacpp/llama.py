"""llama.cpp through its C interface: load a GGUF, decode ids, read logits.

Finds the libraries of a package: the folder of an unpacked `@node-llama-cpp/linux-x64`, or of
`llama_cpp` (llama-cpp-python) where that is installed. Parameter structs grow between versions, so they
are passed as larger blocks than any version reads, made by the library's own defaults.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

_BLOCK_WORDS = 256
_THREADS_BY_DEFAULT = 4
_QUIET = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
"""Called by the library as long as it is loaded, whatever became of an engine."""
_F16, _AUTO = 1, 0xFFFFFFFF


class _Block(ctypes.Structure):
    """A parameter struct with room to spare."""

    _fields_ = [("words", ctypes.c_uint32 * _BLOCK_WORDS)]


class _Batch(ctypes.Structure):
    _fields_ = [("num", ctypes.c_int32), ("token", ctypes.c_void_p), ("rest", ctypes.c_void_p * 5)]


def find(folder: str) -> Path:
    """The folder that holds libllama."""
    roots = [Path(folder)] if folder else _installed()
    for root in roots:
        for file in sorted(root.rglob("libllama.*so*")):
            return file.parent
    raise SystemExit(
        "No llama.cpp found. Unpack one with: npm pack @node-llama-cpp/linux-x64 && tar xzf *.tgz, then give "
        "--llama package; or pip install llama-cpp-python."
    )


def _installed() -> list[Path]:
    import importlib.util

    spec = importlib.util.find_spec("llama_cpp")
    return [Path(spec.origin).parent] if spec and spec.origin else []


class Llama:
    """One model in one context, decoding sequence 0.

    exact   keys and values in F32 and no flash attention, to compare logits
    """

    def __init__(self, folder: Path, model: Path, context: int, threads: int, *, exact: bool = False) -> None:
        self._lib = lib = _load(folder)
        lib.llama_log_set(_QUIET, None)
        lib.llama_backend_init()
        params = lib.llama_model_default_params()
        self._model = lib.llama_model_load_from_file(str(model).encode(), params)
        if not self._model:
            raise SystemExit(f"llama.cpp can't load {model}")
        params = lib.llama_context_default_params()
        params.words[0] = context
        at = self._set_threads(params, threads)
        if exact:
            self._set_exact(params, at)
        self._context = lib.llama_init_from_model(self._model, params)
        self._memory = lib.llama_get_memory(self._context)
        self.kernels = _attach_workers(lib, self._context, threads)

    def _set_exact(self, params: Any, threads_at: int) -> None:
        """Behind the threads stand four settings at "auto", flash attention last; then K's and V's types."""
        words = params.words
        first = next(at for at in range(threads_at, 40) if words[at] == _AUTO)
        types = next(at for at in range(first, 40) if words[at] == words[at + 1] == _F16)
        if any(words[at] != _AUTO for at in range(first, first + 4)):
            raise SystemExit("this llama.cpp lays its parameters out in another way")
        words[first + 3] = words[types] = words[types + 1] = 0

    def _set_threads(self, params: Any, threads: int) -> int:
        """n_threads and n_threads_batch are the first two neighbours at the default. Returns their place."""
        for at in range(4, 32):
            if params.words[at] == params.words[at + 1] == _THREADS_BY_DEFAULT:
                params.words[at] = params.words[at + 1] = threads
                return at
        raise SystemExit("this llama.cpp lays its parameters out in another way")

    def reset(self) -> None:
        self._lib.llama_memory_clear(self._memory, True)

    def decode(self, ids: list[int]) -> None:
        """Append ids; logits of the last are ready on return."""
        array = (ctypes.c_int32 * len(ids))(*ids)
        status = self._lib.llama_decode(self._context, self._lib.llama_batch_get_one(array, len(ids)))
        if status:
            raise SystemExit(f"llama.cpp failed to decode: {status}")

    def logits(self, vocab: int) -> ctypes.Array[ctypes.c_float]:
        pointer = self._lib.llama_get_logits_ith(self._context, -1)
        return (ctypes.c_float * vocab).from_address(ctypes.addressof(pointer.contents))


def _load(folder: Path) -> Any:
    for name in ("libggml-base*.so*", "libggml.*so*", "libllama.*so*"):
        for file in sorted(folder.glob(name)):
            lib = ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)
            if name.startswith("libggml.") and list(folder.glob("libggml-cpu-*.so")):
                lib.ggml_backend_load_all_from_path(str(folder).encode())
    pointer, c_int = ctypes.c_void_p, ctypes.c_int32
    lib.llama_model_default_params.restype = lib.llama_context_default_params.restype = _Block
    lib.llama_model_load_from_file.argtypes = [ctypes.c_char_p, _Block]
    lib.llama_model_load_from_file.restype = lib.llama_init_from_model.restype = pointer
    lib.llama_init_from_model.argtypes = [pointer, _Block]
    lib.llama_get_memory.argtypes, lib.llama_get_memory.restype = [pointer], pointer
    lib.llama_memory_clear.argtypes = [pointer, ctypes.c_bool]
    lib.llama_batch_get_one.argtypes, lib.llama_batch_get_one.restype = [pointer, c_int], _Batch
    lib.llama_decode.argtypes = [pointer, _Batch]
    lib.llama_get_logits_ith.argtypes = [pointer, c_int]
    lib.llama_get_logits_ith.restype = ctypes.POINTER(ctypes.c_float)
    lib.llama_attach_threadpool.argtypes = [pointer, pointer, pointer]
    return lib


def _attach_workers(lib: Any, context: int, threads: int) -> str:
    """Give the context workers that live on, as its own command line does; name the kernels in use."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        found = re.search(r"(/.*libggml-cpu[^/]*\.so\S*)$", line)
        if not found:
            continue
        cpu = ctypes.CDLL(found.group(1))
        cpu.ggml_threadpool_params_default.restype = _Block
        cpu.ggml_threadpool_new.argtypes = [ctypes.POINTER(_Block)]
        cpu.ggml_threadpool_new.restype = ctypes.c_void_p
        base = ctypes.CDLL(None)
        make = getattr(cpu, "ggml_threadpool_params_default", None) or base.ggml_threadpool_params_default
        make.restype, make.argtypes = _Block, [ctypes.c_int]
        params = make(threads)
        workers = cpu.ggml_threadpool_new(ctypes.byref(params))
        lib.llama_attach_threadpool(context, workers, None)
        return Path(found.group(1)).stem.removeprefix("libggml-cpu-")
    return "unknown"
