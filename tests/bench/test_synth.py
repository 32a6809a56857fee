"""`ft bench synth`: what is written loads in every format, walks its cycle, and its experts matter."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple

import numpy as np
import pytest
import torch

from freetoken.bench import _synth_shapes, _synth_text, synth
from freetoken.bench._engine import Driven
from freetoken.bench._synth_measure import Watch, lru_misses, overlap
from freetoken.chat.tokenizer import Tokenizer
from freetoken.core.errors import CapacityError, ConfigError
from freetoken.core.options import Options
from freetoken.engine.build import build
from freetoken.weights.safetensors import read_header
from tests.bench.makers import last_object, run_bench

CASES = [
    *(("qwen3-30b-a3b", fmt) for fmt in _synth_shapes.recipe("qwen3-30b-a3b", None)[0].formats),
    *(("gpt-oss-120b", fmt) for fmt in _synth_shapes.recipe("gpt-oss-120b", None)[0].formats),
    ("qwen3.6-35b-a3b", "nvfp4"),
]


def logprobs(path, prompt, tokens=6):
    with Driven(build(Options(model=str(path), device="cpu", max_model_len=256))) as engine:
        asked = engine.submit(prompt, tokens, logprobs=1)
        engine.wait([asked])
    return asked.ids, np.array([p.logprob for p in asked.logprobs])


@pytest.mark.parametrize(("geometry", "fmt"), CASES)
def test_geometries_and_formats_load_and_walk_their_cycle(geometry, fmt, tmp_path, capsys):
    words = ("--geometry", geometry, "--format", fmt, "--layers", 2, "--tiny", "--no-measure", "--json")
    assert run_bench(synth, "--out", tmp_path / "m", *words) == 0
    assert last_object(capsys)["rows"][0]["format"] == fmt
    walk = json.loads((tmp_path / "m" / "walk.json").read_text())
    assert logprobs(tmp_path / "m", walk["ids"][:40])[0] == walk["ids"][40:46]


def test_the_routing_that_came_out_is_measured_and_printed(tmp_path, capsys):
    assert run_bench(synth, "--out", tmp_path / "m", "--tiny", "--measure-layers", 3, "--json") == 0
    row = last_object(capsys)["rows"][0]
    assert row["measured_layers"] == 3 and row["follows_walk"] == 1.0
    assert 0.55 < row["prediction_recall"] < 0.85
    assert 0.2 < row["lru_misses_37"] < row["lru_misses_11"] <= 1.0
    assert 0.3 < row["step_overlap"] < 0.7
    assert 2.0 < row["lead_logits"] < 9.0
    assert not list((tmp_path / "m").glob(".measure*"))


def routed(path, prompt, tokens):
    """int64 [tokens, k]: layer 1's experts of the rows that answer."""
    built = build(Options(model=str(path), device="cpu", max_model_len=256))
    watch = Watch(built.engine.runner.experts, [torch.zeros(16, 512)] * 3, 4)
    built.engine.runner.experts = watch
    with Driven(built) as engine:
        engine.run(prompt, tokens)
    return np.concatenate(watch.seen.ids[1])[len(prompt) - 1 :][:tokens]


def test_an_expert_that_is_lost_moves_logprobs_where_it_was_routed(tmp_path, capsys):
    path = tmp_path / "m"
    run_bench(synth, "--out", path, "--tiny", "--layers", 3, "--no-measure")
    prompt = json.loads((path / "walk.json").read_text())["ids"][:40]
    whole, ids = logprobs(path, prompt, 24)[1], routed(path, prompt, 24)
    file = path / "model-00003-of-00004.safetensors"
    kept, moved = file.read_bytes(), []
    for expert in np.unique(ids)[:6]:
        entry = read_header(file)[f"model.layers.1.mlp.experts.{expert}.down_proj.weight"]
        with file.open("r+b") as f:
            f.seek(entry.offset)
            f.write(bytes(entry.num_bytes))
        change = np.abs(logprobs(path, prompt, 24)[1] - whole)
        moved.append(change[(ids == expert).any(1)].max())
        file.write_bytes(kept)
    assert np.quantile(moved, 0.25) > 0.02 and np.median(moved) > 0.08 and max(moved) > 0.3, moved


def test_without_drift_the_next_router_is_foreseen(tmp_path, capsys):
    words = ("--tiny", "--layers", 2, "--drift", 0, "--json")
    run_bench(synth, "--out", tmp_path / "m", *words)
    assert last_object(capsys)["rows"][0]["prediction_recall"] > 0.85


def test_equal_seeds_write_equal_bytes_and_others_do_not(tmp_path, capsys):
    for name, seed, threads in (("a", 7, 1), ("b", 7, 3), ("c", 8, 1)):
        words = ("--tiny", "--layers", 1, "--seed", seed, "--threads", threads, "--no-measure")
        run_bench(synth, "--out", tmp_path / name, *words)
    a, b, c = ((tmp_path / n / "model-00002-of-00002.safetensors").read_bytes() for n in "abc")
    assert a == b != c


def test_each_word_is_one_token_and_reads_back(tmp_path):
    walk = _synth_text.write_text_side(tmp_path, 1024, 2048, seed=1)
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.encode("".join(walk.text[:300])).tolist() == walk.ids[:300]
    assert tokenizer.decode(walk.ids[:50]) == "".join(walk.text[:50])
    assert sorted(tokenizer.eos_ids) == sorted(_synth_text.eos_ids(1024))
    assert len(set(walk.ids)) == len(walk.ids) == 1024


def test_a_full_disk_is_told_before_anything_large_is_written(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 9, 1 << 20))
    with pytest.raises(CapacityError):
        run_bench(synth, "--out", tmp_path / "m", "--tiny")
    assert not (tmp_path / "m" / "config.json").exists() and not list(tmp_path.glob("m/*.safetensors"))


@pytest.mark.parametrize(
    "words",
    [
        ("--geometry", "glm-5.2"),
        ("--geometry", "glm-9"),
        ("--geometry", "gpt-oss-120b", "--format", "nvfp4"),
        ("--layers", 0),
        ("--drift", 1.5),
        ("--threads", 0),
        ("--seed", -1),
    ],
)
def test_wrong_wishes_are_refused(words, tmp_path):
    with pytest.raises(ConfigError):
        run_bench(synth, "--out", tmp_path / "m", "--tiny", *words)


def test_a_folder_with_something_in_it_is_left_alone(tmp_path):
    (tmp_path / "kept").write_text("mine")
    with pytest.raises(ConfigError) as refused:
        run_bench(synth, "--out", tmp_path, "--tiny")
    assert refused.value.code == "output_exists" and [p.name for p in tmp_path.iterdir()] == ["kept"]


def test_lru_and_overlap_count_as_defined():
    reads = [[0, 1], [1, 2], [0, 1]]
    assert lru_misses(reads, 2, 0) == 5 / 6  # 0 1 | hit 1, 2 evicts 0 | 0 evicts 1, 1
    assert lru_misses(reads, 3, 1) == 1 / 4
    assert overlap(reads) == 0.5


def test_the_gguf_file_holds_the_same_model(tmp_path, capsys):
    words = ("--tiny", "--layers", 2, "--no-measure", "--gguf", tmp_path / "m.gguf")
    run_bench(synth, "--out", tmp_path / "m", *words)
    walk = json.loads((tmp_path / "m" / "walk.json").read_text())["ids"]
    ids, plain = logprobs(tmp_path / "m", walk[:40])
    also, other = logprobs(tmp_path / "m.gguf", walk[:40])
    assert ids == also == walk[40:46] and np.allclose(plain, other, atol=1e-5)


def test_gguf_is_for_what_it_can_say(tmp_path):
    words = ("--tiny", "--gguf", tmp_path / "m.gguf", "--out", tmp_path / "m")
    for more in (("--format", "fp8"), ("--geometry", "gpt-oss-120b")):
        with pytest.raises(ConfigError):
            run_bench(synth, *words, *more)
    assert not (tmp_path / "m.gguf").exists() and not (tmp_path / "m").exists()
