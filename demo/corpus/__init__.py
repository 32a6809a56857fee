"""From freely licensed packages to plain text, word lists and tokens."""
