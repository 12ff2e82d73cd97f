"""Tiles: whatever their size, results stay the same; they partition the queries and cover what these see."""

import itertools

import pytest
import torch

import sfa_functional as sfa
from sfa_functional import blockwise_indexer, tiles

SCALE = 0.6


def _everything(row_S, topk_TK, start_T, end_T, **bounded):
    """Run every function that works in tiles, on one fixed set of inputs."""
    source = torch.Generator().manual_seed(3)
    q_THE, kv_SE, q_TJI, k_SI, w_TJ = (
        torch.randn(*shape, generator=source, dtype=torch.float64)
        for shape in ((10, 2, 6), (21, 6), (10, 16, 5), (21, 5), (10, 16))
    )
    leaves = [x.requires_grad_() for x in (q_THE, kv_SE, q_TJI, k_SI, w_TJ)]
    sparse = sfa.sparse_attention(q_THE, kv_SE, topk_TK, scale=SCALE, value_dim=4, **bounded)
    dense = sfa.dense_attention(q_THE, kv_SE, start_T, end_T, scale=SCALE, value_dim=4, row_S=row_S, **bounded)
    inputs = q_TJI, k_SI, w_TJ, q_THE, kv_SE, start_T, end_T
    warm, trained = (sfa.indexer_kl(*inputs, scale=SCALE, topk_TK=topk, **bounded) for topk in (None, topk_TK))
    loss = sparse.out_THL.sin().sum() + dense.out_THL.cos().sum() + warm.sum() + trained.sin().sum()
    grads = torch.autograd.grad(loss, leaves)
    names = ("q_TJI", "k_SI", "w_TJ", "q_THE", "kv_SE", "start_T", "end_T")
    compared = dict(zip(names, inputs, strict=True)) | {"row_S": row_S, "k": 5}
    selectors = [sfa.best_keys(SCALE), sfa.block_topk(2)]
    chosen = [sfa.lightning_indexer(q_TJI, k_SI, w_TJ, start_T, end_T, k=5, row_S=row_S, **bounded)]
    chosen += [select(**compared) for select in selectors]
    return [*sparse, *dense, warm, trained, *grads], chosen


@pytest.mark.parametrize(("workspace", "key_tile"), [(1, 1), (1, 1024), (2000, 3), (2**22, 4)])
@pytest.mark.parametrize("pool", [False, True])
def test_results_do_not_depend_on_the_size_of_tiles(monkeypatch, workspace, key_tile, pool):
    row_S = torch.randperm(21)[:17] if pool else None
    start_T = torch.tensor([0] * 4 + [6] * 3 + [0] * 3)
    end_T = torch.randint(0, 25, (10,))
    topk_TK = torch.stack([torch.randperm(30)[:12] - 5 for _ in range(10)]).to(torch.int32)
    want, want_chosen = _everything(row_S, topk_TK, start_T, end_T)
    monkeypatch.setattr(tiles, "TILE_VALUES", max(1, workspace // 8))
    monkeypatch.setattr(tiles, "KEY_TILE", key_tile)
    monkeypatch.setattr(tiles, "CPU_STEP", workspace)
    got, got_chosen = _everything(row_S, topk_TK, start_T, end_T, workspace_bytes=workspace)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
    assert all(torch.equal(a, b) for a, b in zip(got_chosen, want_chosen, strict=True))


def _assert_partition(ranges, num_keys, limit):
    start_T, end_T = (torch.tensor([r[i] for r in ranges], dtype=torch.int64) for i in (0, 1))
    seen = [(max(start, 0), min(end, num_keys)) for start, end in ranges]
    next_query = 0
    for queries, (low, high) in tiles.query_tiles(start_T, end_T, num_keys, limit):
        assert queries.start == next_query
        assert queries.start < queries.stop <= queries.start + limit
        assert 0 <= low <= high <= num_keys
        inside = [(start, end) for start, end in seen[queries] if start < end]
        assert len({start for start, _ in inside}) <= 1, "a tile crosses requests"
        assert (low, high) == ((inside[0][0], max(end for _, end in inside)) if inside else (low, low))
        next_query = queries.stop
    assert next_query == len(ranges)


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_tiles_partition_queries_and_cover_exactly_what_these_see(limit):
    every = list(itertools.product(range(-1, 5), range(-1, 5)))
    for ranges in itertools.product(every, repeat=2):
        _assert_partition(ranges, 3, limit)
    for _ in range(300):
        _assert_partition([every[i] for i in torch.randint(len(every), (6,)).tolist()], 3, limit)


def test_no_queries_make_one_empty_tile():
    none_T = torch.zeros(0, dtype=torch.int64)
    assert list(tiles.query_tiles(none_T, none_T, 9, 4)) == [(slice(0, 0), (0, 0))]


def test_ranges_that_cannot_be_read_make_tiles_over_all_keys():
    seen = []

    def record(start_T, end_T):
        seen.extend(tiles.query_tiles(start_T, end_T, 9, 4))
        return start_T

    torch.func.vmap(record)(torch.zeros(2, 6, dtype=torch.int64), torch.ones(2, 6, dtype=torch.int64))
    assert seen == [(slice(0, 4), (0, 9)), (slice(4, 6), (0, 9))]


@pytest.mark.parametrize(
    ("threads", "each", "workspace", "want"),
    [
        (1, 300, 10_000, 3),  # a step's 1000 bytes
        (2, 300, 10_000, 6),
        (2, 300, 1000, 2),  # half of the workspace each
        (3, 2000, 10_000, 3),  # larger than a step: one each
        (3, 2000, 5000, 2),  # what the workspace holds
        (3, 2000, 1, 1),
    ],
)
def test_each_thread_takes_a_step_of_its_own(monkeypatch, threads, each, workspace, want):
    monkeypatch.setattr(tiles, "CPU_STEP", 1000)
    torch.set_num_threads(threads)
    assert tiles.products_per_step(each, torch.device("cpu"), workspace) == want
    assert tiles.products_per_step(each, torch.device("meta"), workspace) == max(1, workspace // each)


def test_a_sum_tells_of_numbers_that_are_not_finite():
    x = torch.randn(3, 5)
    assert tiles.all_finite(x)
    for lost in ([torch.nan, 0], [torch.inf, 0], [0, -torch.inf], [torch.inf, -torch.inf]):
        assert not tiles.all_finite(x.index_put((torch.tensor([0, 2]), torch.tensor(3)), torch.tensor(lost)))


def test_key_tiles_cut_a_span_into_runs(monkeypatch):
    monkeypatch.setattr(tiles, "KEY_TILE", 4)
    assert list(tiles.key_tiles((3, 12))) == [slice(3, 7), slice(7, 11), slice(11, 12)]


def test_compact_lists_columns_in_order_then_minus_one():
    for k, pattern in itertools.product((1, 2, 4, 5), itertools.product([False, True], repeat=4)):
        columns = [s for s, chosen in enumerate(pattern) if chosen]
        if len(columns) <= k:
            got = blockwise_indexer.compact(torch.tensor([pattern]), k)
            assert got.dtype == torch.int32
            assert got.tolist() == [columns + [-1] * (k - len(columns))]
