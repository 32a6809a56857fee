"""Model families: a file is a family, `FAMILY` its one object, `TINY` its specimen for tests.

A family reads a config, names its tensors and assembles mixers and MLPs from shared parts. It knows
no engine and no placement of experts: those arrive as arguments.
"""
