"""Training through a ring: a layer's weights are taken again in the backward pass, their gradients go to the owner."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from sfa_functional.precision import require

from .manager import Ring, start_next, take


def checkpoint_layer(fn: Callable[..., Any], ring: Ring, layer: int, *inputs: Any) -> tuple[Any, Ring]:
    """Run one layer with the ring's next parameters, and keep its inputs only for the backward pass.

    ``fn(params, start, *inputs)`` runs without a graph here. The backward pass takes the layer from the source a
    second time, into memory of its own, runs ``fn`` again, and differentiates it.

    Args:
        fn: a function of the layer's parameters, of ``start``, a function without arguments that starts the ring's
            next fetch (and does nothing the second time), and of the inputs; it must do the same both times.
        ring: must not be used again.
        layer: the next one of the series.
        inputs: tensors, or trees of them, that may need gradients, and anything else.

    Returns:
        ``(what fn returned, ring)``.

    Raises:
        ValueError, RuntimeError: as `take`.

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
    trained = {name: x for name, x in source.trained(layer).items() if x.requires_grad}
    leaves, tree = tree_flatten(inputs)
    call = _Call(fn, source, layer, list(trained), leaves, tree)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    results = _Recomputed.apply(call, params, start, *trained.values(), *tensors)  # type: ignore[no-untyped-call]
    return call.finish(results), ring


class _Call:
    """One layer's run: what it takes to run it again."""

    def __init__(
        self, fn: Callable[..., Any], source: Any, layer: int, names: list[str], leaves: list[Any], tree: TreeSpec
    ) -> None:
        self.fn, self.source, self.layer, self.names, self.tree = fn, source, layer, names, tree
        self.others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.out_leaves: list[Any] = []
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

    def finish(self, tensors: tuple[Tensor, ...]) -> Any:
        arrived = iter(tensors)
        leaves = [next(arrived) if leaf is _TENSOR else leaf for leaf in self.out_leaves]
        assert self.out_tree is not None
        return tree_unflatten(leaves, self.out_tree)


_TENSOR = object()
"""Stands for a tensor among the leaves of a result."""


class _Recomputed(Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, params: Any, start: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        inputs = tensors[len(call.names) :]
        leaves = [x.detach() if isinstance(x, Tensor) else x for x in call.run(params, start, inputs)]
        call.out_leaves = [_TENSOR if isinstance(x, Tensor) else x for x in leaves]  # results are not kept alive here
        ctx.call = call
        ctx.save_for_backward(*tensors)
        results = tuple(x for x in leaves if isinstance(x, Tensor))
        ctx.mark_non_differentiable(*(x for x in results if not x.is_floating_point()))
        return results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        call = ctx.call
        wanted = ctx.needs_input_grad[3:]
        with ExitStack() as modes:
            modes.enter_context(torch.enable_grad())
            for kind, enabled, dtype in call.casts:  # those of the forward pass
                modes.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype))
            again = [x.detach().requires_grad_(want) for x, want in zip(ctx.saved_tensors, wanted, strict=True)]
            trained = dict(zip(call.names, again, strict=False))
            params, further = call.source.retake(call.layer, trained)
            results = call.run(params, lambda: None, tuple(again[len(call.names) :]))
        tensors = [x for x in results if isinstance(x, Tensor)]
        require(len(tensors) == len(gradients), "checkpoint_layer", "fn must do the same both times", len(tensors))
        pairs = [(x, g) for x, g in zip(tensors, gradients, strict=True) if x.requires_grad]
        leaves = [x for x in again if x.requires_grad]
        if not pairs or not (leaves or further):
            return (None,) * (3 + len(again))
        found = iter(
            torch.autograd.grad([x for x, _ in pairs], [*leaves, *further], [g for _, g in pairs], allow_unused=True)
        )
        return None, None, None, *(next(found) if x.requires_grad else None for x in again)
