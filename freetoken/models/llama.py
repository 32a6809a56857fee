"""Llama and Mistral: dense, neither biases nor norms on q and k unless the config asks for biases."""

from __future__ import annotations

from collections.abc import Sequence

from freetoken.core.model_config import ConfigReader
from freetoken.models import _dense

TINY = {"model_type": "llama", **_dense.TINY}


class LlamaFamily(_dense.DenseFamily):
    name = "llama"
    model_types = ("llama", "mistral")
    TINY = TINY

    def windows(self, read: ConfigReader, layers: int) -> Sequence[int | None]:
        """Mistral states a window for all layers, or null."""
        return [int(read.read("sliding_window", int, default=0)) or None] * layers


FAMILY = LlamaFamily()
