"""The attention layer with its heads dealt out: the baseline that context parallelism replaces."""

from collections.abc import Mapping
from dataclasses import replace

from jaxtyping import Float, Int32
from torch import Tensor

from sfa_functional import LayerOutput, LayerParams, SFAConfig, sfa_layer
from sfa_functional.batch import Batch
from sfa_functional.implementation import Implementation
from sfa_functional.paged import Cache
from sfa_functional.params import named_fields, param_shapes
from sfa_functional.precision import require
from sfa_functional.selectors import Selector

from .collectives import Collectives


def tensor_parallel_layer(
    params: LayerParams,
    x_TD: Float[Tensor, "T D"],
    batch: Batch,
    comm: Collectives,
    *,
    config: SFAConfig,
    cache: Cache | None = None,
    selection: Int32[Tensor, "T K"] | None = None,
    select: Selector | None = None,
    rope: tuple[Float[Tensor, "T F"], Float[Tensor, "T F"]] | None = None,
    implementation: Implementation = None,
    donate: bool = False,
) -> LayerOutput:
    """Run one attention layer with this rank's heads; the indexer runs on every rank.

    ``y = Σ_ranks sfa_layer(its heads)``. Every rank runs the low-rank projections, the whole indexer and the selection
    for all tokens.

    Args:
        params: this rank's heads of ``q_b_proj``, ``kv_b_proj`` and ``o_proj``, all of the rest: the shards of
            ``param_specs(config, Rules(heads="tp"))``.
        x_TD: hidden states of all tokens, the same on every rank.
        batch: all tokens.
        comm: the mesh axis of the heads.
        config: sizes of the whole model.
        cache: as `sfa_layer` takes it, a copy on each rank.
        selection: as `sfa_layer` takes it.
        select: another way to choose keys; it is given the queries of all heads, gathered for it.
        rope: as `sfa_layer` takes it.
        implementation: as `sfa_layer` takes it.
        donate: as `sfa_layer` takes it.

    Returns:
        `LayerOutput`, the same on every rank.

    Raises:
        ValueError: N does not divide H, weights that are not one rank's heads, or as `sfa_layer`; the same on every
            rank, before anything is sent.

    Gradients: as `sfa_layer`; a replicated input's are summed over ranks.
    Cost: 1/N of the heads' work, all of the indexer's. Sends 2·T·D·(N - 1)/N values, an all_reduce; with ``select``
        also T·H/N·E·(N - 1).
    Source: Shoeybi et al., "Megatron-LM" (2019), section 3.
    """
    local = heads_of_rank(config, comm.size)
    require_params("tensor_parallel_layer", params, param_shapes(local))
    out = sfa_layer(
        params,
        x_TD,
        batch,
        config=local,
        cache=cache,
        selection=selection,
        select=None if select is None else with_all_heads(select, comm),
        rope=rope,
        implementation=implementation,
        donate=donate,
    )
    return out._replace(y_TD=comm.all_reduce(out.y_TD))


def heads_of_rank(config: SFAConfig, num_ranks: int) -> SFAConfig:
    """Return the sizes of one rank's share of the attention heads.

    Args:
        config: the whole model.
        num_ranks: N.

    Returns:
        The config with H/N heads; the softmax's scale does not depend on H.

    Raises:
        ValueError: N does not divide H.

    Source: Shoeybi et al., "Megatron-LM" (2019), section 3.
    """
    heads = config.num_attention_heads
    fits = type(num_ranks) is int and num_ranks >= 1 and heads % num_ranks == 0
    require(fits, "heads_of_rank", f"num_ranks must divide {heads} heads", repr(num_ranks))
    return replace(config, num_attention_heads=heads // num_ranks)


def with_all_heads(select: Selector, comm: Collectives) -> Selector:
    """Return a selector that sees the queries of all heads, where each rank has its own.

    Without it, one that looks at ``q_THE`` (`sfa_functional.best_keys`) would choose other keys on every rank.

    Args:
        select: the selector.
        comm: the mesh axis of the heads.

    Returns:
        A selector that gathers ``q_THE`` first.

    Gradients: none (integers).
    Cost: sends T·H/N·E·(N - 1) values.
    """

    def gathered(*, q_THE: Tensor, **compared: object) -> Tensor:
        heads_HTE = comm.all_gather(q_THE.detach().transpose(0, 1).contiguous())
        chosen: Tensor = select(q_THE=heads_HTE.transpose(0, 1), **compared)
        return chosen

    return gathered


def require_params(function: str, params: LayerParams, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse parameters of other shapes than this rank's."""
    for name, tensor in named_fields(params):
        fits = tuple(tensor.shape) == shapes[name]
        require(fits, function, f"{name} must be {list(shapes[name])} on each rank", list(tensor.shape))
        require(tensor.is_floating_point(), function, f"{name} must be floating point", tensor.dtype)
