"""The numbers of a synthetic model: who is routed where, what experts leave behind, what the head sees.

The first half of the hidden dimensions carries the token: a common vector, its topic and its own noise. Each
MoE layer has some dimensions of the second half to itself; its experts write there, 32 times stronger than
anywhere else. Three things follow, whatever the depth:

    routing   a router reads the token (core experts mostly the common vector and the topic, others the noise)
              and, with weight `drift`, what the layer before wrote: that can't be predicted a layer early
    walk      the head's row of a word is the noise of the word before it: greedy decoding walks a known cycle
    sight     all rows of the head also read what experts wrote: an expert dropped moves every logit

Knows no formats and no files. The idea of calibrated routing over embeddings is the benchmark script's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from freetoken.bench._synth_text import TOPICS, Walk
from freetoken.core.model_config import ModelConfig

COMMON, TOPIC = 0.5, 0.6
NOISE = math.sqrt(1 - COMMON**2 - TOPIC**2)
ROUTER_SCALE = 1.5
RIGHT, BLUR = 9.0, 0.8
"""The right word's logit, and the spread that experts give to all: it leads by some four logits."""
MIXER_RMS = 0.15
"""What all mixers together add, in units of the token's own signal."""
WEAK = -5
"""Power of two of what experts write outside their layer's dimensions."""


@dataclass(frozen=True)
class Calibration:
    """How routing behaves.

    core_share  experts that follow the common vector and the topic
    core        their logits' spread from the common vector, the topic, the token
    tail        the others', from the token
    drift       share of a logit's variance that the layer before has written
    """

    core_share: float = 0.5
    core: tuple[float, float, float] = (0.62, 0.82, 0.22)
    tail: float = 0.8
    drift: float = 0.15


@dataclass(frozen=True)
class Plan:
    """A model's dimensions and amplitudes.

    written     rms of what a layer's experts leave in its own dimensions
    norm_one    what a norm's weight is where it changes nothing: 1, or 0 where weights lie around it
    """

    config: ModelConfig
    calibration: Calibration
    seed: int
    written: float
    norm_one: float
    router: str

    @property
    def base(self) -> int:
        """Dimensions that carry the token."""
        return self.config.hidden_size // 2

    def own(self, moe_layer: int) -> slice:
        """The dimensions that a MoE layer writes."""
        rest = self.config.hidden_size - self.base
        width = max(rest // max(self.config.num_moe_layers, 1), 8)
        at = self.base + moe_layer * width % (rest // width * width)
        return slice(at, at + width)

    @property
    def width(self) -> int:
        own = self.own(0)
        return int(own.stop - own.start)

    def rms(self, moe_layers: int) -> float:
        """Of the hidden state once so many MoE layers have written."""
        return math.sqrt((self.base + moe_layers * self.width * self.written**2) / self.config.hidden_size)

    def generator(self, *where: int) -> torch.Generator:
        mixed: int = 0
        for part in (self.seed, *where):
            mixed = (mixed * 1_000_003 + part + 1) % (1 << 62)
        return cast(torch.Generator, torch.Generator().manual_seed(mixed))


def _randn(g: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=g)


def basis(plan: Plan) -> Tensor:
    """Orthonormal [1 + topics, base]: the common vector, then the topics."""
    count = 1 + min(TOPICS, plan.base // 2)
    square = torch.linalg.qr(_randn(plan.generator(1), plan.base, count))[0]
    return cast(Tensor, square.T.contiguous())


def _own_noise(plan: Plan, axes: Tensor, g: torch.Generator, rows: int) -> Tensor:
    """[rows, base] away from the axes, of rms 1."""
    x = _randn(g, rows, plan.base)
    x -= (x @ axes.T) @ axes
    return x * (math.sqrt(plan.base) / x.norm(dim=1, keepdim=True))


class Words:
    """Embedding and head, some rows at a time; only the noise of the walk's words is kept."""

    def __init__(self, plan: Plan, walk: Walk) -> None:
        self._plan, self._axes = plan, basis(plan)
        self._noise = _own_noise(plan, self._axes, plan.generator(5), len(walk.ids))
        vocab, topics = plan.config.vocab_size, len(self._axes) - 1
        words = torch.tensor(walk.ids)
        self._topic = torch.randint(topics, (vocab,), generator=plan.generator(2))
        self._topic[words] = torch.tensor(walk.topic) % topics
        self._place = torch.full((vocab,), -1)
        self._place[words] = torch.arange(len(words))

    def embedding(self, rows: slice) -> Tensor:
        """bf16 [rows, H]: the common vector, the topic and the word's own noise."""
        plan, place = self._plan, self._place[rows]
        noise = _own_noise(plan, self._axes, plan.generator(6, rows.start), len(place))
        noise[place >= 0] = self._noise[place[place >= 0]]
        known = math.sqrt(plan.base) * (COMMON * self._axes[0] + TOPIC * self._axes[1:])
        out = torch.zeros(len(place), plan.config.hidden_size, dtype=torch.bfloat16)
        out[:, : plan.base] = (NOISE * noise + known[self._topic[rows]]).bfloat16()
        return out

    def head(self, rows: slice) -> Tensor:
        """bf16 [rows, H]: the noise of the word before, and a random view of what experts wrote."""
        plan, place = self._plan, self._place[rows]
        hidden, base, layers = plan.config.hidden_size, plan.base, plan.config.num_moe_layers
        last, seen = plan.rms(layers), min(layers * plan.width, hidden - base)
        out = torch.zeros(len(place), hidden, dtype=torch.bfloat16)
        before = (place[place >= 0] - 1) % len(self._noise)
        out[place >= 0, :base] = (RIGHT * last / (NOISE * base) * self._noise[before]).bfloat16()
        blur = BLUR * last / (math.sqrt(seen) * plan.written)
        out[:, base : base + seen] = (
            blur * _randn(plan.generator(7, rows.start), len(place), seen)
        ).bfloat16()
        return out


def router_weight(plan: Plan, moe_layer: int) -> Tensor:
    """[E, H] of a MoE layer's router, bf16."""
    moe, want, axes = plan.config.moe, plan.calibration, basis(plan)
    assert moe is not None
    experts, base, g = moe.num_experts, plan.base, plan.generator(3, moe_layer)
    core = torch.zeros(experts, 1)
    core[torch.randperm(experts, generator=g)[: int(experts * want.core_share)]] = 1
    common = want.core[0] * _randn(g, experts, 1) * core / (COMMON * math.sqrt(base))
    topic = want.core[1] * _randn(g, experts, len(axes) - 1) * core / (TOPIC * math.sqrt(base))
    strength = want.core[2] * core + want.tail * (1 - core)
    noise = _randn(g, experts, base)
    noise -= (noise @ axes.T) @ axes
    token = common * axes[0] + topic @ axes[1:] + strength * noise / (NOISE * math.sqrt(base))
    drift = want.drift if moe_layer else 0.0
    out = torch.zeros(experts, plan.config.hidden_size)
    out[:, :base] = math.sqrt(1 - drift) * token
    if moe_layer:
        spread = core * math.hypot(*want.core) + (1 - core) * want.tail
        read = _randn(g, experts, plan.width) * math.sqrt(drift) * spread
        out[:, plan.own(moe_layer - 1)] = read / (plan.written * math.sqrt(plan.width))
    return (ROUTER_SCALE * plan.rms(moe_layer) * out).bfloat16()


def dense_tensor(plan: Plan, name: str, shape: tuple[int, ...], layer: int, number: int) -> Tensor:
    """Any other tensor of a layer, by what it is: bf16."""
    config, g = plan.config, plan.generator(4, layer, number)
    quiet = MIXER_RMS / math.sqrt(config.num_layers)
    if name.startswith(plan.router):
        if name.endswith("bias"):
            return torch.zeros(shape, dtype=torch.bfloat16)
        return router_weight(plan, config.moe_layer_of[layer])
    if name == "linear_attn.norm.weight":
        return torch.ones(shape, dtype=torch.bfloat16)
    if name.endswith("norm.weight"):
        return torch.full(shape, plan.norm_one, dtype=torch.bfloat16)
    if name == "linear_attn.dt_bias":
        return torch.full(shape, -3.0, dtype=torch.bfloat16)  # decays over some twenty tokens
    if name.endswith(("bias", "sinks", "A_log")):
        return torch.zeros(shape, dtype=torch.bfloat16)
    if name == "linear_attn.conv1d.weight":
        return (0.5 * _randn(g, *shape)).bfloat16()
    quietly = name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight"))
    std = (2 * quiet if quietly else 1.0) / math.sqrt(shape[-1])
    return (std * _randn(g, *shape)).bfloat16()
