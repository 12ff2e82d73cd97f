"""Draw the pictures of README, each for a light and a dark page, and print the table of selectors that stands there.

python notebooks/pictures.py [--out DIRECTORY]; needs the extras hf and plot. The same versions write the same bytes.
"""

import argparse
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from matplotlib import rc_context
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor
from transformers import DeepseekV32ForCausalLM

import sfa_functional as sfa
import sharding
from sfa_functional.bundled import TINY_CHECKPOINT, held_out_text
from sfa_functional.hf import module_config

LENGTHS = [65536] + [4096] * 8  # the batch that README asks `sfa layout` about
LAYER, TOPK, TOKENS = 2, 32, 256  # of the picture of attention mass

INK = {"light": "#1f2328", "dark": "#e6edf3"}
PAPER = {"light": "#ffffff", "dark": "#0d1117"}
MASS = {"light": "Greys", "dark": "Greys_r"}
CHOSEN = {"light": (0.85, 0.08, 0.08, 0.42), "dark": (1.0, 0.3, 0.25, 0.55)}
LINES = {
    "light": ["#1f77b4", "#d9660b", "#2a8f2a", "#cf222e", "#8250df"],
    "dark": ["#58a6ff", "#ffa657", "#56d364", "#ff7b72", "#d2a8ff"],
}


def main() -> None:
    """Print the table of selectors, then write every picture twice."""
    parser = argparse.ArgumentParser(description="draw the pictures of README")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "pictures")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    model = DeepseekV32ForCausalLM.from_pretrained(TINY_CHECKPOINT, dtype=torch.float32).eval()
    config = module_config(model.model.layers[LAYER].self_attn)
    ids = torch.tensor(list(held_out_text().encode()[:4096])).view(8, 512)
    selectors: dict[str, Any] = {
        "best keys": sfa.best_keys(config.softmax_scale),
        "lightning indexer": None,
        "blocks of 8": sfa.block_topk(8),
        "window": sfa.window,
        "random": sfa.random_keys(torch.Generator()),
    }
    for name, select in selectors.items():
        with sfa.use_sfa(model, topk=TOPK, select=select), torch.no_grad():
            perplexity = model(ids, labels=ids, use_cache=False).loss.exp()
        print(f"{name:18} perplexity at {TOPK} keys: {perplexity:.3f}")

    seen = look_into(model, ids[:1, :TOKENS], selectors)
    for theme in ("light", "dark"):
        ink = dict.fromkeys(
            ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK[theme]
        )
        with rc_context(
            ink
            | {
                "font.size": 10.5,
                "axes.titlesize": 11,
                "figure.facecolor": PAPER[theme],
                "axes.facecolor": PAPER[theme],
            }
        ):
            write(draw_ranks(), args.out / f"sixteen-ranks-{theme}.png")
            write(draw_selectors(*seen, theme), args.out / f"selectors-{theme}.png")


def draw_ranks() -> Figure:
    """Draw sixteen ranks: contiguous beside balanced."""
    splits = {name: sharding.split_tokens(LENGTHS, 16, layout=name) for name in ("contiguous", "balanced")}
    return sharding.plot_splits(splits, LENGTHS)


@torch.no_grad()
def look_into(
    model: DeepseekV32ForCausalLM, ids: Tensor, selectors: dict[str, Any]
) -> tuple[Tensor, Tensor, dict[str, dict[int, float]]]:
    """Return a layer's attention mass [query, key], what its indexer chose, and what each selector keeps, by k."""
    module = model.model.layers[LAYER].self_attn
    inputs: list[Tensor] = []
    hook = module.register_forward_pre_hook(
        lambda _, args, named: inputs.append(named["hidden_states"]), with_kwargs=True
    )
    model(ids, use_cache=False)
    hook.remove()
    params, config, batch = sfa.layer_params(module), module_config(module), sfa.Batch.from_lengths([ids.shape[1]])
    x_TD, scale = inputs[0][0], config.softmax_scale
    q_THE, _, kv_TE = sfa.latent_projections(params, x_TD, *sfa.rope_cos_sin(batch.position_T, config), config=config)
    visible_TS = torch.ones(len(kv_TE), len(kv_TE)).tril() > 0
    mass_TS = (scale * q_THE @ kv_TE.T).masked_fill(~visible_TS[:, None], -torch.inf).softmax(-1).mean(1)

    def choose(k: int, select: Any) -> Tensor:
        chosen = sfa.sfa_layer(params, x_TD, batch, config=replace(config, index_topk=k), select=select)
        return chosen.selection_TK.long()

    chosen_TK = choose(TOPK, None)
    chosen_TS = torch.zeros(len(kv_TE), len(kv_TE) + 1).scatter(1, chosen_TK % (len(kv_TE) + 1), 1.0)[:, :-1] > 0
    kept: dict[str, dict[int, float]] = {name: {} for name in selectors}
    for name, select in selectors.items():
        for k in (4, 8, 16, 32, 64, 128):
            topk_TK = choose(k, select).int()
            mass_T = sfa.attention_mass(q_THE, kv_TE, topk_TK, batch.start_T, batch.end_T, scale=scale)
            kept[name][k] = float(mass_T[batch.end_T > k].mean())
    chosen_TS[:TOPK] = False  # these queries see no more keys than they may choose
    return mass_TS.where(visible_TS, torch.nan), chosen_TS, kept


def draw_selectors(mass_TS: Tensor, chosen_TS: Tensor, kept: dict[str, dict[int, float]], theme: str) -> Figure:
    """Draw attention mass with the chosen keys, and kept mass against k."""
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.1, 1))
    image = left.imshow(mass_TS, cmap=MASS[theme], norm=LogNorm(1e-5, 1e-1), interpolation="nearest")
    left.imshow(chosen_TS[:, :, None] * torch.tensor(CHOSEN[theme]), interpolation="nearest")
    left.set_title(f"layer {LAYER}: attention mass, {TOPK} selected keys in red")
    left.set(xlabel="key", ylabel="query")
    figure.colorbar(image, ax=left, shrink=0.8, label="share of the query's mass, mean over heads")
    for (name, shares), color in zip(kept.items(), LINES[theme], strict=True):
        right.plot(list(shares), list(shares.values()), marker="o", color=color, label=name)
    counts = list(next(iter(kept.values())))
    right.set(xscale="log", xlabel="keys per query", ylabel="kept share of attention mass", ylim=(0, 1.02))
    right.set_xticks(counts, [str(k) for k in counts])
    right.minorticks_off()
    right.grid(alpha=0.25)
    right.legend(loc="lower right", fontsize=9, facecolor="none")
    right.set_title(f"layer {LAYER}: queries that see more than k keys")
    return figure


def write(figure: Figure, path: Path) -> None:
    """Write a PNG of 128 colours, without a date or a program's version."""
    pixels = BytesIO()
    figure.savefig(pixels, dpi=160)
    Image.open(pixels).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    main()
