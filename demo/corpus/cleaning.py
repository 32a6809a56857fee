# ruff: noqa: E501 - sentences and small makers read best on one line
"""What text may enter the corpus, and its plain ASCII spelling.

Entries with slurs, obscene or sexual words are dropped whole rather than edited. `held_out` names the words that no
training chat draws, so that the evaluation can use them.
"""

import hashlib
import re

UNWANTED = re.compile(
    r"\b(nigger|niggers|nigga|negro|faggot|fag|fags|dyke|kike|spic|spick|wetback|chink|gook|coon|darky|darkie|"
    r"jap|japs|wop|dago|paki|tranny|retard|whore|slut|cunt|fuck|fucker|fucking|fucked|shit|bullshit|shitty|cock|"
    r"prick|pussy|piss|bitch|bastard|rape|raped|rapist|twat|tits|asshole|arsehole|buttocks|copulat\w*|coitus|"
    r"masturbat\w*|penis|vagina\w*|vulva|anus|semen|sexual\w*|intercourse|prostitut\w*|suicid\w*|nazi|nazis|"
    r"jew|jews|slave|slaves|savages?|half-breed|mulatto|squaw|injun|hottentot|kaffir|offensive|obscen\w*|"
    r"disparaging|derogatory|heroin|cocaine|porn\w*|incest|pedophil\w*)\b",
    re.I,
)
_SPELL = str.maketrans(
    {
        "\u2018": "'",
        "\u2019": "'",
        "\u201c": '"',
        "\u201d": '"',
        "\u2013": "-",
        "\u00a0": " ",
        "\u00b6": None,
        "\r": None,
    }
)


def tidy(text: str) -> str:
    """Fold typographic marks to ASCII and squeeze blank lines."""
    text = text.translate(_SPELL).replace("\u2014", " - ").replace("\u2026", "...")
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+\n", "\n", text)).strip()


def is_prose(text: str) -> bool:
    """True for text worth learning: long enough, mostly letters, nothing unwanted."""
    letters = sum(c.isalpha() or c == " " for c in text)
    return len(text) >= 40 and letters >= 0.72 * len(text) and not UNWANTED.search(text)


def held_out(word: str) -> bool:
    """True for the 5 % of all words that only the evaluation draws."""
    return hashlib.md5(word.lower().encode()).digest()[0] < 13
