"""The shipped dictionary (WordNet): what the demo model looks up instead of reciting.

Read when first asked, some 8,500 lines. Answers are text for a model: a meaning a line, or `not found`.
"""

from __future__ import annotations

from pathlib import Path

from freetoken.chat.conversation import Tool

PATH = Path(__file__).resolve().parent.parent / "data" / "dictionary.tsv"


def _tool(name: str, description: str, parameter: str, meaning: str) -> Tool:
    schema = {"type": "string", "description": meaning}
    return Tool(
        name, description, {"type": "object", "properties": {parameter: schema}, "required": [parameter]}
    )


DEFINE = _tool("define", "Look up the meaning of a word", "word", "The word to look up")
LOOKUP = _tool("lookup", "Look up a name or a place", "query", "What to look up")
PARAMETER_OF = {DEFINE.name: "word", LOOKUP.name: "query"}


def look_up(term: str, *, with_word: bool) -> str:
    """Meanings of `term`, whatever its case; `with_word` puts word and part of speech in front."""
    wanted, found = term.strip().casefold(), []
    with PATH.open(encoding="utf-8") as lines:
        for line in lines:
            word, part, meaning = line.rstrip("\n").split("\t")
            if word.casefold() == wanted:
                found.append(f"{word} ({part}): {meaning}" if with_word else meaning)
    return "\n".join(found) or "not found"
