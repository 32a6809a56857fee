"""Which tokens may come next, so that an answer has the form that was asked for. Uses llguidance.

Owns compiling a form (once, when a request is admitted: what can't be enforced is refused there) and
following an answer token by token. The form begins after the thought, if there is one; until then
only the end of the answer is forbidden. Knows no engine and no logits: a mask is bits on the host.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import any_to_lark
from numpy.typing import NDArray

from freetoken.chat.codec import ChatCodec, Prompt
from freetoken.chat.conversation import Conversation
from freetoken.chat.lark import answer_lark, literal
from freetoken.core.errors import RequestError

MaskArray = NDArray[np.int32]
MAX_GRAMMAR_BYTES = 512 << 10
_LEAD_TOKENS = 2
_UNFORCED = '%llguidance {"no_forcing": true}\n'


class ConstraintMaker:
    """Makes constraints for one model. The tokenizer is prepared at the first request that needs it.

    vocab_size  width of the logits; ids beyond the tokenizer's are never allowed
    """

    def __init__(self, codec: ChatCodec, vocab_size: int) -> None:
        self._codec = codec
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._lead: MaskArray = np.zeros(0, np.int32)

    def make(self, conversation: Conversation, prompt: Prompt, *, may_think: bool) -> TokenConstraint | None:
        """The constraint of an answer, None if it is free.

        may_think  the answer may open a thought although the prompt didn't
        Raises RequestError `invalid_grammar`, or what the form's parts raise.
        """
        lark = answer_lark(conversation, self._codec.grammar, self._mark)
        if lark is None:
            return None
        wished = conversation.answer_format
        where = wished.where if wished is not None else "tools"
        if wished is not None and wished.kind == "grammar":
            lark = _as_lark(lark, where)
        matcher = self._compile(lark, where)
        open_id, close_id = self._codec.think_ids
        if prompt.starts_in_thinking and close_id is None:
            raise RequestError(
                "A form for the answer needs a model whose end of thinking is one token.",
                code="unsupported_response_format",
                hint="Turn thinking off.",
                param=where,
            )
        opens = open_id if may_think and not prompt.starts_in_thinking and close_id is not None else None
        return TokenConstraint(
            matcher,
            self._lead,
            prompt.stop_ids,
            close_id if prompt.starts_in_thinking or opens is not None else None,
            opens,
            in_thinking=prompt.starts_in_thinking,
        )

    def _compile(self, lark: str, where: str) -> llguidance.LLMatcher:
        if len(lark.encode()) > MAX_GRAMMAR_BYTES:
            raise _refused(f"it is larger than {MAX_GRAMMAR_BYTES >> 10} KiB", where)
        tokenizer = self._prepared()
        if self._names_a_token(lark):
            lark = _UNFORCED + lark
        grammar = llguidance.LLMatcher.grammar_from_lark(lark)
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise _refused(_reason(matcher.get_error()), where)
        return matcher

    def _prepared(self) -> llguidance.LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                source = self._codec.tokenizer
                self._tokenizer = llguidance.LLTokenizer(
                    source.backend.to_str(), n_vocab=self._vocab_size, eos_token=list(self._codec.stop_ids)
                )
                blank = [i for i in range(source.vocab_size) if _is_blank(source.token_bytes(i))]
                self._lead = bits(blank, self._vocab_size)
            return self._tokenizer

    def _names_a_token(self, lark: str) -> bool:
        """Whether a form holds the text of a control token, which has to be written in plain pieces.

        Bytes that are forced would be cut as the tokenizer cuts them, into the control token.
        """
        plain = lark.replace("\\", "")
        return "%llguidance" not in lark and any(t.text in plain for t in self._codec.tokenizer.added)

    def _mark(self, text: str) -> str:
        """A marker as a term: its id if it is one token that plain text can't make."""
        id_ = self._codec.tokenizer.id_of(text)
        if id_ is None or not self._prepared().is_special_token(id_):
            return literal(text)
        return f"<[{id_}]>"


class TokenConstraint:
    """One answer's form, followed as it grows. Belongs to the engine's thread once submitted."""

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        lead: MaskArray,
        stop_ids: Sequence[int],
        close_id: int | None,
        open_id: int | None,
        *,
        in_thinking: bool,
    ) -> None:
        self._matcher = matcher
        self._lead = lead
        self._stop_ids = frozenset(stop_ids)
        self._close_id, self._open_id = close_id, open_id
        self._in_thinking = in_thinking
        self._lead_left = 0
        self._begun = False
        self._all_but_stops = ~bits(sorted(self._stop_ids), len(lead) * 32)

    def mask(self) -> MaskArray:
        """The tokens that may come next: int32 [ceil(V / 32)], bit i of word w is token 32 w + i."""
        if self._in_thinking:
            return self._all_but_stops
        allowed: MaskArray = np.frombuffer(self._matcher.compute_bitmask(), np.int32)[: len(self._lead)]
        if self._begun:
            return allowed
        if self._lead_left:
            allowed = allowed | self._lead
        if self._open_id is not None:
            allowed = allowed | bits([self._open_id], len(allowed) * 32)
        return allowed

    def advance(self, token_id: int) -> bool:
        """Take the drawn token in; False if the form does not allow it (only a forced one can be so)."""
        if self._in_thinking:
            if token_id == self._close_id:
                self._in_thinking, self._lead_left, self._open_id = False, _LEAD_TOKENS, None
            return token_id not in self._stop_ids
        if not self._begun and token_id == self._open_id:
            self._in_thinking = True
            return True
        if not self._begun and self._lead_left and has_bit(self._lead, token_id):
            self._lead_left -= 1
            return True
        self._begun = True
        return bool(self._matcher.consume_token(token_id))


def bits(ids: Sequence[int], vocab_size: int) -> MaskArray:
    """A mask with the bits of `ids` set."""
    flags = np.zeros((vocab_size + 31) // 32 * 32, np.uint8)
    flags[list(ids)] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)


def has_bit(mask: MaskArray, token_id: int) -> bool:
    return bool((int(mask[token_id >> 5]) >> (token_id & 31)) & 1)


def _is_blank(data: bytes) -> bool:
    return bool(data) and not data.strip(b"\r\n")


def _as_lark(text: str, where: str) -> str:
    try:
        return str(any_to_lark(text))
    except Exception as error:  # a parser for people's grammars; whatever it says is about the text
        raise _refused(_reason(str(error)), where) from error


def _reason(text: str) -> str:
    """The first line that says what is wrong."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines[:1])[:300] or "it does not read"


def _refused(why: str, where: str) -> RequestError:
    return RequestError(
        f"{where} can't be enforced: {why.rstrip('.')}.",
        code="invalid_grammar",
        hint="Change the schema, expression or grammar, or leave it out.",
        param=where,
    )
