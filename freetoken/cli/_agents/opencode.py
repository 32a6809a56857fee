"""OpenCode, over chat completions. A config file of ours is merged over the user's own.

Without a context limit it never compacts; without `small_model` its titles go to another provider.
"""

from __future__ import annotations

import json
from pathlib import Path

from freetoken.cli._agents import Launch, Server

PACKAGE = "opencode-ai@1.18.33"
HELP = "OpenCode"
_KEY = "FREETOKEN_API_KEY"


def launch(server: Server, folder: Path) -> Launch:
    name = f"freetoken/{server.model}"
    limit = {"context": server.context, "output": server.max_output}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "FreeToken",
        "options": {
            "baseURL": f"{server.url}/v1",
            "apiKey": f"{{env:{_KEY}}}" if server.api_key else "none",
        },
        "models": {server.model: {"name": server.model, "limit": limit}},
    }
    config = {
        "$schema": "https://opencode.ai/config.json",
        "provider": {"freetoken": provider},
        "model": name,
        "small_model": name,
        "autoupdate": False,
        "share": "disabled",
    }
    environment = {
        "OPENCODE_CONFIG": str(folder / "opencode.json"),
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
    }
    if server.api_key:
        environment[_KEY] = server.api_key
    return Launch(
        "opencode", (), environment, {folder / "opencode.json": json.dumps(config, indent=2) + "\n"}
    )
