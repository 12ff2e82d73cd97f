"""Rules and the specs of every parameter: what a spec leaves on a rank is the layer of a model with fewer heads."""

from dataclasses import fields, replace

import pytest
import torch

import sfa_functional as sfa
import sharding
from sharding import MeshShape, P, Rules, param_specs

SHARED = replace(sfa.TINY, indexer_types=("full", "shared"))
FIELDS = [f.name for f in fields(sfa.LayerParams) if f.name not in ("indexer", "prolog")]
INDEXER_FIELDS = [f.name for f in fields(sfa.IndexerParams)]

# rows are heads, or columns are; all other parameters have no head dimension
HEAD_ROWS, HEAD_COLUMNS, INDEX_HEAD_ROWS = ("q_b_proj", "kv_b_proj"), ("o_proj",), ("wq_b", "weights_proj")


def named(params):
    """Return every field of a layer, those of the indexer with its name in front."""
    found = {name: getattr(params, name) for name in FIELDS}
    if params.indexer is not None:
        found |= {f"indexer.{name}": getattr(params.indexer, name) for name in INDEXER_FIELDS}
    return found


def expected(config, layer, heads, index_heads):
    """Write every spec down from the number of dims of its parameter."""
    specs = {}
    for name, x in named(sfa.init_params(config, layer=layer)).items():
        inner = name.removeprefix("indexer.")
        rows = heads if inner in HEAD_ROWS else index_heads if inner in INDEX_HEAD_ROWS else None
        specs[name] = P(rows, heads if inner in HEAD_COLUMNS else None) if x.ndim == 2 else P(None)
    return specs


RULES = [
    Rules(),
    Rules(tokens="cp"),
    Rules(heads="tp"),
    Rules(tokens="cp", heads="tp"),
    Rules(heads="tp", index_heads="tp"),
    Rules(tokens="cp", heads="tp", index_heads="dp"),
    Rules(index_heads="tp"),
]


@pytest.mark.parametrize("layer", [0, 1], ids=["full", "shared"])
@pytest.mark.parametrize("rules", RULES, ids=str)
def test_heads_split_their_rows_and_columns_and_nothing_else_is_split(rules, layer):
    specs = param_specs(SHARED, rules, layer=layer)
    assert isinstance(specs, sfa.LayerParams)
    assert (specs.indexer is None) == (layer == 1)
    assert named(specs) == expected(SHARED, layer, rules.heads, rules.index_heads)


def test_specs_of_the_published_model_are_those_of_the_tiny_one():
    rules = Rules(tokens="cp", heads="tp", index_heads="tp")
    assert named(param_specs(sfa.DEEPSEEK_V32, rules)) == named(param_specs(sfa.TINY, rules))


@pytest.mark.parametrize("rules", [Rules(tokens="cp"), Rules(tokens="tp", index_heads="cp")], ids=str)
def test_gathered_weights_are_flat_shards_over_the_tokens_axis(rules):
    want = expected(sfa.TINY, 0, None, rules.index_heads)
    want |= {name: P(rules.tokens) for name in ("q_b_proj", "kv_b_proj", "o_proj")}
    assert set(sharding.LARGE_FIELDS) == {"q_b_proj", "kv_b_proj", "o_proj"}
    assert named(param_specs(sfa.TINY, rules, weights="gathered")) == want


@pytest.mark.parametrize("layer", [0, 1])
def test_exchanged_weights_split_the_output_matrix_by_heads_over_the_tokens_axis(layer):
    want = expected(SHARED, layer, None, None) | {"o_proj": P(None, "cp")}
    assert named(param_specs(SHARED, Rules(tokens="cp"), layer=layer, weights="exchanged")) == want


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_local_weights_are_the_default(rules):
    assert named(param_specs(sfa.TINY, rules)) == named(param_specs(sfa.TINY, rules, layer=0, weights="local"))


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_what_a_rank_holds_is_the_layer_of_a_model_with_its_heads_alone(num_ranks):
    """Columns and rows of a rank are those of whole heads: as many as fit beside each other, in their order."""
    config, mesh = sfa.TINY, MeshShape(cp=2, tp=num_ranks)
    part = replace(config, num_attention_heads=4 // num_ranks, index_n_heads=16 // num_ranks)
    specs = named(param_specs(config, Rules(heads="tp", index_heads="tp"), mesh_shape=mesh))
    shapes = {name: tuple(x.shape) for name, x in named(sfa.init_params(part)).items()}
    for name, x in named(sfa.init_params(config)).items():
        pieces = [x[mesh.local_slices("test", specs[name], x.shape, rank)] for rank in range(num_ranks)]
        assert {tuple(piece.shape) for piece in pieces} == {shapes[name]}
        split = [dim for dim, axis in enumerate(specs[name].dims) if axis is not None]
        assert torch.equal(torch.cat(pieces, split[0]) if split else pieces[0], x)


# ---- specs of other tensors ------------------------------------------------------------------------------------------


def test_logical_dims_are_translated_one_by_one():
    rules = Rules(tokens="cp", heads="tp", index_heads="tp")
    assert rules.spec("tokens", None) == P("cp", None)
    assert rules.spec("tokens", "heads", None) == P("cp", "tp", None)
    assert rules.spec(None, "index_heads") == P(None, "tp")
    assert rules.spec() == P()
    assert Rules().spec("tokens", "heads") == P(None, None)


def test_rules_are_values_and_an_experiment_is_a_changed_field():
    rules = Rules(tokens="cp")
    assert replace(rules, heads="tp") == Rules(tokens="cp", heads="tp")
    assert len({rules, Rules(tokens="cp"), Rules()}) == 2


# ---- refusals --------------------------------------------------------------------------------------------------------

MESH = MeshShape(cp=2, tp=3)
REFUSED = [
    (
        lambda: Rules(tokens="cp", heads="cp"),
        "Rules: a mesh axis may split one dim of ('tokens', 'heads', None); got ('cp', 'cp', None)",
    ),
    (
        lambda: Rules(tokens="cp", index_heads="cp"),
        "Rules: a mesh axis may split one dim of ('tokens', 'index_heads', None); got ('cp', 'cp', None)",
    ),
    (
        lambda: Rules(heads="tp", index_heads="tp").spec("heads", "index_heads"),
        "Rules: a mesh axis may split one dim of ('heads', 'index_heads'); got ('tp', 'tp')",
    ),
    (
        lambda: Rules(tokens="cp").spec(None, "tokens", "tokens"),
        "Rules: a mesh axis may split one dim of (None, 'tokens', 'tokens'); got (None, 'cp', 'cp')",
    ),
    (
        lambda: Rules().spec("tokens", "width"),
        "Rules.spec: dims must be None or of ['heads', 'index_heads', 'tokens']; got ['width']",
    ),
    (
        lambda: param_specs(sfa.TINY, Rules(), weights="broadcast"),
        "param_specs: weights must be 'local', 'gathered' or 'exchanged'; got 'broadcast'",
    ),
    (
        lambda: param_specs(sfa.TINY, Rules(), weights="gathered"),
        "param_specs: weights='gathered' needs rules that split tokens and no heads; "
        "got Rules(tokens=None, heads=None, index_heads=None)",
    ),
    (
        lambda: param_specs(sfa.TINY, Rules(tokens="cp", heads="tp"), weights="gathered"),
        "param_specs: weights='gathered' needs rules that split tokens and no heads; "
        "got Rules(tokens='cp', heads='tp', index_heads=None)",
    ),
    (
        lambda: param_specs(sfa.TINY, Rules(heads="tp"), weights="exchanged"),
        "param_specs: weights='exchanged' needs rules that split tokens and no heads; "
        "got Rules(tokens=None, heads='tp', index_heads=None)",
    ),
    (
        lambda: param_specs(sfa.TINY, Rules(heads="dp"), mesh_shape=MESH),
        "param_specs: P('dp', None) must name axes of MeshShape(cp=2, tp=3); got 'dp'",
    ),
    (
        lambda: param_specs(sfa.TINY, Rules(index_heads="dp"), mesh_shape=MESH),
        "param_specs: P('dp', None) must name axes of MeshShape(cp=2, tp=3); got 'dp'",
    ),
    (
        lambda: param_specs(sfa.TINY, Rules(tokens="dp"), weights="gathered", mesh_shape=MESH),
        "param_specs: P('dp') must name axes of MeshShape(cp=2, tp=3); got 'dp'",
    ),
    (
        lambda: param_specs(sfa.TINY, Rules(tokens="dp"), weights="exchanged", mesh_shape=MESH),
        "param_specs: P(None, 'dp') must name axes of MeshShape(cp=2, tp=3); got 'dp'",
    ),
    (lambda: param_specs(sfa.TINY, Rules(), layer=2), "param_shapes: layer must be in 0..1; got 2"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_misfits_are_refused_in_one_line(call, message, unchecked):
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("rules", "weights", "count"),
    [
        (Rules(heads="tp"), "local", 4),
        (Rules(index_heads="tp"), "local", 16),
        (Rules(tokens="cp", heads="tp", index_heads="tp"), "local", 4),
        (Rules(tokens="tp"), "exchanged", 4),
    ],
)
def test_heads_that_an_axis_does_not_divide_are_refused(rules, weights, count):
    """The dims would divide: 3 ranks, and 4 heads of 24 rows each."""
    with pytest.raises(ValueError, match=rf"^param_specs: 3 ranks of 'tp' must divide .*heads; got {count}$"):
        param_specs(sfa.TINY, rules, weights=weights, mesh_shape=MESH)
    assert param_specs(sfa.TINY, rules, weights=weights, mesh_shape=MeshShape(cp=3, tp=2))


def test_flat_weights_need_no_heads_that_the_axis_divides():
    assert param_specs(sfa.TINY, Rules(tokens="tp"), weights="gathered", mesh_shape=MESH).q_b_proj == P("tp")


@pytest.mark.parametrize(
    ("rules", "layer"),
    [(Rules(tokens="dp"), 0), (Rules(tokens="dp", heads="cp"), 0), (Rules(index_heads="dp"), 1)],
    ids=["tokens", "tokens beside heads", "index heads of a layer without an indexer"],
)
def test_an_axis_that_the_mesh_does_not_have_is_refused_though_no_parameter_is_split_by_it(rules, layer):
    with pytest.raises(ValueError, match=r"^param_specs: .* must name axes of MeshShape\(cp=2, tp=3\); got 'dp'$"):
        param_specs(SHARED, rules, layer=layer, mesh_shape=MESH)
