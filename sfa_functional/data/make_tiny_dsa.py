"""Train the tiny checkpoint that `sfa eval` reads by default, and write it beside this file.

    python sfa_functional/data/make_tiny_dsa.py [--steps N] [--warmup N] [--out DIR]

Bytes are tokens. First the whole model learns with dense attention, its indexers idle; then the indexers alone learn
to predict that attention (`indexer_kl` over all visible keys), as in the published recipe. The text is
`sfa_functional.bundled.training_text`; `held_out_text` is never read. About half an hour on two cores; the result
depends on the machine in its last bits.
"""

import argparse
import math
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, scaled_dot_product_attention
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

from sfa_functional import (
    Batch,
    LayerOutput,
    dense_attention,
    index_keys,
    index_queries,
    index_weights,
    indexer_kl,
    init_params,
    latent_output,
    latent_projections,
    rms_norm,
    rotate,
)
from sfa_functional.bundled import TINY_CHECKPOINT, training_text
from sfa_functional.hf import attention_modules, layer_params, load_params, module_config, replace_attention

CONTEXT = 512


def tiny_model(seed: int = 0) -> DeepseekV32ForCausalLM:
    """Build the untrained model: four layers, bytes as tokens."""
    torch.manual_seed(seed)
    config = DeepseekV32Config(
        vocab_size=256,
        hidden_size=160,
        intermediate_size=448,
        num_hidden_layers=4,
        first_k_dense_replace=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=1,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=1,
        q_lora_rank=64,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        index_n_heads=16,
        index_head_dim=32,
        index_topk=64,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    return DeepseekV32ForCausalLM(config)


def dense_layer(
    module: nn.Module, x_TD: Tensor, batch: Batch, rope: tuple[Tensor, Tensor], _: Tensor | None
) -> LayerOutput:
    """Attend to all visible keys in the ordinary form, which trains faster than the absorbed one."""
    params, config = layer_params(module), module_config(module)
    size, heads = batch.seq_len_B.shape[0], config.num_attention_heads
    q_latent = rms_norm(linear(x_TD, params.q_a_proj), params.q_a_layernorm, config.latent_norm_eps)
    q = linear(q_latent, params.q_b_proj).unflatten(-1, (heads, -1))
    q_nope, q_rope = q.split([config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1)
    latent, k_rope = linear(x_TD, params.kv_a_proj).split([config.kv_lora_rank, config.qk_rope_head_dim], dim=-1)
    latent = rms_norm(latent, params.kv_a_layernorm, config.latent_norm_eps)
    kv = linear(latent, params.kv_b_proj).unflatten(-1, (heads, -1))
    k_nope, value = kv.split([config.qk_nope_head_dim, config.v_head_dim], dim=-1)
    k_rope = rotate(k_rope, *rope, pairing=config.rope_pairing)[:, None].expand(-1, heads, -1)
    q = torch.cat([q_nope, rotate(q_rope, *rope, pairing=config.rope_pairing)], dim=-1)
    k = torch.cat([k_nope, k_rope], dim=-1)
    q, k, value = (y.unflatten(0, (size, -1)).transpose(1, 2) for y in (q, k, value))
    out = scaled_dot_product_attention(q, k, value, is_causal=True, scale=config.softmax_scale)
    y_TD = linear(out.transpose(1, 2).flatten(0, 1).flatten(1), params.o_proj)
    return LayerOutput(y_TD, torch.empty(x_TD.shape[0], 0, dtype=torch.int32), None)


def windows(data: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """Draw random windows of the text."""
    first = torch.randint(len(data) - length, (count,), generator=generator)
    return data[first[:, None] + torch.arange(length)].long()


def train_dense(model: DeepseekV32ForCausalLM, data: Tensor, *, steps: int, batch: int = 8, rate: float = 3e-3) -> None:
    """Train everything but the indexers with dense attention."""
    generator = torch.Generator().manual_seed(1)
    trained = [p for name, p in model.named_parameters() if ".indexer." not in name]
    matrices, vectors = [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))
    began = time.monotonic()
    config = module_config(attention_modules(model)[0])
    with replace_attention(model, dense_layer, config=config):
        for step in range(steps):
            scale = min(1.0, (step + 1) / 100) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))
            for group in optimizer.param_groups:
                group["lr"] = rate * scale
            ids = windows(data, batch, CONTEXT + 1, generator)
            logits = model(ids[:, :-1], use_cache=False).logits
            loss = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            if step % 50 == 0:
                print(f"dense {step}: loss {loss.item():.3f}, {time.monotonic() - began:.0f} s", flush=True)


def warm_up(model: DeepseekV32ForCausalLM, data: Tensor, *, steps: int, batch: int = 4, rate: float = 3e-3) -> None:
    """Train the indexers alone to predict dense attention."""
    generator = torch.Generator().manual_seed(2)
    modules = attention_modules(model)
    config = module_config(modules[0])
    trained = [p for name, p in model.named_parameters() if ".indexer." in name]
    optimizer = torch.optim.AdamW(trained, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    losses: list[Tensor] = []

    def attend(
        module: nn.Module, x_TD: Tensor, batch: Batch, rope: tuple[Tensor, Tensor], _: Tensor | None
    ) -> LayerOutput:
        params = layer_params(module)
        assert params.indexer is not None
        q_THE, q_latent_TQ, kv_TE = latent_projections(params, x_TD, *rope, config=config)
        with torch.enable_grad():
            kl_T = indexer_kl(
                index_queries(params.indexer, q_latent_TQ, *rope, config=config),
                index_keys(params.indexer, x_TD, *rope, config=config),
                index_weights(params.indexer, x_TD, config=config),
                q_THE,
                kv_TE,
                batch.start_T,
                batch.end_T,
                scale=config.softmax_scale,
            )
            losses.append(kl_T.mean())
        visible = batch.start_T, batch.end_T
        out = dense_attention(q_THE, kv_TE, *visible, scale=config.softmax_scale, value_dim=config.kv_lora_rank)
        y_TD = latent_output(params, out.out_THL, config=config)
        return LayerOutput(y_TD, torch.empty(x_TD.shape[0], 0, dtype=torch.int32), None)

    began = time.monotonic()
    with replace_attention(model, attend, config=config):
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1.0, (step + 1) / 20) * (0.05 + 0.95 * (1 - step / steps))
            losses.clear()
            with torch.no_grad():
                model(windows(data, batch, CONTEXT, generator), use_cache=False)
            loss = torch.stack(losses).sum()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            if step % 20 == 0:
                each = ", ".join(f"{kl.item():.3f}" for kl in losses)
                print(f"warm-up {step}: kl {each}, {time.monotonic() - began:.0f} s", flush=True)


def main() -> None:
    """Train and write the checkpoint."""
    parser = argparse.ArgumentParser(description="train the tiny checkpoint")
    parser.add_argument("--steps", type=int, default=1300, help="steps of dense training")
    parser.add_argument("--warmup", type=int, default=400, help="steps of the indexers' warm-up")
    parser.add_argument("--out", type=Path, default=TINY_CHECKPOINT)
    args = parser.parse_args()
    data = torch.frombuffer(bytearray(training_text().encode()), dtype=torch.uint8)
    model = tiny_model()
    count = sum(p.numel() for p in model.parameters())
    print(f"{len(data)} bytes of text, {count} parameters", flush=True)
    train_dense(model, data, steps=args.steps)
    model.to(torch.bfloat16).to(torch.float32)  # the precision it is stored in: the indexers learn from that
    for layer, module in enumerate(attention_modules(model)):
        drawn = init_params(module_config(module), layer=layer, generator=torch.Generator().manual_seed(3 + layer))
        live = layer_params(module)
        load_params(module, type(live)(**(vars(live) | {"indexer": drawn.indexer})))
    warm_up(model, data, steps=args.warmup)
    model.to(torch.bfloat16).save_pretrained(args.out)


if __name__ == "__main__":
    main()
