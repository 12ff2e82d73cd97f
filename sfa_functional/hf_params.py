"""The weights of a live transformers attention module: taken as they are, gathered where they are shards, and set."""

from typing import Any

import torch
from torch import Tensor, nn

from .params import HF_NAMES, NORM_FIELDS, LayerParams, named_fields, params_from_fields
from .precision import require


def layer_params(module: nn.Module) -> LayerParams:
    """Take the weights of a live attention module: its own tensors, no copy; shards are gathered.

    Inside of a forward pass FSDP2's weights are whole already, if the layer is a unit of ``fully_shard``. Elsewhere,
    and under a tensor-parallel plan at all times, they are DTensors, and every rank of their mesh must call this.

    Args:
        module: a ``DeepseekV32Attention`` or ``GlmMoeDsaAttention``.

    Returns:
        `LayerParams`; ``indexer`` is None in a shared layer.

    Raises:
        ValueError: by name, a projection that is not just a linear map: another class (adapted, quantised,
            parametrised), a bias, a forward or forward hooks of its own (those of FSDP2 and of tensor-parallel plans
            are understood); a weight that is no ordinary floating-point tensor or has no values (offloaded).

    Gradients: those of the module's parameters. A gathered weight's gradient is averaged over the ranks of its mesh,
        as FSDP2 does, and scattered to the shards: the mean over the ranks' micro-batches, and where all ranks compute
        the same (tensor parallelism), that.
    Cost: none, or the gathered weights in memory and over the network.
    Source: the module trees of Hugging Face transformers 5.24, models/deepseek_v32 and models/glm_moe_dsa.
    """
    return params_from_fields({field: _gather(weight) for field, weight in _weights(module).items()})


def load_params(module: nn.Module, params: LayerParams) -> None:
    """Copy parameters into a live attention module, in place; nothing is written if anything does not fit.

    Shards take their part of the whole tensors that every rank passes, without communication. FSDP2's gathered copies
    are given up first, as by ``state_dict``: a write into them would be lost.

    Args:
        module: the attention module; not in the middle of its forward or backward pass.
        params: weights of the same layer, whole, the same on every rank; cast to the module's dtypes.

    Raises:
        ValueError: another shape, an indexer on one side only, or as `layer_params`.

    Source: torch.distributed.fsdp.fully_shard for when weights are shards.
    """
    module.state_dict(keep_vars=True)
    target, source = _weights(module), dict(named_fields(params))
    require(target.keys() == source.keys(), "load_params", f"fields must be {sorted(target)}", sorted(source))
    for name, tensor in target.items():
        fits = tensor.shape == source[name].shape
        require(fits, "load_params", f"{name} must have shape {list(tensor.shape)}", list(source[name].shape))
    with torch.no_grad():
        parts = {name: _part(source[name], tensor) for name, tensor in target.items()}
        for name, tensor in target.items():
            tensor.copy_(parts[name])


def _weights(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that a module holds by field, shards as shards."""
    tensors = {}
    for field, key in HF_NAMES.items():
        owner_name, _, leaf = key.rpartition(".")
        if owner_name.startswith("indexer") and getattr(module, "indexer", None) is None:
            continue
        owner = module.get_submodule(owner_name)
        if field not in NORM_FIELDS:
            _require_linear(owner_name, owner)
        tensors[field] = _require_tensor(key, getattr(owner, leaf))
    return tensors


def _require_linear(name: str, owner: nn.Module) -> None:
    """Refuse a projection that computes anything but ``x Wᵀ`` when it is called."""
    kind = type(owner)
    fully_sharded = hasattr(owner, "unshard") and nn.Linear in kind.__bases__  # fully_shard makes it a class of its own
    plain = kind is nn.Linear or fully_sharded
    got = f"{kind.__name__} of {kind.__module__}"
    require(plain, "layer_params", f"{name} must be a plain torch.nn.Linear", got)
    require(getattr(owner, "bias", None) is None, "layer_params", f"{name} must have no bias", "one")
    # what FSDP2 and tensor-parallel plans (transformers marks its own) run around it only moves weights and activations
    moved = fully_sharded or getattr(owner, "_is_hooked", False) or _is_sharded(getattr(owner, "weight", None))
    own = "a forward" if "forward" in owner.__dict__ else "hooks"
    around = "forward" in owner.__dict__ or len(owner._forward_hooks) + len(owner._forward_pre_hooks) > 0
    rule = f"{name} must have no forward and no forward hooks of its own, they would not run"
    require(moved or not around, "layer_params", rule, own)


def _require_tensor(key: str, weight: Any) -> Tensor:
    """Refuse a weight that is no ordinary tensor of numbers."""
    ordinary = type(weight) in (Tensor, nn.Parameter) or _is_sharded(weight)
    got = f"{type(weight).__name__} of {type(weight).__module__}"
    require(ordinary, "layer_params", f"{key} must be an ordinary tensor or a DTensor", got)
    real = weight.is_floating_point() and weight.element_size() >= 2
    require(real, "layer_params", f"{key} must be float64, 32, 16 or bfloat16", weight.dtype)
    require(weight.device.type != "meta", "layer_params", f"{key} must have values", "a meta tensor")
    return weight


def _is_sharded(weight: Any) -> bool:
    """Tell a DTensor, without importing torch.distributed."""
    return isinstance(weight, Tensor) and hasattr(weight, "full_tensor")


def _gather(weight: Any) -> Tensor:
    if not _is_sharded(weight):
        return weight
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return weight.full_tensor()
    from torch.distributed.tensor import Partial

    ranks = weight.device_mesh.size()
    whole = weight.full_tensor(grad_placements=[Partial()] * weight.device_mesh.ndim)
    whole.register_hook(lambda gradient: gradient / ranks)  # gloo can't average
    return whole


def _part(source: Tensor, target: Any) -> Tensor:
    if not _is_sharded(target):
        return source
    from torch.distributed.tensor import distribute_tensor

    whole = source.detach().to(target.device, target.dtype)
    return distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)
