"""Parameters of one attention layer: frozen dataclasses of tensors, registered as pytrees."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from .config import SFAConfig


@dataclass(frozen=True, kw_only=True, eq=False)
class IndexerParams:
    """Weights of a lightning indexer; projections are [out, in] as in checkpoints."""

    wq_b: Float[Tensor, "JI Q"]
    wk: Float[Tensor, "I D"]
    k_norm_weight: Float[Tensor, " I"]
    k_norm_bias: Float[Tensor, " I"]
    weights_proj: Float[Tensor, "J D"]


@dataclass(frozen=True, kw_only=True, eq=False)
class PrologWeights:
    """What the fused device op of `latent_projections` reads, in its layouts; `npu.prepare_params` makes it."""

    weight_dq: Float[Tensor, "D Q"]
    weight_uq_qr: Float[Tensor, "Q HX"]
    weight_uk: Float[Tensor, "H P L"]
    weight_dkv_kr: Float[Tensor, "D E"]
    gamma_cq: Float[Tensor, " Q"]
    gamma_ckv: Float[Tensor, " L"]


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerParams:
    """Weights of one attention layer; projections are [out, in] as in checkpoints.

    A layer that shares the selection of an earlier one has ``indexer=None``. The three large matrices may be flat
    shards instead, for those who put them together again before use (`sharding.context_parallel_layer`). ``prolog``
    repeats what a fused device op reads, in that op's layouts; checkpoints and plain code know nothing of it.
    """

    q_a_proj: Float[Tensor, "Q D"]
    q_a_layernorm: Float[Tensor, " Q"]
    q_b_proj: Float[Tensor, "HX Q"] | Float[Tensor, " _"]  # X = P + R
    kv_a_proj: Float[Tensor, "E D"]
    kv_a_layernorm: Float[Tensor, " L"]
    kv_b_proj: Float[Tensor, "HY L"] | Float[Tensor, " _"]  # Y = P + V
    o_proj: Float[Tensor, "D HV"] | Float[Tensor, " _"]
    indexer: IndexerParams | None = None
    prolog: PrologWeights | None = None


torch.export.register_dataclass(PrologWeights, serialized_type_name="sfa_functional.PrologWeights")
torch.export.register_dataclass(IndexerParams, serialized_type_name="sfa_functional.IndexerParams")
torch.export.register_dataclass(LayerParams, serialized_type_name="sfa_functional.LayerParams")

HF_NAMES: Mapping[str, str] = {
    "q_a_proj": "q_a_proj.weight",
    "q_a_layernorm": "q_a_layernorm.weight",
    "q_b_proj": "q_b_proj.weight",
    "kv_a_proj": "kv_a_proj_with_mqa.weight",
    "kv_a_layernorm": "kv_a_layernorm.weight",
    "kv_b_proj": "kv_b_proj.weight",
    "o_proj": "o_proj.weight",
    "indexer.wq_b": "indexer.wq_b.weight",
    "indexer.wk": "indexer.wk.weight",
    "indexer.k_norm_weight": "indexer.k_norm.weight",
    "indexer.k_norm_bias": "indexer.k_norm.bias",
    "indexer.weights_proj": "indexer.weights_proj.weight",
}
"""Field -> key in Hugging Face checkpoints, after the prefix ``model.layers.{i}.self_attn.``."""

DEEPSEEK_NAMES: Mapping[str, str] = {
    **HF_NAMES,
    "q_a_proj": "wq_a.weight",
    "q_a_layernorm": "q_norm.weight",
    "q_b_proj": "wq_b.weight",
    "kv_a_proj": "wkv_a.weight",
    "kv_a_layernorm": "kv_norm.weight",
    "kv_b_proj": "wkv_b.weight",
    "o_proj": "wo.weight",
}
"""Field -> key in the checkpoints of DeepSeek's own inference code, after the prefix ``layers.{i}.attn.``."""

NORM_FIELDS = frozenset({"q_a_layernorm", "kv_a_layernorm", "indexer.k_norm_weight", "indexer.k_norm_bias"})
"""Fields kept in float32 whatever the model's dtype."""


def param_shapes(config: SFAConfig, *, layer: int = 0) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter of a layer, keyed like `HF_NAMES`.

    Args:
        config: the model's sizes.
        layer: 0-based number; a shared layer has no ``indexer.*`` entries.

    Returns:
        Field -> shape.

    Raises:
        ValueError: the layer does not exist.

    Source: config.json and the weight listings of deepseek-ai/DeepSeek-V3.2 and zai-org/GLM-5.
    """
    if not 0 <= layer < config.num_layers:
        raise ValueError(f"param_shapes: layer must be in 0..{config.num_layers - 1}; got {layer}")
    d, q, heads = config.hidden_size, config.q_lora_rank, config.num_attention_heads
    j, i = config.index_n_heads, config.index_head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "q_a_proj": (q, d),
        "q_a_layernorm": (q,),
        "q_b_proj": (heads * config.qk_head_dim, q),
        "kv_a_proj": (config.key_width, d),
        "kv_a_layernorm": (config.kv_lora_rank,),
        "kv_b_proj": (heads * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank),
        "o_proj": (d, heads * config.v_head_dim),
    }
    if config.indexer_types[layer] == "full":
        shapes |= {
            "indexer.wq_b": (j * i, q),
            "indexer.wk": (i, d),
            "indexer.k_norm_weight": (i,),
            "indexer.k_norm_bias": (i,),
            "indexer.weights_proj": (j, d),
        }
    return shapes


def params_from_fields(tensors: Mapping[str, Tensor]) -> LayerParams:
    """Build `LayerParams` from tensors keyed by field path (``"q_a_proj"``, ``"indexer.wk"``, ...)."""
    indexer = {name.removeprefix("indexer."): x for name, x in tensors.items() if name.startswith("indexer.")}
    layer: dict[str, Any] = {name: x for name, x in tensors.items() if not name.startswith("indexer.")}
    return LayerParams(**layer, indexer=IndexerParams(**indexer) if indexer else None)


def named_fields(params: LayerParams) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a layer with its field path, in the order of `HF_NAMES`."""
    for field in fields(LayerParams):
        value = getattr(params, field.name)
        if isinstance(value, IndexerParams):
            for inner in fields(IndexerParams):
                yield f"indexer.{inner.name}", getattr(value, inner.name)
        elif value is not None and field.name != "prolog":  # made of the others
            yield field.name, value


def init_params(
    config: SFAConfig,
    *,
    layer: int = 0,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> LayerParams:
    """Draw random parameters for one layer.

    Projections are normal with deviation ``in^-0.5``, so that unit inputs give unit outputs; gains are 1, the bias
    of the index keys' norm is 0.

    Args:
        config: the model's sizes.
        layer: 0-based number; decides whether there is an indexer.
        generator: source of the numbers, advanced by the call. None is a fresh one seeded with 0: the same numbers
            every time, and the global random state is left alone. Numbers are drawn on its device in float32.
        dtype: of the projections. Norm weights are float32, or float64 for a float64 layer.
        device: where to put the result.

    Returns:
        `LayerParams`, without ``indexer`` for a shared layer.

    Raises:
        ValueError: the layer does not exist.
    """
    source = torch.Generator().manual_seed(0) if generator is None else generator
    norm_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    tensors = {}
    for name, shape in param_shapes(config, layer=layer).items():
        if name in NORM_FIELDS:
            fill = torch.zeros if name.endswith("bias") else torch.ones
            tensors[name] = fill(shape, dtype=norm_dtype, device=device)
        else:
            drawn = torch.randn(shape, generator=source, dtype=torch.float32, device=source.device) * shape[1] ** -0.5
            tensors[name] = drawn.to(dtype=dtype, device=device)
    return params_from_fields(tensors)


def params_from_state(
    state: Mapping[str, Tensor],
    *,
    config: SFAConfig,
    layer: int = 0,
    names: Mapping[str, str] = HF_NAMES,
    prefix: str = "",
) -> LayerParams:
    """Take one layer's parameters out of a state dict, without a copy.

    Args:
        state: key -> tensor, for example ``module.state_dict()``.
        config: the model's sizes.
        layer: 0-based number; the config's schedule decides whether there is an indexer, not the keys present.
        names: field -> key; `HF_NAMES`, `DEEPSEEK_NAMES` or your own table.
        prefix: put before every key, for example ``"model.layers.3.self_attn."``.

    Returns:
        `LayerParams` that share memory with ``state``.

    Raises:
        ValueError: a missing key, a wrong shape, or a dtype that is not floating point, each by name.

    Gradients: the tensors are those of ``state``.
    Source: the key names of deepseek-ai/DeepSeek-V3.2 and of its inference/convert.py.
    """
    tensors = {}
    for field, shape in param_shapes(config, layer=layer).items():
        key = prefix + names[field]
        if key not in state:
            raise ValueError(f"params_from_state: key {key} is missing")
        tensor = state[key]
        if tuple(tensor.shape) != shape:
            raise ValueError(f"params_from_state: {key} must have shape {list(shape)}; got {list(tensor.shape)}")
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise ValueError(f"params_from_state: {key} must be float64, 32, 16 or bfloat16; got {tensor.dtype}")
        tensors[field] = tensor
    return params_from_fields(tensors)
