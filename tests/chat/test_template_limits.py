"""Template bombs end soon, in any thread, with a code; what honest templates do is not affected."""

from __future__ import annotations

import json
import threading
import time

import pytest

from freetoken.chat.template import ChatTemplate
from freetoken.chat.template_limits import Limits
from freetoken.core.errors import RequestError

HI = [{"role": "user", "content": "Hi"}]


def grown(first: str, then: str, use: str = "{{ ns.x }}") -> str:
    """Begin with one value and make a larger one of it many times."""
    turns = f"{{% for i in range(200) %}}{{% set ns.x = {then} %}}{{% endfor %}}"
    return f"{{% set ns = namespace(x={first}) %}}{turns}{use}"


BOMBS = {
    "nested loops": "{% for a in range(99999) %}" * 4 + "{% endfor %}" * 4,
    "a filtered loop": "{% for a in range(9999) %}{% for b in range(9999) if 0 %}{% endfor %}{% endfor %}",
    "a recursive loop": "{% for a in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "a huge range": "{{ range(10 ** 12) | list }}",
    "a macro for ever": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a branching macro": (
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}"
    ),
    "a call block": "{% macro m() %}{{ m(caller=caller) }}{% endmacro %}{% call m() %}{% endcall %}",
    "long output": "{% for a in range(99999) %}{% for b in range(9999) %}0123456789{% endfor %}{% endfor %}",
    "text times number": "{{ 'a' * 10 ** 10 }}",
    "number times text": "{{ 10 ** 10 * 'a' }}",
    "list times number": "{{ ([1] * 10 ** 10) | length }}",
    "a high power": "{{ 9 ** (9 ** 9) }}",
    "a squared number": grown("7", "ns.x * ns.x"),
    "doubled by plus": grown("'ab'", "ns.x + ns.x"),
    "doubled by tilde": grown("'ab'", "ns.x ~ ns.x"),
    "doubled by join": grown("'ab'", "[ns.x, ns.x] | join"),
    "doubled by method": grown("'ab'", "''.join([ns.x, ns.x])"),
    "doubled by replace": grown("'aa'", "ns.x | replace('a', ns.x)"),
    "doubled by its replace": grown("'aa'", "ns.x.replace('a', ns.x)"),
    "doubled by percent": grown("'ab'", "'%s%s' % (ns.x, ns.x)"),
    "doubled by format": grown("'ab'", "'{0}{0}'.format(ns.x)"),
    "doubled by a block": (
        "{% macro m(x, n) %}{% set y %}{{ x }}{{ x }}{% endset %}{{ m(y, n) }}{% endmacro %}{{ m('ab', 9) }}"
    ),
    "a tree, shown": grown("[1]", "[ns.x, ns.x]"),
    "a tree, as JSON": grown("[1]", "{'a': ns.x, 'b': ns.x}", "{{ ns.x | tojson }}"),
    "trees compared": grown("[[1], [1]]", "[[ns.x[0]] * 2, [ns.x[1]] * 2]", "{{ ns.x[0] == ns.x[1] }}"),
    "namespaces in a ring": "{% set n = namespace(x=1) %}{% set n.x = [n, n] %}{{ n }}",
    "many lists": grown("[]", "ns.x + [range(99999) | list] * 99", "{{ ns.x | sum(start=[]) | length }}"),
    "a width": "{{ 'a' | center(10 ** 10) }}{{ 'a'.ljust(10 ** 10) }}",
    "a justified width": "{{ 'a'.ljust(10 ** 10) }}",
    "a width in a format": "{{ '%9999999999d' % 1 }}",
    "a width from outside": "{{ '%*d' % (10 ** 9, 1) }}",
    "a width in braces": "{{ '{:9999999999}'.format(1) }}",
    "a nested width": "{{ '{:{}}'.format(1, 10 ** 9) }}",
    "a wide indent": "{{ {'a': [1]} | tojson(indent=10 ** 9) }}",
    "wide tabs": "{{ '\\t'.expandtabs(10 ** 10) }}",
    "a translation": "{{ ('a' * 10 ** 7).translate({97: 'b' * 10 ** 7}) }}",
    "text kept by the piece": grown("[]", "ns.x + [('a' * 10 ** 7) ~ i]", "{{ ns.x | length }}"),
}  # fmt: skip


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_template_bomb_ends_soon_with_a_code(bomb: str) -> None:
    template = ChatTemplate(BOMBS[bomb], limits=Limits(seconds=0.3))
    began_s = time.thread_time()
    with pytest.raises(RequestError) as caught:
        template.render(HI)
    assert caught.value.code == "template_limits", str(caught.value)
    assert time.thread_time() - began_s < 10


def test_limits_hold_in_any_thread_and_for_each_alone() -> None:
    template = ChatTemplate(BOMBS["nested loops"], limits=Limits(seconds=0.3))
    codes: list[str] = []

    def work() -> None:
        try:
            template.render(HI)
        except RequestError as error:
            codes.append(error.code)

    thread = threading.Thread(target=work)
    began_s = time.monotonic()
    thread.start()
    assert ChatTemplate("{{ messages[0].content }}").render(HI) == "Hi"
    thread.join()
    assert codes == ["template_limits"] and time.monotonic() - began_s < 10


def test_the_next_render_begins_with_fresh_limits() -> None:
    text = "{% for m in messages %}{% for i in range(99999) %}{% endfor %}{% endfor %}{{ messages | length }}"
    template = ChatTemplate(text, limits=Limits(seconds=0.4))
    with pytest.raises(RequestError):
        template.render(HI * 1000)
    assert template.render(HI[:0]) == "0"


def test_long_honest_conversations_render() -> None:
    text = (
        "{% set ns = namespace(text='') %}{% for m in messages %}{% set ns.text = '**%s**' % m.role ~ ': ' %}"
        "{{ ns.text + (m.content | trim) }}{{ m | tojson }}{% endfor %}"
    )
    messages = [{"role": "user", "content": f" {i} 12345 {{" + "x" * 2000} for i in range(3000)]
    expected = "".join(f"**user**: {m['content'].strip()}{json.dumps(m)}" for m in messages)
    assert ChatTemplate(text).render(messages) == expected


def test_a_text_of_the_largest_size_is_rendered() -> None:
    big = "a" * (60 << 20)
    assert len(ChatTemplate("{{ messages[0].content }}").render([{"role": "user", "content": big}])) == len(
        big
    )
