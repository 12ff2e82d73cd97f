"""Draw which keys the bundled checkpoint selects, and print what other ways of choosing cost. Needs the plot extra.

python notebooks/compare_selectors.py [--out PICTURE.png]
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.colors import LogNorm
from torch import Tensor, nn
from transformers import DeepseekV32ForCausalLM

from sfa_functional import (
    Batch,
    LayerOutput,
    attention_mass,
    best_keys,
    block_topk,
    global_selection,
    latent_projections,
    random_keys,
    sfa_layer,
    window,
)
from sfa_functional.bundled import TINY_CHECKPOINT, held_out_text
from sfa_functional.hf import attention_modules, layer_params, module_config, replace_attention, use_sfa

LAYER = 2


def main() -> None:
    """Print the table of README, then draw the picture."""
    parser = argparse.ArgumentParser(description="compare ways of choosing keys")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".png"))
    args = parser.parse_args()
    model = DeepseekV32ForCausalLM.from_pretrained(TINY_CHECKPOINT, dtype=torch.float32).eval()
    ids = torch.tensor(list(held_out_text().encode()[:4096])).view(8, 512)
    config = module_config(attention_modules(model)[0])
    selectors: dict[str, Any] = {
        "best keys": best_keys(config.softmax_scale),
        "lightning indexer": None,
        "blocks of 8": block_topk(8),
        "window": window,
        "random": random_keys(torch.Generator()),
    }
    for name, select in selectors.items():
        with use_sfa(model, topk=32, select=select), torch.no_grad():
            perplexity = model(ids, labels=ids, use_cache=False).loss.exp()
        print(f"{name:18} perplexity at 32 keys: {perplexity:.3f}")
    draw(args.out, model, ids[:1], selectors)


def layer_input(model: nn.Module, ids: Tensor) -> tuple[nn.Module, Tensor, Batch, tuple[Tensor, Tensor]]:
    """Return what reaches one layer's attention in a run of the model."""
    config = module_config(attention_modules(model)[0])
    calls: list[Any] = []

    def attend(
        module: nn.Module, x_TD: Tensor, batch: Batch, rope: tuple[Tensor, Tensor], selection: Tensor | None
    ) -> LayerOutput:
        calls.append((module, x_TD, batch, rope))
        return sfa_layer(layer_params(module), x_TD, batch, config=config, selection=selection, rope=rope)

    with replace_attention(model, attend, config=config), torch.no_grad():
        model(ids, use_cache=False)
    return calls[LAYER]


@torch.no_grad()
def draw(path: Path, model: nn.Module, ids: Tensor, selectors: dict[str, Any]) -> None:
    """Draw attention mass with the selected keys, and kept mass against k, on white."""
    matplotlib.use("agg")
    from matplotlib import pyplot

    module, x_TD, batch, rope = layer_input(model, ids)
    params, config = layer_params(module), module_config(module)
    q_THE, _q_latent_TQ, kv_TE = latent_projections(params, x_TD, *rope, config=config)
    ranges = batch.start_T, batch.end_T
    logits_THS = config.softmax_scale * q_THE @ kv_TE.T
    seen_TS = torch.arange(len(kv_TE)) < batch.end_T[:, None]
    mass_TS = logits_THS.masked_fill(~seen_TS[:, None], -torch.inf).softmax(-1).mean(1)
    chosen_TK = sfa_layer(params, x_TD, batch, config=config, rope=rope).selection_TK
    picked_TS = torch.zeros(len(kv_TE), len(kv_TE) + 1).scatter(1, chosen_TK.long() % (len(kv_TE) + 1), 1.0)[:, :-1]

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    shown = mass_TS.where(seen_TS, torch.nan)
    image = left.imshow(shown, cmap="Greys", norm=LogNorm(1e-5, 1e-1), interpolation="nearest")
    red = picked_TS.where((picked_TS > 0) & (torch.arange(len(kv_TE))[:, None] >= config.index_topk), torch.nan)
    left.imshow(red, cmap="autumn", alpha=0.45, interpolation="nearest")
    left.set_title(f"layer {LAYER}: attention mass, {config.index_topk} selected keys in red", fontsize=11)
    left.set(xlabel="key", ylabel="query")
    figure.colorbar(image, ax=left, shrink=0.85, label="share of the query's mass, mean over heads")

    counts = [4, 8, 16, 32, 64, 128, 256]
    for name, select in selectors.items():
        kept = []
        for k in counts:
            small = replace(config, index_topk=k)
            output = sfa_layer(params, x_TD, batch, config=small, select=select, rope=rope)
            topk_TK = global_selection(output.selection_TK, batch)
            mass_T = attention_mass(q_THE, kv_TE, topk_TK, *ranges, scale=config.softmax_scale)
            kept.append(float(mass_T[batch.end_T > k].mean()))
        right.plot(counts, kept, marker="o", label=name)
    right.set(xscale="log", xlabel="keys per query", ylabel="kept share of attention mass", ylim=(0, 1.02))
    right.set_xticks(counts, [str(k) for k in counts])
    right.minorticks_off()
    right.grid(alpha=0.3)
    right.legend(loc="lower right", fontsize=8)
    right.set_title(f"layer {LAYER}: queries that see more than k keys", fontsize=11)
    figure.savefig(path, dpi=110, facecolor="white")


if __name__ == "__main__":
    main()
