"""`use_sfa` and a live model's weights over two processes (gloo): FSDP2 and tensor-parallel plans equal one process.

Models are built before the fork, so that both ranks and the one-process model start from the same weights.
"""

import copy
import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from transformers.distributed.configuration_utils import DistributedConfig

import sfa_functional as sfa
from sfa_functional import hf
from sfa_functional.params import named_fields
from tests.peers.test_transformers import make_model
from tests.sfa_functional.test_hf import generate, prompts
from tests.weights.test_processes import on_processes
from weights import load_layer, open_checkpoint, save_checkpoint

pytestmark = pytest.mark.usefixtures("unchecked")

RANKS = 2


def loss_of(model: nn.Module, rows: slice) -> Tensor:
    """Run some of the prompts, one micro-batch."""
    inputs = {name: x[rows] for name, x in prompts().items()}
    real_BT = inputs["attention_mask"].bool()
    return nn.functional.cross_entropy(
        model(**inputs, use_cache=False).logits[real_BT], torch.arange(int(real_BT.sum()))
    )


def whole(x: Any) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if x.grad is None else whole(x.grad).clone() for name, x in model.named_parameters()}


def worst(ours: dict[str, Tensor | None], theirs: dict[str, Tensor | None]) -> float:
    """Return the largest difference; infinity where a gradient is None on one side only."""
    assert ours.keys() == theirs.keys()
    pairs = [(ours[name], theirs[name]) for name in ours]
    if any((a is None) != (b is None) for a, b in pairs):
        return float("inf")
    return max(sfa.difference(a, b).max_rel for a, b in pairs if a is not None and b is not None)


class Outcome(NamedTuple):
    """What one rank compared with the one-process model: largest differences, and whether things are equal."""

    loss: float
    gradient: float
    weights: bool  # layer_params outside of a forward gives the whole weights
    loaded: float  # logits after load_params
    tokens: bool  # generate() after load_params


def after_training(model: Any, one: Any, loss: float, gradient: float) -> Outcome:
    """Compare weights outside of a forward, load others, and run and generate with them."""
    attention, plain = model.model.layers[0].self_attn, one.model.layers[0].self_attn
    pairs = zip(named_fields(hf.layer_params(attention)), named_fields(hf.layer_params(plain)), strict=True)
    equal = all(torch.equal(a, b) and not isinstance(a, DTensor) for (_, a), (_, b) in pairs)
    fresh = sfa.init_params(hf.module_config(plain), generator=torch.Generator().manual_seed(5))
    for module in (attention, plain):
        hf.load_params(module, fresh)
    inputs = prompts()
    with torch.no_grad(), hf.use_sfa(model), hf.use_sfa(one):
        logits = [each(**inputs, use_cache=False).logits for each in (model, one)]
        tokens = [generate(each, inputs, max_new_tokens=3).sequences for each in (model, one)]
    same_tokens = torch.equal(*tokens)
    return Outcome(loss, gradient, equal, sfa.difference(*logits).max_rel, same_tokens)


# FSDP2: every rank has its own micro-batch, gradients are means


def shard(model: Any, units: str) -> None:
    """Shard a model by layers, as one does, or in other units too."""
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in model.model.layers:
        indexer = layer.self_attn.indexer
        if units == "projections":
            for module in [m for m in layer.self_attn.modules() if type(m) is nn.Linear]:
                fully_shard(module, mesh=mesh)
        elif units == "float32 parts" and indexer is not None:  # transformers does so for modules kept in float32
            fully_shard(indexer.weights_proj, mesh=mesh)
        if units != "root":
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


@pytest.mark.parametrize(
    ("variant", "units", "reentrant"),
    [
        ("deepseek", "layers", None),
        ("glm", "float32 parts", None),
        ("glm", "layers", False),
        ("glm", "layers", True),
        ("deepseek", "root", None),
        ("glm", "projections", None),
    ],
)
def test_fsdp_equals_one_process(variant: str, units: str, reentrant: bool | None, tmp_path: Path) -> None:
    """Two steps' gradients over two micro-batches, activation checkpointing where ``reentrant`` says how."""
    model: Any = make_model(variant, index_topk=5).train()

    def body(rank: int) -> Outcome:
        one = copy.deepcopy(model)
        with hf.use_sfa(one):
            losses = [loss_of(one, slice(r, r + 1)) for r in range(RANKS)]
            (2 * sum(losses) / RANKS).backward()
        if reentrant is not None:
            model.activation_checkpointing_enable({"use_reentrant": reentrant})
        shard(model, units)
        with hf.use_sfa(model):
            for _ in range(2):
                loss = loss_of(model, slice(rank, rank + 1))
                loss.backward()
        distance = worst(gradients(model), gradients(one))
        return after_training(model, one, abs(float((loss - losses[rank]).detach())), distance)

    for outcome in on_processes(RANKS, tmp_path, body):
        assert outcome.loss < 1e-5
        assert outcome.gradient < 1e-5
        assert outcome.weights
        assert outcome.loaded < 1e-5
        assert outcome.tokens


def test_gradients_of_weights_gathered_outside_of_a_forward_are_means_too(tmp_path: Path) -> None:
    """As for an indexer's loss, which uses `layer_params` by itself; rank r's loss is r + 1 times the sum."""
    model: Any = make_model("glm").train()

    def body(rank: int) -> list[list[float]]:
        shard(model, "layers")
        module = model.model.layers[0].self_attn
        params = hf.layer_params(module)
        sums = [x.sum() for _, x in named_fields(params)]
        ((rank + 1) * sum(sums)).backward()
        with torch.no_grad():  # nothing is left for a gradient to go to
            assert not hf.layer_params(module).o_proj.requires_grad
        return [whole(x.grad).unique().tolist() for x in module.parameters()]

    for values in on_processes(RANKS, tmp_path, body):
        assert values == [[1.5]] * len(values)
        assert len(values) == 12


def test_loaded_weights_last_where_a_forward_has_left_them_gathered(tmp_path: Path) -> None:
    """FSDP2's root unit stays gathered after a forward; what is written into that copy is lost with it."""
    model: Any = make_model("deepseek").eval()
    ids = prompts()["input_ids"]

    def body(_rank: int) -> float:
        one = copy.deepcopy(model)
        shard(model, "root")
        fresh = sfa.init_params(
            hf.module_config(one.model.layers[0].self_attn), generator=torch.Generator().manual_seed(5)
        )
        with torch.no_grad(), hf.use_sfa(model), hf.use_sfa(one):
            model(ids, use_cache=False)
            assert not isinstance(model.model.layers[0].self_attn.o_proj.weight, DTensor)
            for each in (model, one):
                hf.load_params(each.model.layers[0].self_attn, fresh)
            assert isinstance(model.model.layers[0].self_attn.o_proj.weight, DTensor)
            return sfa.difference(*(each(ids, use_cache=False).logits for each in (model, one))).max_rel

    assert max(on_processes(RANKS, tmp_path, body)) < 1e-5


def test_mixed_precision_of_fsdp_is_followed(tmp_path: Path) -> None:
    """Its bfloat16 copies of the weights are what the attention computes with: the numbers of a bfloat16 model."""
    model: Any = make_model("deepseek").eval()

    def body(_rank: int) -> bool:
        one = copy.deepcopy(model).to(torch.bfloat16)
        mesh = init_device_mesh("cpu", (RANKS,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        ids = prompts()["input_ids"]
        with torch.no_grad(), hf.use_sfa(model), hf.use_sfa(one):
            logits = [each(ids, use_cache=False).logits for each in (model, one)]
        assert logits[0].dtype == torch.bfloat16
        return torch.equal(*logits)

    assert on_processes(RANKS, tmp_path, body) == [True, True]


# Tensor parallelism: all ranks have the same batch


def check_tensor_parallel(model: Any, one: Any) -> Outcome:
    results = []
    for each in (one, model):
        with hf.use_sfa(each):
            loss = loss_of(each, slice(None))
            loss.backward()
        results.append((float(loss.detach()), gradients(each)))
    (loss_one, gradients_one), (loss_many, gradients_many) = results
    return after_training(model, one, abs(loss_many - loss_one), worst(gradients_many, gradients_one))


def torch_plan(model: Any) -> dict[str, Any]:
    plan: dict[str, Any] = {}
    for i in range(len(model.model.layers)):
        columns = ["self_attn.q_b_proj", "self_attn.kv_b_proj", "mlp.gate_proj", "mlp.up_proj"]
        plan |= {f"model.layers.{i}.{name}": ColwiseParallel() for name in columns}
        plan |= {f"model.layers.{i}.{name}": RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    return plan


@pytest.mark.parametrize("variant", ["deepseek", "glm"])
def test_torchs_tensor_parallel_plan_equals_one_process(variant: str, tmp_path: Path) -> None:
    model: Any = make_model(variant, index_topk=5).train()

    def body(_rank: int) -> Outcome:
        one = copy.deepcopy(model)
        parallelize_module(model, init_device_mesh("cpu", (RANKS,)), torch_plan(model))
        assert model.model.layers[0].self_attn.o_proj.weight.placements[0].is_shard(1)
        return check_tensor_parallel(model, one)

    check_outcomes(on_processes(RANKS, tmp_path, body))


@pytest.mark.parametrize("variant", ["deepseek", "glm"])
def test_transformers_tensor_parallel_plan_equals_one_process(variant: str, tmp_path: Path) -> None:
    one: Any = make_model(variant, index_topk=5).train()
    one.save_pretrained(tmp_path / "model")

    def body(rank: int) -> Outcome:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
        model = type(one).from_pretrained(
            tmp_path / "model", distributed_config=DistributedConfig(tp_size=RANKS), dtype=torch.float32
        )
        assert model.model.layers[0].self_attn.q_b_proj.weight.placements[0].is_shard(0)
        return check_tensor_parallel(model.train(), one)

    check_outcomes(on_processes(RANKS, tmp_path, body))


def check_outcomes(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        assert outcome.loss < 1e-5
        assert outcome.gradient < 1e-5
        assert outcome.weights
        assert outcome.loaded < 1e-5
        assert outcome.tokens


def test_hidden_states_in_shards_are_refused(tmp_path: Path) -> None:
    """A sequence-parallel norm in front of the attention hands on a DTensor."""
    model: Any = make_model("deepseek").eval()

    def body(_rank: int) -> str:
        mesh = init_device_mesh("cpu", (RANKS,))
        plan = {f"model.layers.{i}.input_layernorm": SequenceParallel() for i in range(3)}
        parallelize_module(model, mesh, plan)
        with torch.no_grad(), hf.use_sfa(model):
            try:
                model(prompts()["input_ids"], use_cache=False)
            except ValueError as error:
                return str(error)
        return "no error"

    for line in on_processes(RANKS, tmp_path, body):
        assert line == "use_sfa: hidden states must be whole, not a DTensor; got DTensor"


def test_a_sharded_models_weights_go_to_a_checkpoint_and_back(tmp_path: Path) -> None:
    model: Any = make_model("glm").eval()
    module = model.model.layers[0].self_attn
    config = hf.module_config(module)
    want = [dict(named_fields(hf.layer_params(m))) for m in hf.attention_modules(model)]

    def body(rank: int) -> bool:
        sharded = copy.deepcopy(model)
        shard(sharded, "layers")
        layers = [hf.layer_params(m) for m in hf.attention_modules(sharded)]
        if rank == 0:
            save_checkpoint(tmp_path / "indexers", layers, config)
        dist.barrier()
        checkpoint = open_checkpoint(tmp_path / "indexers")
        with torch.no_grad():
            for x in sharded.parameters():
                x.zero_()
        equal = True
        for layer, live in enumerate(hf.attention_modules(sharded)):
            hf.load_params(live, load_layer(checkpoint, layer, config=config))
            got = dict(named_fields(hf.layer_params(live)))
            equal = equal and all(torch.equal(got[name], x) for name, x in want[layer].items())
        return equal

    assert on_processes(RANKS, tmp_path, body) == [True, True]
