"""DTensors go into `shard_map` and come out of it; values and gradients are those of one rank, placed as they were."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import sfa_functional as sfa
from sfa_functional.params import named_fields, params_from_fields
from sharding import (
    MeshShape,
    P,
    Rules,
    context_parallel_layer,
    distributed_mesh,
    param_specs,
    shard_map,
    simulated_mesh,
    split_tokens,
    tensor_parallel_layer,
)
from sharding.dtensors import placements
from tests.sharding.processes import on_processes

pytestmark = pytest.mark.usefixtures("unchecked")

CONFIG = replace(sfa.TINY, num_attention_heads=8, index_topk=5)
LENGTHS = (9, 4, 7)
SQUARE = MeshShape(cp=2, tp=2)


def message(run: Any) -> str:
    try:
        run()
    except ValueError as error:
        return str(error)
    return "nothing was refused"


@pytest.mark.parametrize(
    ("spec", "want"),
    [
        (P(), (Replicate(), Replicate())),
        (P("cp"), (Shard(0), Replicate())),
        (P(None, "tp"), (Replicate(), Shard(1))),
        (P("cp", "tp"), (Shard(0), Shard(1))),
        (P("tp", "cp"), (Shard(1), Shard(0))),
        (P(("cp", "tp")), (Shard(0), Shard(0))),
    ],
    ids=repr,
)
def test_a_spec_and_its_placements_cut_alike(spec, want):
    """Each rank's part of a DTensor that is placed so is the part that the spec says."""
    assert placements(SQUARE, spec) == want
    whole = torch.arange(32).view(4, 8)

    def body(rank: int) -> bool:
        mesh = distributed_mesh(SQUARE, "cpu")
        part = distribute_tensor(whole, mesh.device_mesh, want).to_local()
        return torch.equal(part, whole[SQUARE.local_slices("test", spec, whole.shape, rank)])

    if spec in (P("tp", "cp"), P(("cp", "tp"))):
        assert on_processes(4, body) == [True] * 4


def test_axes_of_a_dim_in_another_order_than_the_mesh_s_are_refused():
    rule = "P(('tp', 'cp')) must name the axes of a dim in the mesh's order, for DTensors"
    assert message(lambda: placements(SQUARE, P(("tp", "cp")))) == f"shard_map: {rule}; got {SQUARE}"


def one_rank() -> tuple[sfa.LayerOutput, dict[str, torch.Tensor]]:
    """Return one rank's results and the gradients of their squares' sum."""
    params = params_from_fields({name: x.clone().requires_grad_() for name, x in named_fields(PARAMS)})
    x_TD = X_TD.clone().requires_grad_()
    out = sfa.sfa_layer(params, x_TD, BATCH, config=CONFIG)
    out.y_TD.square().sum().backward()
    return out, {name: x.grad for name, x in named_fields(params)} | {"x": x_TD.grad}


PARAMS = sfa.init_params(CONFIG, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
BATCH = sfa.Batch.from_lengths(LENGTHS)
X_TD = torch.randn(20, CONFIG.hidden_size, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


@pytest.mark.parametrize("shape", [MeshShape(tp=2), MeshShape(cp=2), SQUARE], ids=str)
def test_a_model_of_dtensors_has_one_rank_s_values_and_gradients_placed_as_it_is(shape):
    """Tensor parallelism, context parallelism, and both; also without the loss being a plain tensor."""
    want, gradients = one_rank()
    rules = Rules(**{"tokens" if name == "cp" else "heads": name for name in shape.names})
    specs = param_specs(CONFIG, rules, mesh_shape=shape)
    split = split_tokens(LENGTHS, shape.axis_size("cp"), layout="zigzag") if "cp" in shape.names else None
    rows = P() if split is None else P("cp")

    def layer(comm: Any, params: Any, x: torch.Tensor) -> Any:
        if split is None:
            return tensor_parallel_layer(params, x, BATCH, comm["tp"], config=CONFIG)[:2]
        heads = comm["tp"] if "tp" in shape.names else None
        return context_parallel_layer(params, x, BATCH, comm["cp"], config=CONFIG, split=split, heads_comm=heads)[:2]

    def body(rank: int) -> list[str]:
        mesh = distributed_mesh(shape, "cpu")
        by_name = {}
        for (name, x), (_, spec) in zip(named_fields(PARAMS), named_fields(specs), strict=True):
            by_name[name] = distribute_tensor(x, mesh.device_mesh, placements(shape, spec)).requires_grad_()
        x_MD = X_TD if split is None else split.scatter(X_TD)
        x = distribute_tensor(x_MD, mesh.device_mesh, placements(shape, rows)).requires_grad_()
        run = shard_map(layer, mesh, in_specs=(specs, rows), out_specs=(rows, rows))
        y, selection = run(params_from_fields(by_name), x)
        assert isinstance(y, DTensor)
        assert isinstance(selection, DTensor)
        assert y.placements == selection.placements == placements(shape, rows)
        (y * y).sum().full_tensor().backward()
        wrong = []
        ordered = (lambda x: x) if split is None else split.gather
        found = {name: x.grad for name, x in by_name.items()} | {"x": x.grad}
        pairs = {"y": (ordered(y.full_tensor().detach()), want.y_TD)}
        for name, gradient in found.items():
            if gradients[name] is None:
                wrong += [name] if gradient is not None and bool(gradient.full_tensor().any()) else []
                continue
            if gradient.placements != {**by_name, "x": x}[name].placements:
                wrong.append(f"{name} placed {gradient.placements}")
            whole = gradient.full_tensor()
            pairs[name] = (ordered(whole) if name == "x" else whole, gradients[name])
        assert torch.equal(ordered(selection.full_tensor()), want.selection_TK)
        return wrong + [name for name, (a, b) in pairs.items() if sfa.difference(a, b).max_rel > 1e-12]

    assert on_processes(shape.size, body) == [[]] * shape.size


def test_dtensors_and_plain_tensors_mix_and_graphs_go_on_at_both_ends():
    """One DTensor makes all results DTensors; plain arguments are whole values; what DTensors were made of learns too.

    The user's own mesh of the same axes will do.
    """
    w, x, b = torch.arange(12.0).view(4, 3), torch.arange(8.0).view(4, 2) - 3, torch.tensor([1.0, -2.0, 3.0])

    def formula(w: torch.Tensor, x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (x.T @ w) * b

    leaves = [t.clone().requires_grad_() for t in (w, x, b)]
    (formula(leaves[0] * 2, leaves[1], leaves[2]) ** 2).sum().backward()

    def body(rank: int) -> list[bool]:
        mesh = distributed_mesh(MeshShape(cp=2), "cpu")
        device_mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        w_, b_ = (
            distribute_tensor(t, device_mesh, [placed]).requires_grad_()
            for t, placed in ((w, Shard(0)), (b, Replicate()))
        )
        x_ = x.clone().requires_grad_()

        def local(comm: Any, w: torch.Tensor, x: torch.Tensor, b: torch.Tensor) -> Any:
            assert not any(isinstance(t, DTensor) for t in (w, x, b))
            return comm["cp"].all_reduce(formula(w, x, b)), w.sum(1), comm["cp"].size

        run = shard_map(local, mesh, in_specs=(P("cp"), P("cp"), P()), out_specs=(P(), P("cp"), P()))
        y, rows, size = run(w_ * 2, x_, b_)
        (y**2).sum().backward()
        return [
            size == 2,
            y.placements == (Replicate(),),
            rows.placements == (Shard(0),),
            torch.equal(rows.full_tensor(), 2 * w.sum(1)),
            torch.equal(w_.grad.full_tensor(), leaves[0].grad),
            torch.equal(x_.grad, leaves[1].grad),
            torch.equal(b_.grad.full_tensor(), leaves[2].grad),
            b_.grad.placements == (Replicate(),),
        ]

    assert on_processes(2, body) == [[True] * 8] * 2


def test_dtensors_that_are_placed_otherwise_are_refused_in_one_line():
    def body(rank: int) -> list[str]:
        mesh = distributed_mesh(SQUARE, "cpu")
        x, others = torch.ones(4, 2), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

        def run(x: torch.Tensor, spec: P, mesh: Any = mesh) -> str:
            return message(lambda: shard_map(lambda comm, x: x, mesh, in_specs=spec, out_specs=spec)(x))

        def placed(*at: Any) -> torch.Tensor:
            return DTensor.from_local(x, mesh.device_mesh, at, run_check=False)

        return [
            run(placed(Replicate(), Replicate()), P("cp")),
            run(placed(Shard(1), Replicate()), P("cp")),
            run(placed(Partial(), Replicate()), P()),
            run(distribute_tensor(x, others, [Shard(0), Replicate()]), P("cp")),
            run(placed(Shard(0), Replicate()), P("cp"), simulated_mesh(SQUARE)),
            run(placed(Shard(0), Shard(0)), P(("tp", "cp"))),
        ]

    cp, whole = "[Shard(dim=0), Replicate()]", "[Replicate(), Replicate()]"
    other = "must name the axes of a dim in the mesh's order, for DTensors"
    for found in on_processes(4, body):
        starts = [
            f"a DTensor for P('cp') must be placed {cp}; redistribute it first; got {whole}",
            f"a DTensor for P('cp') must be placed {cp}; redistribute it first; got [Shard(dim=1), Replicate()]",
            f"a DTensor for P() must be placed {whole}; redistribute it first; got [Partial(sum), Replicate()]",
            f"DTensors must be on a mesh of the axes of {SQUARE}, over all ranks; got DeviceMesh(",
            "DTensors need a mesh from distributed_mesh; got SimulatedMesh",
            f"P(('tp', 'cp')) {other}; got {SQUARE}",
        ]
        for text, start in zip(found, starts, strict=True):
            assert text.startswith(f"shard_map: {start}"), text
            assert "\n" not in text
