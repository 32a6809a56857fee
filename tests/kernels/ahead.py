"""Compile launches for cards that are not here, and read what the compiler made of them."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from freetoken.kernels._triton import Card, Launch

CARDS = (Card(80, 108), Card(86, 84), Card(89, 128), Card(90, 132), Card(100, 148), Card(120, 170))
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Compiled:
    """shared and spilled in bytes (of a block, of a thread), registers of a thread."""

    shared: int
    spilled: int
    registers: int
    ptx: str
    cubin: bytes

    def longest_stretch(self) -> int:
        """Machine instructions between two labels, at most: a large loop's body, if there is one."""
        said = _ask("nvdisasm", "-c", self.cubin)
        return max(
            len(re.findall(r"/\*[0-9a-f]{4,}\*/ +\S", part)) for part in re.split(r"(?m)^\.L_\S+:", said)
        )


def compile_for(launch: Launch, card: Card) -> Compiled:
    signature, consts, attrs = {}, dict(launch.consts), {}
    for at, (param, value) in enumerate(zip(launch.kernel.params, launch.args, strict=False)):
        kind, divisible = _kind(value, param.do_not_specialize)
        signature[param.name] = kind
        if kind == "constexpr":
            consts[param.name] = value
        elif divisible:
            attrs[(at,)] = [["tt.divisibility", 16]]
    signature |= dict.fromkeys(launch.consts, "constexpr")
    missing = set(launch.kernel.arg_names) - set(signature)
    assert not missing, f"{launch.kernel.__name__} is not given {missing}"
    source = ASTSource(launch.kernel, signature, consts, attrs)
    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    if launch.consts.get("PDL"):
        options["launch_pdl"] = True
    if launch.registers:
        options["maxnreg"] = launch.registers
    made = triton.compile(source, target=GPUTarget("cuda", card.arch, 32), options=options)
    registers, stack = _resources(made.asm["cubin"])
    return Compiled(made.metadata.shared, stack, registers, made.asm["ptx"], made.asm["cubin"])


def _kind(value: object, varying: bool) -> tuple[str, bool]:
    if value is None or (isinstance(value, int) and value == 1 and not varying):
        return "constexpr", False
    if isinstance(value, Tensor):
        names = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "uint8": "u8", "bool": "i1"}
        name = str(value.dtype).removeprefix("torch.")
        return "*" + names.get(name, name.replace("int", "i")), value.data_ptr() % 16 == 0
    if isinstance(value, float):
        return "fp32", False
    assert isinstance(value, int)
    return ("i32" if abs(value) < 1 << 31 else "i64"), not varying and value % 16 == 0


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack of a thread; a stack is where registers are spilled to."""
    said = _ask("cuobjdump", "-res-usage", cubin)
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found, said
    return int(found[1]), int(found[2])


def _ask(tool: str, option: str, cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(_TOOLS / tool), option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
