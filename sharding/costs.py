"""What tokens cost, in floating-point operations, by the sizes of a model; `estimate` adds them up over ranks."""

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


class Pairs(NamedTuple):
    """How often one rank does what a layer consists of."""

    rows: int  # tokens projected
    scored: int  # pairs of a query and a key that are scored
    compared: int  # scores that a selection looks at
    selected: int  # pairs of a query and a key that are attended to


def needed_pairs(visible_t: Int[Tensor, " t"], *, k: int) -> Pairs:
    """Count what some tokens need: every visible key scored, at most k of them attended to.

    Keys of a query that sees at most k are all chosen: they are scored, as in `token_flops`, but not compared.

    Args:
        visible_t: keys that each token sees.
        k: keys that a query selects.

    Returns:
        `Pairs`; with them, the parts of `flop_parts` but for the selection add up to the sum of `token_flops`.
    """
    scored, compared = int(visible_t.sum()), int(visible_t[visible_t > k].sum())
    return Pairs(visible_t.shape[0], scored, compared, int(visible_t.clamp(max=k).sum()))


def computed_pairs(
    visible_t: Int[Tensor, " t"], request_t: Int[Tensor, " t"], *, rows: int, key_rows: int, k: int, tile: int | None
) -> Pairs:
    """Count what kernels run for some tokens: tiles are rounded up, padding rows and unused entries are worked on.

    A tile holds consecutive tokens of one request and scores, for each of them, all keys that any of them sees; it
    scores nothing where that is at most k. Attention reads k entries for each row.

    Args:
        visible_t: keys that each token sees, in the order of the rank's rows, without padding.
        request_t: request of each token.
        rows: of the rank, padding included.
        key_rows: rows of keys in all.
        k: keys that a query selects.
        tile: queries of a tile; None: every row meets every key row, as in `sfa_functional.reference`.

    Returns:
        `Pairs`.
    """
    if tile is None:
        return Pairs(rows, rows * key_rows, rows * key_rows, rows * k)
    begins_t = torch.ones_like(request_t, dtype=torch.bool)
    begins_t[1:] = request_t[1:] != request_t[:-1]
    index_t = torch.arange(request_t.shape[0])
    first_t = torch.where(begins_t, index_t, 0).cummax(0).values
    tile_t = ((index_t - first_t) % tile == 0).cumsum(0) - 1
    count_M = torch.bincount(tile_t)
    span_M = torch.zeros_like(count_M).scatter_reduce(0, tile_t, visible_t, "amax")
    scored = int((count_M * span_M)[span_M > k].sum())
    return Pairs(rows, scored, scored, rows * k)


class FlopParts(NamedTuple):
    """Floating-point operations of one rank in one layer, by part."""

    projections: int  # hidden states to queries and keys, of attention and indexer
    scoring: int  # index queries with index keys
    selection: int  # one comparison per score
    attention: int
    output: int  # attention's results to hidden states

    @property
    def total(self) -> int:
        """All parts together."""
        return sum(self)


def flop_parts(config: SFAConfig, pairs: Pairs, *, indexer: bool = True, weighted_sum: bool = False) -> FlopParts:
    """Split what a layer costs into its parts.

    ``projections = rows · 2 (D Q + Q H (P + R) + H P L + D E + Q J I + D I + D J)``, without the last three where
    there is no indexer; ``scoring = scored · 2 J I``; ``selection = compared``;
    ``attention = selected · 2 H (E + L)``; ``output = rows · 2 (H V L + H V D)``.

    Args:
        config: the sizes; those of a rank's share of the heads where heads are dealt out.
        pairs: how often.
        indexer: whether the layer has one of its own; without, nothing is scored or compared.
        weighted_sum: count the sum of scores over indexer heads too, ``2 J (I + 1)``: a product that kernels run and
            that the model leaves out, 1 in 128 of scoring at V3.2's sizes.

    Returns:
        `FlopParts`. Projections and output of one row together are `LayerFlops.projections`.

    Source: `layer_flops`.
    """
    flops = layer_flops(config)
    output = 2 * config.num_attention_heads * config.v_head_dim * (config.kv_lora_rank + config.hidden_size)
    index = config.q_lora_rank * config.index_n_heads * config.index_head_dim
    index += config.hidden_size * (config.index_head_dim + config.index_n_heads)
    score = flops.per_visible_key + (2 * config.index_n_heads if weighted_sum else 0)
    return FlopParts(
        projections=pairs.rows * (flops.projections - output - (0 if indexer else 2 * index)),
        scoring=pairs.scored * score if indexer else 0,
        selection=pairs.compared if indexer else 0,
        attention=pairs.selected * flops.per_selected_key,
        output=pairs.rows * output,
    )
