"""Sparse attention over pages keeps the precision that a serving stack asks of it, on that stack's batches.

Eleven ragged batches of V3.2's widths: keys written into pages, selections translated to rows of the pool, results
compared with float64 attention in a plain loop over requests. Beyond what the peer looks at: selections of a quarter
of each sequence, selections that the lightning indexer makes, log-sum-exps, and gradients.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import sfa_functional as sfa
from tests.vectors import read_vectors

VECTORS = read_vectors("peers.json")["sfa_precision"]
SPECS = {spec["name"]: spec for spec in VECTORS["specs"]}
SMALL = [name for name in SPECS if name.endswith(("small", "small_batch", "single"))]
H, L, R = VECTORS["heads"], VECTORS["latent"], VECTORS["rope"]
J, I = 8, 64  # noqa: E741  the letters of the library; the indexer's sizes are ours, the peer has none
BLOCK, SCALE = VECTORS["block_size"], VECTORS["scale"]

LONG = [name for name, spec in SPECS.items() if max(spec["query_lens"]) > 16]
EVERY = 9

implementations = pytest.mark.parametrize("implementation", ["reference", "blockwise"])
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


@dataclass
class Case:
    """A batch whose keys lie in pages: some query tokens of it, and what they are compared with."""

    batch: sfa.Batch
    pool: sfa.JointCache
    q_THE: Tensor
    q_TJI: Tensor
    w_TJ: Tensor
    kv_SE: list[Tensor]  # of each request, in order of position
    k_SI: list[Tensor]
    rows: list[slice]  # of each request among the query tokens
    position_T: Tensor
    start_T: Tensor
    end_T: Tensor

    @property
    def seq_lens(self) -> list[int]:
        return [len(kv_SE) for kv_SE in self.kv_SE]

    def attend(self, selection_TK: Tensor, implementation: Any) -> sfa.AttentionOutput:
        """Attend to positions within each request, through the pages."""
        key_TK = torch.where(selection_TK >= 0, selection_TK + self.start_T[:, None], -1).to(torch.int32)
        assert self.batch.row_S is not None
        result = sfa.sparse_attention(
            self.q_THE,
            sfa.cache_rows(self.pool),
            sfa.map_selection(key_TK, self.batch.row_S),
            scale=SCALE,
            value_dim=L,
            implementation=implementation,
        )
        assert result.out_THL.dtype == self.q_THE.dtype
        return result


def make_case(name: str, dtype: torch.dtype, *, every: int = 1, requires_grad: bool = False) -> Case:
    """Draw a batch's numbers, write its keys into pages from page 1, and take some of its query tokens.

    Queries know nothing of each other, so ``every`` leaves out all but every so-manieth token of a long prefill (more
    than 16 new tokens), counted back from its last. Rows that hold no key are NaN.
    """
    spec = SPECS[name]
    query_lens, seq_lens = spec["query_lens"], spec["seq_lens"]
    generator = torch.Generator().manual_seed(VECTORS["seed"])

    def normal(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator, dtype=dtype) * VECTORS["input_scale"]).requires_grad_(
            requires_grad
        )

    kv_SE, k_SI = [normal(n, L + R) for n in seq_lens], [normal(n, I).detach() for n in seq_lens]
    q_THE = normal(sum(query_lens), H, L + R)
    q_TJI = normal(sum(query_lens), J, I).detach()
    w_TJ = torch.randn(sum(query_lens), J, generator=generator)

    table_BU = sfa.allocate_blocks(seq_lens, BLOCK)
    table_BU = torch.where(table_BU >= 0, table_BU + 1, -1).to(torch.int32)
    blocks = int(table_BU.max()) + 1
    pool = sfa.JointCache(
        kv=torch.full((blocks, BLOCK, L + R), torch.nan, dtype=dtype),
        index_k=torch.full((blocks, BLOCK, I), torch.nan, dtype=dtype),
    )
    context = [s - n for n, s in zip(query_lens, seq_lens, strict=True)]
    batch = sfa.Batch.from_lengths(query_lens, seq_lens, block_table=table_BU, block_size=BLOCK)
    for step, low, high in (
        (sfa.Batch.from_lengths(context, block_table=table_BU, block_size=BLOCK), [0] * len(context), context),
        (batch, context, seq_lens),
    ):
        new_kv_TE, new_k_TI = (
            torch.cat([rows[a:b] for rows, a, b in zip(part, low, high, strict=True)]) for part in (kv_SE, k_SI)
        )
        assert step.slot_T is not None
        pool = sfa.write_cache(pool, new_kv_TE, new_k_TI, step.slot_T)

    taken, rows, first = [], [], 0
    for start, n in zip(batch.query_start_B1[:-1].tolist(), query_lens, strict=True):
        of_request = range(start + n - 1, start - 1, -every if n > 16 else -1)
        taken += reversed(of_request)
        rows.append(slice(first, first + len(of_request)))
        first += len(of_request)
    return Case(
        batch=batch,
        pool=pool,
        q_THE=q_THE if requires_grad else q_THE[taken],
        q_TJI=q_TJI[taken],
        w_TJ=w_TJ[taken],
        kv_SE=kv_SE,
        k_SI=k_SI,
        rows=rows,
        position_T=batch.position_T[taken],
        start_T=batch.start_T[taken],
        end_T=batch.end_T[taken],
    )


@pytest.fixture(
    scope="module",
    params=[(name, dtype) for name in SPECS for dtype in (torch.bfloat16, torch.float32)],
    ids=lambda param: f"{param[0]}-{param[1]}",
)
def case(request: pytest.FixtureRequest) -> Case:
    """One batch at a time, for all tests that take it; of a long prefill every 9th token, for the time it takes."""
    name, dtype = request.param
    return make_case(name, dtype, every=EVERY)


def prefix_selection(case: Case, width: int) -> Tensor:
    s_K = torch.arange(width)
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


def exact_attention(
    case: Case, selection_TK: Tensor, q_THE: Tensor | None = None, kv_SE: list[Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Attend in float64, request by request, with a dense mask."""
    outs, lses = [], []
    for rows, keys in zip(case.rows, kv_SE or case.kv_SE, strict=True):
        queries = (case.q_THE if q_THE is None else q_THE)[rows].double()
        chosen = torch.zeros(len(queries), len(keys) + 1, dtype=torch.bool)
        chosen.scatter_(1, torch.where(selection_TK[rows] >= 0, selection_TK[rows], len(keys)).long(), True)
        z = SCALE * torch.einsum("the,se->ths", queries, keys.double())
        z = z.masked_fill(~chosen[:, None, :-1], -torch.inf)
        lses.append(z.logsumexp(-1))
        outs.append(torch.einsum("ths,sl->thl", z.softmax(-1), keys[:, :L].double()))
    return torch.cat(outs), torch.cat(lses)


def check(result: sfa.AttentionOutput, exact: tuple[Tensor, Tensor]) -> None:
    """Apply the peer's tolerance; in float32 also ours, which is a thousand times tighter."""
    tolerance = VECTORS["tolerance"]
    out_THL, (exact_THL, exact_lse_TH) = result.out_THL, exact
    dtype = out_THL.dtype
    expected_THL = exact_THL.to(dtype)
    assert out_THL.shape == expected_THL.shape
    assert bool(out_THL.isfinite().all())
    actual, expected = out_THL.double(), expected_THL.double()
    error, size = (actual - expected).abs(), expected.abs()
    assert bool((error <= tolerance["atol"] + tolerance["rtol"] * size).all())
    peak = size.max()
    assert error.max() / peak < tolerance["max_error_over_peak_below"]
    assert error.mean() / size.mean() < tolerance["mean_error_over_mean_below"]
    counts = size >= peak * tolerance["relative_error_counts_where_abs_reference_is_at_least_this_part_of_peak"]
    assert (error / size)[counts].max() < tolerance["relative_error_below"]
    assert sfa.difference(result.lse_TH, exact_lse_TH).max_rel < 1e-5
    if dtype == torch.float32:
        assert sfa.difference(out_THL, exact_THL).max_rel < 1e-5


# The peer's own check: the whole causal prefix


def peer_width(case: Case) -> int:
    """Take the peer's width for short steps; for a long prefill, where most of it is -1, the longest length."""
    return max(case.seq_lens) if max(rows.stop - rows.start for rows in case.rows) > 8 else VECTORS["k"]


@implementations
def test_attention_to_the_causal_prefix_is_precise(case: Case, implementation: str) -> None:
    selection_TK = prefix_selection(case, peer_width(case))
    check(case.attend(selection_TK, implementation), exact_attention(case, selection_TK))


@pytest.mark.parametrize("name", LONG)
def test_bfloat16_attention_of_every_token_of_a_prefill_is_precise(name: str) -> None:
    """With the default implementation; nothing is left out here."""
    case = make_case(name, torch.bfloat16)
    selection_TK = prefix_selection(case, peer_width(case))
    check(case.attend(selection_TK, None), exact_attention(case, selection_TK))


@pytest.mark.parametrize("name", SMALL)
@implementations
def test_float16_attention_to_the_causal_prefix_is_precise(name: str, implementation: str) -> None:
    """Small batches alone: products are taken in float32 from float16 inputs."""
    case = make_case(name, torch.float16, every=EVERY)
    selection_TK = prefix_selection(case, peer_width(case))
    check(case.attend(selection_TK, implementation), exact_attention(case, selection_TK))


@implementations
def test_dense_attention_through_pages_is_attention_to_the_causal_prefix(case: Case, implementation: str) -> None:
    """The oracle reads every key row of the table for every query: of more than 8 queries it gets about 8."""
    some = slice(None, None, -(-len(case.q_THE) // 8) if implementation == "reference" else None)
    result = sfa.dense_attention(
        case.q_THE[some],
        sfa.cache_rows(case.pool),
        case.start_T[some],
        case.end_T[some],
        scale=SCALE,
        value_dim=L,
        row_S=case.batch.row_S,
        implementation=implementation,
    )
    exact_THL, exact_lse_TH = exact_attention(case, prefix_selection(case, max(case.seq_lens)))
    check(result, (exact_THL[some], exact_lse_TH[some]))


# Fewer keys than the sequence has


@implementations
def test_attention_to_a_random_quarter_is_precise(case: Case, implementation: str) -> None:
    """Entries stand in random order, with holes between them."""
    selection_TK = random_selection(case)
    check(case.attend(selection_TK, implementation), exact_attention(case, selection_TK))


@implementations
def test_attention_to_the_indexers_quarter_is_precise(case: Case, implementation: str) -> None:
    """The indexer scores through the pages, and chooses a quarter of each request's length by float64's scores too."""
    assert case.pool.index_k is not None
    selection_TK = torch.full((len(case.position_T), max(case.seq_lens) // 4), -1, dtype=torch.int32)
    for rows, k_SI in zip(case.rows, case.k_SI, strict=True):
        k = len(k_SI) // 4
        ranges = case.start_T[rows], case.end_T[rows]
        topk_tK = sfa.lightning_indexer(
            case.q_TJI[rows],
            case.pool.index_k.flatten(0, 1),
            case.w_TJ[rows],
            *ranges,
            k=k,
            row_S=case.batch.row_S,
            implementation=implementation,
        )
        sfa.validate_selection(topk_tK, *ranges)
        chosen_tK = torch.where(topk_tK >= 0, topk_tK - ranges[0][:, None], -1)
        check_indexer(case, rows, k_SI, chosen_tK, k)
        selection_TK[rows, :k] = chosen_tK.to(torch.int32)
    check(case.attend(selection_TK, implementation), exact_attention(case, selection_TK))


def check_indexer(case: Case, rows: slice, k_SI: Tensor, chosen_tK: Tensor, k: int) -> None:
    """Compare with float64 scores: k keys (all, where fewer are seen), the best ones, near-ties aside."""
    z_tJS = torch.einsum("tji,si->tjs", case.q_TJI[rows].double(), k_SI.double())
    score_tS = torch.einsum("tj,tjs->ts", case.w_TJ[rows].double(), z_tJS.relu())
    visible_t1 = case.position_T[rows, None] + 1
    seen_tS = torch.arange(len(k_SI)) < visible_t1
    count_t1 = visible_t1.clamp(max=k)
    assert torch.equal((chosen_tK >= 0).sum(-1, keepdim=True), count_t1)
    chosen_tS = torch.zeros(len(score_tS), len(k_SI) + 1, dtype=torch.bool)
    chosen_tS = chosen_tS.scatter(1, torch.where(chosen_tK >= 0, chosen_tK, len(k_SI)).long(), True)[:, :-1]
    eps = 1e-5 * score_tS.abs().max()
    ordered_tS = score_tS.masked_fill(~seen_tS, -torch.inf).sort(dim=-1, descending=True).values
    kth_t1 = ordered_tS.gather(1, count_t1 - 1)
    assert bool((chosen_tS <= seen_tS).all())
    assert bool((score_tS >= kth_t1 - eps)[chosen_tS].all())
    assert bool((score_tS <= kth_t1 + eps)[seen_tS & ~chosen_tS].all())


# Gradients


@pytest.mark.parametrize("name", ["pure_decode_small_batch", "mtp_1_plus_1", "mixed_small"])
@implementations
@dtypes
def test_gradients_through_pages_equal_those_of_float64(name: str, implementation: str, dtype: torch.dtype) -> None:
    """Of queries and of keys before they were written, through out and lse, for a random quarter of each length.

    In bfloat16 the result may be rounded, once; sums over the queries that share a key may not.
    """
    case = make_case(name, dtype, requires_grad=True)
    selection_TK = random_selection(case)
    generator = torch.Generator().manual_seed(11)
    out_weight = torch.randn(case.q_THE.shape[0], H, L, generator=generator, dtype=torch.float64)
    lse_weight = torch.randn(case.q_THE.shape[0], H, generator=generator, dtype=torch.float64)
    out_weight = out_weight.to(dtype).double()  # so that the same numbers enter both

    out_THL, lse_TH = case.attend(selection_TK, implementation)
    loss = (out_THL * out_weight.to(dtype)).sum(dtype=torch.float32) + (lse_TH * lse_weight.float()).sum()
    ours = torch.autograd.grad(loss, [case.q_THE, *case.kv_SE])
    q_THE = case.q_THE.detach().double().requires_grad_()
    kv_SE = [rows.detach().double().requires_grad_() for rows in case.kv_SE]
    exact_THL, exact_lse_TH = exact_attention(case, selection_TK, q_THE, kv_SE)
    exact_loss = (exact_THL * out_weight).sum() + (exact_lse_TH * lse_weight.float().double()).sum()
    exact = torch.autograd.grad(exact_loss, [q_THE, *kv_SE])
    for gradient, expected in zip(ours, exact, strict=True):
        assert gradient.dtype == dtype
        assert bool(gradient.isfinite().all())
        assert sfa.difference(gradient, expected).max_rel < (1e-5 if dtype == torch.float32 else 2**-8)


@implementations
@dtypes
def test_gradient_of_a_key_sums_all_queries_that_selected_it(implementation: str, dtype: torch.dtype) -> None:
    """4096 queries, each with all its weight on row 0: a sum kept in bfloat16 would stop at 256."""
    q_THE = torch.zeros(4096, 1, 4, dtype=dtype)
    kv_SE = torch.ones(2, 4, dtype=dtype, requires_grad=True)
    topk_TK = torch.zeros(4096, 1, dtype=torch.int32)
    out_THL, _ = sfa.sparse_attention(q_THE, kv_SE, topk_TK, scale=1.0, value_dim=2, implementation=implementation)
    (gradient,) = torch.autograd.grad(out_THL.sum(dtype=torch.float32), kv_SE)
    assert gradient.tolist() == [[4096.0, 4096.0, 0.0, 0.0], [0.0] * 4]
