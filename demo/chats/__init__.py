"""Endless generated chats: small talk, look-ups, arithmetic, tool calls and coding sessions.

Names, parameters, schemas and values are drawn at random, so that a model must copy them from the prompt.
"""
