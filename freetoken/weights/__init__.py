"""Checkpoints on disk: containers, the names inside, and a directory as one opened thing.

Knows bytes, names and shapes; no model family and no device.
"""
