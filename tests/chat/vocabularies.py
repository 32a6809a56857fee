"""Small tokenizers of each kind, made on the spot."""

from __future__ import annotations

from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

DEMO = Path(__file__).parents[2] / "freetoken" / "data" / "demo-model"
CONTROL = ["<|im_start|>", "<|im_end|>"]
HARMONY = [
    *("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"),
    "<|endoftext|>",
]
MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]


def byte_level() -> tokenizers.Tokenizer:
    """Byte-level BPE with a few merges; ChatML's tokens added."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "i"), ("\u0120", "w"), ("i", "m"), ("<", "|"), ("|", ">")]
    pieces = [*alphabet, *(a + b for a, b in merges)]
    made = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return _with_chat(made)


def byte_fallback() -> tokenizers.Tokenizer:
    """SentencePiece-like BPE: a mark for spaces, bytes for the unknown, BOS in front of plain text."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["\u2581", *map(chr, range(0x21, 0x7F)), "\u00e9", "\u4f60", "\u2581h", "hi", "\u2581hi"]
    merges = [("\u2581", "h"), ("h", "i"), ("\u2581h", "i")]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    made = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return _with_chat(made)


def unigram() -> tokenizers.Tokenizer:
    """A unigram vocabulary that also holds its control tokens, as pieces that text could match."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("\u2581", -3.0), ("\u2581hi", -2.0), ("hi", -2.5)]
    pieces += [(chr(c), -5.0) for c in range(0x21, 0x7F)]
    made = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.add_special_tokens(["</s>"])
    return _with_chat(made)


def word_piece() -> tokenizers.Tokenizer:
    """Whole words and their endings: a vocabulary that is not made of bytes."""
    pieces = ["[UNK]", "hi", "there", "##s", "##ing", "walk", ",", "!"]
    made = tokenizers.Tokenizer(
        models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]")
    )
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece(cleanup=False)
    return made


def harmony() -> tokenizers.Tokenizer:
    """Byte-level BPE with the tokens of harmony, all special."""
    made = byte_level()
    made.add_special_tokens([AddedToken(text, normalized=False) for text in HARMONY])
    return made


def demo() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))


def _with_chat(made: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    made.add_special_tokens([AddedToken(text, normalized=False) for text in CONTROL])
    made.add_tokens([AddedToken(text, normalized=False) for text in MARKERS])
    return made


BYTES = {"byte level": byte_level, "byte fallback": byte_fallback, "demo": demo}
ALL = {**BYTES, "unigram": unigram, "word piece": word_piece}
