"""Records, bank and the native page: bytes lie where the layout says."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import freetoken
from freetoken.core.errors import WeightsError
from freetoken.core.model_config import Activation
from freetoken.experts import abi
from freetoken.experts.bank import ExpertBank
from freetoken.experts.record import layout, tile_width
from freetoken.quant.bf16 import FORMAT
from tests.experts.build import config, tiny

HEADER = Path(freetoken.__file__).parent / "native" / "abi.h"


@given(st.integers(1, 64).map(lambda n: 32 * n), st.integers(1, 400).map(lambda n: 8 * n))
def test_a_layout_is_aligned_and_covers_every_column_once(hidden, expert_size):
    one = layout(hidden, expert_size, FORMAT)
    assert one.num_tiles * one.tile_width == expert_size
    assert one.record_bytes % 4096 == 0 and one.tile_bytes % 128 == 0 and one.tiles_offset % 256 == 0
    ends = [one.tile_range(t, t + 1) for t in range(one.num_tiles)]
    assert ends[0][0] == 0 and ends[-1][1] == one.used_bytes <= one.record_bytes
    assert all(a[1] == b[0] for a, b in zip(ends, ends[1:], strict=False))


@pytest.mark.parametrize(
    ("width", "block", "want"),
    [
        (64, 1, 16),
        (32, 1, 8),
        (512, 1, 32),
        (2048, 1, 128),
        (768, 32, 32),
        (2880, 1, 64),
        (2048, 256, 256),
        (8, 1, 8),
    ],
)
def test_tile_widths_leave_many_tiles_and_whole_code_blocks(width, block, want):
    assert tile_width(width, block) == want


def test_a_width_that_no_code_block_divides_is_refused():
    with pytest.raises(WeightsError, match="code blocks of 32"):
        tile_width(40, 32)


def test_the_bank_holds_what_was_put():
    made = tiny(config(2, 6, 2, 48, 64), 3)
    bank, one = made.bank, made.bank.layouts[0]
    assert bank.buffer.data_ptr() % 4096 == 0 and not bank.missing()
    for (layer, expert), (gate, up, down) in made.weights.items():
        record = bank.record(layer * 6 + expert)
        assert record.data_ptr() == bank.layer(layer)[expert].data_ptr()
        tiles = record[one.tiles_offset : one.used_bytes].view(one.num_tiles, one.tile_bytes)
        parts = FORMAT.tile_weights(tiles[:, : one.code_bytes], one.tile_width, one.hidden)
        joined = [p.reshape(one.expert_size, one.hidden) for p in parts]
        assert torch.equal(joined[0], gate) and torch.equal(joined[1], up)
        assert torch.equal(joined[2], down.t())


def test_layers_may_have_layouts_of_their_own():
    wide, narrow = layout(32, 64, FORMAT), layout(32, 32, FORMAT)
    bank = ExpertBank([wide, narrow], [FORMAT, FORMAT], 3)
    assert bank.slot_bytes == wide.record_bytes
    assert bank.total_bytes == 3 * (wide.record_bytes + narrow.record_bytes) == bank.buffer.numel()
    assert bank.record(4).shape == (narrow.record_bytes,) and bank.missing() == list(range(6))


def test_a_tensor_of_another_shape_is_refused():
    made = tiny()
    gate, up, down = made.weights[0, 0]
    with pytest.raises(WeightsError, match=r"down of expert 1 in MoE layer 0 is \[32, 8\]"):
        made.bank.put(0, 1, gate, up, down[:, :8])


def test_a_checksum_tells_records_apart():
    bank = tiny().bank
    sums = [bank.checksum(i) for i in range(4)]
    assert len(set(sums)) == 4
    bank.record(0)[17] ^= 1
    assert bank.checksum(0) != sums[0]


def test_a_phantom_bank_has_sizes_only():
    one = layout(4096, 2048, FORMAT)
    bank = ExpertBank([one] * 43, [FORMAT] * 43, 256, phantom=True)
    assert bank.buffer.is_meta and bank.total_bytes == 43 * 256 * one.record_bytes


STRUCTS = {"ft_layout": abi.Layout, "ft_request": abi.Request, "ft_reply": abi.Reply, "ft_poison": abi.Poison,
           "ft_item": abi.Item, "ft_io": abi.Io}  # fmt: skip


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler")
@pytest.mark.parametrize("language", ["c", "c++"])
def test_the_header_and_its_mirror_agree_on_every_offset(tmp_path, language):
    lines = []
    for name, mirror in STRUCTS.items():
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        for field in mirror._fields_:
            lines.append(f'printf("{name}.{field[0]} %zu\\n", offsetof({name}, {field[0]}));')
    source = (
        f'#include <stddef.h>\n#include <stdio.h>\n#include "{HEADER}"\nint main(void) {{{"".join(lines)}}}'
    )
    program = tmp_path / "offsets"
    command = ["gcc", "-x", language, "-Wall", "-Werror", "-", "-o", str(program)]
    subprocess.run(command, input=source, text=True, check=True)
    found = dict(
        line.split() for line in subprocess.run([program], capture_output=True, text=True).stdout.splitlines()
    )
    for name, mirror in STRUCTS.items():
        assert int(found[name]) == ctypes.sizeof(mirror)
        for field in mirror._fields_:
            assert int(found[f"{name}.{field[0]}"]) == getattr(mirror, field[0]).offset


def test_an_io_block_lies_where_its_header_says():
    io = abi.IoBlock(48, torch.bfloat16, max_items=7, max_rows=19, max_tokens=5, out_rows=33)
    base, head = io.bytes.data_ptr(), io.header.layout
    assert base % 64 == 0 and head.magic == abi.MAGIC and head.hidden == 48
    for view, offset in ((io.items, head.items_offset), (io.rows, head.rows_offset), (io.x, head.x_offset),
                         (io.out, head.out_offset)):  # fmt: skip
        assert view.data_ptr() == base + offset and offset % 64 == 0
    io.items[:1] = io.item_array([(3, 1, 4, 0, 2, 9)], [0x7F0012345678])
    item = abi.Item.from_address(io.items.data_ptr())
    assert (item.expert, item.first_tile, item.last_tile, item.out_row) == (3, 1, 4, 9)
    assert item.source == 0x7F0012345678
    io.request[0] = 5
    io.poison[0] = 1
    assert io.header.request.sequence == 5 and io.header.poison.word == 1


def test_a_poisoned_block_is_left_alone():
    from freetoken.core.interfaces import Numerics
    from freetoken.experts.cpu_executor import CpuExecutor
    from freetoken.experts.math import TileMath

    made = tiny()
    executor = CpuExecutor(made.bank, TileMath(made.bank, Activation(), Numerics()))
    io = abi.IoBlock(32, torch.bfloat16, max_items=2, max_rows=4, max_tokens=2, out_rows=8)
    io.request[:5] = torch.tensor([1, 0, 1, 1, 1], dtype=torch.int32)
    io.items[:1] = io.item_array([(0, 0, 4, 0, 1, 0)], [0])
    io.poison[0] = 1
    out = torch.full((8, 32), 7.0)
    assert not executor.serve(io, out) and (out == 7).all() and int(io.reply[1]) == abi.POISONED
    io.poison[0], io.request[0] = 0, 2
    assert executor.serve(io, out) and int(io.reply[0]) == 2 and (out[0] != 7).any()
    assert not executor.serve(io, out), "a request is answered once"


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 3), st.integers(2, 9), st.integers(0, 10**6))
def test_any_geometry_fills_completely(layers, experts, seed):
    made = tiny(config(layers, experts, 1, 32, 16 + 8 * (seed % 5)), seed)
    assert not made.bank.missing()
