"""Chat templates: Jinja in a sandbox, with the extras that published templates rely on.

Owns finding a model's templates and rendering them to text exactly as the reference does: trimmed
blocks, loop controls, `tojson` without HTML escapes, `raise_exception`, `strftime_now`, the
generation tag. Knows no tokenizer and no conversation: messages are plain dicts here.
A template is untrusted code: whatever goes wrong inside one is the request's error, never a crash.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.utils import Namespace

from freetoken.chat.files import read_object, read_text
from freetoken.chat.template_limits import Limits, MeteredEnvironment, TemplateLimit, metered
from freetoken.core.errors import RequestError, WeightsError

_SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_ESCAPED_MARK = re.compile(r"(?<!\\)((?:\\\\)*)\\ufdd0")
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class ChatTemplate:
    """A model's templates by name.

    sources         dict  name -> Jinja text; `default` is used unless a better name fits
    special_tokens  dict  bos_token etc. as the template sees them
    now             returns local time, for `strftime_now`
    limits          what one render may use up
    Raises WeightsError `invalid_chat_template` on a syntax error.
    """

    def __init__(
        self,
        sources: Mapping[str, str] | str,
        special_tokens: Mapping[str, str] | None = None,
        now: Callable[[], datetime.datetime] = datetime.datetime.now,
        limits: Limits = Limits(),
    ) -> None:
        self.sources = {"default": sources} if isinstance(sources, str) else dict(sources)
        self._special_tokens = dict(special_tokens or {})
        environment = _environment(now, limits)
        self._meter = environment.meter
        self._compiled = {name: _compile(environment, name, text) for name, text in self.sources.items()}

    @classmethod
    def from_directory(cls, path: Path) -> ChatTemplate | None:
        """Find the templates of a checkpoint; None if it has none (a base model)."""
        config = read_object(path / "tokenizer_config.json")
        sources: dict[str, str] = {}
        for where in (config, read_object(path / "chat_template.json")):
            sources.update(_named(where.get("chat_template")))
        for file in sorted(path.glob("additional_chat_templates/*.jinja")):
            sources[file.stem] = read_text(file, code="invalid_chat_template")
        if (path / "chat_template.jinja").is_file():
            sources["default"] = read_text(path / "chat_template.jinja", code="invalid_chat_template")
        special = {name: _token_text(config[name]) for name in _SPECIAL_NAMES if config.get(name)}
        return cls(sources, special) if sources else None

    @property
    def special_tokens(self) -> dict[str, str]:
        """bos_token etc. as the template sees them."""
        return dict(self._special_tokens)

    @property
    def text(self) -> str:
        """All sources together, to look for words in."""
        return "\n".join(self.sources.values())

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Render messages to the prompt's text.

        messages   dicts as templates read them; a key whose value is None counts as absent
        tools      JSON schemas of functions, or None
        variables  what else the template may ask for, e.g. enable_thinking
        Raises RequestError `template_error` with the template's own words, `template_limits` if it
        used up more than it may.
        """
        variables = variables or {}
        if clash := _RESERVED & variables.keys():
            raise RequestError(
                f"{sorted(clash)[0]!r} cannot be given as a template variable.",
                code="invalid_template_variable",
                hint="Pass it in its own field of the request.",
                param="chat_template_kwargs",
            )
        plain = [{key: value for key, value in m.items() if value is not None} for m in messages]
        self._meter.start()
        try:
            return self._pick(tools).render(
                **{**self._special_tokens, **variables},
                messages=plain,
                tools=list(tools) if tools else None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except (TemplateLimit, OverflowError, RecursionError, MemoryError) as error:
            raise RequestError(
                f"The model's chat template used more than it may: {str(error).rstrip('.') or 'memory'}.",
                code="template_limits",
                hint="Shorten the conversation, or repair the checkpoint's chat_template.jinja.",
                param="messages",
            ) from error
        except Exception as error:
            raise RequestError(
                f"The model's chat template refused the conversation: {str(error).rstrip('.')}.",
                code="template_error",
                hint="Change the roles or their order, or repair the checkpoint's chat_template.jinja.",
                param="messages",
            ) from error
        finally:
            self._meter.stop()

    def _pick(self, tools: Sequence[Mapping[str, Any]] | None) -> Template:
        if tools and "tool_use" in self._compiled:
            return self._compiled["tool_use"]
        return self._compiled.get("default") or next(iter(self._compiled.values()))


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}`: marks what a model wrote; rendering ignores it."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's protocol

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _PlainNamespace(Namespace):
    """Jinja's namespace without names that could reach the interpreter's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        for name in dict(*args[1:], **kwargs):
            _check_name(name)
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"A template may not set the attribute {name!r}.")


def _environment(now: Callable[[], datetime.datetime], limits: Limits) -> MeteredEnvironment:
    environment = MeteredEnvironment(
        limits, trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.meter_filters()
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=lambda form: now().strftime(form),
        namespace=_PlainNamespace,
        dict=lambda *args, **kwargs: dict(*args, **kwargs),
    )
    return environment


def _compile(environment: MeteredEnvironment, name: str, text: str) -> Template:
    try:
        return environment.from_string(metered(environment.parse(text)))
    except TemplateSyntaxError as error:
        raise WeightsError(
            f"The chat template {name!r} does not compile: {error} (line {error.lineno}).",
            code="invalid_chat_template",
            hint="Repair the template in chat_template.jinja or tokenizer_config.json.",
        ) from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    text = json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    # Noncharacters mark places in user data (see inert.py); escaping would hide them.
    return _ESCAPED_MARK.sub("\\1\ufdd0", text) if ensure_ascii else text


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message))


def _named(found: object) -> dict[str, str]:
    """Read the forms that `chat_template` takes in JSON: a text, or a list of named texts."""
    if isinstance(found, str):
        return {"default": found}
    if isinstance(found, Mapping):
        return {str(name): str(text) for name, text in found.items()}
    if isinstance(found, Sequence):
        try:
            return {str(entry["name"]): str(entry["template"]) for entry in found}
        except (TypeError, KeyError) as error:
            raise WeightsError(
                "chat_template is a list, but not of templates with their names.",
                code="invalid_chat_template",
                hint="Fetch tokenizer_config.json again.",
            ) from error
    return {}


def _token_text(token: object) -> str:
    return str(token.get("content", "")) if isinstance(token, Mapping) else str(token)
