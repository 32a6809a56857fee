"""The demo model as a GGUF file answers as its folder does, from the same command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from freetoken.chat.conversation import Conversation, Message
from freetoken.chat.events import fold
from freetoken.core.errors import WeightsError
from freetoken.core.generate import GenerateParams
from freetoken.core.options import Options
from freetoken.engine.build import DEMO_MODEL
from freetoken.engine.convert import Wish, convert
from freetoken.llm import LLM, build_llm
from freetoken.weights.load import open_checkpoint
from tests.weights import gguf_files, gguf_models

ASK = Conversation((Message.make("user", "What is the capital of France?"),))
GREEDY = GenerateParams(temperature=0.0, max_tokens=24, thinking="off")


@pytest.fixture(scope="module")
def demo_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    opened = open_checkpoint(DEMO_MODEL)
    tensors = {name: opened.source.read(name) for name in opened.source.names()}
    tensors = {n: x.float() if x.dim() < 2 else x for n, x in tensors.items()}
    text = {
        "tokenizer.huggingface.json": (DEMO_MODEL / "tokenizer.json").read_text(),
        "tokenizer.chat_template": (DEMO_MODEL / "chat_template.jinja").read_text(),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["a"],
        "general.sampling.temp": 0.0,
    }
    raw = json.loads((DEMO_MODEL / "config.json").read_text())
    first, *more = raw["eos_token_id"]
    raw["eos_token_id"] = first
    blobs = {
        n: gguf_files.plain(x, "BF16" if x.dim() > 1 else "F32")
        for n, x in gguf_models.stored(raw, tensors).items()
    }
    path = tmp_path_factory.mktemp("gguf") / "freetoken-demo-BF16.gguf"
    ends = {"tokenizer.ggml.eot_token_id": more[0]}
    return gguf_files.write_file(path, {**gguf_models.metadata(raw), **ends, **text}, blobs)


def answer(llm: LLM) -> str:
    return fold(list(llm.submit_chat(ASK, GREEDY, "x"))).content


def test_a_gguf_file_is_served_as_its_folder(demo_gguf: Path) -> None:
    answers = []
    for model in (None, str(demo_gguf)):
        llm = build_llm(Options(model=model, device="cpu", moe_backend="fused", exact=True))
        answers.append(answer(llm))
        if model:
            assert llm.model_name == demo_gguf.name and llm.built.generation_defaults == {"temperature": 0.0}
        llm.close()
    assert answers[0] == answers[1] != ""


def test_it_becomes_a_complete_ftw_directory_that_answers_the_same(demo_gguf: Path, tmp_path: Path) -> None:
    convert(Wish(demo_gguf, tmp_path / "ftw", threads=2))
    llms = [build_llm(Options(model=str(p), device="cpu", exact=True)) for p in (demo_gguf, tmp_path / "ftw")]
    assert answer(llms[0]) == answer(llms[1]) != ""
    assert set(llms[0].tokenizer.eos_ids) <= set(llms[1].tokenizer.eos_ids)
    assert llms[0].built.generation_defaults == llms[1].built.generation_defaults
    for llm in llms:
        llm.close()


def test_a_damaged_one_is_refused_before_anything_is_served(demo_gguf: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(demo_gguf.read_bytes()[:-100_000])
    with pytest.raises(WeightsError) as caught:
        build_llm(Options(model=str(path), device="cpu"))
    assert caught.value.code == "truncated_shard" and "blk." in caught.value.message
