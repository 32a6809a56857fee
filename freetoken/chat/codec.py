"""Between a conversation and the engine's integers, both ways.

Owns the prompt's ids, the places where agents cut prompts (anchors), what ends an answer, whether
the prompt ends inside a thought, and the reading of sampled ids as events. Knows no engine, no
protocol and no format: those are the caller, and the grammar it is given.
Invariants: only the template's text becomes control ids (see inert.py); ids of a conversation that
quotes no control text equal the plain tokenisation of the rendered text; nothing adds a second BOS.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from freetoken.chat.conversation import Conversation, Message
from freetoken.chat.events import Event, Finish, Reason, TokenInfo, TokenLogprobs, ToolCallEnd, Usage
from freetoken.chat.gguf_vocabulary import template_of, tokenizer_of
from freetoken.chat.grammar import Grammar, Think, spoken_rows
from freetoken.chat.inert import InertText
from freetoken.chat.nonces import without_nonces
from freetoken.chat.parsers import grammar_for
from freetoken.chat.prompt_edit import Asked, Place, marks_of
from freetoken.chat.prompt_form import PromptForm, split_thoughts
from freetoken.chat.prompt_places import place_of
from freetoken.chat.stream_parser import StreamParser
from freetoken.chat.template import ChatTemplate
from freetoken.chat.tokenizer import Detokenizer, IntArray, Tokenizer
from freetoken.core.errors import RequestError
from freetoken.core.generate import Thinking
from freetoken.core.request import Output, ThinkBudget, TokenLogprob

_THINKS: dict[Thinking, bool | None] = {"auto": None, "on": True, "off": False}


@dataclass(frozen=True)
class Prompt:
    """A conversation as the engine takes it.

    ids                 int32 [n]
    anchor_positions    prefix lengths in 1..n, rising: where blocks begin (before the opening token)
                        and end (behind the closing one): turns, thoughts, calls, results
    starts_in_thinking  the prompt ends inside an open thought
    anchor_ids          ids around which the answer will have anchors: thoughts, calls, its end
    stop_ids            ids that end the answer
    think               the budget of thinking, None if unlimited
    text                what was rendered, for people; never logged
    """

    ids: IntArray
    anchor_positions: tuple[int, ...]
    anchor_ids: tuple[int, ...]
    starts_in_thinking: bool
    stop_ids: tuple[int, ...]
    think: ThinkBudget | None
    text: str


class ChatCodec:
    """Encodes conversations and reads answers for one model.

    template     None for a base model: conversations are refused, plain text works
    parser       name of a file in parsers/, None to choose by the template
    drop_nonces  leave out lines that clients change with each request (nonces.py)

    anchor_ids  ids around which a generated answer has anchors: thoughts, calls, the answer's end
    stop_ids    ids that end an answer
    think_ids   (open, close), each None unless it is one token
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        parser: str | None = None,
        *,
        drop_nonces: bool = True,
    ) -> None:
        self.tokenizer = tokenizer
        self._drop_nonces = drop_nonces
        self.template = template
        text = template.text if template else ""
        self.grammar: Grammar = grammar_for(text, parser)
        opens, closes = self.grammar.opens, self.grammar.closes
        spoken_of = [token for token in tokenizer.added if token.text in text or token.text in opens + closes]
        control = {token.text for token in tokenizer.added if token.special}
        control |= {token.text for token in spoken_of if not token.text.isspace()}
        self._inert = InertText(tokenizer, frozenset(control))
        self._form = PromptForm(template) if template else None
        specials = [token.text for token in tokenizer.added if token.special]
        turn_end = tokenizer.id_of(self._form.turn_end(specials) or "") if self._form else None
        stops = [
            *tokenizer.eos_ids,
            *([] if turn_end is None else [turn_end]),
            *self._ids(self.grammar.stops),
        ]
        self.stop_ids = tuple(dict.fromkeys(stops))
        opening, closing = self._ids(opens), self._ids(closes)
        self.anchor_ids = tuple(sorted({*opening, *closing, *self.stop_ids}))
        ends = {*closing, *self.stop_ids}
        ends |= {token.id for token in tokenizer.added if token.text.startswith(("</", "[/", "<|/"))}
        self._closer_ids = np.array(sorted(ends), np.int32)
        begins = set(self._ids(tuple(control))) - ends - set(self._ids(self.grammar.marks))
        self._opener_ids = np.array(sorted(begins), np.int32)
        think = self.grammar.think or Think("", "")
        self.think_ids = tokenizer.id_of(think.open), tokenizer.id_of(think.close)

    @classmethod
    def from_directory(cls, path: Path, parser: str | None = None, *, drop_nonces: bool = True) -> ChatCodec:
        """Read a checkpoint's tokenizer and template."""
        tokenizer, template = Tokenizer.from_directory(path), ChatTemplate.from_directory(path)
        return cls(tokenizer, template, parser, drop_nonces=drop_nonces)

    @classmethod
    def from_gguf(
        cls, metadata: Mapping[str, Any], parser: str | None = None, *, drop_nonces: bool = True
    ) -> ChatCodec:
        """Read the tokenizer and the template in a GGUF file's header."""
        return cls(tokenizer_of(metadata), template_of(metadata), parser, drop_nonces=drop_nonces)

    def encode(
        self, conversation: Conversation, *, thinking: Thinking = "auto", thinking_budget: int | None = None
    ) -> Prompt:
        """Render and tokenize.

        thinking         what to do if the conversation doesn't say; auto is the template's default
        thinking_budget  most tokens of a thought if the conversation doesn't say
        Raises RequestError: `no_chat_template`, `template_error`, `thinking_budget_unsupported`.
        """
        thinks = _THINKS[thinking] if conversation.thinking is None else conversation.thinking
        budget = thinking_budget if conversation.think_budget is None else conversation.think_budget
        text = self._with_thought(self._render(conversation, thinks), conversation, thinks, budget)
        ids = self._inert.encode(text)
        in_thinking = self._ends_in_thought(text)
        return Prompt(
            ids=ids,
            anchor_positions=self.anchors(ids),
            anchor_ids=self.anchor_ids,
            starts_in_thinking=in_thinking,
            stop_ids=self.stop_ids,
            think=self._budget(budget, in_thinking, tools=bool(conversation.offered_tools)),
            text=self._inert.text(text),
        )

    def anchors(self, ids: IntArray) -> tuple[int, ...]:
        """Find the prefix lengths at which blocks begin and end. ids int32 [n]."""
        begins = np.flatnonzero(np.isin(ids, self._opener_ids))
        ends = np.flatnonzero(np.isin(ids, self._closer_ids)) + 1
        positions = np.union1d(begins, ends)
        return tuple(int(position) for position in positions if position > 0)

    def reader(
        self,
        conversation: Conversation,
        prompt: Prompt,
        *,
        stop: Sequence[str] = (),
        logprobs: bool = False,
    ) -> AnswerReader:
        """Start reading the answer to a conversation. `stop` strings are looked for in content only."""
        parser = StreamParser(
            self.grammar,
            tools=conversation.offered_tools,
            stop=stop,
            in_thinking=prompt.starts_in_thinking,
            parallel=conversation.parallel_tool_calls,
        )
        shown = self._ids(self.grammar.opens + self.grammar.closes + self.grammar.marks)
        return AnswerReader(self, parser, self.tokenizer.detokenizer(keep=shown), len(prompt.ids), logprobs)

    def text_reader(
        self, prompt_ids: IntArray, *, stop: Sequence[str] = (), logprobs: bool = False
    ) -> AnswerReader:
        """Start reading the completion of plain text: no thoughts, no calls."""
        parser = StreamParser(Grammar(spoken_rows({}, None)), stop=stop)
        return AnswerReader(self, parser, self.tokenizer.detokenizer(), len(prompt_ids), logprobs)

    def token_info(self, id_: int, logprob: TokenLogprob) -> TokenInfo:
        """Describe a drawn token and its alternatives for people."""
        top = tuple(self._info(other, value) for other, value in logprob.top)
        return replace(self._info(id_, logprob.logprob), top=top)

    def _info(self, id_: int, logprob: float) -> TokenInfo:
        data = self.tokenizer.token_bytes(id_)
        return TokenInfo(id_, data.decode(errors="replace"), data, logprob)

    def _render(self, conversation: Conversation, thinks: bool | None) -> str:
        if self.template is None or self._form is None:
            raise RequestError(
                "This model has no chat template.",
                code="no_chat_template",
                hint="Use /v1/completions, or put a chat_template.jinja into the checkpoint folder.",
            )
        messages = self._form.messages(self.normal_form(conversation))
        tools = [tool.to_template() for tool in conversation.offered_tools]
        variables = self._inert.break_up(conversation.template_kwargs)
        if thinks is not None:
            variables |= {"enable_thinking": thinks, "thinking": thinks}
        effort = variables.get("reasoning_effort")
        if isinstance(effort, str):
            variables["reasoning_effort"] = self.grammar.efforts.get(effort, effort)
        return self.template.render(self._inert.break_up(messages), self._inert.break_up(tools), variables)

    def _with_thought(
        self, text: str, conversation: Conversation, thinks: bool | None, budget: int | None
    ) -> str:
        """The prompt with its thought opened or closed where the template has not done it."""
        think = self.grammar.think
        if think is None:
            return text
        if think.late and not self._ends_in_thought(text):
            if thinks is False:
                return f"{text}{think.open}{think.close}"
            return text + think.open if budget is not None or conversation.is_formed else text
        if thinks is False and self._ends_in_thought(text):
            return f"{text.rstrip()}\n\n{think.close}\n\n"
        return text

    def normal_form(self, conversation: Conversation) -> Conversation:
        """The conversation as it is rendered: thoughts in their place, without nonces."""
        turns: Sequence[Message] = conversation.messages
        if self._drop_nonces:
            turns = without_nonces(turns)
        return replace(
            conversation, messages=tuple(split_thoughts(turn, self.grammar.think) for turn in turns)
        )

    def asked(self, conversation: Conversation, prompt: Prompt, session: str = "") -> Asked:
        """What is to be remembered of a prompt, to compare later ones with."""
        turns, tools = marks_of(self.normal_form(conversation))
        return Asked(session, prompt.ids, len(prompt.ids), turns, tools, prompt.starts_in_thinking)

    def place_of(self, conversation: Conversation, prompt: Prompt, position: int) -> Place:
        """The part of a prompt in which token `position` lies."""
        text = self.tokenizer.backend.decode(prompt.ids[:position].tolist(), skip_special_tokens=False)
        return place_of(self.normal_form(conversation), prompt.text, len(text))

    def _ends_in_thought(self, text: str) -> bool:
        return self.grammar.think is not None and text.rstrip().endswith(self.grammar.think.open)

    def _budget(self, max_tokens: int | None, in_thinking: bool, *, tools: bool) -> ThinkBudget | None:
        if max_tokens is None or self.grammar.think is None:
            return None
        open_id, close_id = self.think_ids
        if close_id is None:
            raise RequestError(
                "A thinking budget needs a model whose end of thinking is one token.",
                code="thinking_budget_unsupported",
                hint="Turn thinking off or leave the budget out.",
            )
        forced = self.tokenizer.encode(self.grammar.think.ending(tools))
        return ThinkBudget(max_tokens, close_id, tuple(map(int, forced)), open_id, in_thinking)

    def _ids(self, texts: Sequence[str]) -> list[int]:
        found = (self.tokenizer.id_of(text) for text in texts)
        return [id_ for id_ in found if id_ is not None]


class AnswerReader:
    """One answer: what the engine gives, as events. The last event is Finish, exactly once.

    prompt_tokens  length of the prompt
    done           nothing more is wanted (a stop string, or the one call that was allowed)
    """

    def __init__(
        self,
        codec: ChatCodec,
        parser: StreamParser,
        detokenizer: Detokenizer,
        prompt_tokens: int,
        logprobs: bool,
    ) -> None:
        self._codec = codec
        self._parser = parser
        self._detokenizer = detokenizer
        self._logprobs = logprobs
        self._whole_calls = 0
        self._finished = False
        self._usage = Usage(prompt_tokens)

    @property
    def prompt_tokens(self) -> int:
        return self._usage.prompt_tokens

    @property
    def done(self) -> bool:
        return self._parser.done

    def feed(self, output: Output) -> list[Event]:
        """Take one step's output in; return the events that are certain now.

        Ends with Finish when the output does, or when nothing more is wanted; the caller then aborts a
        request that is still running. Stop ids are read as nothing; forced ids as any others.
        """
        if self._finished:
            return []
        self._usage = replace(self._usage, cached_tokens=max(self._usage.cached_tokens, output.cached_tokens))
        logprobs: Sequence[TokenLogprob | None] = output.logprobs or (None,) * len(output.token_ids)
        events: list[Event] = []
        for id_, logprob in zip(output.token_ids, logprobs, strict=True):
            if not self.done:
                events += self._take(id_, logprob)
        if self.done:
            return [*events, self._finish("tool_calls")]
        return events if output.finish is None else [*events, *self.finish(output.finish.value)]

    def finish(self, reason: Reason) -> list[Event]:
        """End the answer: what was held back, then Finish. Nothing if it has ended.

        reason  why the engine stopped; "stop" becomes "tool_calls" if the answer holds a whole call
        """
        if self._finished:
            return []
        events: list[Event] = []
        if not self.done:
            events += self._count(self._parser.feed(self._detokenizer.finish()))
        if not self.done:
            events += self._count(self._parser.finish())
        return [*events, self._finish("tool_calls" if self._whole_calls and reason == "stop" else reason)]

    def _take(self, id_: int, logprob: TokenLogprob | None) -> list[Event]:
        channel = self._parser.channel
        self._usage = replace(
            self._usage,
            completion_tokens=self._usage.completion_tokens + 1,
            reasoning_tokens=self._usage.reasoning_tokens + (channel == "reasoning"),
        )
        events: list[Event] = []
        if self._logprobs and logprob is not None:
            events.append(TokenLogprobs((self._codec.token_info(id_, logprob),), channel))
        if id_ not in self._codec.stop_ids:
            events += self._count(self._parser.feed(self._detokenizer.feed((id_,))))
        return events

    def _finish(self, reason: Reason) -> Finish:
        self._finished = True
        stop = self._parser.stop_match
        return Finish("stop" if stop is not None else reason, self._usage, stop)

    def _count(self, events: list[Event]) -> list[Event]:
        self._whole_calls += sum(isinstance(event, ToolCallEnd) and event.complete for event in events)
        return events
