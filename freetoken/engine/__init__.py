"""The engine: what runs next, on what memory, and how a batch becomes tokens.

`build` is the composition root; `scheduler`, `budget`, `plan` and `stats` decide with integers.
"""
