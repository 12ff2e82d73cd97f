"""Rules from logical dims to mesh axes, and the spec of every parameter derived from them."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from sfa_functional import IndexerParams, LayerParams, SFAConfig
from sfa_functional.params import param_shapes
from sfa_functional.precision import require

from .mesh import MeshShape, P

Weights = Literal["local", "gathered", "exchanged"]
LogicalDim = Literal["tokens", "heads", "index_heads"]

LARGE_FIELDS = ("q_b_proj", "kv_b_proj", "o_proj")
"""The matrices that grow with the number of heads; all others together are a tenth of a layer."""

PARAM_DIMS: Mapping[str, tuple[LogicalDim | None, ...]] = {
    "q_a_proj": (None, None),
    "q_a_layernorm": (None,),
    "q_b_proj": ("heads", None),
    "kv_a_proj": (None, None),
    "kv_a_layernorm": (None,),
    "kv_b_proj": ("heads", None),
    "o_proj": (None, "heads"),
    "indexer.wq_b": ("index_heads", None),
    "indexer.wk": (None, None),
    "indexer.k_norm_weight": (None,),
    "indexer.k_norm_bias": (None,),
    "indexer.weights_proj": ("index_heads", None),
}
"""Logical dims of every parameter, keyed like `sfa_functional.params.HF_NAMES`."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Which mesh axis splits tokens, attention heads and indexer heads; None splits nothing.

    ``Rules(tokens="cp")`` is context parallelism (`context_parallel_layer`), ``Rules(heads="tp")`` the tensor-parallel
    baseline (`tensor_parallel_layer`; its indexer is on every rank), ``Rules(tokens="cp", heads="tp")`` both
    (`context_parallel_layer` with ``heads_comm=``). ``index_heads`` gives specs for experiments of your own: no layer
    here sums scores over ranks.

    Raises:
        ValueError: tokens and heads on one axis: queries are [tokens, heads, width].

    Source: logical axis rules as in jax-ml/jax-llm-examples.
    """

    tokens: str | None = None
    heads: str | None = None
    index_heads: str | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            axis = getattr(self, field.name)
            named = axis is None or isinstance(axis, str)
            require(named, "Rules", f"{field.name} must be a mesh axis or None", repr(axis))
        self.spec("tokens", "heads", None)
        self.spec("tokens", "index_heads", None)

    def spec(self, *dims: LogicalDim | None) -> P:
        """Translate logical dims into a partition spec.

        Args:
            dims: "tokens", "heads", "index_heads" or None, one per dim of the tensor.

        Returns:
            The spec, ``spec("tokens", None)`` of hidden states for example.

        Raises:
            ValueError: an unknown dim, or two that go to one mesh axis.
        """
        known = {field.name for field in fields(self)}
        unknown = [dim for dim in dims if dim is not None and dim not in known]
        require(not unknown, "Rules.spec", f"dims must be None or of {sorted(known)}", unknown)
        axes = [None if dim is None else getattr(self, dim) for dim in dims]
        used = [axis for axis in axes if axis is not None]
        rule = f"a mesh axis may split one dim of {dims}"
        require(len(set(used)) == len(used), "Rules", rule, f"({', '.join(map(repr, axes))})")
        return P(*axes)


def param_specs(
    config: SFAConfig,
    rules: Rules,
    *,
    layer: int = 0,
    weights: Weights = "local",
    mesh_shape: MeshShape | None = None,
) -> LayerParams:
    """Derive the spec of every parameter of a layer.

    Args:
        config: the model's sizes.
        rules: which axis splits which logical dim.
        layer: 0-based number; a shared layer has no indexer.
        weights: "local" as the rules say; "gathered": the large matrices are flat and split over the tokens' axis, as
            `sharding.shard_flat` makes them; "exchanged": ``o_proj`` is split by heads over the tokens' axis. As
            `context_parallel_layer` takes them.
        mesh_shape: if given, sizes are checked: heads must be divisible where they are split.

    Returns:
        `LayerParams` whose fields are specs, for ``in_specs`` of `shard_map`.

    Raises:
        ValueError: an axis that the mesh does not have, heads that the axis does not divide, flat or exchanged
            weights without an axis for the tokens or beside rules that split heads, or an unknown word.
    """
    known = weights in ("local", "gathered", "exchanged")
    require(known, "param_specs", "weights must be 'local', 'gathered' or 'exchanged'", repr(weights))
    if weights != "local":
        rule = f"weights={weights!r} needs rules that split tokens and no heads"
        require(rules.tokens is not None and rules.heads is None, "param_specs", rule, rules)
    specs = {name: rules.spec(*PARAM_DIMS[name]) for name in param_shapes(config, layer=layer)}
    if weights == "gathered":
        specs |= dict.fromkeys(LARGE_FIELDS, P(rules.tokens))
    if weights == "exchanged":
        specs["o_proj"] = P(None, rules.tokens)
    if mesh_shape is not None:
        for spec in (*specs.values(), P(rules.tokens), P(rules.heads), P(rules.index_heads)):
            mesh_shape.require_axes("param_specs", spec)
        counts = [
            (rules.heads, "attention heads", config.num_attention_heads),
            (rules.index_heads, "indexer heads", config.index_n_heads),
            (rules.tokens if weights == "exchanged" else None, "attention heads", config.num_attention_heads),
        ]
        for axis, heads, count in counts:
            if axis is not None:
                ranks = mesh_shape.axis_size(axis)
                rule = f"{ranks} ranks of {axis!r} must divide the {heads}"
                require(count % ranks == 0, "param_specs", rule, count)
    return spec_tree(specs)


def spec_tree(specs: Mapping[str, P]) -> LayerParams:
    """Build `LayerParams` of specs from specs keyed by field path. The classes' annotations speak of tensors only."""
    indexer = {name.removeprefix("indexer."): spec for name, spec in specs.items() if name.startswith("indexer.")}
    layer: dict[str, Any] = {name: spec for name, spec in specs.items() if not name.startswith("indexer.")}
    layer["indexer"] = _filled(IndexerParams, indexer) if indexer else None
    return _filled(LayerParams, layer)


def _filled(cls: type[Any], values: Mapping[str, Any]) -> Any:
    made = object.__new__(cls)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made
