"""Attention kinds: what a token mixer keeps between steps, where it lies, and how it is read.

A kind is a file: its StateSpec, typed views over a Pool and `attend`. Projections, norms and rotation
are the model's; the pool's units belong to whoever hands out page and state ids.
"""
