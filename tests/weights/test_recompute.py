"""Training through a ring gives the gradients of plain autograd, on the owners, and keeps no weights; or it raises."""

import functools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import sfa_functional as sfa
import weights
from sfa_functional.params import named_fields, params_from_fields
from sharding import MeshShape, P, context_parallel_layer, shard_map, simulated_mesh, split_tokens
from sharding.collectives import DifferentiableCollectives
from sharding.simulate import SimulatedTransport
from weights import (
    checkpoint_layer,
    close_ring,
    from_checkpoint,
    from_owners,
    from_shards,
    open_ring,
    owned_layers,
    resident,
    shard_layer,
    start_next,
    stream_layers,
    take,
)

pytestmark = pytest.mark.usefixtures("unchecked")

CONFIG = replace(sfa.TINY, num_attention_heads=8, indexer_types=("full", "shared", "full", "full"))
LENGTHS = (9, 4)
BATCH = sfa.Batch.from_lengths(LENGTHS)
LAYERS = range(4)
LARGE = ("q_b_proj", "o_proj")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}

Fields = dict[str, torch.Tensor]


def drawn(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def learning(dtype: torch.dtype, wanted: Callable[[int, str], bool] = lambda layer, name: True) -> list[Fields]:
    """Draw all layers by field; those that are ``wanted(layer, name)`` require grad."""
    layers = []
    for layer in LAYERS:
        params = sfa.init_params(CONFIG, layer=layer, generator=torch.Generator().manual_seed(layer), dtype=dtype)
        tensors = {name: x.clone() for name, x in named_fields(params)}
        layers.append({name: x.requires_grad_(wanted(layer, name)) for name, x in tensors.items()})
    return layers


GIVEN = learning(torch.float64, lambda layer, name: False)
"""The layers when nothing is to learn."""


def hidden(dtype: torch.dtype, *, learns: bool = True) -> torch.Tensor:
    return drawn((sum(LENGTHS), CONFIG.hidden_size), dtype, 11).requires_grad_(learns)


def loss(y_TD: torch.Tensor) -> torch.Tensor:
    """Weigh every number with one of its own, so that no two gradients can be exchanged."""
    return (y_TD * drawn(y_TD.shape, y_TD.dtype, 12)).sum() + y_TD.square().sum()


def block(params: sfa.LayerParams, start: Any, x_TD: torch.Tensor, selection: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Run one layer of a stack on one rank; a layer without an indexer takes the selection of the one before."""
    start()
    given = None if params.indexer is not None else selection
    out = sfa.sfa_layer(params, x_TD, BATCH, config=CONFIG, selection=given)
    return x_TD + out.y_TD, out.selection_TK


def through(ring: Any, x_TD: torch.Tensor, fn: Any = block) -> torch.Tensor:
    """Run a stack of layers through a ring."""
    selection: Any = None
    for layer in LAYERS:
        (x_TD, selection), ring = checkpoint_layer(fn, ring, layer, x_TD, selection)
    close_ring(ring)
    return x_TD


class Plain:
    """The stack by plain autograd: what it returns, and the gradient of every tensor that requires one."""

    def __init__(self, layers: list[Fields], x_TD: torch.Tensor) -> None:
        self.x_TD, self.layers = x_TD, layers
        y_TD, selection = x_TD, None
        for tensors in layers:
            y_TD, selection = block(params_from_fields(tensors), lambda: None, y_TD, selection)
        loss(y_TD).backward()
        self.y_TD = y_TD.detach()


@functools.cache
def plain(dtype: torch.dtype) -> Plain:
    return Plain(learning(dtype), hidden(dtype))


def apart(got: torch.Tensor | None, want: torch.Tensor | None) -> float:
    """Return the largest difference, as a part of the largest value; None is zeros."""
    if got is None or want is None:
        left = want if got is None else got
        return 0.0 if left is None or not left.any() else float("inf")
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    return float(((got - want).abs().amax() / want.abs().amax().clamp(min=1e-30)).nan_to_num(nan=torch.inf))


def assert_same_gradients(layers: list[Fields], x_TD: torch.Tensor, want: Plain) -> None:
    tolerance = TOLERANCE[x_TD.dtype]
    assert apart(x_TD.grad, want.x_TD.grad) <= tolerance
    trained = 0
    for layer, name in ((i, name) for i, tensors in enumerate(layers) for name in tensors):
        got, right = layers[layer][name].grad, want.layers[layer][name].grad
        assert apart(got, right) <= tolerance, (layer, name)
        trained += right is not None and bool(right.any())
    assert trained or not any(x.requires_grad for tensors in want.layers for x in tensors.values())


def by_owners(comm: Any, layers: list[Fields], fields: Any = None) -> Any:
    return from_owners(comm, owned_layers(layers, comm.rank, comm.size, fields=fields), fields=fields)


def stack_on_ranks(
    size: int,
    *,
    layout: str = "contiguous",
    prefetch: int = 1,
    make: Callable[[Any, list[Fields]], Any] = by_owners,
    record: list[Any] | None = None,
) -> Callable[[list[Fields], torch.Tensor], torch.Tensor]:
    """Return the stack as a function on simulated ranks, its tokens dealt out, its weights brought by a ring.

    Weights are replicated arguments: the gradient of what one rank alone keeps is that rank's.
    """
    split = split_tokens(LENGTHS, size, layout=layout)

    def body(comm: Any, layers: list[Fields], x_tD: torch.Tensor) -> torch.Tensor:
        def layer(params: Any, start: Any, x_tD: torch.Tensor, selection: Any) -> Any:
            given = None if params.indexer is not None else selection
            out = context_parallel_layer(
                params, x_tD, BATCH, comm["cp"], config=CONFIG, split=split, selection=given, while_gathering=start
            )
            return x_tD + out.y_TD, out.selection_TK

        return through(open_ring(make(comm["cp"], layers), prefetch=prefetch, passes=1), x_tD, layer)

    mesh = simulated_mesh(MeshShape(cp=size), record=record)
    sharded = shard_map(body, mesh, in_specs=(P(), P("cp")), out_specs=P("cp"))
    return lambda layers, x_TD: split.gather(sharded(layers, split.scatter(x_TD)))


class TestOneRank:
    """Resident layers and layers of a file."""

    @pytest.mark.parametrize("dtype", TOLERANCE)
    def test_resident_layers_have_the_gradients_of_plain_autograd(self, dtype):
        layers, x_TD, want = learning(dtype), hidden(dtype), plain(dtype)
        y_TD = through(open_ring(resident([params_from_fields(tensors) for tensors in layers])), x_TD)
        assert torch.equal(y_TD, want.y_TD)
        loss(y_TD).backward()
        assert_same_gradients(layers, x_TD, want)

    @pytest.mark.parametrize("prefetch", [0, 1, 3, 9])
    def test_a_layer_of_a_file_passes_the_input_s_gradient_on(self, tmp_path, prefetch):
        want = plain(torch.float64)
        params = [params_from_fields({k: x.detach() for k, x in tensors.items()}) for tensors in want.layers]
        weights.save_checkpoint(tmp_path / "model", params, CONFIG)
        source = from_checkpoint(tmp_path / "model", config=CONFIG, dtype=torch.float64)
        x_TD = hidden(torch.float64)
        loss(through(open_ring(source, prefetch=prefetch, debug=True), x_TD)).backward()
        assert apart(x_TD.grad, want.x_TD.grad) <= 1e-12

    def test_a_backward_pass_after_the_ring_was_closed_leaves_no_thread(self, tmp_path):
        layers = [sfa.init_params(CONFIG, layer=layer) for layer in LAYERS]
        weights.save_checkpoint(tmp_path / "model", layers, CONFIG)
        before = threading.enumerate()
        x_TD = hidden(torch.float32)
        source = from_checkpoint(tmp_path / "model", config=CONFIG)
        y_TD = through(open_ring(source), x_TD)
        assert threading.enumerate() == before
        loss(y_TD).backward()
        assert threading.enumerate() == before

    def test_a_file_that_is_gone_fails_the_backward_pass(self, tmp_path):
        weights.save_checkpoint(tmp_path / "model", [sfa.init_params(CONFIG, layer=layer) for layer in LAYERS], CONFIG)
        x_TD = hidden(torch.float32)
        source = from_checkpoint(tmp_path / "model", config=CONFIG)
        y_TD = through(open_ring(source), x_TD)
        (tmp_path / "model" / "model.safetensors").unlink()
        with pytest.raises(ValueError, match=r"^load_layer: .*model\.safetensors"):
            loss(y_TD).backward()
        source.close()

    def test_frozen_tensors_get_no_gradient_and_change_no_other(self):
        def wanted(layer: int, name: str) -> bool:
            return layer != 2 and name not in ("o_proj", "q_a_layernorm")

        layers, x_TD = learning(torch.float64, wanted), hidden(torch.float64)
        loss(through(open_ring(resident([params_from_fields(x) for x in layers])), x_TD)).backward()
        assert_same_gradients(layers, x_TD, Plain(learning(torch.float64, wanted), hidden(torch.float64)))
        assert all(layers[layer]["o_proj"].grad is None for layer in LAYERS)
        assert all(x.grad is None for x in layers[2].values())

    def test_an_input_without_grad_leaves_the_weights_their_gradients(self):
        layers, x_TD = learning(torch.float64), hidden(torch.float64, learns=False)
        loss(through(open_ring(resident([params_from_fields(x) for x in layers])), x_TD)).backward()
        assert x_TD.grad is None
        assert_same_gradients(layers, x_TD, Plain(learning(torch.float64), hidden(torch.float64, learns=False)))

    def test_nothing_that_learns_makes_no_graph(self):
        frozen = learning(torch.float32, lambda layer, name: False)
        source = resident([params_from_fields(x) for x in frozen])
        y_TD = through(open_ring(source), hidden(torch.float32, learns=False))
        assert not y_TD.requires_grad
        with torch.no_grad():
            z_TD = through(open_ring(resident([params_from_fields(x) for x in learning(torch.float32)])), y_TD)
        assert not z_TD.requires_grad

    def test_a_gradient_of_the_input_alone(self):
        layers, x_TD = learning(torch.float64), hidden(torch.float64)
        y_TD = through(open_ring(resident([params_from_fields(x) for x in layers])), x_TD)
        (got,) = torch.autograd.grad(loss(y_TD), [x_TD])
        assert apart(got, plain(torch.float64).x_TD.grad) <= 1e-12
        assert all(x.grad is None for tensors in layers for x in tensors.values())

    def test_a_graph_kept_can_be_walked_twice(self):
        layers, x_TD = learning(torch.float64), hidden(torch.float64)
        total = loss(through(open_ring(resident([params_from_fields(x) for x in layers])), x_TD))
        total.backward(retain_graph=True)
        total.backward()
        assert apart(x_TD.grad / 2, plain(torch.float64).x_TD.grad) <= 1e-12
        with pytest.raises(RuntimeError, match="second time"):
            total.backward()

    def test_autocast_holds_in_the_backward_pass_as_in_the_forward(self):
        """The second run of a layer must be the first one's, not one in float32."""

        def gated(params: Any, start: Any, x_TD: torch.Tensor) -> torch.Tensor:
            return x_TD + torch.tanh(x_TD @ params.q_a_proj.T) @ params.q_a_proj

        found = []
        for run in ("ring", "plain"):
            layers, x_TD = learning(torch.float32), hidden(torch.float32)
            ring, y_TD = open_ring(resident([params_from_fields(x) for x in layers])), x_TD
            with torch.autocast("cpu", dtype=torch.bfloat16):
                for layer in LAYERS:
                    if run == "ring":
                        y_TD, ring = checkpoint_layer(gated, ring, layer, y_TD)
                    else:
                        y_TD = gated(params_from_fields(layers[layer]), None, y_TD)
            loss(y_TD.float()).backward()
            found.append((y_TD.detach(), x_TD.grad, *(tensors["q_a_proj"].grad for tensors in layers)))
        for got, want in zip(*found, strict=True):
            assert apart(got, want) <= 1e-6


class TestResults:
    """Whatever a layer returns comes back, and gradients find their way through it."""

    @staticmethod
    def run(fn: Any, *inputs: Any) -> tuple[Any, Fields]:
        """Run a function of the first layer through a ring; also return the layer's tensors."""
        (tensors, *_) = learning(torch.float64)
        ring = open_ring(resident([params_from_fields(tensors)]))
        results, ring = checkpoint_layer(fn, ring, 0, *inputs)
        close_ring(ring)
        return results, tensors

    def test_integers_and_other_things_come_back_without_gradient(self):
        x_TD = hidden(torch.float64)
        (y, out), tensors = self.run(
            lambda params, start, x: (
                x * params.o_proj.sum(),
                {"mask": x > 0, "count": (x > 0).sum(0), "text": "y", "none": None, "parts": [x.sum(), 3]},
            ),
            x_TD,
        )
        assert (out["text"], out["none"], out["parts"][1]) == ("y", None, 3)
        assert torch.equal(out["mask"], x_TD > 0)
        assert torch.equal(out["count"], (x_TD > 0).sum(0))
        assert (y.requires_grad, out["mask"].requires_grad, out["count"].requires_grad) == (True, False, False)
        (y.sum() + 5 * out["parts"][0]).backward()
        assert apart(x_TD.grad, torch.full_like(x_TD, tensors["o_proj"].sum().item() + 5)) <= 1e-12
        assert apart(tensors["o_proj"].grad, torch.full_like(tensors["o_proj"].detach(), x_TD.sum().item())) <= 1e-12

    def test_a_loss_on_some_of_the_results_is_enough(self):
        x_TD = hidden(torch.float64)
        (_, second), tensors = self.run(lambda params, start, x: (x * params.o_proj.sum(), 3 * x), x_TD)
        second.sum().backward()
        assert x_TD.grad.eq(3).all()
        assert tensors["o_proj"].grad is None or not tensors["o_proj"].grad.any()

    def test_an_input_handed_back_keeps_its_gradient(self):
        x_TD = hidden(torch.float64)
        (same, y), tensors = self.run(lambda params, start, x: (x, x * params.o_proj.sum()), x_TD)
        (2 * same.sum() + y.sum()).backward()
        assert apart(x_TD.grad, torch.full_like(x_TD, 2 + tensors["o_proj"].sum().item())) <= 1e-12

    def test_a_result_that_depends_on_nothing_that_learns(self):
        x_TD = hidden(torch.float64)
        (y, constant), _ = self.run(lambda params, start, x: (2 * x, torch.ones(3)), x_TD)
        (y.sum() + constant.sum()).backward()
        assert x_TD.grad.eq(2).all()

    def test_inputs_may_be_trees_with_tensors_that_learn_integers_and_constants(self):
        x_TD, other = hidden(torch.float64), drawn((3,), torch.float64, 5).requires_grad_()
        tree = {"scale": [other, 2.0], "rows": torch.tensor([2, 0]), "none": None, "text": "t"}

        def pick(params: Any, start: Any, x: torch.Tensor, tree: Mapping[str, Any]) -> torch.Tensor:
            assert (tree["text"], tree["none"]) == ("t", None)
            scale, factor = tree["scale"]
            return x[tree["rows"]].sum() * scale.sum() * factor

        y, _ = self.run(pick, x_TD, tree)
        y.backward()
        rows = x_TD.detach()[[2, 0]].sum()
        assert apart(other.grad, torch.full_like(other, float(2 * rows))) <= 1e-12
        want = torch.zeros_like(x_TD)
        want[[0, 2]] = 2 * other.sum().item()
        assert apart(x_TD.grad, want) <= 1e-12

    def test_a_function_that_returns_something_else_the_second_time_is_refused(self):
        runs = []

        def fickle(params: Any, start: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            runs.append(1)
            return tuple(x * i for i in range(1, 2 + len(runs)))

        results, _ = self.run(fickle, hidden(torch.float64))
        with pytest.raises(ValueError, match=r"^checkpoint_layer: fn must do the same both times; got 3$"):
            results[0].sum().backward()

    @pytest.mark.parametrize(
        ("second", "got"),
        [
            (lambda y: y[:1], r"float64 \[1, 64\]"),
            (lambda y: y.float(), r"float32 \[13, 64\]"),
            (lambda y: y.T, r"float64 \[64, 13\]"),
        ],
    )
    def test_results_of_another_shape_or_dtype_the_second_time_are_refused(self, second, got):
        """A gradient of one row would be spread over the others without a word."""
        runs = []

        def fickle(params: Any, start: Any, x: torch.Tensor) -> torch.Tensor:
            runs.append(1)
            return 2 * x if len(runs) == 1 else second(2 * x)

        x_TD = hidden(torch.float64)
        y, _ = self.run(fickle, x_TD)
        rule = rf"fn must do the same both times; got torch\.{got} where it was torch\.float64 \[13, 64\]"
        with pytest.raises(ValueError, match=f"^checkpoint_layer: {rule}$"):
            y.sum().backward()
        assert x_TD.grad is None

    def test_complex_results_keep_their_gradient(self):
        x_TD = hidden(torch.float64)
        (y, z), tensors = self.run(
            lambda params, start, x: (x * params.o_proj.sum(), torch.complex(3 * x, 5 * params.o_proj.sum() * x)), x_TD
        )
        assert z.requires_grad
        (y.sum() + z.real.sum() + z.imag.sum()).backward()
        factor = tensors["o_proj"].sum().item()
        assert apart(x_TD.grad, torch.full_like(x_TD, 3 + 6 * factor)) <= 1e-12
        want = torch.full_like(tensors["o_proj"].detach(), 6 * x_TD.sum().item())
        assert apart(tensors["o_proj"].grad, want) <= 1e-12

    def test_weights_among_the_results_are_copies_of_what_a_slot_held(self, tmp_path):
        params = [params_from_fields({name: x.float() for name, x in tensors.items()}) for tensors in GIVEN]
        weights.save_checkpoint(tmp_path / "model", params, CONFIG)
        ring, kept = open_ring(from_checkpoint(tmp_path / "model", config=CONFIG), prefetch=0), []
        for layer in LAYERS:
            (weight, part), ring = checkpoint_layer(
                lambda params, start: (params.o_proj, params.kv_b_proj[3]), ring, layer
            )
            kept.append((weight, part))
        close_ring(ring)
        for layer, (weight, part) in enumerate(kept):
            assert torch.equal(weight, params[layer].o_proj)
            assert torch.equal(part, params[layer].kv_b_proj[3])

    def test_an_error_in_the_layer_is_told_as_it_is(self):
        def failing(params: Any, start: Any, x: torch.Tensor) -> torch.Tensor:
            raise ZeroDivisionError

        ring = open_ring(resident([params_from_fields(x) for x in learning(torch.float32)]))
        with pytest.raises(ZeroDivisionError):
            checkpoint_layer(failing, ring, 0, hidden(torch.float32))
        close_ring(ring)

    def test_the_ring_is_used_up_and_layers_come_in_order(self):
        old = open_ring(resident([params_from_fields(x) for x in learning(torch.float32)]))
        with pytest.raises(ValueError, match=r"^take: layers must be taken in order, 0 is next; got 1"):
            checkpoint_layer(block, old, 1, hidden(torch.float32), None)
        _, ring = checkpoint_layer(block, old, 0, hidden(torch.float32), None)
        with pytest.raises(ValueError, match="a ring must be used once"):
            checkpoint_layer(block, old, 0, hidden(torch.float32), None)
        close_ring(ring)

    def test_func_grad_and_a_second_derivative_are_refused(self):
        x_TD = hidden(torch.float64)
        with pytest.raises(RuntimeError):
            torch.func.grad(lambda x: self.run(lambda params, start, x: x.square().sum(), x)[0])(x_TD.detach())
        y, _ = self.run(lambda params, start, x: x.pow(3).sum(), x_TD)
        (gradient,) = torch.autograd.grad(y.square(), x_TD, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.sum().backward()


class TestRunTwice:
    """What a second run could not repeat, or could not differentiate, is refused in one line, never left out."""

    run = staticmethod(TestResults.run)

    @pytest.mark.parametrize("kind", ["a module", "a result of one", "a leaf handed back"])
    def test_what_learns_and_is_no_input_is_refused(self, kind):
        """It would get no gradient."""
        mlp = torch.nn.Linear(64, 64, bias=False).double()
        made = {
            "a module": None,
            "a result of one": mlp(hidden(torch.float64, learns=False)),
            "a leaf handed back": None,
        }

        def layer(params: Any, start: Any, x: torch.Tensor) -> Any:
            y = x * params.o_proj.sum()
            return (y, mlp.weight) if kind == "a leaf handed back" else mlp(y) if kind == "a module" else y + made[kind]

        x_TD = hidden(torch.float64)
        results, tensors = self.run(layer, x_TD)
        y = results[0] if isinstance(results, tuple) else results
        rule = r"tensors that learn must be inputs of fn, or detached; got one of shape \[64, 64\]"
        with pytest.raises(ValueError, match=f"^checkpoint_layer: {rule}$"):
            y.sum().backward()
        assert (x_TD.grad, tensors["o_proj"].grad) == (None, None)

    def test_what_learns_and_is_no_input_is_refused_at_once_where_nothing_else_learns(self):
        """There would be no backward pass to say so."""
        mlp = torch.nn.Linear(64, 64).double()
        layer = lambda params, start, x: mlp(x * params.o_proj.sum())  # noqa: E731
        ring = open_ring(resident([params_from_fields(tensors) for tensors in GIVEN]))
        rule = r"^checkpoint_layer: tensors that learn must be inputs of fn, or detached"
        with pytest.raises(ValueError, match=rule):
            checkpoint_layer(layer, ring, 0, hidden(torch.float64, learns=False))
        with torch.no_grad():
            y, ring = checkpoint_layer(layer, open_ring(ring.state.source), 0, hidden(torch.float64, learns=False))
        assert not y.requires_grad
        close_ring(ring)

    def test_a_module_s_parameters_among_the_inputs_learn(self):
        mlp, x_TD = torch.nn.Linear(64, 64).double(), hidden(torch.float64)
        call = lambda params, start, x, given: torch.func.functional_call(mlp, given, (x * params.o_proj.sum(),))  # noqa: E731
        y, tensors = self.run(call, x_TD, dict(mlp.named_parameters()))
        y.square().sum().backward()
        got = mlp.weight.grad, mlp.bias.grad, x_TD.grad, tensors["o_proj"].grad
        x_TD, (tensors, *_) = hidden(torch.float64), learning(torch.float64)
        mlp.zero_grad()
        mlp(x_TD * tensors["o_proj"].sum()).square().sum().backward()
        for mine, right in zip(got, (mlp.weight.grad, mlp.bias.grad, x_TD.grad, tensors["o_proj"].grad), strict=True):
            assert apart(mine, right) <= 1e-12

    @pytest.mark.parametrize("what", ["an input that learns", "an input that does not", "a weight"])
    def test_writing_to_an_input_or_a_weight_is_refused(self, what):
        """The second run would begin with what the first has left."""
        x_TD, state = hidden(torch.float64) * 1, torch.zeros(64, dtype=torch.float64)

        def layer(params: Any, start: Any, x: torch.Tensor, states: list[torch.Tensor]) -> torch.Tensor:
            written = {"an input that learns": x, "an input that does not": states[0], "a weight": params.o_proj}[what]
            y = (x + states[0]) * params.o_proj.sum()
            written[:1].add_(1)
            return y

        shape = {"an input that learns": [13, 64], "an input that does not": [64], "a weight": [64, 160]}[what]
        rule = "fn must not write to its inputs or parameters, the backward pass runs it again"
        with pytest.raises(ValueError) as refusal:
            self.run(layer, x_TD, [state])
        assert str(refusal.value) == f"checkpoint_layer: {rule}; got one of shape {shape} written to"

    @pytest.mark.parametrize("learns", [False, True])
    def test_a_cache_may_be_written_to_where_nothing_is_differentiated(self, learns):
        cache = torch.zeros(13, 64, dtype=torch.float64)

        def layer(params: Any, start: Any, x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
            return cache.add_(x) * params.o_proj.sum()

        with torch.set_grad_enabled(not learns):
            layers = learning(torch.float64) if learns else GIVEN
            x_TD = hidden(torch.float64, learns=learns)
            ring = open_ring(resident([params_from_fields(tensors) for tensors in layers]))
            y, ring = checkpoint_layer(layer, ring, 0, x_TD, cache)
        assert torch.equal(cache, x_TD)
        assert torch.equal(y, x_TD * layers[0]["o_proj"].sum())
        close_ring(ring)

    @pytest.mark.parametrize("frozen", ["resident", "owners"])
    def test_a_frozen_weight_changed_before_the_backward_pass_is_found_out(self, frozen):
        """Autograd does not watch it: it is not saved, but taken again."""
        layers = [{name: x.clone() for name, x in tensors.items()} for tensors in GIVEN]

        def body(comm: Any, x_TD: torch.Tensor) -> torch.Tensor:
            if frozen == "resident":
                ring = open_ring(resident([params_from_fields(tensors) for tensors in layers]))
            else:
                ring = open_ring(from_owners(comm["cp"], dict(enumerate(layers))))
            for layer in LAYERS:
                x_TD, ring = checkpoint_layer(lambda params, start, x: x * params.o_proj.sum(), ring, layer, x_TD)
            close_ring(ring)
            return x_TD

        x_TD = hidden(torch.float64)
        y_TD = shard_map(body, simulated_mesh(MeshShape(cp=1)), in_specs=(P(),), out_specs=P())(x_TD)
        layers[1]["o_proj"].mul_(2)
        rule = "weights of layer 1 must be in the backward pass what they were; got o_proj changed since"
        with pytest.raises(ValueError, match=f"^checkpoint_layer: {rule}"):
            loss(y_TD).backward()
        assert x_TD.grad is None

    def test_dropout_drops_the_same_the_second_time(self):
        def layer(params: Any, start: Any, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.dropout(torch.ones_like(x), 0.5) * x * params.o_proj.sum()

        x_TD = hidden(torch.float64)
        y, tensors = self.run(layer, x_TD)
        torch.rand(7)
        before = torch.get_rng_state()
        y.sum().backward()
        factor = y.detach() / x_TD.detach()
        assert 0 < (factor == 0).sum() < factor.numel()
        assert apart(x_TD.grad, factor) <= 1e-12
        want = torch.full_like(tensors["o_proj"].detach(), y.sum().item() / tensors["o_proj"].sum().item())
        assert apart(tensors["o_proj"].grad, want) <= 1e-12
        assert torch.equal(torch.get_rng_state(), before)  # and others draw as if nothing had been

    def test_other_random_numbers_the_second_time_are_refused(self):
        def layer(params: Any, start: Any, x: torch.Tensor) -> torch.Tensor:
            drawn.append(1)
            return x * torch.rand(len(drawn)).sum()

        drawn: list[int] = []
        before = torch.get_rng_state()
        y, _ = self.run(layer, hidden(torch.float64))
        assert not torch.equal(before, torch.get_rng_state())
        before = torch.get_rng_state()
        rule = "fn must draw the same random numbers both times"
        with pytest.raises(ValueError, match=f"^checkpoint_layer: {rule}; got others"):
            y.sum().backward()
        assert torch.equal(before, torch.get_rng_state())

    @pytest.mark.parametrize("drawn_after", [False, True])
    def test_dropout_on_simulated_ranks_is_right_or_refused(self, drawn_after):
        """They share one generator; a rank that draws after a collective may find it where others have left it."""
        found: list[Any] = [None] * 2

        def body(comm: Any) -> None:
            ranks = comm["cp"]

            def layer(params: Any, start: Any, x: torch.Tensor) -> torch.Tensor:
                first = torch.nn.functional.dropout(torch.ones_like(x), 0.5)
                ranks.all_reduce(torch.ones(1))
                second = torch.nn.functional.dropout(torch.ones_like(x), 0.5) if drawn_after else 1.0
                return first * second * x * params.o_proj.sum()

            torch.rand(ranks.rank)
            x = torch.ones(50, dtype=torch.float64, requires_grad=True)
            y, ring = checkpoint_layer(layer, open_ring(by_owners(ranks, GIVEN), passes=1), 0, x)
            close_ring(ring)
            ranks.all_reduce(torch.ones(1))
            try:
                y.sum().backward()
                found[ranks.rank] = apart(x.grad, y.detach())
            except ValueError as error:
                found[ranks.rank] = 0.0 if "fn must draw the same random numbers both times" in str(error) else 1.0

        shard_map(body, simulated_mesh(MeshShape(cp=2)), in_specs=(), out_specs=P())()
        assert max(found) <= 1e-12


class TestKept:
    """Between forward and backward a layer keeps its inputs, and neither weights nor results."""

    @staticmethod
    def saved_bytes(make: Callable[[Any], Any], *, prefetch: int) -> tuple[set[int], set[int], set[int], int]:
        """Run the stack on one simulated rank and look at every tensor that the graph keeps.

        Returns:
            The addresses of the storages kept, of the slots, of the weights given, and the bytes kept beside those.
        """
        layers, found = learning(torch.float32), []

        def body(comm: Any) -> None:
            kept: dict[int, int] = {}

            def pack(x: torch.Tensor) -> torch.Tensor:
                kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
                return x

            ring = open_ring(make(comm["cp"], layers), prefetch=prefetch)
            slots = {slot.data_ptr() for slot in ring.state.slots}
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
                y_TD = through(ring, hidden(torch.float32))
            assert y_TD.requires_grad
            given = {x.untyped_storage().data_ptr() for tensors in layers for x in tensors.values()}
            found.append((set(kept), slots, given, sum(n for place, n in kept.items() if place not in given)))

        shard_map(body, simulated_mesh(MeshShape(cp=1)), in_specs=(), out_specs=P())()
        return found[0]

    @pytest.mark.parametrize("prefetch", [0, 1, 3, 9])
    @pytest.mark.parametrize("source", ["owners", "large fields of owners", "shards", "resident"])
    def test_the_graph_keeps_inputs_and_no_slot(self, source, prefetch):
        make = {
            "owners": by_owners,
            "large fields of owners": lambda comm, layers: by_owners(comm, layers, LARGE),
            "shards": lambda comm, layers: from_shards(comm, {i: shard_layer(x, 0, 1) for i, x in enumerate(layers)}),
            "resident": lambda comm, layers: resident([params_from_fields(x) for x in layers]),
        }[source]
        kept, slots, given, others = self.saved_bytes(make, prefetch=prefetch)
        assert not kept & slots
        rows = sum(LENGTHS)
        states, selections = 4 * rows * CONFIG.hidden_size * 4, 2 * rows * CONFIG.index_topk * 4
        assert others == states + selections  # each layer's hidden states; layer 1 hands the selection of layer 0 on
        assert source == "shards" or given <= kept  # the tensors that learn are the owner's own, not copies

    def test_plain_autograd_keeps_slots(self):
        """What the test above would see if a layer ran outside of `checkpoint_layer`."""
        kept, slots = set(), set()

        def body(comm: Any) -> None:
            shards = {i: shard_layer(x, 0, 1) for i, x in enumerate(learning(torch.float32))}
            ring = open_ring(from_shards(comm["cp"], shards), prefetch=9)
            slots.update(slot.data_ptr() for slot in ring.state.slots)
            params, ring = take(ring, 0)
            with torch.autograd.graph.saved_tensors_hooks(
                lambda x: kept.add(x.untyped_storage().data_ptr()), lambda x: x
            ):
                block(params, lambda: None, hidden(torch.float32), None)
            close_ring(ring)

        shard_map(body, simulated_mesh(MeshShape(cp=1)), in_specs=(), out_specs=P())()
        assert kept & slots

    @pytest.mark.parametrize("when", ["before the backward pass", "after it"])
    def test_results_that_nobody_holds_are_freed_at_once(self, when):
        """Not when the garbage collector comes round: a graph that holds its own results would keep itself alive."""
        x_TD = hidden(torch.float32)
        ring = open_ring(resident([params_from_fields(x) for x in learning(torch.float32)]))
        (y, extra), ring = checkpoint_layer(lambda params, start, x: (x * 2, x * 3), ring, 0, x_TD)
        close_ring(ring)
        watched = [weakref.ref(y), weakref.ref(extra)]
        if when == "after it":
            y.sum().backward()
        del y, extra
        assert [ref() for ref in watched] == [None, None]

    def test_weights_changed_before_the_backward_pass_are_found_out(self):
        """Else the second run would not be the first one's."""
        layers, x_TD = learning(torch.float32), hidden(torch.float32)
        y_TD = through(open_ring(resident([params_from_fields(x) for x in layers])), x_TD)
        with torch.no_grad():
            layers[1]["o_proj"].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss(y_TD).backward()

    def test_inputs_changed_before_the_backward_pass_are_found_out(self):
        x_TD = hidden(torch.float32) * 1
        y_TD = through(open_ring(resident([params_from_fields(x) for x in learning(torch.float32)])), x_TD)
        x_TD.detach().mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss(y_TD).backward()


RUNS = [
    # ranks, layout, fields, prefetch, dtype
    (1, "contiguous", None, 1, torch.float64),
    (1, "balanced", LARGE, 2, torch.float32),
    (2, "contiguous", LARGE, 0, torch.float64),
    (2, "zigzag", None, 1, torch.float64),
    (2, "striped", LARGE, 9, torch.float32),
    (2, "balanced", None, 3, torch.float64),
    (4, "contiguous", None, 2, torch.float32),
    (4, "zigzag", LARGE, 1, torch.float64),
    (4, "striped", None, 0, torch.float64),
    (4, "balanced", ("o_proj", "indexer.wk"), 1, torch.float64),
]


class TestRanks:
    """A stack of context-parallel layers fed by a ring trains as the stack on one rank does."""

    @pytest.mark.parametrize(("size", "layout", "fields", "prefetch", "dtype"), RUNS)
    def test_gradients_are_those_of_plain_autograd(self, size, layout, fields, prefetch, dtype):
        make = functools.partial(by_owners, fields=fields)
        run = stack_on_ranks(size, layout=layout, prefetch=prefetch, make=make)
        layers, x_TD, want = learning(dtype), hidden(dtype), plain(dtype)
        y_TD = run(layers, x_TD)
        assert apart(y_TD.detach(), want.y_TD) <= TOLERANCE[dtype]
        loss(y_TD).backward()
        assert_same_gradients(layers, x_TD, want)

    def test_resident_layers_on_ranks_have_them_too(self):
        def make(comm: Any, layers: list[Fields]) -> Any:
            return resident([params_from_fields(tensors) for tensors in layers])

        layers, x_TD, want = learning(torch.float64), hidden(torch.float64), plain(torch.float64)
        loss(stack_on_ranks(2, layout="striped", make=make)(layers, x_TD)).backward()
        assert_same_gradients(layers, x_TD, want)

    def test_shards_pass_the_input_s_gradient_on(self):
        def make(comm: Any, layers: list[Fields]) -> Any:
            return from_shards(comm, {i: shard_layer(x, comm.rank, comm.size) for i, x in enumerate(layers)})

        x_TD, want = hidden(torch.float64), plain(torch.float64)
        frozen = learning(torch.float64, lambda layer, name: False)
        loss(stack_on_ranks(2, layout="zigzag", make=make)(frozen, x_TD)).backward()
        assert apart(x_TD.grad, want.x_TD.grad) <= 1e-12

    @pytest.mark.parametrize("size", [2, 4])
    def test_the_owner_gets_the_sum_over_ranks_and_the_others_nothing(self, size):
        """A backward pass inside of each rank, as separate processes would run it."""
        want, split = plain(torch.float64), split_tokens(LENGTHS, size, layout="zigzag")
        weight_TD = drawn(want.y_TD.shape, torch.float64, 12)
        found: list[Any] = [None] * size

        def body(comm: Any, x_tD: torch.Tensor, weight_tD: torch.Tensor) -> None:
            kept = owned_layers(learning(torch.float64), comm["cp"].rank, size)

            def layer(params: Any, start: Any, x_tD: torch.Tensor, selection: Any) -> Any:
                given = None if params.indexer is not None else selection
                named = {"config": CONFIG, "split": split, "selection": given, "while_gathering": start}
                out = context_parallel_layer(params, x_tD, BATCH, comm["cp"], **named)
                return x_tD + out.y_TD, out.selection_TK

            x_tD = x_tD.detach().requires_grad_()
            y_tD = through(open_ring(from_owners(comm["cp"], kept)), x_tD, layer)
            ((y_tD * weight_tD).sum() + y_tD.square().sum()).backward()
            found[comm["cp"].rank] = x_tD.grad, kept

        mesh = simulated_mesh(MeshShape(cp=size))
        local = split.scatter(hidden(torch.float64, learns=False)), split.scatter(weight_TD)
        shard_map(body, mesh, in_specs=(P("cp"), P("cp")), out_specs=P())(*local)
        assert apart(split.gather(torch.cat([x for x, _ in found])), want.x_TD.grad) <= 1e-12
        for rank, (_, kept) in enumerate(found):
            for layer in LAYERS:
                assert bool(kept[layer]) == (layer % size == rank)
                for name, x in kept[layer].items():
                    assert apart(x.grad, want.layers[layer][name].grad) <= 1e-12, (layer, name)

    @pytest.mark.parametrize("fields", [None, LARGE])
    def test_frozen_tensors_on_ranks(self, fields):
        def wanted(layer: int, name: str) -> bool:
            return layer != 2 and name not in ("o_proj", "q_a_layernorm")

        layers, x_TD = learning(torch.float64, wanted), hidden(torch.float64)
        loss(stack_on_ranks(2, make=functools.partial(by_owners, fields=fields))(layers, x_TD)).backward()
        assert_same_gradients(layers, x_TD, Plain(learning(torch.float64, wanted), hidden(torch.float64)))
        assert all(layers[layer]["o_proj"].grad is None or not layers[layer]["o_proj"].grad.any() for layer in LAYERS)

    @pytest.mark.parametrize("fields", [None, LARGE])
    @pytest.mark.parametrize("size", [1, 2, 4])
    def test_an_input_without_grad_on_ranks(self, size, fields):
        """A rank that has nothing of the first layer must take part in its backward pass all the same."""
        layers, x_TD = learning(torch.float64), hidden(torch.float64, learns=False)
        y_TD = stack_on_ranks(size, make=functools.partial(by_owners, fields=fields))(layers, x_TD)
        loss(y_TD).backward()
        assert_same_gradients(layers, x_TD, Plain(learning(torch.float64), hidden(torch.float64, learns=False)))

    def test_a_simulated_rank_that_has_nothing_to_learn_is_named(self):
        """More ranks than layers and an input without grad: an error, never a wrong gradient."""
        layers, x_TD = learning(torch.float64), hidden(torch.float64, learns=False)
        y_TD = stack_on_ranks(5)(layers, x_TD)
        with pytest.raises(RuntimeError, match="rank 4: returned"):
            loss(y_TD).backward()
        assert all(x.grad is None for tensors in layers for x in tensors.values())

    @pytest.mark.parametrize("prefetch", [0, 1, 2])
    @pytest.mark.parametrize("fields", [None, LARGE])
    def test_without_checkpoint_layer_the_backward_pass_raises(self, prefetch, fields):
        """It never returns wrong numbers."""
        split = split_tokens(LENGTHS, 2, layout="striped")

        def body(comm: Any, x_tD: torch.Tensor) -> torch.Tensor:
            ring, selection = open_ring(by_owners(comm["cp"], GIVEN, fields), prefetch=prefetch, passes=1), None
            for layer in LAYERS:
                params, ring = take(ring, layer)
                ring = start_next(ring)
                given = None if params.indexer is not None else selection
                named = {"config": CONFIG, "split": split, "selection": given}
                out = context_parallel_layer(params, x_tD, BATCH, comm["cp"], **named)
                x_tD, selection = x_tD + out.y_TD, out.selection_TK
            close_ring(ring)
            return x_tD

        mesh = simulated_mesh(MeshShape(cp=2))
        x_TD = hidden(torch.float64)
        y_TD = split.gather(shard_map(body, mesh, in_specs=(P("cp"),), out_specs=P("cp"))(split.scatter(x_TD)))
        assert apart(y_TD.detach(), plain(torch.float64).y_TD) <= 1e-12
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss(y_TD).backward()
        assert x_TD.grad is None

    @pytest.mark.parametrize("size", [1, 2])
    @pytest.mark.parametrize("prefetch", [0, 9])
    @pytest.mark.parametrize("fields", [None, LARGE])
    def test_weights_that_learn_without_checkpoint_layer_raise_though_their_slots_are_whole(
        self, size, prefetch, fields
    ):
        """The input's gradient would be right, the weights' would be missing without a word."""
        layers = learning(torch.float64, lambda layer, name: layer == 1 and name == "o_proj")

        def body(comm: Any) -> list[str]:
            told = []
            for layer, params in stream_layers(by_owners(comm["cp"], layers, fields), prefetch=prefetch):
                x = torch.ones(2, params.o_proj.shape[1], dtype=torch.float64, requires_grad=True)
                try:
                    (x @ params.o_proj.T).sum().backward()
                    told.append(f"layer {layer}: gradient")
                except RuntimeError as error:
                    told.append(str(error))
                with torch.no_grad():
                    assert not (x @ params.o_proj.T).requires_grad
            return told

        found: list[Any] = [None] * size

        def run(comm: Any) -> None:
            found[comm["cp"].rank] = body(comm)

        shard_map(run, simulated_mesh(MeshShape(cp=size)), in_specs=(), out_specs=P())()
        told = [f"layer {layer}: gradient" for layer in LAYERS]
        told[1] = "take: weights of layer 1 require grad; run the layer by checkpoint_layer"
        assert found == [told] * size

    @pytest.mark.parametrize("prefetch", [0, 1, 2])
    def test_the_backward_pass_brings_each_layer_a_second_time(self, prefetch):
        """Twice the bytes of a forward pass, and as many again for the gradients' way back."""
        record: list[Any] = []
        layers, x_TD = learning(torch.float64), hidden(torch.float64)
        y_TD = stack_on_ranks(2, prefetch=prefetch, record=record)(layers, x_TD)
        forward = [t for t in record if t.collective == "broadcast"]
        assert {t.phase for t in forward} == {"forward"}
        assert len(forward) == 2 * len(LAYERS)  # one a layer, on both ranks
        loss(y_TD).backward()
        fields = sum(map(len, layers))
        again = [t for t in record if t.phase == "backward" and t.collective in ("broadcast", "reduce")]
        assert sum(t.collective == "broadcast" for t in again) == 2 * fields
        for kind in ("broadcast", "reduce"):
            sent = sum(t.bytes_sent for t in again if t.collective == kind)
            assert sent <= sum(x.numel() * x.element_size() for tensors in layers for x in tensors.values())


class LoggedTransport:
    """Logs every start and every wait of a transport under a name."""

    def __init__(self, transport: Any, name: str, log: list[tuple[str, str]]) -> None:
        self.transport, self.name, self.log = transport, name, log
        self.rank, self.size = transport.rank, transport.size

    def start(self, collective: str, x: torch.Tensor, source: int, out: Any) -> Any:
        self.log.append(("start", self.name))
        pending = self.transport.start(collective, x, source, out)
        return LoggedPending(pending, self.name, self.log)


class LoggedPending:
    def __init__(self, pending: Any, name: str, log: list[tuple[str, str]]) -> None:
        self.pending, self.name, self.log = pending, name, log

    def wait(self) -> torch.Tensor:
        self.log.append(("wait", self.name))
        return self.pending.wait()


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("make", ["owners", "shards"])
def test_the_next_fetch_starts_behind_the_key_gather_and_in_front_of_its_wait(prefetch, training, make):
    """So that the keys do not wait for the weights, and the weights travel while the layer computes."""
    size, shape = 2, MeshShape(cp=2)
    split = split_tokens(LENGTHS, size, layout="zigzag")
    logs: list[list[tuple[str, str]]] = [[] for _ in range(size)]

    def body(comm: Any, x_tD: torch.Tensor) -> torch.Tensor:
        rank = comm["cp"].rank
        log = logs[rank]
        keys, moved = (
            DifferentiableCollectives(LoggedTransport(SimulatedTransport(shape, rank, ("cp",)), name, log))
            for name in ("keys", "weights")
        )
        if make == "owners":
            source = by_owners(moved, GIVEN)
        else:
            source = from_shards(moved, {i: shard_layer(x, rank, size) for i, x in enumerate(GIVEN)})
        log.clear()

        def layer(params: Any, start: Any, x_tD: torch.Tensor, selection: Any) -> Any:
            named = {"config": CONFIG, "split": split, "while_gathering": start}
            given = None if params.indexer is not None else selection
            out = context_parallel_layer(params, x_tD, BATCH, keys, selection=given, **named)
            return x_tD + out.y_TD, out.selection_TK

        ring = open_ring(source, prefetch=prefetch, passes=1)
        if training:
            return through(ring, x_tD, layer)
        selection: Any = None
        for i in LAYERS:
            params, ring = take(ring, i)
            following: list[Any] = []
            x_tD, selection = layer(
                params, lambda ring=ring, into=following: into.append(start_next(ring)), x_tD, selection
            )
            (ring,) = following
        close_ring(ring)
        return x_tD

    x_tD = split.scatter(hidden(torch.float64, learns=training))
    shard_map(body, simulated_mesh(shape), in_specs=(P("cp"),), out_specs=P("cp"))(x_tD)
    want = [("start", "weights")] * prefetch
    for i in LAYERS:
        now, ahead = (("start", "weights") if prefetch == wanted else None for wanted in (0, prefetch))
        ahead = ahead if prefetch and i + prefetch < 4 else None
        want += [now, ("wait", "weights"), ("start", "keys"), ahead, ("wait", "keys")]
    assert logs == [[event for event in want if event is not None]] * size
