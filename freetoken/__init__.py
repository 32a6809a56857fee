"""FreeToken: an edge-native serving engine for mixture-of-experts language models.

The package's map is ARCHITECTURE.md. A folder is an axis, a file is a choice; imports point from
`cli` towards `core` only. Importing this module loads nothing heavy: `ft --help` must stay instant.
"""

__version__ = "0.1.0"
