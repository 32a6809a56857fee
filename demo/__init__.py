# ruff: noqa: E501 - sentences and small makers read best on one line
"""Recipe, evaluation and routing traces of the demo model that FreeToken ships.

Nothing in the package `freetoken` imports this folder; it only needs to run when the demo model is trained again.
"""
