"""Claude Code, over the Messages API. Told everything by its environment; no file is written.

Without its context size it assumes a million tokens for a model name it doesn't know, and would
compact only when the server refuses. Its attribution line changes with every prompt, so it is off.
"""

from __future__ import annotations

from pathlib import Path

from freetoken.cli._agents import Launch, Server

PACKAGE = "@anthropic-ai/claude-code@2.1.332"
HELP = "Claude Code"
_MODEL_NAMES = (
    "ANTHROPIC_MODEL",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL",
    "ANTHROPIC_DEFAULT_SONNET_MODEL",
    "ANTHROPIC_DEFAULT_OPUS_MODEL",
    "CLAUDE_CODE_SUBAGENT_MODEL",
)


def launch(server: Server, folder: Path) -> Launch:
    environment = {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_AUTH_TOKEN": server.api_key or "none",
        **dict.fromkeys(_MODEL_NAMES, server.model),
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(server.context),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(server.max_output),
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "API_TIMEOUT_MS": "3000000",
    }
    return Launch("claude", ("--model", server.model), environment)
