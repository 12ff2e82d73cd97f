"""Sparse attention over a cache dealt out to ranks keeps the precision that a serving stack asked of it.

Eleven ragged batches of V3.2's widths on simulated ranks (pcp × dcp): queries are dealt out over pcp, the latent cache
over all ranks. Each rank writes its own rows into pages and attends in two ways: it gathers the blocks of all ranks and
attends to all of them, or it attends to its own rows for everyone's queries and the parts are merged by log-sum-exp.
Both are compared with one rank and with float64 attention in a plain loop over requests. The peer mocked the gathers;
here they run. Beyond what the peer looked at: selections of a quarter of each sequence in float32 and float64,
log-sum-exps, and positions dealt out singly as well as in whole blocks.

The normal run takes all 34 combinations of batch and ranks in bfloat16, a fifth of them in float16, and all of them in
float32 or float64, batch by batch. The heads of tensor parallel 1, 2 and 4 rotate through the batches, the runs of
positions (1 and a block) through the combinations; of a long prefill it takes every 17th query token. ``SFA_ALL=1``
runs the full product, with every query token.
"""

import functools
import itertools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import sfa_functional as sfa
import sharding
from sharding import CacheSplit, P
from tests.vectors import read_vectors

VECTORS = read_vectors("peers.json")["sfa_cp_precision"]
SPECS = {spec["name"]: spec for spec in VECTORS["specs"]}
HEADS = list(VECTORS["heads_by_tp"].values())
L, R = VECTORS["latent"], VECTORS["rope"]
BLOCK, SCALE = VECTORS["block_size"], VECTORS["scale"]
INTERLEAVES = (1, BLOCK)

ALL = os.environ.get("SFA_ALL") == "1"
EVERY = 1 if ALL else 17

RANKS = [tuple(x) for x in VECTORS["combinations_spec_pcp_dcp"]]

Combination = tuple[str, int, torch.dtype, int, int, int]  # batch, heads, dtype, pcp, dcp, interleave


def combinations(*dtypes: torch.dtype) -> list[Combination]:
    """List all, or each batch and ranks once, with the others in rotation; those of one batch together."""
    if ALL:
        product = itertools.product(SPECS, HEADS, dtypes, RANKS, INTERLEAVES)
        return [(name, heads, dtype, *x[1:], run) for name, heads, dtype, x, run in product if x[0] == name]
    found = []
    for i, (name, pcp, dcp) in enumerate(RANKS):
        n = list(SPECS).index(name)
        found.append((name, HEADS[n % 3], dtypes[n % len(dtypes)], pcp, dcp, INTERLEAVES[(i + n) % 2]))
    return found


@dataclass
class Case:
    """A batch: some query tokens of it, the keys of each request, and where a token stands."""

    decodes: bool  # at most 8 new tokens of each request
    q_THE: Tensor
    kv_SE: list[Tensor]  # of each request, in order of position
    rows: list[slice]  # of each request among the query tokens
    request_T: Tensor
    position_T: Tensor

    @property
    def seq_lens(self) -> list[int]:
        return [len(kv_SE) for kv_SE in self.kv_SE]


def make_case(name: str, heads: int, dtype: torch.dtype) -> Case:
    """Draw a batch's numbers and take some of its query tokens: of a long prefill (more than 16) every 17th,
    counted back from its last. Queries know nothing of each other.
    """
    query_lens, seq_lens = SPECS[name]["query_lens"], SPECS[name]["seq_lens"]
    generator = torch.Generator().manual_seed(VECTORS["seed"])

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype) * VECTORS["input_scale"]

    kv_SE, q_THE = [normal(n, L + R) for n in seq_lens], normal(sum(query_lens), heads, L + R)
    batch = sfa.Batch.from_lengths(query_lens, seq_lens)
    taken, rows = [], []
    for start, n in zip(batch.query_start_B1[:-1].tolist(), query_lens, strict=True):
        of_request = range(start + n - 1, start - 1, -EVERY if n > 16 else -1)
        rows.append(slice(len(taken), len(taken) + len(of_request)))
        taken += reversed(of_request)
    return Case(max(query_lens) <= 8, q_THE[taken], kv_SE, rows, batch.request_T[taken], batch.position_T[taken])


def prefix_selection(case: Case) -> Tensor:
    """Select the whole causal prefix: the peer's width for decode, the longest length for a prefill."""
    s_K = torch.arange(VECTORS["k"] if case.decodes else max(case.seq_lens))
    return torch.where(s_K <= case.position_T[:, None], s_K, -1).to(torch.int32)


def random_selection(case: Case) -> Tensor:
    """Choose a quarter of each request's length at random among what each token sees, in random order, with holes."""
    generator = torch.Generator().manual_seed(7)
    selection_TK = torch.full((len(case.position_T), max(case.seq_lens) // 4 + 3), -1, dtype=torch.int32)
    for rows, length in zip(case.rows, case.seq_lens, strict=True):
        for t in range(rows.start, rows.stop):
            chosen = torch.randperm(int(case.position_T[t]) + 1, generator=generator)[: length // 4]
            place = torch.randperm(selection_TK.shape[1], generator=generator)[: len(chosen)]
            selection_TK[t, place] = chosen.to(torch.int32)
    return selection_TK


def exact_attention(case: Case, selection_TK: Tensor) -> sfa.AttentionOutput:
    """Attend in float64, request by request, with a dense mask."""
    outs, lses = [], []
    for rows, keys in zip(case.rows, case.kv_SE, strict=True):
        queries, selection = case.q_THE[rows].double(), selection_TK[rows].long()
        chosen = torch.zeros(len(queries), len(keys) + 1, dtype=torch.bool)
        chosen.scatter_(1, torch.where(selection >= 0, selection, len(keys)), True)
        z = SCALE * torch.einsum("the,se->ths", queries, keys.double())
        z = z.masked_fill(~chosen[:, None, :-1], -torch.inf)
        lses.append(z.logsumexp(-1))
        outs.append(torch.einsum("ths,sl->thl", z.softmax(-1), keys[:, :L].double()))
    return sfa.AttentionOutput(torch.cat(outs), torch.cat(lses))


# One rank, and many


def pages(seq_lens: list[int], block_size: int) -> Tensor:
    """Hand out pages in order from page 1; page 0 is reserved."""
    table_BU = sfa.allocate_blocks(seq_lens, block_size)
    return torch.where(table_BU >= 0, table_BU + 1, -1).to(torch.int32)


def empty_pool(table_BU: Tensor, dtype: torch.dtype) -> sfa.JointCache:
    """Allocate pages of NaN: what is read without being written shows."""
    return sfa.JointCache(kv=torch.full((int(table_BU.max()) + 1, BLOCK, L + R), torch.nan, dtype=dtype))


def attend(
    q_THE: Tensor, rows_SE: Tensor, table_BU: Tensor, request_T: Tensor, place_TK: Tensor
) -> sfa.AttentionOutput:
    """Attend to the rows that a block table has for places within each query's request."""
    request_TK = request_T[:, None].expand_as(place_TK)
    row_TK = sfa.token_slots(table_BU, request_TK.flatten(), place_TK.flatten(), block_size=BLOCK).view(place_TK.shape)
    return sfa.sparse_attention(q_THE, rows_SE, row_TK.to(torch.int32), scale=SCALE, value_dim=L)


def on_one_rank(case: Case, selection_TK: Tensor) -> sfa.AttentionOutput:
    table_BU = pages(case.seq_lens, BLOCK)
    batch = sfa.Batch.from_lengths(case.seq_lens, block_table=table_BU, block_size=BLOCK)
    assert batch.slot_T is not None
    pool, kv_SE = empty_pool(table_BU, case.q_THE.dtype), torch.cat(case.kv_SE)
    pool = sfa.write_cache(pool, kv_SE, None, batch.slot_T, donate=True)
    return attend(case.q_THE, pool.kv.flatten(0, 1), table_BU, case.request_T, selection_TK)


def on_ranks(case: Case, selection_TK: Tensor, pcp: int, dcp: int, interleave: int) -> dict[str, sfa.AttentionOutput]:
    """Attend over a cache dealt out to pcp · dcp ranks, by blocks and by queries; queries are dealt out over pcp."""
    cut = CacheSplit(pcp * dcp, interleave)
    table_BU = pages(case.seq_lens, BLOCK * cut.num_ranks)
    written = sfa.Batch.from_lengths(case.seq_lens)

    def body(comm: Mapping, q_tHE: Tensor, selection_tK: Tensor, request_t: Tensor, kv_SE: Tensor) -> dict:
        rank = comm["pcp", "dcp"].rank
        slot_S = cut.local_slots(table_BU, written.request_T, written.position_T, rank, block_size=BLOCK)
        mine_S, pool = slot_S >= 0, empty_pool(table_BU, kv_SE.dtype)
        kv = sfa.write_cache(pool, kv_SE[mine_S], None, slot_S[mine_S], donate=True).kv
        ways = {"blocks": by_compact_blocks if not case.decodes else by_all_blocks, "queries": by_queries}
        return {name: way(comm, q_tHE, selection_tK, request_t, kv, table_BU, cut) for name, way in ways.items()}

    tokens = sharding.split_tokens([len(case.q_THE)], pcp, layout="contiguous")
    dealt = tokens.scatter(case.q_THE), tokens.scatter(selection_TK, fill=-1), tokens.scatter(case.request_T, fill=-1)
    mesh = sharding.simulated_mesh(sharding.MeshShape(pcp=pcp, dcp=dcp))
    run = sharding.shard_map(body, mesh, in_specs=(P("pcp"), P("pcp"), P("pcp"), P()), out_specs=P("pcp"))
    results = run(*dealt, torch.cat(case.kv_SE))
    return {way: sfa.AttentionOutput(*map(tokens.gather, result)) for way, result in results.items()}


def by_all_blocks(
    comm: Mapping, q_tHE: Tensor, selection_tK: Tensor, request_t: Tensor, kv: Tensor, table_BU: Tensor, cut: CacheSplit
) -> sfa.AttentionOutput:
    """Gather every request's pages, also where it has fewer than others; then attend as if there were one rank."""
    rows_SE = comm["pcp", "dcp"].all_gather(kv[table_BU.flatten().clamp(min=0)].flatten(0, 1))
    blocks_BU = sharding.gathered_block_table(*table_BU.shape, cut.num_ranks)
    return attend(q_tHE, rows_SE, blocks_BU, request_t, cut.gathered_position(selection_tK, block_size=BLOCK))


def by_compact_blocks(
    comm: Mapping, q_tHE: Tensor, selection_tK: Tensor, request_t: Tensor, kv: Tensor, table_BU: Tensor, cut: CacheSplit
) -> sfa.AttentionOutput:
    """Gather the pages that the batch refers to; then attend as if there were one rank."""
    page_M, blocks_BU = sharding.compact_block_table(table_BU, cut.num_ranks)
    rows_SE = comm["pcp", "dcp"].all_gather(kv[page_M].flatten(0, 1))
    return attend(q_tHE, rows_SE, blocks_BU, request_t, cut.gathered_position(selection_tK, block_size=BLOCK))


def by_queries(
    comm: Mapping, q_tHE: Tensor, selection_tK: Tensor, request_t: Tensor, kv: Tensor, table_BU: Tensor, cut: CacheSplit
) -> sfa.AttentionOutput:
    """Gather the queries, attend to the rows that are here, and merge the parts: over pcp, then over dcp.

    Parts travel in the dtype of sums: rounded to bfloat16 before each merge, they would miss the tolerance.
    """
    pcp, dcp = comm["pcp"], comm["dcp"]
    q_MHE, selection_MK, request_M = map(pcp.all_gather, (q_tHE, selection_tK, request_t))
    mine_MK = cut.local_selection(selection_MK, comm["pcp", "dcp"].rank)
    mine_MK = mine_MK[:, : int((mine_MK >= 0).sum(-1).max())]  # what is mine stands in front
    part = attend(q_MHE, kv.flatten(0, 1), table_BU, request_M, mine_MK)
    arrived = pcp.all_to_all(part.out_THL.to(part.lse_TH.dtype)), pcp.all_to_all(part.lse_TH)
    out_tHL, lse_tH = merge(*map(dcp.all_gather, merge(*arrived, count=pcp.size)), count=dcp.size)
    return sfa.AttentionOutput(out_tHL.to(q_tHE.dtype), lse_tH)


def merge(out: Tensor, lse: Tensor, *, count: int) -> sfa.AttentionOutput:
    """Merge the parts that arrived one after the other."""
    parts = zip(out.chunk(count), lse.chunk(count), strict=True)
    return sfa.merge_attention([sfa.AttentionOutput(*part) for part in parts])


# Comparison


def check(result: sfa.AttentionOutput, exact: sfa.AttentionOutput) -> None:
    """Apply the peer's tolerance."""
    tolerance = VECTORS["tolerance"]
    dtype = result.out_THL.dtype
    expected_THL = exact.out_THL.to(dtype)
    assert result.out_THL.shape == expected_THL.shape
    assert bool(result.out_THL.isfinite().all())
    actual, expected = result.out_THL.double(), expected_THL.double()
    error, size = (actual - expected).abs(), expected.abs()
    assert bool((error <= tolerance["atol"] + tolerance["rtol"] * size).all())
    peak = size.max()
    assert error.max() / peak < tolerance["max_error_over_peak_below"]
    assert error.mean() / size.mean() < tolerance["mean_error_over_mean_below"]
    counts = size >= peak * tolerance["relative_error_counts_where_abs_reference_is_at_least_this_part_of_peak"]
    assert (error / size)[counts].max() < tolerance["relative_error_below"]
    assert sfa.difference(result.lse_TH, exact.lse_TH).max_rel < 1e-5


@functools.lru_cache(maxsize=1)
def expected(
    name: str, heads: int, dtype: torch.dtype, select: Callable[[Case], Tensor]
) -> tuple[Case, Tensor, sfa.AttentionOutput, sfa.AttentionOutput]:
    """Return a batch, its selection, and what float64 and one rank make of them; once for all ranks."""
    case = make_case(name, heads, dtype)
    selection_TK = select(case)
    return case, selection_TK, exact_attention(case, selection_TK), on_one_rank(case, selection_TK)


@pytest.mark.parametrize(
    ("name", "heads", "dtype", "pcp", "dcp", "interleave"),
    combinations(torch.bfloat16) + combinations(torch.float16)[:: 1 if ALL else 5],
    ids=str,
)
def test_attention_to_the_causal_prefix_over_a_sharded_cache_is_precise(
    name: str, heads: int, dtype: torch.dtype, pcp: int, dcp: int, interleave: int
) -> None:
    """Products are taken in float32 from float16 inputs."""
    case, selection_TK, exact, one = expected(name, heads, dtype, prefix_selection)
    for result in on_ranks(case, selection_TK, pcp, dcp, interleave).values():
        assert result.out_THL.dtype == dtype
        check(result, exact)
        check(result, one)


@pytest.mark.parametrize(
    ("name", "heads", "dtype", "pcp", "dcp", "interleave"), combinations(torch.float32, torch.float64), ids=str
)
def test_attention_to_a_random_quarter_over_a_sharded_cache_is_exact(
    name: str, heads: int, dtype: torch.dtype, pcp: int, dcp: int, interleave: int
) -> None:
    """Entries stand in random order, with holes between them."""
    case, selection_TK, *right = expected(name, heads, dtype, random_selection)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    results = on_ranks(case, selection_TK, pcp, dcp, interleave)
    for result, (out_THL, lse_TH) in itertools.product(results.values(), right):
        assert sfa.difference(result.out_THL, out_THL).max_rel < tolerance
        assert sfa.difference(result.lse_TH, lse_TH).max_rel < tolerance
