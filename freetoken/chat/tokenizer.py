"""A checkpoint's tokenizer: text to ids and back, whole or as a stream.

Owns the byte view of a vocabulary (byte-level BPE, byte fallback, or any other kind), the list of
added tokens and the ids that end an answer. Knows no chat and no template.
Invariant: feeding ids one by one through `Detokenizer` gives the text that `decode` gives; U+FFFD
stands only for bytes that no later byte can make valid.
"""

from __future__ import annotations

import codecs
import functools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from freetoken.chat.files import read_object
from freetoken.core.errors import WeightsError

IntArray = NDArray[np.int32]


@dataclass(frozen=True)
class AddedToken:
    """A token matched before the vocabulary's own pieces. `special`: hidden from readers."""

    id: int
    text: str
    special: bool


class Tokenizer:
    """Text to ids and back.

    backend  the `tokenizers` object
    eos_ids  ids that end an answer
    """

    def __init__(self, backend: tokenizers.Tokenizer, eos_ids: Iterable[int] = ()) -> None:
        self.backend = backend
        self.eos_ids = tuple(dict.fromkeys(eos_ids))
        self.added = tuple(
            AddedToken(id_, token.content, token.special)
            for id_, token in sorted(backend.get_added_tokens_decoder().items())
        )
        self.special_ids = frozenset(token.id for token in self.added if token.special)
        self._added_by_id = {token.id: token for token in self.added}
        self._pieces = _pieces_of(backend)
        self._leading_id: int | None = next(iter(backend.encode("").ids), None)

    @classmethod
    def from_directory(cls, path: Path) -> Tokenizer:
        """Read tokenizer.json and the ids that end an answer from a checkpoint.

        Raises WeightsError `missing_tokenizer` or `invalid_tokenizer`.
        """
        file = path / "tokenizer.json"
        if not file.is_file():
            raise WeightsError(
                f"{path} holds no tokenizer.json.",
                code="missing_tokenizer",
                hint="Fetch the model's tokenizer.json, or save its tokenizer with transformers.",
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:
            raise WeightsError(
                f"tokenizer.json can't be read: {error}.",
                code="invalid_tokenizer",
                hint="Fetch the file again.",
            ) from error
        backend.no_truncation()
        backend.no_padding()
        return cls(backend, _eos_ids(path, backend))

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    def id_of(self, text: str) -> int | None:
        """The id of a token written exactly so, None if there is none."""
        return self.backend.token_to_id(text)

    def encode(self, text: str, add_special: bool = False) -> IntArray:
        """Tokenize; added tokens written out in the text become their ids.

        add_special  add what the tokenizer puts around plain text (often BOS), never a second BOS
        Returns      int32 [n]
        """
        ids = ids_of(self.backend, valid_unicode(text), add_special)
        doubled = add_special and len(ids) > 1 and ids[0] == ids[1] == self._leading_id
        return np.array(ids[1:] if doubled else ids, np.int32)

    def token_bytes(self, id_: int, previous: int | None = None) -> bytes:
        """The bytes that a token adds to the text; b"" for ids outside the vocabulary.

        previous  the id before it; only vocabularies that aren't made of bytes look at it
        """
        added = self._added_by_id.get(id_)
        return added.text.encode() if added else self._pieces.piece(int(id_), previous)

    def decode(self, ids: Sequence[int] | IntArray, skip_special: bool = True) -> str:
        detokenizer = self.detokenizer(skip_special=skip_special)
        return detokenizer.feed(ids) + detokenizer.finish()

    def detokenizer(self, *, skip_special: bool = True, keep: Iterable[int] = ()) -> Detokenizer:
        """Start a stream. `keep` lists special ids that are shown even if specials are skipped."""
        return Detokenizer(self, self.special_ids - frozenset(keep) if skip_special else frozenset())

    @property
    def drops_first_space(self) -> bool:
        """True if the space that opens a text is the tokenizer's and not the reader's."""
        return self._pieces.drops_first_space


def ids_of(backend: tokenizers.Tokenizer, text: str, add_special: bool = False) -> list[int]:
    """As a batch of one: that is twice as fast, and unlike `encode` it lets other threads run meanwhile.

    A long text takes seconds, in which a server's streams and the engine would stand still.
    """
    return list(backend.encode_batch_fast([text], add_special_tokens=add_special)[0].ids)


class Detokenizer:
    """Ids in, text out, as early as the bytes allow. Belongs to one answer."""

    def __init__(self, tokenizer: Tokenizer, skip: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skip = skip
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._drop_space = tokenizer.drops_first_space
        self._previous: int | None = None

    def feed(self, ids: Iterable[int] | IntArray) -> str:
        """Take ids in; return the text that is certain now. Bytes of a half character wait."""
        shown = [int(i) for i in ids if int(i) not in self._skip]
        data = b""
        for id_ in shown:
            data += self._tokenizer.token_bytes(id_, self._previous)
            self._previous = id_
        return self._opening(self._utf8.decode(data))

    def finish(self) -> str:
        """End the stream; a half character becomes one U+FFFD."""
        return self._opening(self._utf8.decode(b"", final=True))

    def _opening(self, text: str) -> str:
        if self._drop_space and text:
            self._drop_space = False
            return text.removeprefix(" ")
        return text


class _Pieces:
    """How a vocabulary's tokens turn into bytes. This one asks the decoder, with one token of context."""

    drops_first_space = False

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend

    def piece(self, id_: int, previous: int | None) -> bytes:
        if previous is None:
            return self._backend.decode([id_], skip_special_tokens=False).encode()
        before = self._backend.decode([previous], skip_special_tokens=False)
        both = self._backend.decode([previous, id_], skip_special_tokens=False)
        return both[len(before) :].encode()

    def _token(self, id_: int) -> str:
        return self._backend.id_to_token(id_) or ""


class _ByteLevelPieces(_Pieces):
    """Each character of a token stands for one byte."""

    def piece(self, id_: int, previous: int | None) -> bytes:
        table = _byte_of_char()
        return b"".join(table.get(char) or char.encode() for char in self._token(id_))


class _ByteFallbackPieces(_Pieces):
    """Tokens are text with a mark for the space; `<0x0A>` stands for one byte."""

    def __init__(self, backend: tokenizers.Tokenizer, mark: str, drops_first_space: bool) -> None:
        super().__init__(backend)
        self._mark = mark
        self.drops_first_space = drops_first_space

    def piece(self, id_: int, previous: int | None) -> bytes:
        token = self._token(id_)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return token.replace(self._mark, " ").encode()


def valid_unicode(text: str) -> str:
    """Replace lone surrogates, which JSON can carry and UTF-8 cannot; joins those that form a pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _pieces_of(backend: tokenizers.Tokenizer) -> _Pieces:
    steps = _decoder_steps(backend)
    kinds = {step["type"]: step for step in steps}
    if "ByteLevel" in kinds:
        return _ByteLevelPieces(backend)
    if "ByteFallback" in kinds or set(kinds) == {"Metaspace"}:
        metaspace = kinds.get("Metaspace", {})
        strips = kinds.get("Strip", {}).get("start", 0) > 0
        prepends = bool(metaspace) and metaspace.get("prepend_scheme", "always") != "never"
        return _ByteFallbackPieces(backend, metaspace.get("replacement", "\u2581"), strips or prepends)
    return _Pieces(backend)


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """Read the decoder's steps from its serialised form, the only place that tells them."""
    if backend.decoder is None:
        return []
    state = json.loads(backend.decoder.__getstate__())
    return list(state["decoders"]) if state["type"] == "Sequence" else [state]


@functools.cache
def _byte_of_char() -> dict[str, bytes]:
    """Byte-level vocabularies write printable Latin-1 bytes as themselves, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): bytes([byte]) for byte in printable}
    return table | {chr(0x100 + i): bytes([byte]) for i, byte in enumerate(hidden)}


def _eos_ids(path: Path, backend: tokenizers.Tokenizer) -> list[int]:
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        found = read_object(path / name).get("eos_token_id")
        several = found if isinstance(found, list) else [] if found is None else [found]
        if not all(isinstance(i, int) and 0 <= i < 1 << 31 for i in several):
            raise WeightsError(
                f"{name}: eos_token_id is {found!r}, expected token ids.",
                code="invalid_model_config",
                hint="Fetch the file again.",
            )
        ids += several
    token = read_object(path / "tokenizer_config.json").get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    named = backend.token_to_id(text) if isinstance(text, str) else None
    return ids + ([] if named is None else [named])
