"""Run a function on every rank of a mesh: whole values in, shards in the body, named collectives, whole values out."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad
from torch.func import debug_unwrap
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from sfa_functional.precision import require, wide

from .collectives import Collectives, DifferentiableCollectives
from .mesh import MeshShape, P, SimulatedMesh
from .simulate import SimulatedTransport, run_ranks


def shard_map(fn: Callable[..., Any], mesh: SimulatedMesh, *, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Return a function of whole values that runs ``fn`` on every rank's shards.

    ``fn(comm, *local)`` is called once per rank. ``comm["cp"]`` is one axis's `Collectives`, ``comm["cp", "tp"]`` that
    of several axes taken together, the first outermost.

    Args:
        fn: the body. Tensors that need gradients must come to it as arguments or in trees of them (a module is none:
            pass ``dict(module.named_parameters())``); others may be closed over. It must not change its arguments in
            place: they share the caller's memory, and each other's where they are replicated (``donate=True`` means
            just that).
        mesh: from `simulated_mesh`.
        in_specs: a `P` for each argument, or a tree of them whose leaves stand for whole subtrees of it. A single `P`
            stands for all arguments. Arguments that are not tensors reach every rank as they are.
        out_specs: likewise for what the body returns. A dim split over an axis is joined again; what is not split
            must have exactly the same values on the ranks that hold it.

    Returns:
        A function of the whole values; it takes no keywords and holds no state.

    Raises:
        ValueError: on making it, a spec that is none or names no axis of the mesh. On the call, before any rank
            starts, specs that don't fit the arguments, a dim that the axis does not divide, an outer ``vmap`` or
            ``jvp`` (``torch.compile`` refuses with its own error). At the end, results whose trees differ from rank
            to rank or don't fit the specs, that were to be the same and are not, or that depend on a tensor that
            requires grad and is no argument (its gradient would be lost).
        RuntimeError: collectives that don't match, or that a rank leaves without; the message says what every rank
            does. An exception of the body is raised again as it is, with a note of the same kind.

    Gradients: by ``backward()`` and ``torch.func.grad`` from outside, once, not twice; and by either inside of the
        body. They are those of the sum over ranks: a replicated argument's is summed over the ranks that hold it; of
        a replicated result one rank's copy counts, so that it counts once.
    Cost: that of all ranks, one after the other; what autograd keeps of all ranks lives as long as the result.

    Ranks are threads, of which one runs until it waits for others, so results are the same every time. Modes that
    count operations or allocations are seen by the thread that enters them alone: enter those inside of the body.

    Source: jax.shard_map.
    """
    require(isinstance(mesh, SimulatedMesh), "shard_map", "mesh must be from simulated_mesh", type(mesh).__name__)
    for spec in [*_specs(in_specs), *_specs(out_specs)]:
        require(isinstance(spec, P), "shard_map", "a spec must be a P", repr(spec))
        mesh.shape.require_axes("shard_map", spec)

    def run(*args: Any) -> Any:
        if not isinstance(in_specs, P):
            fits = isinstance(in_specs, tuple) and len(in_specs) == len(args)
            require(fits, "shard_map", f"in_specs must be a P or a tuple of {len(args)}, one per argument", in_specs)
        leaves, tree = tree_flatten(args)
        _refuse_outer_transforms(fn, leaves)
        call = _Call(fn, mesh, leaves, tree, _spread(in_specs, args, "in_specs"), out_specs)
        if not call.places:
            return call.finish(call.forward(()))
        return call.finish(_Forward.apply(call, *(leaves[i] for i in call.places)))  # type: ignore[no-untyped-call]

    refusal = "shard_map: simulated ranks can't be compiled; compile what the body calls"
    uncompiled = torch.compiler.disable(run, reason=refusal)

    @functools.wraps(fn)
    def sharded(*args: Any) -> Any:
        return uncompiled(*args)

    return sharded


class MeshCollectives(Mapping[Any, Collectives]):
    """What a body gets: the `Collectives` of each mesh axis, or of several together, as one rank sees them."""

    def __init__(self, shape: MeshShape, rank: int) -> None:
        self._shape, self._rank, self._made = shape, rank, dict[tuple[str, ...], Collectives]()

    def __getitem__(self, axes: str | tuple[str, ...]) -> Collectives:
        """Return the collectives of an axis, or of several taken together."""
        named = (axes,) if isinstance(axes, str) else axes
        known = isinstance(named, tuple) and len(named) > 0 and all(axis in self._shape.names for axis in named)
        require(known and len(set(named)) == len(named), "comm", f"axes must be of {self._shape}", repr(axes))
        if named not in self._made:
            self._made[named] = DifferentiableCollectives(SimulatedTransport(self._shape, self._rank, named))
        return self._made[named]

    def __contains__(self, axis: object) -> bool:
        return axis in self._shape.names

    def __iter__(self) -> Iterator[str]:
        return iter(self._shape.names)

    def __len__(self) -> int:
        return len(self._shape.names)


class _Call:
    """One call: its arguments and, after the forward pass, every rank's shards and results with the graph between."""

    def __init__(
        self, fn: Callable[..., Any], mesh: SimulatedMesh, leaves: list[Any], tree: TreeSpec, specs: list[P], outs: Any
    ) -> None:
        self.fn, self.mesh, self.shape, self.tree, self.out_specs = fn, mesh, mesh.shape, tree, outs
        self.others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.specs = [specs[i] for i in self.places]
        self.grad_mode = torch.is_grad_enabled()
        self.transformed = torch._C._are_functorch_transforms_active()
        self.wanted = [leaves[i].requires_grad and self.grad_mode for i in self.places]
        for spec, place in zip(self.specs, self.places, strict=True):
            self.shape.local_slices("shard_map", spec, leaves[place].shape, 0)
        self.inputs: list[list[Tensor]] = []  # by rank
        self.results: list[list[Any]] = []  # by rank: leaves
        self.result_specs: list[P] = []  # by leaf
        self.learning: list[bool] = []  # by leaf: whether any rank's part carries a gradient

    def forward(self, arguments: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Cut the arguments, run the body on all ranks, join the results' tensors."""
        for rank in range(self.shape.size):
            cut = [self._cut(x.detach(), spec, rank) for x, spec in zip(arguments, self.specs, strict=True)]
            self.inputs.append([x.requires_grad_() if w else x for x, w in zip(cut, self.wanted, strict=True)])

        def body(rank: int) -> Any:
            local = list(self.others)
            for place, x in zip(self.places, self.inputs[rank], strict=True):
                local[place] = x
            watch: AbstractContextManager[Any] = _RefuseWrapped() if self.transformed else nullcontext()
            with torch.set_grad_enabled(self.grad_mode), watch:
                return self.fn(MeshCollectives(self.shape, rank), *tree_unflatten(local, self.tree))

        returned = run_ranks(self.shape, body, phase="forward", record=self.mesh.record)
        flat = [tree_flatten(value) for value in returned]
        for rank, (leaves, tree) in enumerate(flat):
            same = tree == flat[0][1] and all(map(_same_kind, leaves, flat[0][0]))
            require(same, "shard_map", "every rank must return the same structure", f"ranks 0 and {rank} that differ")
        self.result_tree = flat[0][1]
        self.result_specs = _spread(self.out_specs, returned[0], "out_specs")
        self.results = [leaves for leaves, _ in flat]
        self._refuse_outsiders()
        columns = list(zip(*self.results, strict=True))
        self.learning = [any(isinstance(x, Tensor) and x.requires_grad for x in column) for column in columns]
        return tuple(self._join(i, column) for i, column in enumerate(columns) if isinstance(column[0], Tensor))

    def finish(self, tensors: Sequence[Tensor]) -> Any:
        """Put the joined tensors into the tree that the body returned."""
        joined = iter(tensors)
        leaves = [next(joined) if isinstance(leaf, Tensor) else leaf for leaf in self.results[0]]
        return tree_unflatten(leaves, self.result_tree)

    def backward(self, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Cut the results' gradients, run every rank's backward pass, join those of the arguments."""
        tensors = [i for i, leaf in enumerate(self.results[0]) if isinstance(leaf, Tensor)]
        given = dict(zip(tensors, gradients, strict=True))

        def body(rank: int) -> list[Tensor | None]:
            roots, seeds = [], []
            for i, leaf in enumerate(self.results[rank]):
                gradient = given.get(i)
                if isinstance(leaf, Tensor) and leaf.requires_grad and gradient is not None:
                    spec = self.result_specs[i]
                    mine = self._cut(gradient, spec, rank)
                    roots.append(leaf)
                    seeds.append(mine if self._holder(spec, rank) == rank else torch.zeros_like(mine))
            wanted = [x for x in self.inputs[rank] if x.requires_grad]
            if not roots or not wanted:
                return [None] * len(self.inputs[rank])
            found = iter(torch.autograd.grad(roots, wanted, seeds, retain_graph=True, allow_unused=True))
            return [next(found) if x.requires_grad else None for x in self.inputs[rank]]

        by_rank = run_ranks(self.shape, body, phase="backward", record=self.mesh.record)
        return tuple(
            self._add_up([by_rank[rank][i] for rank in range(self.shape.size)], spec)
            for i, spec in enumerate(self.specs)
        )

    def _cut(self, x: Tensor, spec: P, rank: int) -> Tensor:
        return x[self.shape.local_slices("shard_map", spec, x.shape, rank)]

    def _holder(self, spec: P, rank: int) -> int:
        """Return the first of the ranks that hold the same part as this one."""
        return min(self.shape.group(rank, *(axis for axis in self.shape.names if axis not in spec.axes)))

    def _join(self, leaf: int, parts: Sequence[Tensor]) -> Tensor:
        spec, first = self.result_specs[leaf], parts[0]
        rule = f"{spec} in out_specs must not name more dims than the result has"
        require(len(spec.dims) <= first.ndim, "shard_map", rule, list(first.shape))
        for rank, part in enumerate(parts):
            holder = self._holder(spec, rank)
            if rank != holder and not _same_values(part.detach(), parts[holder].detach()):
                rule = f"a result of {spec} must be the same on the ranks that hold it"
                raise ValueError(f"shard_map: {rule}; got {_apart(part, parts[holder])} between ranks {holder}, {rank}")
        if not spec.axes:
            place = first.untyped_storage().data_ptr()
            aliased = any(place == x.untyped_storage().data_ptr() for x in self.inputs[0])
            return first.detach().clone() if aliased and self.learning[leaf] else first.detach()
        whole = [count * self.shape.axis_size(*spec.dim_axes(dim)) for dim, count in enumerate(first.shape)]
        joined = first.detach().new_empty(whole)
        for rank, part in enumerate(parts):
            if self._holder(spec, rank) == rank:
                self._cut(joined, spec, rank).copy_(part.detach())
        return joined

    def _add_up(self, gradients: Sequence[Tensor | None], spec: P) -> Tensor | None:
        known = [g for g in gradients if g is not None]
        if not known:
            return None
        whole = [count * self.shape.axis_size(*spec.dim_axes(dim)) for dim, count in enumerate(known[0].shape)]
        dtype = known[0].dtype
        total = known[0].new_zeros(whole, dtype=wide(dtype) if dtype.is_floating_point else dtype)
        for rank, gradient in enumerate(gradients):
            if gradient is not None:
                self._cut(total, spec, rank).add_(gradient)
        return total.to(dtype)

    def _refuse_outsiders(self) -> None:
        """Find tensors that a result depends on, that require grad, and that no argument is: their gradient is lost."""
        for rank, leaves in enumerate(self.results):
            known = {id(x) for x in self.inputs[rank]}
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
        raise ValueError("shard_map: an outer vmap can't run simulated ranks; use vmap inside of the body")

    @staticmethod
    def jvp(*_: Any) -> Any:
        raise ValueError("shard_map: simulated ranks have no forward-mode derivative; use backward() or func.grad")


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
        raise RuntimeError("shard_map: a gradient of a gradient can't pass simulated ranks; use func.grad in the body")

    @staticmethod
    def vmap(*_: Any) -> Any:
        raise ValueError("shard_map: an outer vmap can't run simulated ranks; use vmap inside of the body")


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


def _same_kind(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype
    return type(a) is type(b) and (a is b or bool(a == b) or bool(a != a and b != b))


def _same_values(a: Tensor, b: Tensor) -> bool:
    if a.is_floating_point() and a.itemsize == 1:
        a, b = a.float(), b.float()
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def _apart(a: Tensor, b: Tensor) -> str:
    if a.dtype == torch.bool or a.numel() == 0:
        return "different values"
    if a.is_complex():
        return f"a difference of {float((a.detach() - b.detach()).abs().max()):.3g}"
    return f"a difference of {float((a.detach().double() - b.detach().double()).abs().max()):.3g}"
