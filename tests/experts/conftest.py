"""Property tests run on shared machines: no deadline per example."""

from hypothesis import settings

settings.register_profile("shared", deadline=None)
settings.load_profile("shared")
