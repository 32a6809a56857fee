# ruff: noqa: E501, E731 - sentences and small makers read best on one line
"""Training-side model. Parameter names equal transformers' Qwen3_5MoeForCausalLM, plus the family's draft head `mtp.*`.

Written for packed rows: `start` marks the first token of each document, and neither state nor attention crosses it. All
experts are computed as one wide product and masked by the router's weights; at this size that beats gathering. A test
compares the logits with transformers.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from demo.training.kernels import scan, tri_inv
from demo.training.routing import Routing, choose

_LAYERS = ["linear_attention"] * 3 + ["full_attention"]
CONFIG = dict(
    architectures=["Qwen3_5MoeForCausalLM"], model_type="qwen3_5_moe_text", vocab_size=8192, hidden_size=256, num_hidden_layers=8,
    num_attention_heads=8, num_key_value_heads=2, head_dim=64, hidden_act="silu", max_position_embeddings=16384,
    initializer_range=0.02, rms_norm_eps=1e-6, use_cache=True, tie_word_embeddings=True, attention_bias=False, attention_dropout=0.0,
    rope_parameters=dict(rope_type="default", rope_theta=1000000.0, partial_rotary_factor=0.25, mrope_section=[3, 3, 2], mrope_interleaved=True),
    partial_rotary_factor=0.25, linear_conv_kernel_dim=4, linear_key_head_dim=64, linear_value_head_dim=64, linear_num_key_heads=2,
    linear_num_value_heads=4, moe_intermediate_size=64, shared_expert_intermediate_size=64, num_experts=32, num_experts_per_tok=4,
    norm_topk_prob=True, output_router_logits=False, router_aux_loss_coef=0.01, layer_types=_LAYERS * 2, full_attention_interval=4,
    attn_output_gate=True, mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False, bos_token_id=None, eos_token_id=[8185, 8183],
    pad_token_id=8183, dtype="bfloat16",
)  # fmt: skip
CHUNK = 64  # tokens of one chunk of the delta rule
BLOCK = 128  # tokens of one block of the attention mask


@dataclass
class Rows:
    """What layers need to know of a batch of packed rows: positions, documents, rotary angles and the attention mask."""

    position: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    mask: BlockMask | torch.Tensor


def gated_delta(q, k, v, g, beta):
    """q, k: [B, T, Hk, D]; v: [B, T, H, D]; g (log decay), beta: [B, T, H]; float32, q and k normalised, q scaled."""
    b, t, hk, dim = q.shape
    h, n = v.shape[2], t // CHUNK
    r = h // hk
    by_key = lambda x: x.view(b, n, CHUNK, hk, 1, dim).permute(1, 0, 3, 4, 2, 5)  # [n, b, hk, 1, CHUNK, dim]
    q, k = by_key(q), by_key(k)
    v = v.view(b, n, CHUNK, hk, r, dim).permute(1, 0, 3, 4, 2, 5)
    g, beta = (x.view(b, n, CHUNK, hk, r).permute(1, 0, 3, 4, 2) for x in (g, beta))  # [n, b, hk, r, CHUNK]
    total = g.cumsum(-1)
    last = total[..., -1:]
    i = torch.arange(CHUNK, device=q.device)
    decay = torch.exp((total[..., :, None] - total[..., None, :]).masked_fill(i[:, None] < i[None, :], -1e4))
    flat = lambda x: x.reshape(-1, x.shape[-2], x.shape[-1])
    kf = flat(k)
    kk = torch.bmm(kf, kf.mT).view(n, b, hk, 1, CHUNK, CHUNK)
    qk = torch.bmm(flat(q), kf.mT).view(n, b, hk, 1, CHUNK, CHUNK)
    inverse = tri_inv(flat((kk * decay * beta[..., None]) * (i[:, None] > i[None, :])))
    w = torch.bmm(inverse, flat(k * (beta * total.exp())[..., None]))
    u = torch.bmm(inverse, flat(v * beta[..., None]))
    kd = flat(k * (last - total).exp()[..., None])
    p = last.exp()[..., None].reshape(-1, 1, 1) * torch.eye(dim, device=q.device) - torch.bmm(kd.mT, w)
    s = scan(p.view(n, -1, dim, dim), torch.bmm(kd.mT, u).view(n, -1, dim, dim)).flatten(0, 1)
    o = torch.bmm(flat(q * total.exp()[..., None]), s) + torch.bmm(flat(qk * decay), u - torch.bmm(w, s))
    return o.view(n, b, hk, r, CHUNK, dim).permute(1, 0, 4, 2, 3, 5).reshape(b, t, h, dim)


def _linear(a: int, b: int) -> nn.Linear:
    return nn.Linear(a, b, bias=False)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


def _rms(x: torch.Tensor) -> torch.Tensor:
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Norm(nn.Module):
    """RMS norm with weights around zero."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        return (_rms(x) * (1 + self.weight.float())).to(x.dtype)


class GatedNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x, z):
        return _rms(x) * self.weight * F.silu(z.float())


class DeltaNet(nn.Module):
    """Gated DeltaNet with a causal convolution over four tokens."""

    def __init__(self, c: dict) -> None:
        super().__init__()
        self.key_heads, self.heads, self.dim = (
            c["linear_num_key_heads"],
            c["linear_num_value_heads"],
            c["linear_key_head_dim"],
        )
        self.kd, self.vd, h = self.key_heads * self.dim, self.heads * self.dim, c["hidden_size"]
        mixed = 2 * self.kd + self.vd
        self.in_proj_qkv, self.in_proj_z = _linear(h, mixed), _linear(h, self.vd)
        self.in_proj_b, self.in_proj_a, self.out_proj = (
            _linear(h, self.heads),
            _linear(h, self.heads),
            _linear(self.vd, h),
        )
        self.conv1d = nn.Conv1d(mixed, mixed, 4, groups=mixed, bias=False)
        dt = torch.exp(torch.linspace(math.log(0.1), math.log(0.002), self.heads))
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))
        self.A_log = nn.Parameter(torch.log(torch.linspace(1, 12, self.heads)))
        self.norm = GatedNorm(self.dim)

    def forward(self, x, rows: Rows):
        b, t, _ = x.shape
        m = self.in_proj_qkv(x)
        w = self.conv1d.weight[:, 0].to(m.dtype)
        y = m * w[:, 3]
        for j in (1, 2, 3):
            y = y + F.pad(m, (0, 0, j, 0))[:, :t] * (rows.position >= j)[..., None].to(m.dtype) * w[:, 3 - j]
        q, k, v = F.silu(y).float().split([self.kd, self.kd, self.vd], -1)
        q = _unit(q.view(b, t, self.key_heads, self.dim)) * self.dim**-0.5
        k = _unit(k.view(b, t, self.key_heads, self.dim))
        beta = self.in_proj_b(x).float().sigmoid()
        g = -self.A_log.float().exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias)
        g = torch.where(
            (rows.position == 0)[..., None], torch.full_like(g, -60.0), g
        )  # forget the previous document
        with torch.autocast(x.device.type, enabled=False):
            o = gated_delta(q, k, v.view(b, t, self.heads, self.dim), g, beta)
        z = self.in_proj_z(x).view(b, t, self.heads, self.dim)
        return self.out_proj(self.norm(o, z).reshape(b, t, -1).to(x.dtype))


class Attention(nn.Module):
    """Gated grouped-query attention; rotary on the first quarter of each head."""

    def __init__(self, c: dict) -> None:
        super().__init__()
        self.heads, self.kv, self.dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        h = c["hidden_size"]
        self.q_proj, self.k_proj = _linear(h, 2 * self.heads * self.dim), _linear(h, self.kv * self.dim)
        self.v_proj, self.o_proj = _linear(h, self.kv * self.dim), _linear(self.heads * self.dim, h)
        self.q_norm, self.k_norm = Norm(self.dim), Norm(self.dim)

    def forward(self, x, rows: Rows):
        b, t, _ = x.shape
        q, gate = self.q_proj(x).view(b, t, self.heads, 2 * self.dim).chunk(2, -1)
        q = self.q_norm(q).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(b, t, self.kv, self.dim)).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.kv, self.dim).transpose(1, 2)
        q, k = self._rotate(q, rows).to(v.dtype), self._rotate(k, rows).to(v.dtype)
        if isinstance(rows.mask, torch.Tensor):
            wide = [y.repeat_interleave(self.heads // self.kv, 1) for y in (k, v)]
            o = F.scaled_dot_product_attention(q, *wide, attn_mask=rows.mask)
        else:
            o = flex_attention(q, k, v, block_mask=rows.mask, enable_gqa=True)
        return self.o_proj(o.transpose(1, 2).reshape(b, t, -1) * torch.sigmoid(gate.reshape(b, t, -1)))

    @staticmethod
    def _rotate(x, rows: Rows):
        n = rows.cos.shape[-1]
        a, rest = x[..., :n], x[..., n:]
        h1, h2 = a.chunk(2, -1)
        return torch.cat([(a * rows.cos + torch.cat([-h2, h1], -1) * rows.sin).to(x.dtype), rest], -1)


class MLP(nn.Module):
    def __init__(self, h: int, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = _linear(h, width), _linear(h, width), _linear(width, h)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    def __init__(self, c: dict) -> None:
        super().__init__()
        count, width, h = c["num_experts"], c["moe_intermediate_size"], c["hidden_size"]
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * width, h))
        self.down_proj = nn.Parameter(torch.empty(count, h, width))


class Router(nn.Module):
    def __init__(self, c: dict) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(c["num_experts"], c["hidden_size"]))


class MoE(nn.Module):
    def __init__(self, c: dict) -> None:
        super().__init__()
        h = c["hidden_size"]
        self.k, self.count, self.width = (
            c["num_experts_per_tok"],
            c["num_experts"],
            c["moe_intermediate_size"],
        )
        self.gate, self.experts = Router(c), Experts(c)
        self.shared_expert, self.shared_expert_gate = (
            MLP(h, c["shared_expert_intermediate_size"]),
            _linear(h, 1),
        )

    def forward(self, x):
        b, t, h = x.shape
        weights, routing = choose(F.linear(x, self.gate.weight).float(), self.k)
        x, w = x.reshape(-1, h), weights.view(-1, self.count)
        both = F.linear(x, self.experts.gate_up_proj.view(-1, h)).view(-1, self.count, 2 * self.width)
        inner = F.silu(both[..., : self.width]) * both[..., self.width :] * w[..., None].to(both.dtype)
        y = F.linear(
            inner.reshape(-1, self.count * self.width), self.experts.down_proj.permute(1, 0, 2).reshape(h, -1)
        )
        y = y + torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        return y.view(b, t, h), routing


class Layer(nn.Module):
    def __init__(self, c: dict, kind: str) -> None:
        super().__init__()
        h = c["hidden_size"]
        self.kind = kind
        self.input_layernorm, self.post_attention_layernorm, self.mlp = Norm(h), Norm(h), MoE(c)
        if kind == "full_attention":
            self.self_attn = Attention(c)
        else:
            self.linear_attn = DeltaNet(c)

    def forward(self, x, rows: Rows):
        mixer = self.self_attn if self.kind == "full_attention" else self.linear_attn
        x = x + mixer(self.input_layernorm(x), rows)
        y, routing = self.mlp(self.post_attention_layernorm(x))
        return x + y, routing


class DraftHead(nn.Module):
    """One more layer that predicts the token after next from a final hidden state and the next token's embedding."""

    def __init__(self, c: dict) -> None:
        super().__init__()
        h = c["hidden_size"]
        self.fc, self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = _linear(2 * h, h), Norm(h), Norm(h)
        self.layers = nn.ModuleList([Layer(c, "full_attention")])
        self.norm = Norm(h)

    def forward(self, hidden, embedded, rows: Rows):
        x = self.fc(torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)], -1))
        x, routing = self.layers[0](x, rows)
        return self.norm(x), routing


class Trunk(nn.Module):
    def __init__(self, c: dict) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Layer(c, kind) for kind in c["layer_types"])
        self.norm = Norm(c["hidden_size"])


class Model(nn.Module):
    """model.* and mtp.*; use_flex=False masks attention with a plain tensor (short rows, or where flex fails)."""

    def __init__(self, c: dict = CONFIG, use_flex: bool = False) -> None:
        super().__init__()
        self.use_flex = use_flex
        self.model, self.mtp = Trunk(c), DraftHead(c)
        for name, p in self.named_parameters():
            if p.dim() >= 2 and "conv1d" not in name:
                small = "embed" in name or name.endswith(("gate.weight", "expert_gate.weight"))
                out = name.endswith(("out_proj.weight", "o_proj.weight", "down_proj", "down_proj.weight"))
                nn.init.normal_(p, std=0.02 if small else 0.5 * p.shape[-1] ** -0.5 * (0.3 if out else 1))
        n = int(c["head_dim"] * c["partial_rotary_factor"])
        theta = c["rope_parameters"]["rope_theta"]
        self.register_buffer("frequency", theta ** -(torch.arange(0, n, 2).float() / n), persistent=False)

    def rows(self, start: torch.Tensor) -> Rows:
        """start: bool [B, T], True at each document's first token and at every row's first."""
        b, t = start.shape
        at = torch.arange(t, device=start.device)
        first = torch.where(start, at, 0).cummax(1).values
        angle = at[:, None].float() * self.frequency
        angle = torch.cat([angle, angle], -1)
        if self.use_flex:
            mask = self._blocks(first, b, t)
        else:
            mask = ((first[:, :, None] == first[:, None, :]) & (at[:, None] >= at[None, :]))[:, None]
        return Rows(at - first, angle.cos(), angle.sin(), mask)

    @staticmethod
    def _blocks(first: torch.Tensor, b: int, t: int) -> BlockMask:
        """Only the blocks from the start of a block's first document up to the diagonal are visited."""
        n = t // BLOCK
        i = torch.arange(n, device=first.device)
        low = first[:, ::BLOCK] // BLOCK
        count = (i - low + 1).int()
        index = (low[:, :, None] + i).clamp(max=n - 1).int()
        same = lambda batch, head, q, kv: (q >= kv) & (first[batch, q] == first[batch, kv])
        return BlockMask.from_kv_blocks(
            count[:, None], index[:, None], BLOCK_SIZE=BLOCK, mask_mod=same, seq_lengths=(t, t)
        )

    def hidden(self, ids: torch.Tensor, rows: Rows) -> tuple[torch.Tensor, list[Routing]]:
        """ids [B, T] -> normed final states [B, T, h] and each layer's routing."""
        x = self.model.embed_tokens(ids)
        if torch.is_autocast_enabled(ids.device.type):
            x = x.to(torch.bfloat16)
        routings = []
        for layer in self.model.layers:
            x, routing = layer(x, rows)
            routings.append(routing)
        return self.model.norm(x), routings

    def draft(self, hidden: torch.Tensor, following: torch.Tensor, rows: Rows):
        """hidden [B, T, h] of tokens t, following [B, T] = tokens t + 1 -> states that predict tokens t + 2, and routing."""
        return self.mtp(hidden, self.model.embed_tokens(following).to(hidden.dtype), rows)
