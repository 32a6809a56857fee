# ruff: noqa: E501 - sentences and small makers read best on one line
"""Held-out evaluation of a demo model on the CPU: tool calls, coding sessions, look-ups, perplexity, drafts, routing."""
