"""Codex CLI, over the Responses API. Its home is a folder of ours, so `~/.codex` stays as it is."""

from __future__ import annotations

import json
from pathlib import Path

from freetoken.cli._agents import Launch, Server

PACKAGE = "@openai/codex@0.171.0"
HELP = "Codex CLI"
_KEY = "FREETOKEN_API_KEY"
_CONFIG = """model = {model}
model_provider = "freetoken"
model_context_window = {context}
check_for_update_on_startup = false
web_search = "disabled"

[analytics]
enabled = false

[model_providers.freetoken]
name = "FreeToken"
base_url = {base}
wire_api = "responses"
"""


def launch(server: Server, folder: Path) -> Launch:
    text = _CONFIG.format(
        model=json.dumps(server.model), context=server.context, base=json.dumps(f"{server.url}/v1")
    )
    environment = {"CODEX_HOME": str(folder)}
    if server.api_key:
        text += f'env_key = "{_KEY}"\n'
        environment[_KEY] = server.api_key
    return Launch("codex", (), environment, {folder / "config.toml": text})
