"""Operations on plain tensors: a folder is an operation, a file in it is a maker of it.

Each operation's `__init__` is the contract; `reference.py` is slow, always there and the oracle.
Kernels know no layer, no model and no batch.
"""
