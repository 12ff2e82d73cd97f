"""Training through a ring: a layer's weights are taken again in the backward pass, their gradients go to the owner."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from sfa_functional.precision import require

from .manager import Ring, start_next, take
from .ring_buffer import version


def checkpoint_layer(fn: Callable[..., Any], ring: Ring, layer: int, *inputs: Any) -> tuple[Any, Ring]:
    """Run one layer with the ring's next parameters, and keep its inputs only for the backward pass.

    ``fn(params, start, *inputs)`` runs without a graph here. The backward pass takes the layer from the source a
    second time, into memory of its own, runs ``fn`` again, and differentiates it.

    Args:
        fn: a function of the layer's parameters, of ``start``, a function without arguments that starts the ring's
            next fetch (and does nothing the second time), and of the inputs; it must do the same both times. Tensors
            that learn must be among its inputs: those that it finds elsewhere (a module that it calls) are refused in
            the backward pass. Where something learns, it must not write to its inputs or parameters: the second run
            would begin with what the first has left. So a cache is for evaluation, under ``torch.no_grad()``.
            Random numbers that it draws from the default generators (dropout) are the same the second time.
        ring: must not be used again.
        layer: the next one of the series.
        inputs: tensors, or trees of them, that may need gradients, and anything else.

    Returns:
        ``(what fn returned, ring)``.

    Raises:
        ValueError, RuntimeError: as `take`; and where fn does what it must not, or a weight of `resident` or
            `from_owners` was changed between the two runs, in one line, most of them in the backward pass. Simulated
            ranks share one generator: where they draw in turns, and the second run can't draw the same, it is refused.

    Gradients: of the inputs, and of the source's tensors that require grad: those given to `resident`, and those of
        `from_owners`, where the gradients of what is broadcast are summed over ranks on the owner. Once, not twice;
        by ``backward()``, not by ``func.grad``. On many ranks all must run the backward pass; a simulated rank that
        owns nothing that learns, and whose inputs do not learn either, cannot, and is named in an error.
    Cost: a second fetch and a second run of ``fn``; keeps the inputs.
    Source: Chen et al., "Training deep nets with sublinear memory cost" (2016).
    """
    params, ring = take(ring, layer)

    def start() -> None:
        nonlocal ring
        ring = start_next(ring)

    source = ring.state.source
    held = source.trained(layer)
    trained = {name: x for name, x in held.items() if x.requires_grad}
    leaves, tree = tree_flatten(inputs)
    call = _Call(fn, source, layer, held, leaves, tree)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    results = _Recomputed.apply(call, params, start, *trained.values(), *tensors)  # type: ignore[no-untyped-call]
    return call.finish(results), ring


class _Call:
    """One layer's run: what it takes to run it again."""

    def __init__(
        self,
        fn: Callable[..., Any],
        source: Any,
        layer: int,
        held: Mapping[str, Tensor],
        leaves: list[Any],
        tree: TreeSpec,
    ) -> None:
        self.fn, self.source, self.layer, self.tree = fn, source, layer, tree
        self.names = [name for name, x in held.items() if x.requires_grad]
        # the others are not saved for the backward pass, which would see to it that they are what they were
        self.frozen = {name: (x, version(x)) for name, x in held.items() if not x.requires_grad}
        learns = bool(self.names) or any(isinstance(x, Tensor) and x.requires_grad for x in leaves)
        self.learns, self.differentiates = learns and torch.is_grad_enabled(), torch.is_grad_enabled()
        self.draws: _Draws | None = None
        self.others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.out_leaves: list[Any] = []
        self.out_kinds: list[tuple[torch.dtype, torch.Size]] = []
        kinds = {"cpu", *(x.device.type for x in leaves if isinstance(x, Tensor))}
        self.casts = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in sorted(kinds)
            if torch.amp.is_autocast_available(kind)
        ]
        self.out_tree: TreeSpec | None = None

    def run(self, params: Any, start: Callable[[], None], tensors: tuple[Tensor, ...]) -> list[Any]:
        local = list(self.others)
        for place, x in zip(self.places, tensors, strict=True):
            local[place] = x
        leaves, self.out_tree = tree_flatten(self.fn(params, start, *tree_unflatten(local, self.tree)))
        return leaves

    def run_first(self, params: Any, start: Callable[[], None], tensors: tuple[Tensor, ...]) -> list[Any]:
        """Run the layer without a graph, and see whether it can be run again."""
        if not self.learns:
            with torch.set_grad_enabled(self.differentiates):  # there is no graph, unless fn brings what learns
                leaves = self.run(params, start, tensors)
            _refuse_others([x for x in leaves if isinstance(x, Tensor)], known=())
            return leaves
        given = [x for x in (*tree_flatten(params)[0], *tensors) if isinstance(x, Tensor)]
        before, draws = [version(x) for x in given], _Draws(given)
        leaves = self.run(params, start, tensors)
        written = next((list(x.shape) for x, was in zip(given, before, strict=True) if version(x) != was), None)
        rule = "fn must not write to its inputs or parameters, the backward pass runs it again"
        require(written is None, "checkpoint_layer", rule, f"one of shape {written} written to")
        self.draws = draws if draws.end() else None
        return leaves

    def result(self, x: Tensor, params: Any) -> Tensor:
        """Detach a result; a weight, whose slot is refilled, leaves as a copy."""
        place = x.untyped_storage().data_ptr()
        kept = all(y.untyped_storage().data_ptr() != place for y in tree_flatten(params)[0])
        return x.detach() if kept else x.detach().clone()

    def run_again(self, params: Any, tensors: tuple[Tensor, ...]) -> list[Tensor]:
        """Run the layer as it was run first, and return its tensors."""
        with self.draws.again() if self.draws is not None else nullcontext():
            results = [x for x in self.run(params, lambda: None, tensors) if isinstance(x, Tensor)]
        rule = "fn must do the same both times"
        require(len(results) == len(self.out_kinds), "checkpoint_layer", rule, len(results))
        for x, (dtype, shape) in zip(results, self.out_kinds, strict=True):
            got = f"{x.dtype} {list(x.shape)} where it was {dtype} {list(shape)}"
            require((x.dtype, x.shape) == (dtype, shape), "checkpoint_layer", rule, got)
        return results

    def require_unchanged(self) -> None:
        """Refuse weights that learn nothing and are not what the first run was made with."""
        changed = [name for name, (x, was) in self.frozen.items() if version(x) != was]
        rule = f"weights of layer {self.layer} must be in the backward pass what they were"
        require(not changed, "checkpoint_layer", rule, f"{', '.join(changed)} changed since")

    def finish(self, tensors: tuple[Tensor, ...]) -> Any:
        arrived = iter(tensors)
        leaves = [next(arrived) if leaf is _TENSOR else leaf for leaf in self.out_leaves]
        assert self.out_tree is not None
        return tree_unflatten(leaves, self.out_tree)


_TENSOR = object()
"""Stands for a tensor among the leaves of a result."""


class _Draws:
    """What the default generators were before a run and after it, to draw the same once more."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._devices = sorted({x.device for x in tensors if x.device.type not in ("cpu", "meta")}, key=str)
        self._begin = self._end = self._states()

    def _states(self) -> list[Tensor]:
        return [torch.get_rng_state(), *(_module_of(device).get_rng_state(device) for device in self._devices)]

    def _set(self, states: Sequence[Tensor]) -> None:
        torch.set_rng_state(states[0])
        for device, state in zip(self._devices, states[1:], strict=True):
            _module_of(device).set_rng_state(state, device)

    def end(self) -> bool:
        """Say, after the run, whether it has drawn anything."""
        self._end = self._states()
        return not all(map(torch.equal, self._begin, self._end))

    @contextmanager
    def again(self) -> Iterator[None]:
        """Draw within as in the first run, and leave the generators as they are."""
        outer = self._states()
        self._set(self._begin)
        try:
            yield
            same = all(map(torch.equal, self._states(), self._end))
        finally:
            self._set(outer)
        rule = "fn must draw the same random numbers both times"
        require(same, "checkpoint_layer", rule, "others, or another count of them")


def _module_of(device: torch.device) -> Any:
    return torch.get_device_module(device)


class _Recomputed(Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, params: Any, start: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        inputs = tensors[len(call.names) :]
        leaves = call.run_first(params, start, inputs)
        leaves = [call.result(x, params) if isinstance(x, Tensor) else x for x in leaves]
        call.out_leaves = [_TENSOR if isinstance(x, Tensor) else x for x in leaves]  # results are not kept alive here
        ctx.call = call
        ctx.save_for_backward(*tensors)
        results = tuple(x for x in leaves if isinstance(x, Tensor))
        call.out_kinds = [(x.dtype, x.shape) for x in results]
        ctx.mark_non_differentiable(*(x for x in results if not (x.is_floating_point() or x.is_complex())))
        return results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        call = ctx.call
        wanted = ctx.needs_input_grad[3:]
        call.require_unchanged()
        with ExitStack() as modes:
            modes.enter_context(torch.enable_grad())
            for kind, enabled, dtype in call.casts:  # those of the forward pass
                modes.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype))
            again = [x.detach().requires_grad_(want) for x, want in zip(ctx.saved_tensors, wanted, strict=True)]
            trained = dict(zip(call.names, again, strict=False))
            params, further = call.source.retake(call.layer, trained)
            tensors = call.run_again(params, tuple(again[len(call.names) :]))
        _refuse_others(tensors, known=[*again, *further])
        pairs = [(x, g) for x, g in zip(tensors, gradients, strict=True) if x.requires_grad]
        leaves = [x for x in again if x.requires_grad]
        if not pairs or not (leaves or further):
            return (None,) * (3 + len(again))
        found = iter(
            torch.autograd.grad([x for x, _ in pairs], [*leaves, *further], [g for _, g in pairs], allow_unused=True)
        )
        return None, None, None, *(next(found) if x.requires_grad else None for x in again)


def _refuse_others(results: Sequence[Tensor], *, known: Sequence[Tensor]) -> None:
    """Refuse results that depend on a tensor that learns and is not known here: it would get no gradient."""
    expected, found = {id(x) for x in known}, [x for x in results if x.requires_grad and x.grad_fn is None]
    todo = [x.grad_fn for x in results if x.grad_fn is not None]
    seen = set(todo)
    while todo:
        node = todo.pop()
        if type(node).__name__ == "AccumulateGrad":
            leaf: Any = node
            found.append(leaf.variable)
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                todo.append(child)
    other = next((list(x.shape) for x in found if id(x) not in expected), None)
    rule = "tensors that learn must be inputs of fn, or detached"
    require(other is None, "checkpoint_layer", rule, f"one of shape {other}")
