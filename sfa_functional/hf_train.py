"""Train the indexers of a live transformers DSA model, in the warm-up and in the sparse stage.

with train_indexer(model, stage="sparse") as losses:
    lm = model(ids, labels=ids, use_cache=False).loss
    (lm + coefficient * losses.mean).backward()
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from .attention import dense_attention
from .batch import Batch
from .config import SFAConfig
from .hf import attention_modules, layer_params, module_config, real_tokens, replace_attention
from .implementation import Implementation
from .latent import latent_output, latent_projections
from .layer import LayerOutput, sfa_layer
from .precision import require
from .training import Compared, index_vectors, indexer_loss

Stage = Literal["warm-up", "sparse"]


class IndexerLosses:
    """The divergences of one forward pass, layer by layer; the next pass replaces them. Read them before ``backward``.

    With activation checkpointing the pass runs again in backward, and what is read here then belongs to that. After a
    pass that failed half way, some layers still hold those of the pass before.
    """

    def __init__(self) -> None:
        self.layers: dict[int, Tensor] = {}
        """kl_T of each layer: `indexer_loss`, one value per token, 0 for padding."""
        self.owners: dict[int, int] = {}
        """For each layer the one whose indexer serves it: itself, or an earlier one."""
        self.rows = 0
        """Tokens of the pass that are no padding."""

    @property
    def sum(self) -> Tensor:
        """Σ over indexers of the mean over the layers that one serves of Σ_T kl_T: a scalar, to be divided by the rows
        of all micro-batches and ranks."""
        require(bool(self.layers), "IndexerLosses.sum", "the model must have run inside of train_indexer", "no layer")
        served = list(self.owners.values())
        return torch.stack([kl_T.sum() / served.count(self.owners[i]) for i, kl_T in self.layers.items()]).sum()

    @property
    def mean(self) -> Tensor:
        """`sum` over the rows of this pass."""
        return self.sum / max(1, self.rows)


@contextmanager
def train_indexer(
    model: nn.Module,
    *,
    stage: Stage,
    topk: int | None = None,
    implementation: Implementation = None,
    config: SFAConfig | None = None,
) -> Iterator[IndexerLosses]:
    """Run a live model through this library and collect what its indexers are to learn from.

    In the warm-up attention is dense, and the divergence is taken over all visible keys; the caller lets nothing but
    the indexers learn. In the sparse stage attention reads the selected keys, the divergence is taken over them, and
    the model learns from its own loss beside it. Whole forward passes without a cache.

    Args:
        model: a transformers model of type ``deepseek_v32`` or ``glm_moe_dsa``.
        stage: ``"warm-up"`` or ``"sparse"``.
        topk: keys per query in the sparse stage, >= 1; None is the model's own number.
        implementation: of attention.
        config: sizes and constants to use instead of the live model's (`module_config`).

    Yields:
        `IndexerLosses`.

    Raises:
        ValueError: an unknown stage, topk < 1, or as `use_sfa`.

    Gradients: of a loss from `IndexerLosses` those of the indexers' own weights, zero with a coefficient of 0; of the
        model's loss those of `use_sfa`, to everything but the indexers. The divergence has its graph also where the
        model runs under ``torch.no_grad()``, which makes the warm-up cheap.
    Cost: the layers twice over in their projections, and `indexer_loss`.
    Source: DeepSeek-V3.2-Exp report (2025), section 2.1.1.
    """
    require(stage in get_args(Stage), "train_indexer", f"stage must be one of {get_args(Stage)}", repr(stage))
    require(topk is None or topk >= 1, "train_indexer", "topk must be >= 1", topk)
    modules = attention_modules(model)
    number = {id(module): layer for layer, module in enumerate(modules)}
    used = module_config(modules[0]) if config is None else config
    used = used if topk is None else replace(used, index_topk=topk)
    losses = IndexerLosses()
    kept: dict[int, Compared] = {}

    def attend(
        module: nn.Module, x_TD: Tensor, batch: Batch, rope: tuple[Tensor, Tensor], selection: Tensor | None
    ) -> LayerOutput:
        rule = "gradients must be possible, also where the model runs without"
        require(not torch.is_inference_mode_enabled(), "train_indexer", rule, "torch.inference_mode()")
        params, layer = layer_params(module), number[id(module)]
        if stage == "sparse":
            output = sfa_layer(
                params, x_TD, batch, config=used, selection=selection, rope=rope, implementation=implementation
            )
        else:
            q_THE, _q_latent_TQ, kv_TE = latent_projections(params, x_TD, *rope, config=used)
            out_THL, _lse_TH = dense_attention(
                q_THE,
                kv_TE,
                batch.start_T,
                batch.end_T,
                scale=used.softmax_scale,
                value_dim=used.kv_lora_rank,
                implementation=implementation,
            )
            nothing = torch.empty(x_TD.shape[0], 0, dtype=torch.int32, device=x_TD.device)
            output = LayerOutput(latent_output(params, out_THL, config=used), nothing, None)
        batch = real_tokens(batch)
        owner = layer if params.indexer is not None else max((i for i in kept if i < layer), default=-1)
        require(owner >= 0, "train_indexer", f"layer {layer} must have an indexer or follow one", "none")
        with torch.enable_grad():
            if owner == layer:
                kept[layer] = index_vectors(params, x_TD, batch, config=used, rope=rope)
            losses.layers[layer] = indexer_loss(
                params,
                x_TD,
                batch,
                config=used,
                selection=output.selection_TK if stage == "sparse" else None,
                rope=rope,
                compared=kept[owner],
            )
        losses.owners[layer] = owner
        losses.rows = int((batch.request_T >= 0).sum())
        return output

    with replace_attention(model, attend, config=used):
        yield losses
