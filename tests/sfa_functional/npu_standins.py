"""Stand-ins for Ascend's operators: the vendor's schemas, and CPU kernels as strict and as hostile as these allow.

A kernel raises `Broken` on every broken rule of the documentation, and does what the documentation leaves open in the
worst way: it shuffles indices, lets ties go to the higher row, leaves numbers that look like results behind the last
prefix sum and in rows without keys, writes the last row for slot -1, and de-interleaves where the operator does.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tests.vectors import read_vectors

SCHEMAS: dict[str, dict[str, str]] = read_vectors("npu_ops.json")
EVERYTHING = 2**63 - 1
GARBAGE = 77_777_777


class Broken(RuntimeError):
    """A rule of an operator's documentation that a call breaks; the device's own error is no ValueError either."""


def rule(ok: bool, text: str) -> None:
    if not ok:
        raise Broken(text)


class StandIns:
    """What the kernels remember: calls with what matters of their arguments, and weights in the device's format."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.formatted: dict[int, Tensor] = {}
        self.narrow_weights = False  # a 950 wants the heads' weights in the queries' dtype

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    # ----------------------------------------------------------------------------------------------------------------

    def npu_lightning_indexer(
        self,
        query: Tensor,
        key: Tensor,
        weights: Tensor,
        *,
        actual_seq_lengths_query: Tensor | None = None,
        actual_seq_lengths_key: Tensor | None = None,
        block_table: Tensor | None = None,
        layout_query: str = "BSND",
        layout_key: str = "BSND",
        sparse_count: int = 2048,
        sparse_mode: int = 3,
        pre_tokens: int = EVERYTHING,
        next_tokens: int = EVERYTHING,
        return_value: bool = False,
    ) -> tuple[Tensor, Tensor]:
        self.calls.append(("npu_lightning_indexer", {"layout_key": layout_key, "key": key, "query": query}))
        self.calls[-1][1].update(query_lens=actual_seq_lengths_query, key_lens=actual_seq_lengths_key)
        rule(layout_query == "TND" and layout_key in ("TND", "PA_BSND"), "layouts")
        rule(query.ndim == 3 and weights.shape == query.shape[:2], "query [T, J, I], weights [T, J]")
        rule(query.dtype in (torch.bfloat16, torch.float16) and key.dtype == query.dtype, "dtypes")
        rule(weights.dtype == (query.dtype if self.narrow_weights else torch.float32), "weights' dtype")
        rule(query.shape[1] in (8, 16, 24, 32, 64) and query.shape[2] == key.shape[-1] == 128, "head counts, widths")
        rule(1 <= sparse_count <= 2048 or sparse_count in range(3072, 8193, 1024), "sparse_count")
        rule(sparse_mode in (0, 3) and not return_value, "mode")
        rule(pre_tokens == next_tokens == EVERYTHING, "pre_tokens, next_tokens")
        tokens = query.shape[0]
        rule(min(query.numel(), key.numel()) > 0, "empty tensors")
        _contiguous(query, key, weights, block_table)
        query_ends = _lengths(actual_seq_lengths_query, prefix=True, limit=tokens)
        keys_of = _keys_of_requests(key, actual_seq_lengths_key, block_table, layout_key, len(query_ends))
        result = torch.randint(0, GARBAGE, (tokens, 1, sparse_count), dtype=torch.int32)
        for b, (first, last) in enumerate(zip([0, *query_ends], query_ends, strict=False)):
            rows_SI = keys_of[b]().float()
            for t in range(first, last):
                count = len(rows_SI) if sparse_mode == 0 else len(rows_SI) - (last - t) + 1
                if count <= 0:
                    continue  # garbage stays
                heads_JS = torch.relu(query[t].float() @ rows_SI[:count].T)
                score_S = weights[t].float() @ heads_JS
                best = (count - 1) - score_S.flip(0).argsort(descending=True, stable=True)[:sparse_count]
                result[t, 0] = -1
                result[t, 0, : len(best)] = best[torch.randperm(len(best))].to(torch.int32)
        return result, torch.empty(0, dtype=query.dtype)

    def npu_sparse_flash_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None,
        sparse_indices: Tensor,
        scale_value: float,
        *,
        block_table: Tensor | None = None,
        actual_seq_lengths_query: Tensor | None = None,
        actual_seq_lengths_kv: Tensor | None = None,
        query_rope: Tensor | None = None,
        key_rope: Tensor | None = None,
        sparse_block_size: int = 1,
        layout_query: str = "BSND",
        layout_kv: str = "BSND",
        sparse_mode: int = 3,
        pre_tokens: int = EVERYTHING,
        next_tokens: int = EVERYTHING,
        attention_mode: int = 0,
        return_softmax_lse: bool = False,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        self.calls.append(("npu_sparse_flash_attention", {"layout_kv": layout_kv, "key": key, "key_rope": key_rope}))
        self.calls[-1][1].update(query_lens=actual_seq_lengths_query, key_lens=actual_seq_lengths_kv, query=query)
        rule(layout_query == "TND" and layout_kv in ("TND", "PA_BSND"), "layouts")
        rule(attention_mode == 2 and sparse_block_size == 1 and sparse_mode in (0, 3), "modes")
        rule(pre_tokens == next_tokens == EVERYTHING and sinks is None, "pre_tokens, next_tokens, sinks")
        rule(query_rope is not None and key_rope is not None and value is not None, "rope and value are passed")
        assert query_rope is not None
        assert key_rope is not None
        assert value is not None
        tensors = (query, key, value, query_rope, key_rope)
        rule(query.dtype in (torch.bfloat16, torch.float16) and len({x.dtype for x in tensors}) == 1, "dtypes")
        tokens, heads = query.shape[:2]
        rule(heads in (1, 2, 4, 8, 16, 32, 64, 128), "head count")
        rule(query.shape[2] == key.shape[-1] == 512 and query_rope.shape == (tokens, heads, 64), "widths of queries")
        rule(key_rope.shape == (*key.shape[:-1], 64) and value.data_ptr() == key.data_ptr(), "widths of keys; value")
        rule(min(x.numel() for x in (*tensors, sparse_indices)) > 0, "empty tensors")
        _contiguous(*tensors, sparse_indices, block_table)
        indices = sparse_indices
        rule(indices.dtype == torch.int32 and indices.shape[:2] == (tokens, 1) and indices.ndim == 3, "indices")
        used = indices[:, 0] >= 0
        rule(bool((indices >= -1).all()) and not bool((used[:, 1:] & ~used[:, :-1]).any()), "valid indices come first")
        rule(not (return_softmax_lse and layout_kv == "PA_BSND"), "no lse with PA_BSND")
        query_ends = _lengths(actual_seq_lengths_query, prefix=True, limit=tokens)
        joined = torch.cat([key, key_rope], dim=-1)
        keys_of = _keys_of_requests(joined, actual_seq_lengths_kv, block_table, layout_kv, len(query_ends))
        out = torch.full_like(query, torch.nan)
        top, total = torch.randn(1, tokens, heads), torch.rand(1, tokens, heads)
        for b, (first, last) in enumerate(zip([0, *query_ends], query_ends, strict=False)):
            rows_SE = keys_of[b]().float()
            for t in range(first, last):
                chosen = indices[t, 0][used[t]].long()
                rule(chosen.numel() == 0 or int(chosen.max()) < len(rows_SE), "an index beyond the keys")
                rule(len(chosen.unique()) == len(chosen), "an index twice")
                if sparse_mode == 3:
                    chosen = chosen[chosen < len(rows_SE) - (last - t) + 1]
                if len(chosen) == 0:
                    continue  # NaN stays
                z_HK = scale_value * torch.cat([query[t], query_rope[t]], dim=-1).float() @ rows_SE[chosen].T
                top[0, t], total[0, t] = z_HK.amax(-1), torch.exp(z_HK - z_HK.amax(-1, keepdim=True)).sum(-1)
                out[t] = (torch.softmax(z_HK, dim=-1) @ rows_SE[chosen, :512]).to(out.dtype)
        return (out, top, total) if return_softmax_lse else (out, torch.empty(0), torch.empty(0))

    def npu_mla_prolog_v3(
        self,
        token_x: Tensor,
        weight_dq: Tensor,
        weight_uq_qr: Tensor,
        weight_uk: Tensor,
        weight_dkv_kr: Tensor,
        rmsnorm_gamma_cq: Tensor,
        rmsnorm_gamma_ckv: Tensor,
        rope_sin: Tensor,
        rope_cos: Tensor,
        kv_cache: Tensor,
        kr_cache: Tensor,
        *,
        rmsnorm_epsilon_cq: float = 1e-5,
        rmsnorm_epsilon_ckv: float = 1e-5,
        cache_mode: str = "PA_BSND",
        query_norm_flag: bool = False,
        **rest: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        self.calls.append(("npu_mla_prolog_v3", {}))
        rule(cache_mode == "TND" and not any(x is not None for x in rest.values() if isinstance(x, Tensor)), "modes")
        tensors = [x for x in locals().values() if isinstance(x, Tensor)]
        rule(all(x.dtype == torch.bfloat16 for x in tensors), "bfloat16 throughout")
        rule(all(x.is_contiguous() for x in tensors) and min(x.numel() for x in tensors) > 0, "contiguous, not empty")
        tokens, hidden = token_x.shape
        heads, nope, _ = weight_uk.shape
        low_rank = weight_dq.shape[1]
        rule(hidden in (1024, 2048, 3072, 4096, 5120, 6144, 7168, 7680, 8192) and low_rank in (1536, 2048), "D, Q")
        rule(heads in (1, 2, 4, 8, 16, 32, 64, 128) and nope in (128, 192), "H, P")
        rule(weight_dq.shape[0] == hidden and weight_uk.shape[2] == 512, "weight_dq, weight_uk")
        rule(weight_uq_qr.shape == (low_rank, heads * (nope + 64)), "weight_uq_qr")
        rule(weight_dkv_kr.shape == (hidden, 576), "weight_dkv_kr")
        for weight in (weight_dq, weight_uq_qr, weight_dkv_kr):
            rule(weight.data_ptr() in self.formatted, "large weights are FRACTAL_NZ")
        rule(weight_uk.data_ptr() not in self.formatted, "weight_uk is plain")
        rule(rmsnorm_gamma_cq.shape == (low_rank,) and rmsnorm_gamma_ckv.shape == (512,), "gains")
        rule(rope_sin.shape == rope_cos.shape == (tokens, 64), "rope tables")
        for table in (rope_sin, rope_cos):
            rule(torch.equal(table[:, :32], table[:, 32:]), "rope tables hold every value twice")
        rule(kv_cache.shape == (tokens, 1, 512) and kr_cache.shape == (tokens, 1, 64), "caches of mode TND")
        latent = _rms(token_x.float() @ weight_dq.float(), rmsnorm_gamma_cq, rmsnorm_epsilon_cq).bfloat16()
        q = (latent.float() @ weight_uq_qr.float()).bfloat16().unflatten(1, (heads, nope + 64)).float()
        query = torch.einsum("thp,hpl->thl", q[..., :nope], weight_uk.float()).bfloat16()
        kv = (token_x.float() @ weight_dkv_kr.float()).bfloat16().float()
        kv_cache.copy_(_rms(kv[:, None, :512], rmsnorm_gamma_ckv, rmsnorm_epsilon_ckv))
        kr_cache.copy_(_deinterleaved_rope(kv[:, None, 512:], rope_sin, rope_cos))
        query_rope = _deinterleaved_rope(q[..., nope:], rope_sin, rope_cos).bfloat16()
        none = torch.empty(0)
        return query, query_rope, none, latent if query_norm_flag else none, none

    def npu_format_cast(
        self, input: Tensor, acl_format: int, *, customize_dtype: int | None = None, input_dtype: int | None = None
    ) -> Tensor:
        self.calls.append(("npu_format_cast", {}))
        rule(acl_format == 29 and input.is_contiguous(), "format 29 of a contiguous weight")
        result = input.clone()
        self.formatted[result.data_ptr()] = result
        return result

    # ----------------------------------------------------------------------------------------------------------------

    def npu_scatter_nd_update_(self, input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
        self.calls.append(("npu_scatter_nd_update_", {"pool": input}))
        _scatter(input, indices, updates)
        return input

    def npu_scatter_nd_update(self, input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
        self.calls.append(("npu_scatter_nd_update", {"pool": input}))
        result = input.clone()
        _scatter(result, indices, updates)
        return result

    def npu_scatter_pa_kv_cache(
        self,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        *,
        compress_lens: Tensor | None = None,
        compress_seq_offsets: Tensor | None = None,
        seq_lens: Tensor | None = None,
        cache_mode: str | None = "PA_NZ",
    ) -> None:
        self.calls.append(("npu_scatter_pa_kv_cache", {"pool": key_cache, "rope": value_cache}))
        rule(cache_mode == "Norm" and compress_lens is None and seq_lens is None, "mode")
        rule(key.dtype in (torch.bfloat16, torch.float16) and len({x.dtype for x in (key, value)}) == 1, "dtypes")
        rule(slot_mapping.dtype == torch.int32 and slot_mapping.shape == key.shape[:1], "slots")
        for rows, cache in ((key, key_cache), (value, value_cache)):
            rule(rows.ndim == 3 and cache.ndim == 4 and rows.shape[1:] == cache.shape[2:], "shapes")
            rule(cache.shape[2] == 1 and rows.is_contiguous() and cache.is_contiguous(), "one head, contiguous")
            _scatter(cache.view(-1, cache.shape[-1]), slot_mapping[:, None], rows[:, 0])


def _lengths(lengths: Tensor | None, *, prefix: bool, limit: int) -> list[int]:
    rule(lengths is not None and lengths.dtype == torch.int32 and lengths.ndim == 1, "lengths are int32 vectors")
    assert lengths is not None
    listed = lengths.tolist()
    rule(len(listed) > 0 and min(listed) >= 0, "lengths are not negative")
    if prefix:
        rule(listed == sorted(listed) and listed[-1] <= limit, "prefix sums grow up to the number of rows")
    return listed


def _keys_of_requests(key: Tensor, lengths: Tensor | None, table: Tensor | None, layout: str, requests: int) -> Any:
    """Return, for each request, a function that reads its rows."""
    if layout == "TND":
        rule(key.ndim == 3 and key.shape[1] == 1 and table is None, "keys [S, 1, W], no block table")
        ends = _lengths(lengths, prefix=True, limit=len(key))
        rule(len(ends) == requests, "as many key lengths as requests")
        pairs = zip([0, *ends], ends, strict=False)
        return [lambda first=first, last=last: key[first:last, 0] for first, last in pairs]
    rule(key.ndim == 4 and key.shape[2] == 1 and table is not None, "keys [blocks, size, 1, W], a block table")
    assert table is not None
    size = key.shape[1]
    rule(size % 16 == 0 and 16 <= size <= 1024, "block size")
    rule(table.dtype == torch.int32 and table.ndim == 2 and table.shape[0] == requests, "block table int32 [B, U]")
    counts = _lengths(lengths, prefix=False, limit=0)
    rule(len(counts) == requests and max(counts) <= table.shape[1] * size, "lengths fit the block table")

    def read(b: int) -> Tensor:
        pages = table[b, : -(-counts[b] // size)].long()
        rule(bool(((pages >= 0) & (pages < len(key))).all()), "a page beyond the pool")
        return key[pages].flatten(0, 2)[: counts[b]]

    return [lambda b=b: read(b) for b in range(requests)]


def _scatter(pool: Tensor, indices: Tensor, updates: Tensor) -> None:
    known = (torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int64, torch.bool)
    rule(pool.ndim == 2 and pool.dtype in known and updates.dtype == pool.dtype, "dtypes")
    rule(indices.dtype in (torch.int32, torch.int64) and indices.shape == (len(updates), 1), "indices [T, 1]")
    rule(len(updates) > 0 and updates.shape[1] == pool.shape[1], "updates [T, W]")
    _contiguous(pool, updates)
    slots = indices[:, 0].tolist()
    rule(all(-1 <= slot < len(pool) for slot in slots), "slots lie in the pool")
    before: dict[int, Tensor] = {}
    for slot, row in zip(slots, updates.clone(), strict=True):
        same = slot not in before or torch.equal(before[slot].view(torch.uint8), row.view(torch.uint8))
        before[slot] = row
        pool[slot] = row if same else torch.nan  # -1 is the last row, as plain indexing has it


def _contiguous(*tensors: Tensor | None) -> None:
    rule(all(x is None or x.is_contiguous() for x in tensors), "tensors are contiguous")


def _rms(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gamma.float()


def _deinterleaved_rope(x: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    """Rotate pairs (2i, 2i + 1); first all first elements come out, then all second ones."""
    a, b, sin, cos = x[..., 0::2], x[..., 1::2], sin[:, None, :32].float(), cos[:, None, :32].float()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def _fakes(lib: torch.library.Library) -> None:
    """Give shapes without kernels, as the vendor's meta functions do."""

    def indexer(query: Tensor, key: Tensor, weights: Tensor, *, sparse_count: int = 2048, **_: Any) -> Any:
        return query.new_empty(query.shape[0], 1, sparse_count, dtype=torch.int32), query.new_empty(0)

    def attention(query: Tensor, *_: Any, return_softmax_lse: bool = False, **__: Any) -> Any:
        shape = (1, *query.shape[:2]) if return_softmax_lse else (0,)
        sums = (query.new_empty(shape, dtype=torch.float32) for _ in range(2))
        return (query.new_empty(query.shape), *sums)

    def prolog(
        token_x: Tensor, weight_dq: Tensor, weight_uq_qr: Tensor, weight_uk: Tensor, *rest: Any, **_: Any
    ) -> Any:
        tokens, heads = token_x.shape[0], weight_uk.shape[0]
        none = token_x.new_empty(0, dtype=torch.float32)
        rope, normed = token_x.new_empty(tokens, heads, 64), token_x.new_empty(tokens, weight_dq.shape[1])
        return token_x.new_empty(tokens, heads, 512), rope, none, normed, none

    fakes = {
        "npu_lightning_indexer": indexer,
        "npu_sparse_flash_attention": attention,
        "npu_mla_prolog_v3": prolog,
        "npu_format_cast": lambda input, acl_format, **_: torch.empty_like(input),
        "npu_scatter_nd_update": lambda input, indices, updates: torch.empty_like(input),
        "npu_scatter_nd_update_": lambda input, indices, updates: input,
        "npu_scatter_pa_kv_cache": lambda *_, **__: None,
    }
    for name, fake in fakes.items():
        torch.library.register_fake(f"npu::{name}", fake, lib=lib)


@contextmanager
def registered(*, kernels: bool = True) -> Iterator[StandIns]:
    """Declare all operators of the vectors, with kernels for the CPU, for as long as the context lasts."""
    stand_ins = StandIns()
    lib = torch.library.Library("npu", "FRAGMENT")
    try:
        for name, entry in SCHEMAS.items():
            assert not torch._C._dispatch_has_kernel(f"npu::{name}"), f"{name} is there already: is torch_npu loaded?"
            lib.define(entry["schema"])
            if kernels and hasattr(stand_ins, name):
                lib.impl(name, getattr(stand_ins, name), "CPU")
        _fakes(lib)
        yield stand_ins
    finally:
        lib._destroy()
