"""What a token costs, in floating-point operations, by the sizes of a model."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sfa_functional import SFAConfig
from sfa_functional.precision import require


class LayerFlops(NamedTuple):
    """Floating-point operations of one attention layer; a multiply-add counts as two."""

    projections: int  # per token
    per_visible_key: int  # the indexer's score of one key
    per_selected_key: int  # attention to one key


def layer_flops(config: SFAConfig) -> LayerFlops:
    """Count a layer's operations: matrix products only; norms, rope, softmax and the selection are left out.

    ``projections = 2 (D Q + Q H (P + R) + H P L + D E + Q J I + D I + D J + H V L + H V D)``,
    ``per_visible_key = 2 J I``, ``per_selected_key = 2 H (E + L)``.

    Args:
        config: the model's sizes.

    Returns:
        `LayerFlops` of a layer with an indexer of its own. At V3.2's sizes 402 128 896, 16 384 and 278 528.

    Source: the products of `sfa_functional.latent` and `sfa_functional.indexer`, one by one.
    """
    d, h, q = config.hidden_size, config.num_attention_heads, config.q_lora_rank
    p, v, e = config.qk_nope_head_dim, config.v_head_dim, config.key_width
    latent, j, i = config.kv_lora_rank, config.index_n_heads, config.index_head_dim
    queries = d * q + q * h * config.qk_head_dim + h * p * latent
    index = q * j * i + d * i + d * j
    return LayerFlops(2 * (queries + d * e + index + h * v * (latent + d)), 2 * j * i, 2 * h * (e + latent))


def token_flops(config: SFAConfig, visible_T: Int[Tensor, " T"]) -> Float[Tensor, " T"]:
    """Return what each token costs in one layer, from the number of keys that it sees.

    ``projections + per_visible_key · visible + per_selected_key · min(visible, k)``.

    Args:
        config: the model's sizes and k.
        visible_T: keys that each token sees, >= 0.

    Returns:
        float64 operations per token.

    Cost: vector operations on T numbers.
    Source: `layer_flops`.
    """
    flops = layer_flops(config)
    selected_T = visible_T.clamp(max=config.index_topk)
    visible_T, selected_T = visible_T.to(torch.float64), selected_T.to(torch.float64)
    return flops.projections + flops.per_visible_key * visible_T + flops.per_selected_key * selected_T


def visible_keys(lengths: Sequence[int], seq_lens: Sequence[int]) -> Int[Tensor, " T"]:
    """Return how many keys each token of a packed batch sees.

    Query i of request b sees ``seq_len[b] - length[b] + i + 1`` keys, those up to its own position; none where
    ``seq_len[b]`` is 0 (padding).

    Args:
        lengths: new tokens of each request.
        seq_lens: context + new tokens of each, as `sfa_functional.Batch.from_lengths` takes them.

    Returns:
        int64, one number per token.

    Raises:
        ValueError: lists of different lengths, or ``0 < seq_len < length``.
    """
    require(len(lengths) == len(seq_lens), "visible_keys", "lengths and seq_lens must have one length", len(seq_lens))
    for b, (n, s) in enumerate(zip(lengths, seq_lens, strict=True)):
        require(s == 0 or s >= n, "visible_keys", f"seq_len must be 0 or >= length {n} of request {b}", s)
    pairs = zip(lengths, seq_lens, strict=True)
    seen = [torch.arange(s - n, s) + 1 if s > 0 else torch.zeros(n, dtype=torch.int64) for n, s in pairs]
    return torch.cat([torch.zeros(0, dtype=torch.int64), *seen])
