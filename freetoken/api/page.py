"""The page at `/`: what runs here and how to call it, readable in a browser and in a terminal.

One static page without scripts, fonts or anything else that would be fetched from elsewhere.
"""

from __future__ import annotations

import html

from freetoken import __version__
from freetoken.api.face import LanguageModel

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>FreeToken · {model}</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font: 16px/1.55 system-ui, sans-serif; max-width: 44rem; margin: 3rem auto; padding: 0 1.2rem }}
pre {{ padding: 1rem; overflow-x: auto; border: 1px solid #8886; border-radius: 8px }}
code, pre {{ font: 14px/1.5 ui-monospace, monospace }}
li {{ margin: .3rem 0 }}
</style>
<h1>FreeToken</h1>
<p>This is a FreeToken {version} server. It serves <strong>{model}</strong>
with a context of {context} tokens. State: <strong>{state}</strong>.</p>
<p>Try it from a terminal:</p>
<pre>curl {base}/v1/chat/completions -H 'content-type: application/json' -d '{{
  "model": "{json_model}",
  "messages": [{{"role": "user", "content": "Hello!"}}]
}}'</pre>
<p>Or point any OpenAI client at it:</p>
<pre>from openai import OpenAI
client = OpenAI(base_url="{base}/v1", api_key="{key}")</pre>
<ul>
<li><code>POST /v1/chat/completions</code> chat, tools, streaming</li>
<li><code>POST /v1/responses</code> items, tools, streaming</li>
<li><code>POST /v1/messages</code> the same for Anthropic clients; base URL {base}</li>
<li><code>POST /v1/completions</code> raw text or token ids</li>
<li><a href="/v1/models"><code>GET /v1/models</code></a> what is served</li>
<li><a href="/health"><code>GET /health</code></a> loading, ok or failed</li>
<li><a href="/v1/stats"><code>GET /v1/stats</code></a> the engine's figures</li>
<li><a href="/metrics"><code>GET /metrics</code></a> the same for Prometheus</li>
</ul>
<p>In a terminal, <code>ft launch</code> runs a coding agent on it, <code>ft chat</code> talks to it,
and <code>ft --help</code> lists the rest.</p>
</html>
"""


def render(llm: LanguageModel, base_url: str, needs_key: bool) -> str:
    """The page as HTML; every value is escaped."""
    status = llm.status()
    state = status.state if status.state != "loading" else f"loading, {status.percent} %"
    name = llm.model_name
    return _PAGE.format(
        model=html.escape(name),
        json_model=html.escape(name.replace("\\", "\\\\").replace('"', '\\"').replace("'", "'\\''")),
        version=html.escape(__version__),
        context=f"{llm.max_model_len:,}",
        state=html.escape(state),
        base=html.escape(base_url.rstrip("/")),
        key="YOUR-KEY" if needs_key else "none",
    )
