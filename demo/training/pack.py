# ruff: noqa: E501 - sentences and small makers read best on one line
"""Lay config, tokenizer files, chat template and generation defaults beside trained shards.

usage: python -m demo.training.pack DATA FOLDER
"""

import json
import shutil
import sys
from pathlib import Path

from demo.chats.chat_format import TEMPLATE
from demo.training.model import CONFIG

_TOKENIZER = dict(
    tokenizer_class="PreTrainedTokenizerFast", model_max_length=CONFIG["max_position_embeddings"], bos_token=None, eos_token="<|im_end|>", pad_token="<|endoftext|>",
    unk_token=None, clean_up_tokenization_spaces=False, add_prefix_space=False, additional_special_tokens=["<|im_start|>", "<|im_end|>"], padding_side="left",
    model_input_names=["input_ids", "attention_mask"],
)  # fmt: skip
_GENERATION = dict(
    eos_token_id=[8185, 8183],
    pad_token_id=8183,
    do_sample=True,
    temperature=0.3,
    top_p=0.9,
    top_k=20,
    repetition_penalty=1.0,
)


def pack(data: Path, folder: Path) -> None:
    for name, content in (
        ("config", CONFIG),
        ("tokenizer_config", _TOKENIZER),
        ("generation_config", _GENERATION),
    ):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    shutil.copy(data / "tokenizer.json", folder / "tokenizer.json")
    (folder / "chat_template.jinja").write_text(TEMPLATE)


if __name__ == "__main__":
    pack(Path(sys.argv[1]), Path(sys.argv[2]))
