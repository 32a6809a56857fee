"""Anthropic's content blocks, system texts and tools, brought to the Conversation's neutral form.

Owns what each block means: tool results become tool turns, thoughts go back to where they came from
(out of the signature if the client never saw them). Blocks that a text model can't read are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from freetoken.api.thoughts import unsign
from freetoken.chat.conversation import Message, Tool, ToolCall
from freetoken.core.errors import RequestError
from freetoken.core.log import logger

_HOSTED = ("web_search", "web_fetch", "code_execution", "tool_search", "mcp_toolset", "advisor")
_SILENT = ("redacted_thinking", "server_tool_use", "web_search_tool_result", "web_fetch_tool_result")
_log = logger("api")

Block = Mapping[str, Any]


class Turn(msgspec.Struct):
    role: str
    content: str | list[dict[str, Any]] | None = None

    def blocks(self) -> list[dict[str, Any]]:
        """The content as blocks: a string is one text block, null is none."""
        if isinstance(self.content, str):
            return [{"type": "text", "text": self.content}]
        return self.content or []


def system_turns(system: str | Sequence[Block] | None) -> tuple[Message, ...]:
    """The top-level system text as turns: none or one. Blocks are joined by lines."""
    if isinstance(system, str):
        texts = [system]
    else:
        texts = [_text(block, f"system[{i}]") for i, block in enumerate(system or [])]
    whole = "\n".join(text for text in texts if text)
    return (Message("system", whole),) if whole.strip() else ()


def read_turns(turns: Sequence[Turn]) -> list[Message]:
    """All messages. Raises RequestError naming the message and the block."""
    names: dict[str, str] = {}
    messages: list[Message] = []
    for i, turn in enumerate(turns):
        where = f"messages[{i}]"
        if turn.role == "assistant":
            messages.append(_assistant(turn.blocks(), where))
            names.update({call.id: call.name for call in messages[-1].tool_calls})
        elif turn.role == "user":
            messages += _user(turn.blocks(), where, names)
        elif turn.role == "system":
            messages += [m for m in (_plain("system", turn.blocks(), where),) if m.content]
        else:
            raise RequestError(
                f'{where}: Unexpected role "{turn.role}".',
                code="invalid_role",
                hint="Use user, assistant or system.",
                param=where,
            )
    return messages


def _plain(role: str, blocks: Sequence[Block], where: str) -> Message:
    texts = [_text(block, f"{where}.content[{k}]") for k, block in enumerate(blocks)]
    return Message.make(role, "\n".join(text for text in texts if text), where=where)


def _user(blocks: Sequence[Block], where: str, names: Mapping[str, str]) -> Iterator[Message]:
    """A user turn: each tool result is a tool turn, what stands between them is user text."""
    texts: list[str] = []
    for k, block in enumerate(blocks):
        place = f"{where}.content[{k}]"
        if block.get("type") != "tool_result":
            texts.append(_text(block, place))
            continue
        if any(texts):
            yield Message("user", "\n".join(filter(None, texts)))
        texts = []
        call_id = str(block.get("tool_use_id") or "")
        yield Message("tool", _result(block, place), tool_call_id=call_id, name=names.get(call_id))
    if any(texts) or not blocks:
        yield Message("user", "\n".join(filter(None, texts)))


def _result(block: Block, where: str) -> str:
    """A tool result's text; a failed tool's says so."""
    content = block.get("content")
    if content is None or isinstance(content, str):
        text = content or ""
    else:
        parts = [_text(part, f"{where}.content[{k}]") for k, part in enumerate(_blocks(content, where))]
        text = "\n".join(part for part in parts if part)
    if block.get("is_error") and not text.lower().startswith(("error", "<tool_use_error>")):
        return f"Error: {text}".rstrip()
    return text


def _assistant(blocks: Sequence[Block], where: str) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for k, block in enumerate(blocks):
        kind, place = block.get("type", "text"), f"{where}.content[{k}]"
        if kind == "thinking":
            thoughts.append(str(block.get("thinking") or "") or unsign(str(block.get("signature") or "")))
        elif kind == "tool_use":
            calls.append(_call(block, place))
        elif kind not in _SILENT:
            texts.append(_text(block, place))
    return Message.make(
        "assistant",
        "\n".join(filter(None, texts)),
        where=where,
        reasoning="\n".join(filter(None, thoughts)),
        tool_calls=calls,
    )


def _call(block: Block, where: str) -> ToolCall:
    id_, name, given = block.get("id"), block.get("name"), block.get("input")
    if (
        not isinstance(id_, str)
        or not isinstance(name, str)
        or not isinstance(given, (dict, str, type(None)))
    ):
        raise RequestError(
            f"{where}: a tool_use block needs an id, a name and an object as input.",
            code="invalid_content",
            hint="Send the block back as it came.",
            param=where,
        )
    return ToolCall(id_, name, given or {})


def _text(block: Block, where: str) -> str:
    """The text of a block that is one; RequestError `unsupported_content` names any other kind."""
    kind = block.get("type", "text")
    source = block.get("source")
    if kind == "document" and isinstance(source, Mapping) and source.get("type") == "text":
        text = source.get("data")
    elif kind == "tool_reference":
        text = f"The tool {block.get('tool_name', '')} is available now."
    elif kind == "text":
        text = block.get("text")
    else:
        raise RequestError(
            f"{where}: a block of type {kind!r} is not supported here; this model reads text only.",
            code="unsupported_content",
            hint="Remove the block or describe it in words.",
            param=where,
        )
    if text is not None and not isinstance(text, str):
        raise RequestError(
            f"{where}.text must be a string.",
            code="invalid_content",
            hint="Send the block as an object with type text and a string.",
            param=where,
        )
    return text or ""


def _blocks(content: object, where: str) -> list[Block]:
    if isinstance(content, list) and all(isinstance(block, dict) for block in content):
        return content
    raise RequestError(
        f"{where}.content must be a string or a list of blocks.",
        code="invalid_content",
        hint="Send the text as a plain string.",
        param=f"{where}.content",
    )


def read_tools(tools: Sequence[Block], turns: Sequence[Turn]) -> tuple[Tool, ...]:
    """Tools on offer. Hosted ones are skipped; deferred ones count once something has named them."""
    found: list[Tool] = []
    named = _referenced(turns)
    for i, tool in enumerate(tools):
        kind, name = tool.get("type") or "custom", tool.get("name")
        if str(kind).startswith(_HOSTED):
            _log.debug("skipped the hosted tool %s", kind)
        elif kind != "custom" or not isinstance(name, str) or not name:
            raise RequestError(
                f"tools[{i}] of type {kind!r} is not a tool with a name and an input_schema.",
                code="unsupported_tool",
                hint="Send tools as {name, description, input_schema}.",
                param=f"tools[{i}]",
            )
        elif not tool.get("defer_loading") or name in named:
            schema = tool.get("input_schema")
            described = str(tool.get("description") or "")
            more = {"parameters": schema} if isinstance(schema, dict) else {}
            found.append(Tool(name, described, strict=tool.get("strict") is True, **more))
    return tuple(found)


def _referenced(turns: Sequence[Turn]) -> set[str]:
    """Names of tools that calls or tool references in the history mention."""
    blocks = [block for turn in turns for block in turn.blocks()]
    results = (block.get("content") for block in blocks if block.get("type") == "tool_result")
    inner = [part for content in results if isinstance(content, list) for part in content]
    names = {str(b.get("name")) for b in blocks if b.get("type") == "tool_use"}
    references = (b for b in inner if isinstance(b, dict) and b.get("type") == "tool_reference")
    return names | {str(b.get("tool_name")) for b in references}
