"""Run a function on every rank of a mesh: whole values in, shards in the body, named collectives, whole values out."""

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad
from torch.func import debug_unwrap
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from sfa_functional.precision import require

from .dtensors import from_part, home_of, is_dtensor, local_part
from .mesh import P, SimulatedMesh
from .processes import DistributedMesh
from .ranks import MeshCollectives, Ranks, cut, holder, ranks_of


def shard_map(
    fn: Callable[..., Any], mesh: SimulatedMesh | DistributedMesh, *, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """Return a function of whole values that runs ``fn`` on every rank's shards.

    ``fn(comm, *local)`` is called once per rank. ``comm["cp"]`` is one axis's `Collectives`, ``comm["cp", "tp"]`` that
    of several axes taken together, the first outermost.

    Args:
        fn: the body. Tensors that need gradients must come to it as arguments or in trees of them (a module is none:
            pass ``dict(module.named_parameters())``); others may be closed over. It must not change its arguments in
            place: they share the caller's memory, and each other's where they are replicated (``donate=True`` means
            just that).
        mesh: from `simulated_mesh`, or from `distributed_mesh`: then every process calls the function, with the same
            whole values, and runs the body once.
        in_specs: a `P` for each argument, or a tree of them whose leaves stand for whole subtrees of it. A single `P`
            stands for all arguments. Arguments that are not tensors reach every rank as they are.
        out_specs: likewise for what the body returns. A dim split over an axis is joined again; what is not split
            must have exactly the same values on the ranks that hold it.

    Returns:
        A function of the whole values; it takes no keywords and holds no state. On a distributed mesh every process
        gets the whole results. There, arguments may be DTensors, placed as their specs say, of which the body gets
        this rank's part; if any argument is one, all results that are tensors are DTensors, placed as their specs say.

    Raises:
        ValueError: on making it, a spec that is none or names no axis of the mesh. On the call, before any rank
            starts, specs that don't fit the arguments, a dim that the axis does not divide, an outer ``vmap`` or
            ``jvp`` (``torch.compile`` refuses with its own error). At the end, results whose trees differ from rank
            to rank or don't fit the specs, that were to be the same and are not, or that depend on a tensor that
            requires grad and is no argument (its gradient would be lost). A DTensor that is placed otherwise than its
            spec says, a Partial one for example: nothing is redistributed.
        RuntimeError: collectives that don't match, or that a rank leaves without; the message says what every rank
            does. An exception of the body is raised again as it is, with a note of the same kind. On a distributed
            mesh also another rank's exception, by its number, kind and first line; a rank that calls with other
            arguments, or something else; and one that does not come, or is gone, within the mesh's timeout. After
            that last kind the mesh can't be used any more.

    Gradients: by ``backward()`` and ``torch.func.grad`` from outside, once, not twice; and by either inside of the
        body. They are those of the sum over ranks: a replicated argument's is summed over the ranks that hold it; of
        a replicated result one rank's copy counts, so that it counts once. On a distributed mesh every process must
        take the same gradients of the same results; each gets the gradients of the whole arguments, those of DTensors
        placed as these are.
    Cost: that of all ranks, one after the other; what autograd keeps of all ranks lives as long as the result. On a
        distributed mesh that of one rank, and beside the body's own collectives a gather of each result that is split;
        in the backward pass an all_reduce of the gradient of each argument that is replicated, in float32 or wider,
        and a gather of each that is split. DTensors take no gathers.

    Ranks of a simulated mesh are threads, of which one runs until it waits for others, so results are the same every
    time. Modes that count operations or allocations are seen by the thread that enters them alone: enter those inside
    of the body.

    Source: jax.shard_map.
    """
    known = isinstance(mesh, SimulatedMesh | DistributedMesh)
    require(known, "shard_map", "mesh must be from simulated_mesh or distributed_mesh", type(mesh).__name__)
    for spec in [*_specs(in_specs), *_specs(out_specs)]:
        require(isinstance(spec, P), "shard_map", "a spec must be a P", repr(spec))
        mesh.shape.require_axes("shard_map", spec)

    def run(*args: Any) -> Any:
        if not isinstance(in_specs, P):
            fits = isinstance(in_specs, tuple) and len(in_specs) == len(args)
            require(fits, "shard_map", f"in_specs must be a P or a tuple of {len(args)}, one per argument", in_specs)
        leaves, tree = tree_flatten(args)
        _refuse_outer_transforms(fn, leaves)
        home = home_of(leaves, mesh.shape)
        rule = "DTensors need a mesh from distributed_mesh"
        require(home is None or isinstance(mesh, DistributedMesh), "shard_map", rule, type(mesh).__name__)
        call = _Call(fn, ranks_of(mesh), leaves, tree, _spread(in_specs, args, "in_specs"), out_specs, home)
        if not call.places:
            return call.finish(call.forward(()))
        arguments, call.arguments = call.arguments, []
        return call.finish(_Forward.apply(call, *arguments))  # type: ignore[no-untyped-call]

    # Where Dynamo may be at work, the call must also be out of its reach; where nobody imported it, nothing compiles.
    uncompiled = _untraced(
        lambda *args: (torch.compiler.disable(run) if "torch._dynamo" in sys.modules else run)(*args)
    )

    @functools.wraps(fn)
    def sharded(*args: Any) -> Any:
        return uncompiled(*args)

    return sharded


def _untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function that `torch.compile` is to refuse, as `torch.compiler.disable` does, which imports Dynamo.

    That takes as long as everything else that a process of torchrun imports.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    reason = "shard_map: a mesh's ranks can't be compiled; compile what the body calls"
    function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
    return function


class _Call:
    """One call: its arguments and, after the forward pass, its ranks' shards and results with the graph between."""

    def __init__(
        self,
        fn: Callable[..., Any],
        ranks: Ranks,
        leaves: list[Any],
        tree: TreeSpec,
        specs: list[P],
        outs: Any,
        home: Any,
    ) -> None:
        self.fn, self.ranks, self.shape, self.tree, self.out_specs, self.home = fn, ranks, ranks.shape, tree, outs, home
        self.name, self.given = getattr(fn, "__name__", type(fn).__name__), leaves
        self.others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.specs = [specs[i] for i in self.places]
        self.grad_mode = torch.is_grad_enabled()
        self.transformed = torch._C._are_functorch_transforms_active()
        self.wanted = [leaves[i].requires_grad and self.grad_mode for i in self.places]
        for spec, place in zip(self.specs, self.places, strict=True):
            self.shape.local_slices("shard_map", spec, leaves[place].shape, 0)
        self.whole = [not is_dtensor(leaves[i]) for i in self.places]  # else each rank has its part already
        self.arguments = [local_part(leaves[i], specs[i], self.shape) for i in self.places]
        self.inputs: list[list[Tensor]] = []  # by rank, of those that are here
        self.results: list[list[Any]] = []  # likewise: leaves
        self.result_specs: list[P] = []  # by leaf
        learns = iter(self.wanted)
        self.learning: Sequence[bool] = [isinstance(leaf, Tensor) and next(learns) for leaf in leaves]
        """By leaf, of the arguments and then of the results: whether any rank's part carries a gradient."""

    def forward(self, arguments: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Cut the arguments, run the body on all ranks, join the results' tensors."""
        given, self.given = self.given, []
        with self.ranks.during(f"forward pass of {self.name}", given, self.learning):
            for rank in self.ranks.here:
                parts = zip(arguments, self.specs, self.whole, strict=True)
                mine = [cut(self.shape, x.detach(), spec, rank) if w else x.detach() for x, spec, w in parts]
                self.inputs.append([x.requires_grad_() if w else x for x, w in zip(mine, self.wanted, strict=True)])

            def body(rank: int, comm: MeshCollectives) -> Any:
                local = list(self.others)
                for place, x in zip(self.places, self.inputs[self.ranks.here.index(rank)], strict=True):
                    local[place] = x
                watch: AbstractContextManager[Any] = _RefuseWrapped() if self.transformed else nullcontext()
                with torch.set_grad_enabled(self.grad_mode), watch:
                    return self.fn(comm, *tree_unflatten(local, self.tree))

            returned = self.ranks.run(body, "forward")
            flat = [tree_flatten(value) for value in returned]
            self.result_tree = flat[0][1]
            self.result_specs = _spread(self.out_specs, returned[0], "out_specs")
            self.results = [leaves for leaves, _ in flat]
            self._refuse_outsiders()
            for leaf, spec in zip(self.results[0], self.result_specs, strict=True):
                fits = not isinstance(leaf, Tensor) or len(spec.dims) <= leaf.ndim
                rule = f"{spec} in out_specs must not name more dims than the result has"
                require(fits, "shard_map", rule, list(leaf.shape) if isinstance(leaf, Tensor) else None)
            self.learning = self.ranks.settle(self.results, [tree for _, tree in flat], self.result_specs)
            columns = enumerate(zip(*self.results, strict=True))
            return tuple(self._join(i, column) for i, column in columns if isinstance(column[0], Tensor))

    def finish(self, tensors: Sequence[Tensor]) -> Any:
        """Put the joined tensors into the tree that the body returned."""
        joined, leaves = iter(tensors), []
        for leaf, spec in zip(self.results[0], self.result_specs, strict=True):
            x = next(joined) if isinstance(leaf, Tensor) else leaf
            if self.home is not None and isinstance(leaf, Tensor):
                x = from_part(x, spec, self.shape, self.home)
            leaves.append(x)
        return tree_unflatten(leaves, self.result_tree)

    def backward(self, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Cut the results' gradients, run every rank's backward pass, join those of the arguments."""
        tensors = [i for i, leaf in enumerate(self.results[0]) if isinstance(leaf, Tensor)]
        given = dict(zip(tensors, gradients, strict=True))

        def body(rank: int, comm: MeshCollectives) -> list[Tensor | None]:
            here = self.ranks.here.index(rank)
            roots, seeds = [], []
            for i, leaf in enumerate(self.results[here]):
                gradient = given.get(i)
                if isinstance(leaf, Tensor) and leaf.requires_grad and gradient is not None:
                    spec = self.result_specs[i]
                    mine = cut(self.shape, gradient, spec, rank) if self.home is None else gradient
                    roots.append(leaf)
                    seeds.append(mine if holder(self.shape, spec, rank) == rank else torch.zeros_like(mine))
            wanted = [x for x in self.inputs[here] if x.requires_grad]
            if not roots or not wanted:
                return [None] * len(self.inputs[here])
            found = iter(torch.autograd.grad(roots, wanted, seeds, retain_graph=True, allow_unused=True))
            return [next(found) if x.requires_grad else None for x in self.inputs[here]]

        with self.ranks.during(f"backward pass of {self.name}", gradients, [False] * len(gradients)):
            by_rank = self.ranks.run(body, "backward")
            return tuple(self.ranks.add_up(by_rank, self.inputs[0], self.specs, self.whole))

    def _join(self, leaf: int, parts: Sequence[Tensor]) -> Tensor:
        spec, first = self.result_specs[leaf], parts[0].detach()
        if spec.axes and self.home is None:
            return self.ranks.join([part.detach() for part in parts], spec)
        place = first.untyped_storage().data_ptr()
        aliased = any(place == x.untyped_storage().data_ptr() for x in self.inputs[0])
        return first.clone() if aliased and self.learning[leaf] else first

    def _refuse_outsiders(self) -> None:
        """Find tensors that a result depends on, that require grad, and that no argument is: their gradient is lost."""
        for leaves, inputs in zip(self.results, self.inputs, strict=True):
            known = {id(x) for x in inputs}
            for x in leaves if self.grad_mode else ():
                if isinstance(x, Tensor) and x.requires_grad and x.grad_fn is None and id(x) not in known:
                    raise ValueError(f"shard_map: {_OUTSIDER}; got one of shape {list(x.shape)}")
            todo = [x.grad_fn for x in leaves if isinstance(x, Tensor) and x.grad_fn is not None]
            seen = set(todo)
            while todo:
                node = todo.pop()
                variable = getattr(node, "variable", None)
                if variable is not None and id(variable) not in known and variable.numel() > 0:
                    raise ValueError(f"shard_map: {_OUTSIDER}; got one of shape {list(variable.shape)}")
                for child, _ in node.next_functions:
                    if child is not None and child not in seen:
                        seen.add(child)
                        todo.append(child)


_OUTSIDER = "a tensor that requires grad must come to the body as a tensor among its arguments, or detached"
"""A module is not one: pass ``dict(module.named_parameters())``."""


class _RefuseWrapped(TorchFunctionMode):
    """Refuses the tensors of an outer ``func.grad`` that reach a rank's thread other than as arguments.

    There, operations would take them for plain tensors, and their gradients would be zeros without a word. Those that
    need no gradient (everything made inside of the outer function is wrapped) are taken for what they hold.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not torch._C._are_functorch_transforms_active():  # else they may belong to a transform inside of the body
            args, kwargs = tree_map(_plain, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _plain(x: Any) -> Any:
    if not isinstance(x, Tensor) or (inner := debug_unwrap(x)) is x:
        return x
    if x.requires_grad:
        raise ValueError(f"shard_map: {_OUTSIDER}; got one of shape {list(x.shape)}")
    return inner


class _Forward(Function):
    """All ranks' forward passes as one step of the caller's graph."""

    @staticmethod
    def forward(call: _Call, *arguments: Tensor) -> tuple[Tensor, ...]:
        return call.forward(arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.call, arguments = inputs[0], inputs[1:]
        ctx.save_for_backward(*(x for x, wanted in zip(arguments, ctx.call.wanted, strict=True) if wanted))
        leaves = zip(ctx.call.learning, ctx.call.results[0], strict=True)
        learning = [learns for learns, leaf in leaves if isinstance(leaf, Tensor)]
        ctx.mark_non_differentiable(*(x for x, learns in zip(output, learning, strict=True) if not learns))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *_Backward.apply(ctx.call, len(gradients), *gradients, *ctx.saved_tensors))  # type: ignore[no-untyped-call]

    @staticmethod
    def vmap(*_: Any) -> Any:
        raise ValueError("shard_map: an outer vmap can't run a mesh's ranks; use vmap inside of the body")

    @staticmethod
    def jvp(*_: Any) -> Any:
        raise ValueError("shard_map: a mesh's ranks have no forward-mode derivative; use backward() or func.grad")


class _Backward(Function):
    """All ranks' backward passes. A function of its own, so that it gets plain tensors under ``func.grad`` too; it
    takes the arguments, so that a second backward pass finds its way here.
    """

    @staticmethod
    def forward(call: _Call, count: int, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        return call.backward(tensors[:count])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(*_: Any) -> Any:
        raise RuntimeError("shard_map: a gradient of a gradient can't pass a mesh's ranks; use func.grad in the body")

    @staticmethod
    def vmap(*_: Any) -> Any:
        raise ValueError("shard_map: an outer vmap can't run a mesh's ranks; use vmap inside of the body")


def _refuse_outer_transforms(fn: Callable[..., Any], leaves: list[Any]) -> None:
    """Refuse, before any rank runs, what could only be refused afterwards or would lose a gradient."""
    if torch._C._are_functorch_transforms_active():
        kinds = [interpreter.key() for interpreter in torch._C._functorch.get_interpreter_stack() or []]
        if torch._C._functorch.TransformType.Jvp in kinds:
            _Forward.jvp()
        for x in _closed_over(fn, set()):
            if debug_unwrap(x) is not x and x.requires_grad:
                raise ValueError(f"shard_map: {_OUTSIDER}; got one of shape {list(x.shape)}")
    elif forward_ad._current_level >= 0 and any(
        isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in leaves
    ):
        _Forward.jvp()


def _closed_over(fn: Any, seen: set[int]) -> Iterator[Tensor]:
    """Yield the tensors in a function's closure, and in those of the functions there."""
    if id(fn) in seen:
        return
    seen.add(id(fn))
    for cell in getattr(fn, "__closure__", None) or ():
        try:
            content = cell.cell_contents
        except ValueError:  # assigned later
            continue
        for leaf in tree_leaves(content):
            if isinstance(leaf, Tensor):
                yield leaf
            elif callable(leaf):
                yield from _closed_over(leaf, seen)


def _specs(tree: Any) -> list[Any]:
    return tree_flatten(tree, is_leaf=lambda x: isinstance(x, P))[0]


def _spread(specs: Any, value: Any, name: str) -> list[P]:
    """Return a spec for each leaf of a value, from a tree of specs whose leaves stand for whole subtrees."""
    if isinstance(specs, P):
        return [specs] * len(tree_flatten(value)[0])
    if type(specs) is type(value) is dict and set(specs) == set(value):
        return [spec for key in value for spec in _spread(specs[key], value[key], name)]
    spec_children, spec_node = tree_flatten(specs, is_leaf=lambda x: x is not specs)
    children, node = tree_flatten(value, is_leaf=lambda x: x is not value)
    rule = f"{name} must be a tree that the values' tree begins with"
    require(spec_node == node and not node.is_leaf(), "shard_map", rule, f"{_kind(specs)} for {_kind(value)}")
    return [spec for pair in zip(spec_children, children, strict=True) for spec in _spread(*pair, name)]


def _kind(value: Any) -> str:
    size = f" of {len(value)}" if isinstance(value, tuple | list | dict) else ""
    return f"{type(value).__name__}{size}"
