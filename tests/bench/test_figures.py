"""Charts are well-formed XML whatever the words and values in them."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.bench import figures

SVG = "{http://www.w3.org/2000/svg}"
words = st.text("ab Z09<>&'\"/;%#{}[]-\u00a0é\u0300ß中あ\u202e\u200d\U0001f469", max_size=12)
values = st.none() | st.floats(0, 1e5, allow_nan=False)


def chart(title, labels, rows, **kind):
    series = [figures.Series(label, row) for label, row in zip(labels, rows, strict=True)]
    return figures.Chart(title=title, subtitle="a < b & c", y_label="y", series=series, **kind)


@given(title=words, labels=st.lists(words, min_size=1, max_size=14), data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_chart_parses_and_keeps_its_words(title, labels, data):
    rows = [data.draw(st.lists(values, min_size=3, max_size=3)) for _ in labels]
    line = ET.fromstring(figures.lines(chart(title, labels, rows, x=[5, 11, 60], x_marks=[(8, "<mark>")])))
    bar = ET.fromstring(figures.bars(chart(title, labels, rows, groups=["a", "b", title])))
    assert len(line.findall(f"{SVG}polyline")) == len(labels)
    texts = [t.text or "" for t in bar.iter(f"{SVG}text")]
    assert all(label in texts for label in labels)
    assert len(bar.findall(f"{SVG}rect")) == 1 + len(labels) + sum(v is not None for r in rows for v in r)


def test_higher_values_are_drawn_higher_and_zero_on_the_axis():
    root = ET.fromstring(figures.lines(chart("t", ["a"], [[0.0, 50.0, 100.0]], x=[1, 2, 3])))
    heights = [float(c.get("cy")) for c in root.findall(f"{SVG}circle")]
    assert heights[0] == figures.TOP + figures.PLOT_HEIGHT
    assert heights == sorted(heights, reverse=True)
