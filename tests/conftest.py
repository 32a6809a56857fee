"""What all tests share: hypothesis draws the same examples in every run; a failure is the change's then."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("same", deadline=None, derandomize=True, database=None)
settings.load_profile("same")
