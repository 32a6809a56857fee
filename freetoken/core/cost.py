"""What a piece of a model costs in bytes read and floating point operations. Pure arithmetic.

Used by the simulated device's clock, the planner and the simulator, so that all three agree.
"""

from __future__ import annotations

from freetoken.core.model_config import ModelConfig


def mixer_params(config: ModelConfig, layer: int) -> int:
    """Weights of one layer's mixer."""
    h, kind = config.hidden_size, config.layers[layer].mixer
    if kind == "gated_delta" and config.delta:
        d = config.delta
        value = d.num_v_heads * d.v_dim
        return h * (d.conv_dim + value + 2 * d.num_v_heads) + value * h + d.conv_dim * d.conv_kernel
    assert config.attention is not None
    a = config.attention
    query = a.num_heads * a.head_dim
    return h * (query * (2 if a.gated else 1) + 2 * a.num_kv_heads * a.head_dim) + query * h


def mixer(config: ModelConfig, layer: int, tokens: int, context: int) -> tuple[float, float]:
    """(bytes, flops) of one layer's mixer over `tokens` rows attending to `context` tokens each."""
    params = mixer_params(config, layer)
    num_bytes, flops = 2.0 * params, 2.0 * params * tokens
    if config.layers[layer].mixer == "gated_delta" and config.delta:
        d = config.delta
        num_bytes += 8.0 * d.num_v_heads * d.k_dim * d.v_dim
        flops += 6.0 * tokens * d.num_v_heads * d.k_dim * d.v_dim
    elif config.attention:
        a = config.attention
        context = min(context, config.layers[layer].window or context)
        num_bytes += 4.0 * a.num_kv_heads * a.head_dim * context
        flops += 4.0 * a.num_heads * a.head_dim * context * tokens
    return num_bytes, flops


def shared_expert(config: ModelConfig, tokens: int) -> tuple[float, float]:
    """(bytes, flops) of router and shared expert of one MoE layer."""
    if config.moe is None:
        return 0.0, 0.0
    params = config.hidden_size * (config.moe.num_experts + 3 * config.moe.shared_size)
    return 2.0 * params, 2.0 * params * tokens


def dense_mlp(config: ModelConfig, tokens: int) -> tuple[float, float]:
    params = 3 * config.hidden_size * config.dense_size
    return 2.0 * params, 2.0 * params * tokens


def head(config: ModelConfig, rows: int) -> tuple[float, float]:
    params = config.hidden_size * config.vocab_size
    return 2.0 * params, 2.0 * params * rows


def expert_flops(config: ModelConfig, rows: int) -> float:
    """Flops of one routed expert over `rows` token rows."""
    assert config.moe is not None
    return 6.0 * config.hidden_size * config.moe.expert_size * rows
