"""What `run.py` measures in a process of its own: memory of one call, and a layer here and in transformers.

    python tests/benchmarks/measured.py memory sparse_attention        # MB; set MALLOC_MMAP_THRESHOLD_=65536
    python tests/benchmarks/measured.py ours 4096 [--whole]            # seconds of one GLM-5 layer
    python tests/benchmarks/measured.py transformers 4096 [--whole]

The last line printed is the number. Without ``--whole`` the seven large projections of tokens are left out on both
sides: they are replaced by what they would return.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from ring import anonymous_growth
from torch import Tensor

import sfa_functional as sfa
from sfa_functional.latent import absorb_queries, head_values
from sfa_functional.per_head import attend_in_both_forms, batch_runs

CONFIG = sfa.GLM_5


def memory(function: str) -> float:
    """Return by how many MB memory grew beyond the result: 512 queries of V3.2's widths against 64K keys."""
    config, keys, queries = sfa.DEEPSEEK_V32, 65536, 512
    start_T, end_T = torch.zeros(queries, dtype=torch.int64), keys - queries + 1 + torch.arange(queries)
    if function == "lightning_indexer":
        heads, width = config.index_n_heads, config.index_head_dim
        inputs = torch.randn(queries, heads, width), torch.randn(keys, width), torch.randn(queries, heads)
        result, run = queries * 2048 * 4, lambda: sfa.lightning_indexer(*inputs, start_T, end_T, k=2048)
    else:
        q_THE = torch.randn(queries, config.num_attention_heads, config.key_width)
        kv_SE, topk_TK = torch.randn(keys, config.key_width), torch.randint(keys, (queries, 2048), dtype=torch.int32)
        result = q_THE.shape[0] * q_THE.shape[1] * (config.kv_lora_rank + 1) * 4
        run = lambda: sfa.sparse_attention(q_THE, kv_SE, topk_TK, scale=0.1, value_dim=config.kv_lora_rank)  # noqa: E731
    with anonymous_growth() as growth:
        kept = run()
    assert kept is not None
    return (growth.peak - result) / 2**20


def seconds(run: Callable[[], Any], clock: Callable[[], float]) -> float:
    """Return the time of the quicker of two runs, or of one that took longer than half a minute."""
    best = float("inf")
    for _ in range(2):
        begin = clock()
        run()
        best = min(best, clock() - begin)
        if best > 30:
            break
    return best


def projected(tokens: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Make what a layer's seven projections of tokens would return, and the up-projection of latents."""
    source, c = torch.Generator().manual_seed(0), CONFIG

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source).to(dtype)

    head = c.qk_nope_head_dim + c.qk_rope_head_dim
    return {
        "q_a_proj": normal(tokens, c.q_lora_rank),
        "q_b_proj": normal(tokens, c.num_attention_heads * head) / 4,
        "kv_a_proj": normal(tokens, c.key_width),
        "o_proj": normal(tokens, c.hidden_size),
        "wq_b": normal(tokens, c.index_n_heads * c.index_head_dim),
        "wk": normal(tokens, c.index_head_dim),
        "weights_proj": normal(tokens, c.index_n_heads),
        "kv_b_proj": normal(c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank) / 22,
    }


def ours_between(tokens: int, dtype: torch.dtype) -> Callable[[], Any]:
    """Return the layer between its projections: rotate, select, attend in the form that the layer chooses."""
    given, c, batch = projected(tokens, dtype), CONFIG, sfa.Batch.from_lengths([tokens])
    rope = sfa.rope_cos_sin(batch.position_T, c)
    params = replace(sfa.init_params(replace(c, hidden_size=1), dtype=dtype), kv_b_proj=given["kv_b_proj"])
    named = {"config": c, "k": c.index_topk}

    def run(rows: slice = slice(None), implementation: Any = None) -> Tensor:
        some = replace(batch, **{name: getattr(batch, name)[rows] for name in ("start_T", "end_T", "request_T")})
        cos, sin = (x[rows] for x in rope)
        q = given["q_b_proj"][rows].unflatten(1, (c.num_attention_heads, -1))
        q_nope, q_rope = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
        q_THX = torch.cat([q_nope, sfa.rotate(q_rope, cos, sin, pairing=c.rope_pairing)], dim=-1)
        latent, key = given["kv_a_proj"].split([c.kv_lora_rank, c.qk_rope_head_dim], dim=-1)
        latent = sfa.rms_norm(latent, torch.ones(c.kv_lora_rank), c.latent_norm_eps)
        kv_SE = torch.cat([latent, sfa.rotate(key, *rope, pairing=c.rope_pairing)], dim=-1)
        q_TJI = given["wq_b"][rows].unflatten(1, (c.index_n_heads, -1))
        k_SI = sfa.layer_norm(
            given["wk"], torch.ones(c.index_head_dim), torch.zeros(c.index_head_dim), c.index_norm_eps
        )
        width = c.qk_rope_head_dim
        q_TJI, k_SI = (
            torch.cat([sfa.rotate(x[..., :width], *angles, pairing=c.index_rope_pairing), x[..., width:]], dim=-1)
            for x, angles in ((q_TJI, (cos, sin)), (k_SI, rope))
        )
        w_TJ = given["weights_proj"][rows].float() * c.index_weight_scale
        ranges = some.start_T, some.end_T
        topk_TK = sfa.lightning_indexer(q_TJI, k_SI, w_TJ, *ranges, k=c.index_topk, implementation=implementation)
        if implementation is None:
            runs = batch_runs(some, kv_SE, implementation=None, **named)
            return attend_in_both_forms(params, q_THX, kv_SE, topk_TK, some, runs, config=c)
        absorbed = {"scale": c.softmax_scale, "value_dim": c.kv_lora_rank, "implementation": implementation}
        out_THL = sfa.sparse_attention(absorb_queries(params, q_THX, config=c), kv_SE, topk_TK, **absorbed).out_THL
        return head_values(params, out_THL, config=c)

    few, whole = slice(tokens - 2, tokens), run()
    torch.testing.assert_close(whole[few], run(few, "reference"), rtol=1e-2, atol=1e-3)
    return run


def transformers_layer(tokens: int, dtype: torch.dtype, whole: bool) -> Callable[[], Any]:
    """Return transformers' layer with its sdpa path; without ``whole`` its projections are given."""
    from transformers import GlmMoeDsaConfig
    from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaAttention, GlmMoeDsaRotaryEmbedding

    config = GlmMoeDsaConfig(**CONFIG.to_hf())
    config._attn_implementation = "sdpa"
    attention = GlmMoeDsaAttention(config, layer_idx=0).to(dtype)
    if not whole:

        class Given(torch.nn.Module):
            """Returns what a projection would."""

            def __init__(self, value: Tensor) -> None:
                super().__init__()
                self.value, self.weight = value[None], value[:0]  # its dtype is looked at

            def forward(self, x: Tensor) -> Tensor:
                return self.value

        given = projected(tokens, dtype)
        attention.q_a_proj, attention.q_b_proj = Given(given["q_a_proj"]), Given(given["q_b_proj"])
        attention.kv_a_proj_with_mqa, attention.o_proj = Given(given["kv_a_proj"]), Given(given["o_proj"])
        for name in ("wq_b", "wk", "weights_proj"):
            setattr(attention.indexer, name, Given(given[name]))
        attention.kv_b_proj.weight.data = given["kv_b_proj"]
    x = torch.randn(1, tokens, config.hidden_size).to(dtype)
    position = torch.arange(tokens)[None]
    rope = GlmMoeDsaRotaryEmbedding(config)(x, position)
    mask = torch.ones(tokens, tokens, dtype=torch.bool).tril_()[None, None]
    return lambda: attention(x, position_embeddings=rope, attention_mask=mask, position_ids=position)


def ours(tokens: int, dtype: torch.dtype, whole: bool) -> Callable[[], Any]:
    """Return our layer, or the part of it between the projections."""
    if not whole:
        return ours_between(tokens, dtype)
    params, batch = sfa.init_params(CONFIG, dtype=dtype), sfa.Batch.from_lengths([tokens])
    x_TD = torch.randn(tokens, CONFIG.hidden_size).to(dtype)
    return lambda: sfa.sfa_layer(params, x_TD, batch, config=CONFIG)


def main() -> None:
    """Measure what the arguments say and print the number last."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("what", choices=["memory", "ours", "transformers"])
    parser.add_argument("subject", help="a function, or a number of tokens")
    parser.add_argument("--whole", action="store_true", help="with the projections")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--cpu-time", action="store_true", help="count this process's seconds, not the clock's")
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.cpu_time:  # threads that wait for each other spin, and that counts
        torch.set_num_threads(1)
    with torch.no_grad():
        if options.what == "memory":
            print(memory(options.subject))
        else:
            make = ours if options.what == "ours" else transformers_layer
            run = make(int(options.subject), getattr(torch, options.dtype), options.whole)
            print(seconds(run, time.process_time if options.cpu_time else time.perf_counter))


if __name__ == "__main__":
    main()
