"""The tokenizer and the chat templates that a GGUF file's metadata hold.

Builds the same `tokenizers` object that the model's tokenizer.json would: byte-level BPE ("gpt2"), whose
splitting is known by name only (SPLITS), or sentencepiece-style BPE ("llama"), whose merges follow from
the scores; a file may also hold that tokenizer.json itself. Knows no file: keys and values come as a
mapping. What isn't known is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors

from freetoken.chat.template import ChatTemplate
from freetoken.chat.tokenizer import Tokenizer
from freetoken.core.errors import WeightsError

_AT = "tokenizer.ggml."
_WHOLE = "tokenizer.huggingface.json"
_TEMPLATE = "tokenizer.chat_template"
_NORMAL, _CONTROL, _USER = 1, 3, 4
_SPACE = "\u2581"
_LATER = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CLITIC = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_SLASHED = _LATER.replace(r"[\r\n]*", r"[\r\n/]*", 1)
_DIGITS = "digits"
SPLITS: Mapping[str, str] = {
    "gpt-2": "",
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "llama-bpe": rf"{_CLITIC}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_LATER}",
    "qwen2": rf"{_CLITIC}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_LATER}",
    "qwen35": rf"{_CLITIC}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|{_LATER}".replace(
        r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"
    ),
    "gpt-4o": rf"{_CASED[0]}{_CLITIC}?|{_CASED[1]}{_CLITIC}?|\p{{N}}{{1,3}}|{_SLASHED}",
    "tekken": rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_SLASHED}",
}
"""Name of a splitting -> its pattern; empty: GPT-2's own; `digits`: GPT-2's after cutting digits apart."""
_ALIASES = {
    "gpt2": "gpt-2",
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "deepseek-r1-qwen": "qwen2",
    "llama4": "gpt-4o",
    "refact": "smollm",
}
_WHOLE_WORDS = ("llama-bpe", "tekken")
"""A word that is a token is taken as it is, whatever its merges say."""
_COMPOSED = ("qwen2", "qwen35")
"""Text is normalised to NFC first."""


def tokenizer_of(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a header. WeightsError `missing_tokenizer`, `invalid_tokenizer`."""
    read = _Keys(metadata)
    whole = metadata.get(_WHOLE)
    kind = read("model", str)
    if whole is None and kind not in _BUILDERS:
        raise _refuse(f"The tokenizer {kind!r} of this file is not supported, only {', '.join(_BUILDERS)}")
    try:
        backend = _BUILDERS[kind](read) if whole is None else tokenizers.Tokenizer.from_str(str(whole))
    except WeightsError:
        raise
    except Exception as error:  # the library raises bare exceptions
        raise _refuse(
            f"The file's vocabulary makes no tokenizer: {error}", "Fetch the file again."
        ) from error
    return Tokenizer(backend, read.ids("eos", "eot", "eom"))


def template_of(metadata: Mapping[str, Any]) -> ChatTemplate | None:
    """The templates of a header; None if it has none."""
    sources = {
        key.removeprefix(_TEMPLATE).removeprefix(".") or "default": str(metadata[key])
        for key in metadata
        if key == _TEMPLATE or key.startswith(_TEMPLATE + ".")
    }
    if not sources:
        return None
    read = _Keys(metadata)
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    special = {ours: read.text(theirs) for theirs, ours in names.items() if read.ids(theirs)}
    return ChatTemplate(sources, special)


def files_of(metadata: Mapping[str, Any]) -> dict[str, bytes]:
    """The same as files of a directory: tokenizer, templates, and the ids that end an answer."""
    template, tokenizer = template_of(metadata), tokenizer_of(metadata)
    config: dict[str, Any] = template.special_tokens if template else {}
    files = {
        "generation_config.json": json.dumps({"eos_token_id": list(tokenizer.eos_ids)}).encode(),
        "tokenizer.json": tokenizer.backend.to_str().encode(),
        "tokenizer_config.json": json.dumps(config, ensure_ascii=False).encode(),
    }
    for name, source in (template.sources if template else {}).items():
        at = "chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja"
        files[at] = source.encode()
    return files


class _Keys:
    """The vocabulary's keys with their kinds checked."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self.tokens = self("tokens", list)
        self.types = self("token_type", list, [_NORMAL] * len(self.tokens))
        if len(self.types) != len(self.tokens) or not self.tokens:
            raise _refuse(f"{len(self.tokens)} tokens have {len(self.types)} types", "Fetch the file again.")

    def __call__(self, key: str, kind: type, default: Any = None) -> Any:
        value = self._metadata.get(_AT + key)
        if value is None and default is not None:
            return default
        if not isinstance(value, kind):
            found = "missing" if value is None else type(value).__name__
            raise WeightsError(
                f"{_AT}{key} is {found}, expected {kind.__name__}.",
                code="missing_tokenizer" if value is None else "invalid_tokenizer",
                hint="Fetch the file again, or another one of this model.",
            )
        return value

    def ids(self, *names: str) -> list[int]:
        """The special ids of that names which the file has, each once."""
        found = [self._metadata.get(f"{_AT}{name}_token_id") for name in names]
        return list(dict.fromkeys(i for i in found if isinstance(i, int) and 0 <= i < len(self.tokens)))

    def text(self, name: str) -> str:
        return str(self.tokens[self.ids(name)[0]])

    def vocabulary(self) -> dict[str, int]:
        vocabulary = {token: i for i, token in enumerate(self.tokens)}
        if len(vocabulary) != len(self.tokens):
            raise _refuse(
                f"{len(self.tokens) - len(vocabulary)} tokens of the file occur twice",
                "Fetch the file again.",
            )
        return vocabulary


def _byte_level(read: _Keys) -> tokenizers.Tokenizer:
    name = str(read("pre", str, "default"))
    name = _ALIASES.get(name, name)
    if name not in SPLITS:
        raise _refuse(
            f"How the tokenizer {name!r} splits text is not known here, only {', '.join(SPLITS)} are",
            "Use the model's safetensors folder, whose tokenizer.json says it.",
        )
    pairs = [_pair(merge) for merge in read("merges", list)]
    model = models.BPE(vocab=read.vocabulary(), merges=pairs, ignore_merges=name in _WHOLE_WORDS)
    backend = tokenizers.Tokenizer(model)
    if name in _COMPOSED:
        backend.normalizer = normalizers.NFC()
    pattern = SPLITS[name]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern in ("", _DIGITS))
    steps: list[Any] = [last]
    if pattern == _DIGITS:
        steps = [pre_tokenizers.Digits(individual_digits=True), last]
    elif pattern:
        steps = [pre_tokenizers.Split(Regex(pattern), "isolated"), last]
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return _finish(backend, read, adds_bos=bool(read("add_bos_token", bool, name == "llama-bpe")))


def _pair(merge: str) -> tuple[str, str]:
    cut = merge.index(" ", 1)
    return merge[:cut], merge[cut + 1 :]


def _sentencepiece(read: _Keys) -> tokenizers.Tokenizer:
    scores = read("scores", list)
    if len(scores) != len(read.tokens):
        raise _refuse(f"{len(read.tokens)} tokens have {len(scores)} scores", "Fetch the file again.")
    vocabulary = read.vocabulary()
    unknown = read.text("unknown") if read.ids("unknown") else None
    model = models.BPE(
        vocab=vocabulary,
        merges=_merges(vocabulary, scores, read.types),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    prefixed = bool(read("add_space_prefix", bool, True))
    marks: list[Any] = [normalizers.Prepend(_SPACE)] if prefixed else []
    backend.normalizer = normalizers.Sequence([*marks, normalizers.Replace(" ", _SPACE)])
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefixed:
        steps.append(decoders.Strip(content=" ", left=1))
    backend.decoder = decoders.Sequence(steps)
    return _finish(backend, read, adds_bos=bool(read("add_bos_token", bool, True)))


def _merges(vocabulary: Mapping[str, int], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """All ways to make a piece of two, the best-scored piece first: what sentencepiece would join next."""
    found = []
    for piece, id_ in vocabulary.items():
        if types[id_] != _NORMAL:
            continue
        for cut in range(1, len(piece)):
            left, right = vocabulary.get(piece[:cut]), vocabulary.get(piece[cut:])
            if left is not None and right is not None and types[left] == types[right] == _NORMAL:
                found.append((-scores[id_], left, right, piece[:cut], piece[cut:]))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _finish(backend: tokenizers.Tokenizer, read: _Keys, *, adds_bos: bool) -> tokenizers.Tokenizer:
    """Name the tokens that are matched before all others, and what surrounds plain text."""
    added: dict[int, list[tokenizers.AddedToken]] = {_CONTROL: [], _USER: []}
    for text, kind in zip(read.tokens, read.types, strict=True):
        if kind in added:
            added[kind].append(tokenizers.AddedToken(text, special=kind == _CONTROL, normalized=False))
    backend.add_special_tokens(added[_CONTROL])  # all at once: every call looks at all of them again
    backend.add_tokens(added[_USER])
    if adds_bos and read.ids("bos"):
        bos = read.text("bos")
        backend.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], special_tokens=[(bos, read.ids("bos")[0])]
        )
    return backend


def _refuse(what: str, hint: str = "Use the model's safetensors folder.") -> WeightsError:
    return WeightsError(what + ".", code="invalid_tokenizer", hint=hint)


_BUILDERS: Mapping[str, Callable[[_Keys], tokenizers.Tokenizer]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
}
