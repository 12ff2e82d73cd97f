"""What the indexer learns from: values and gradients equal the published definition, and nothing else learns."""

import math
from dataclasses import replace

import pytest
import torch
from torch.utils._pytree import tree_map

import sfa_functional as sfa
from sfa_functional.params import named_fields, params_from_fields
from sharding import MeshShape, P, gather_rows_start, shard_map, simulated_mesh, split_tokens

YARN = sfa.Yarn(factor=40.0, original_max_position_embeddings=64, mscale_all_dim=1.0)
CONFIGS = {
    "half": replace(sfa.TINY, num_attention_heads=3),  # a mean over heads must not assume a power of two
    "interleaved, yarn": replace(sfa.TINY, index_rope_pairing="interleaved", latent_norm_eps=1e-2, yarn=YARN),
}
CONFIG = CONFIGS["half"]
BATCHES = {
    "ragged": ((6, 1, 0, 5), None),
    "padded": ((4, 3, 5, 2), (4, 0, 5, 0)),
}
STAGES = ("warm-up", "sparse")
INDEXER = ("wq_b", "wk", "k_norm_weight", "k_norm_bias", "weights_proj")

stages = pytest.mark.parametrize("stage", STAGES)
batches = pytest.mark.parametrize("name", BATCHES)


def drawn(*shape, seed=2):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer_params(config=CONFIG, seed=1):
    """Draw a layer whose norms are random too."""
    generator = torch.Generator().manual_seed(seed)
    params = sfa.init_params(config, generator=generator, dtype=torch.float64)
    noise = {name: 0.2 * torch.randn(x.shape, generator=generator).double() for name, x in named_fields(params)}
    return params_from_fields({n: x + noise[n] if "norm" in n else x for n, x in named_fields(params)})


def tokens(query_lens, seq_lens=None):
    """Name the request and the position of every row, None for padding."""
    seq_lens = query_lens if seq_lens is None else seq_lens
    lengths = list(enumerate(zip(query_lens, seq_lens, strict=True)))
    return [(b, i) if total else None for b, (new, total) in lengths for i in range(new)]


def selection_for(rows, stage, seed=3, width=4):
    """Choose random positions, some of which stand after their query; None in the warm-up."""
    if stage == "warm-up":
        return None
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(8, generator=generator)[:width] - 1 for _ in rows]).to(torch.int32)


# --- the oracle: plain attention with keys of its own for every head, query by query ---


def angles(rows, config):
    frequency = [config.rope_theta ** (-2 * i / config.qk_rope_head_dim) for i in range(config.qk_rope_head_dim // 2)]
    table = torch.tensor([[(0 if at is None else at[1]) * f for f in frequency] for at in rows], dtype=torch.float64)
    return table.reshape(len(rows), len(frequency)).cos(), table.reshape(len(rows), len(frequency)).sin()


def turned(x, cos, sin, pairing):
    half = x.shape[-1] // 2
    y = list(x.unbind(-1))
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if pairing == "interleaved" else (i, i + half)
        y[a], y[b] = x[..., a] * cos[i] - x[..., b] * sin[i], x[..., b] * cos[i] + x[..., a] * sin[i]
    return torch.stack(y, -1)


def rms(x, gain, eps):
    return x / (x.square().mean() + eps).sqrt() * gain


def vectors(params, x_TD, rows, config):
    """Return q, k, w of the indexer, token by token; hidden states and the low-rank query are constants."""
    cos, sin = angles(rows, config)
    width, found = config.qk_rope_head_dim, ([], [], [])
    for t in range(len(rows)):
        x = x_TD[t].detach()
        c = rms(params.q_a_proj @ x, params.q_a_layernorm, config.latent_norm_eps).detach()
        q = (params.indexer.wq_b @ c).view(config.index_n_heads, config.index_head_dim)
        k = params.indexer.wk @ x
        k = (k - k.mean()) / (k.var(unbiased=False) + 1e-6).sqrt()
        k = k * params.indexer.k_norm_weight + params.indexer.k_norm_bias
        w = params.indexer.weights_proj @ x / math.sqrt(config.index_n_heads * config.index_head_dim)
        for into, y in zip(found, (q, k), strict=False):
            head = turned(y[..., :width], cos[t], sin[t], config.index_rope_pairing)
            into.append(torch.cat([head, y[..., width:]], -1))
        found[2].append(w)
    return tuple(torch.stack(part) for part in found)


def targets(params, x_TD, rows, sets, config):
    """Return the mean over heads of ordinary attention's weights over each query's set."""
    cos, sin = angles(rows, config)
    heads, nope, rope = config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
    m = 1.0 if config.yarn is None else 0.1 * math.log(config.yarn.factor) + 1.0
    queries, keys = [], []
    w_uk_HPL = params.kv_b_proj.view(heads, -1, config.kv_lora_rank)[:, :nope]
    for t, x in enumerate(x_TD):
        c = rms(params.q_a_proj @ x, params.q_a_layernorm, config.latent_norm_eps)
        q = (params.q_b_proj @ c).view(heads, nope + rope)
        queries.append(torch.cat([q[:, :nope], turned(q[:, nope:], cos[t], sin[t], config.rope_pairing)], -1))
        kv = params.kv_a_proj @ x
        latent = rms(kv[: config.kv_lora_rank], params.kv_a_layernorm, config.latent_norm_eps)
        k_rope = turned(kv[config.kv_lora_rank :], cos[t], sin[t], config.rope_pairing)
        keys.append(torch.cat([w_uk_HPL @ latent, k_rope.expand(heads, rope)], -1))
    found = []
    for t, members in enumerate(sets):
        p = torch.zeros(len(members), dtype=torch.float64)
        for h in range(heads if members else 0):
            logits = torch.stack([queries[t][h] @ keys[s][h] for s in members]) * m**2 / math.sqrt(nope + rope)
            p = p + torch.softmax(logits, 0) / heads
        found.append(p.detach())
    return found


def sets_of(rows, selection_TK):
    """Return the rows of the keys that each query is compared over: visible ones, of these the selected ones."""
    sets = []
    for t, at in enumerate(rows):
        seen = [s for s, other in enumerate(rows) if at and other and other[0] == at[0] and other[1] <= at[1]]
        sets.append([s for s in seen if selection_TK is None or rows[s][1] in selection_TK[t].tolist()])
    return sets


def divergences(target, compared, sets):
    """Return Σ p (ln p - ln π) of every query, 0 where there is nothing to learn, and π."""
    q_TJI, k_TI, w_TJ = compared
    kl, pi = [], []
    for t, members in enumerate(sets):
        scores = [(w_TJ[t] * (q_TJI[t] @ k_TI[s]).clamp(min=0)).sum() for s in members]
        pi.append(torch.softmax(torch.stack(scores), 0) if members else torch.zeros(0, dtype=torch.float64))
        ok = len(members) > 1
        kl.append((target[t] * (target[t].log() - pi[t].log())).sum() if ok else torch.zeros((), dtype=torch.float64))
    return torch.stack(kl), pi


def oracle(params, x_TD, rows, config, selection_TK=None):
    sets = sets_of(rows, selection_TK)
    compared = vectors(params, x_TD, rows, config)
    return divergences(targets(params, x_TD, rows, sets, config), compared, sets)[0]


def learning(params, x_TD=None):
    """Return copies of all weights (and hidden states) that require gradients."""
    return tree_map(lambda x: x.detach().clone().requires_grad_(), params if x_TD is None else (params, x_TD))


def indexer_gradients(loss, params):
    leaves = [getattr(params.indexer, name) for name in INDEXER]
    return dict(zip(INDEXER, torch.autograd.grad(loss, leaves), strict=True))


def assert_near(got, want, tolerance=1e-12):
    for name in want:
        assert got[name].shape == want[name].shape
        assert want[name].any(), name
        assert (got[name] - want[name]).abs().max() <= tolerance * want[name].abs().max(), name


class Given:
    """One layer, its hidden states, a batch of them, and what each query selected."""

    def __init__(self, name, stage, config=CONFIG, seed=1):
        self.rows = tokens(*BATCHES[name])
        self.batch = sfa.Batch.from_lengths(*BATCHES[name])
        self.params, self.x_TD = layer_params(config, seed), drawn(len(self.rows), config.hidden_size)
        self.selection_TK = selection_for(self.rows, stage)
        self.named = {"config": config, "selection": self.selection_TK, "rope": angles(self.rows, config)}


# --- the definition ---


@stages
@batches
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_values_and_gradients_equal_the_published_definition(config, name, stage):
    given, u_T = Given(name, stage, config), drawn(len(tokens(*BATCHES[name])), seed=5)
    params = learning(given.params)
    got_T = sfa.indexer_loss(params, given.x_TD, given.batch, **given.named)
    want_T = oracle(params, given.x_TD, given.rows, config, given.selection_TK)
    torch.testing.assert_close(got_T, want_T, rtol=1e-12, atol=1e-12)
    assert want_T.max() > 0.01
    assert_near(*(indexer_gradients((kl_T * u_T).sum(), params) for kl_T in (got_T, want_T)))


@stages
def test_gradients_equal_the_table(stage):
    """g = u (π - p); dw = Σ_s g relu(z); dz = g w [z > 0]; dq = Σ_s dz k; dk = Σ_t Σ_j dz q."""
    given = Given("ragged", stage)
    params, rows = learning(given.params), given.rows
    u_T, sets = drawn(len(rows), seed=5), sets_of(given.rows, given.selection_TK)
    q_TJI, k_TI, w_TJ = vectors(params, given.x_TD, rows, CONFIG)
    target = targets(given.params, given.x_TD, rows, sets, CONFIG)
    q, k, w = (x.detach() for x in (q_TJI, k_TI, w_TJ))
    pi = divergences(target, (q, k, w), sets)[1]
    dq, dk, dw = (torch.zeros_like(x) for x in (q, k, w))
    for t, members in enumerate(sets):
        for place, s in enumerate(members if len(members) > 1 else []):
            g = float(u_T[t] * (pi[t][place] - target[t][place]))
            for j in range(CONFIG.index_n_heads):
                z = float(q[t, j] @ k[s])
                dw[t, j] += g * max(z, 0.0)
                dz = g * float(w[t, j]) * (z > 0)
                dq[t, j] += dz * k[s]
                dk[s] += dz * q[t, j]
    leaves = [getattr(params.indexer, name) for name in INDEXER]
    want = torch.autograd.grad([q_TJI, k_TI, w_TJ], leaves, [dq, dk, dw])
    loss = (sfa.indexer_loss(params, given.x_TD, given.batch, **given.named) * u_T).sum()
    assert_near(indexer_gradients(loss, params), dict(zip(INDEXER, want, strict=True)))


def test_positions_are_those_of_the_batch_where_no_rope_is_given():
    given = Given("padded", "warm-up")
    got_T = sfa.indexer_loss(given.params, given.x_TD, given.batch, config=CONFIG)
    want_T = oracle(given.params, given.x_TD, given.rows, CONFIG)
    torch.testing.assert_close(got_T, want_T, rtol=1e-5, atol=1e-7)  # angles are float32


def test_a_selection_of_all_visible_keys_is_the_warm_up():
    given = Given("ragged", "warm-up")
    all_TK = torch.arange(8, dtype=torch.int32).expand(len(given.rows), 8).flip(1)
    params = learning(given.params)
    dense_T, sparse_T = (
        sfa.indexer_loss(params, given.x_TD, given.batch, **given.named | {"selection": selection})
        for selection in (None, all_TK)
    )
    torch.testing.assert_close(sparse_T, dense_T, rtol=1e-12, atol=1e-14)
    assert_near(indexer_gradients(sparse_T.sum(), params), indexer_gradients(dense_T.sum(), params))


def test_the_sparse_stage_takes_what_the_layer_selected():
    given = Given("ragged", "warm-up")
    rope = given.named["rope"]
    out = sfa.sfa_layer(given.params, given.x_TD, given.batch, config=CONFIG, rope=rope)
    got_T = sfa.indexer_loss(
        given.params, given.x_TD, given.batch, config=CONFIG, rope=rope, selection=out.selection_TK
    )
    want_T = oracle(given.params, given.x_TD, given.rows, CONFIG, out.selection_TK)
    torch.testing.assert_close(got_T, want_T, rtol=1e-12, atol=1e-12)
    dense_T = oracle(given.params, given.x_TD, given.rows, CONFIG)
    assert (got_T - dense_T).abs().max() > 1e-3


# --- who learns ---


@stages
def test_nothing_but_the_indexer_learns(stage):
    given = Given("padded", stage)
    params, x_TD = learning(given.params, given.x_TD)
    sfa.indexer_loss(params, x_TD, given.batch, **given.named).sum().backward()
    assert x_TD.grad is None
    for name, x in named_fields(params):
        assert (x.grad is not None and bool(x.grad.any())) == name.startswith("indexer."), name


def test_vectors_that_are_compared_let_nothing_but_the_indexer_learn():
    given = Given("padded", "warm-up")
    params, x_TD = learning(given.params, given.x_TD)
    compared = sfa.index_vectors(params, x_TD, given.batch, config=CONFIG)
    assert [x.requires_grad for x in compared] == [True] * 3
    torch.stack([x.sum() for x in compared]).sum().backward()
    assert x_TD.grad is None
    assert {name for name, x in named_fields(params) if x.grad is not None} == {f"indexer.{name}" for name in INDEXER}


@stages
def test_a_coefficient_of_zero_gives_zero_gradients_and_not_none(stage):
    given = Given("ragged", stage)
    params = learning(given.params)
    (0.0 * sfa.indexer_loss(params, given.x_TD, given.batch, **given.named).sum()).backward()
    for name in INDEXER:
        grad = getattr(params.indexer, name).grad
        assert grad is not None
        assert not grad.any()


@pytest.mark.parametrize("lengths", [([1, 1, 1], None), ([0], None), ([3], [0]), ([], None)])
@pytest.mark.parametrize("width", [None, 0, 2])
def test_where_nothing_is_to_be_learnt_loss_and_gradients_are_zero(lengths, width):
    """One visible key, padding alone, no rows at all, selections without entries."""
    batch, params = sfa.Batch.from_lengths(*lengths), learning(layer_params())
    count = len(batch.position_T)
    selection = None if width is None else torch.full((count, width), -1, dtype=torch.int32)
    kl_T = sfa.indexer_loss(params, drawn(count, 64), batch, config=CONFIG, selection=selection)
    assert kl_T.tolist() == [0.0] * count
    assert not any(x.any() for x in indexer_gradients(kl_T.sum(), params).values())


@stages
def test_func_grad_equals_backward(stage):
    given = Given("ragged", stage)

    def loss(params, x_TD):
        return sfa.indexer_loss(params, x_TD, given.batch, **given.named).sum()

    found, x_TD = torch.func.grad(loss, argnums=(0, 1))(given.params, given.x_TD)
    params = learning(given.params)
    want = indexer_gradients(loss(params, given.x_TD), params)
    for name, x in named_fields(found):
        assert torch.equal(x, want[name.removeprefix("indexer.")]) if "indexer" in name else not x.any()
    assert not x_TD.any()


def test_arguments_are_left_alone():
    given = Given("padded", "sparse")
    before = tree_map(torch.clone, (given.params, given.x_TD, given.selection_TK))
    sfa.indexer_loss(given.params, given.x_TD, given.batch, **given.named)
    after = (given.params, given.x_TD, given.selection_TK)
    for (_, x), (_, y) in zip(named_fields(before[0]), named_fields(after[0]), strict=True):
        assert torch.equal(x, y)
    assert torch.equal(before[1], after[1])
    assert torch.equal(before[2], after[2])


# --- any split of rows ---

COEFFICIENT = 0.3


def one_batch(given):
    """Return the loss of the whole batch, averaged over its rows that are no padding, and its gradients."""
    params = learning(given.params)
    count = sum(at is not None for at in given.rows)
    loss = COEFFICIENT * sfa.indexer_loss(params, given.x_TD, given.batch, **given.named).sum() / count
    return loss.item(), indexer_gradients(loss, params), count


@stages
def test_micro_batches_divided_by_all_rows_add_up_to_one_batch(stage):
    given = Given("padded", stage)
    want, gradients, count = one_batch(given)
    lengths, seq_lens = BATCHES["padded"]
    for groups in ([[0], [1], [2], [3]], [[0, 2], [1, 3]], [[3, 2, 1], [0]]):
        params, total = learning(given.params), 0.0
        for group in groups:
            index = [t for b in group for t in range(sum(lengths[:b]), sum(lengths[: b + 1]))]
            batch = sfa.Batch.from_lengths([lengths[b] for b in group], [seq_lens[b] for b in group])
            selection = None if given.selection_TK is None else given.selection_TK[index]
            rope = tuple(x[index] for x in given.named["rope"])
            named = {"config": CONFIG, "selection": selection, "rope": rope}
            loss = COEFFICIENT * sfa.indexer_loss(params, given.x_TD[index], batch, **named).sum() / count
            loss.backward()  # gradients add up in the leaves, as in a training loop
            total += loss.item()
        assert abs(total - want) <= 1e-12 * want
        assert_near({name: getattr(params.indexer, name).grad for name in INDEXER}, gradients)


def sharded_loss(params, x_tD, given, split, comm, count):
    """Return one rank's part of the loss: its own queries against the keys of all."""
    local = split.local_batch(given.batch, comm.rank)
    take = split.index_NC[comm.rank].clamp(min=0)
    rope = tuple(x[take] for x in given.named["rope"])
    compared = sfa.index_vectors(params, x_tD, local, config=CONFIG, rope=rope)
    with torch.no_grad():
        clean_tD = torch.where(local.request_T[:, None] >= 0, x_tD, 0)
        q_tHE, _, kv_tE = sfa.latent_projections(params, clean_tD, *rope, config=CONFIG)
    k_SI = split.gather(gather_rows_start(comm, compared.k_TI).wait()[0])
    kv_SE = split.gather(gather_rows_start(comm, kv_tE).wait()[0])
    topk_TK = None if given.selection_TK is None else sfa.global_selection(given.selection_TK[take], local)
    named = {"scale": CONFIG.softmax_scale, "topk_TK": topk_TK}
    kl_t = sfa.indexer_kl(compared.q_TJI, k_SI, compared.w_TJ, q_tHE, kv_SE, local.start_T, local.end_T, **named)
    return COEFFICIENT * kl_t.sum() / count


@stages
@pytest.mark.parametrize(("ranks", "layout"), [(1, "contiguous"), (2, "zigzag"), (4, "striped"), (7, "contiguous")])
def test_ranks_that_hold_rows_add_up_to_one_batch(ranks, layout, stage):
    """Keys are gathered; gradients are summed by shard_map from outside, and by an all_reduce on each rank."""
    given = Given("padded", stage)
    want, gradients, count = one_batch(given)
    split = split_tokens(BATCHES["padded"][0], ranks, layout=layout, seq_lens=BATCHES["padded"][1])
    mesh, specs = simulated_mesh(MeshShape(cp=ranks)), {"in_specs": (P(), P("cp")), "out_specs": P()}

    def outside(comm, params, x_tD):
        return comm["cp"].all_reduce(sharded_loss(params, x_tD, given, split, comm["cp"], count))

    def inside(comm, params, x_tD):
        params = learning(params)
        loss = sharded_loss(params, x_tD, given, split, comm["cp"], count)
        found = indexer_gradients(loss, params)
        return comm["cp"].all_reduce(loss.detach()), {name: comm["cp"].all_reduce(x) for name, x in found.items()}

    x_MD = split.scatter(given.x_TD, fill=math.nan)
    params = learning(given.params)
    loss = shard_map(outside, mesh, **specs)(params, x_MD)
    assert abs(loss.item() - want) <= 1e-12 * want
    assert_near(indexer_gradients(loss, params), gradients)
    loss, found = shard_map(inside, mesh, **specs)(given.params, x_MD)
    assert abs(loss.item() - want) <= 1e-12 * want
    assert_near(found, gradients)


@stages
def test_queries_that_look_at_nothing_leave_their_rows_to_another_rank(stage):
    """Each rank has all hidden states, and a batch in which its own queries alone see keys."""
    given = Given("padded", stage)
    want, gradients, count = one_batch(given)
    params, total = learning(given.params), 0.0
    for rank in range(3):
        mine_T = torch.arange(len(given.rows)) % 3 == rank
        batch = replace(given.batch, end_T=torch.where(mine_T, given.batch.end_T, given.batch.start_T))
        loss = COEFFICIENT * sfa.indexer_loss(params, given.x_TD, batch, **given.named).sum() / count
        loss.backward()
        total += loss.item()
    assert abs(total - want) <= 1e-12 * want
    assert_near({name: getattr(params.indexer, name).grad for name in INDEXER}, gradients)


# --- one indexer for several layers ---


@stages
def test_the_mean_over_the_layers_served_learns_from_their_mean_attention(stage):
    """The values differ by a number that no indexer changes."""
    given = Given("ragged", stage)
    others = [replace(layer_params(seed=11), indexer=None), layer_params(seed=12)]  # what is given is what counts
    hidden = [given.x_TD, drawn(*given.x_TD.shape, seed=21), drawn(*given.x_TD.shape, seed=22)]
    sets = sets_of(given.rows, given.selection_TK)
    apart = []
    for seed in (1, 31):
        owner = learning(layer_params(seed=seed))
        owner = replace(learning(given.params), indexer=owner.indexer)
        rope = given.named["rope"]
        compared = sfa.index_vectors(owner, hidden[0], given.batch, config=CONFIG, rope=rope)
        served = list(zip([owner, *others], hidden, strict=True))
        parts = [sfa.indexer_loss(p, x, given.batch, **given.named, compared=compared) for p, x in served]
        alone_T = sfa.indexer_loss(owner, hidden[0], given.batch, **given.named)
        assert torch.equal(parts[0], alone_T)
        mean_T = torch.stack(parts).mean(0)
        targeted = [targets(p, x.detach(), given.rows, sets, CONFIG) for p, x in served]
        target = [torch.stack(p).mean(0) for p in zip(*targeted, strict=True)]
        want_T = divergences(target, vectors(owner, hidden[0], given.rows, CONFIG), sets)[0]
        u_T = drawn(len(given.rows), seed=5)
        assert_near(*(indexer_gradients((x_T * u_T).sum(), owner) for x_T in (mean_T, want_T)))
        apart.append((mean_T - want_T).detach())
    torch.testing.assert_close(*apart, rtol=0, atol=1e-12)
    assert apart[0].min() > -1e-14
    assert apart[0].max() > 1e-3


# --- padding, NaN, dtypes ---


@stages
def test_padding_gives_zero_and_changes_nothing_whatever_it_holds(stage):
    given, params = Given("padded", stage), learning(layer_params())
    real_T = given.batch.request_T >= 0
    x_TD = torch.where(real_T[:, None], given.x_TD, torch.nan)
    kl_T = sfa.indexer_loss(params, x_TD, given.batch, **given.named)
    assert kl_T[~real_T].tolist() == [0.0] * 5
    plain = sfa.Batch.from_lengths([4, 5])
    selection = None if given.selection_TK is None else given.selection_TK[real_T]
    named = {"config": CONFIG, "selection": selection, "rope": tuple(x[real_T] for x in given.named["rope"])}
    want_T = sfa.indexer_loss(params, given.x_TD[real_T], plain, **named)
    torch.testing.assert_close(kl_T[real_T], want_T, rtol=1e-12, atol=1e-14)
    assert_near(indexer_gradients(kl_T.sum(), params), indexer_gradients(want_T.sum(), params))


@stages
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_spoiled_row_reaches_no_query_that_does_not_see_it(stage, poison):
    """Row 9 is in the middle of the last request: earlier queries and other requests do not see it."""
    given = Given("ragged", stage)
    x_TD = given.x_TD.clone()
    x_TD[9] = poison
    assert given.rows[9] == (3, 2)
    kl_T = sfa.indexer_loss(given.params, x_TD, given.batch, **given.named)
    want_T = sfa.indexer_loss(given.params, given.x_TD, given.batch, **given.named)
    torch.testing.assert_close(kl_T[:9], want_T[:9], rtol=1e-12, atol=1e-14)
    touched = [9 in members and len(members) > 1 for members in sets_of(given.rows, given.selection_TK)]
    spoiled = [len(m) > 1 and (9 in m or t == 9) for t, m in enumerate(sets_of(given.rows, given.selection_TK))]
    assert any(touched)
    assert kl_T.isnan().tolist() == spoiled


@stages
def test_low_precision_is_near_and_sums_are_float32(stage):
    given = Given("ragged", stage)
    params = params_from_fields(
        {name: x.float() if "norm" in name else x.bfloat16() for name, x in named_fields(given.params)}
    )
    got_T = sfa.indexer_loss(params, given.x_TD.bfloat16(), given.batch, config=CONFIG, selection=given.selection_TK)
    assert got_T.dtype == torch.float32
    wide = tree_map(lambda x: x.double(), params)
    want_T = oracle(wide, given.x_TD.bfloat16().double(), given.rows, CONFIG, given.selection_TK)
    assert (got_T - want_T).abs().max() < 0.02 * want_T.max()
    params = learning(params)
    x_TD = given.x_TD.bfloat16()
    loss = sfa.indexer_loss(params, x_TD, given.batch, config=CONFIG, selection=given.selection_TK).sum()
    assert [x.dtype for x in indexer_gradients(loss, params).values()] == [
        torch.bfloat16,
        torch.bfloat16,
        torch.float32,
        torch.float32,
        torch.bfloat16,
    ]


@stages
def test_autocast_and_switched_off_gradients_change_no_value(stage):
    given = Given("ragged", stage)
    params, x_TD = tree_map(lambda x: x.float(), (given.params, given.x_TD))
    want_T = sfa.indexer_loss(params, x_TD, given.batch, **given.named)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(sfa.indexer_loss(params, x_TD, given.batch, **given.named), want_T)
    with torch.no_grad():
        got_T = sfa.indexer_loss(learning(params), x_TD, given.batch, **given.named)
    assert torch.equal(got_T, want_T)
    assert not got_T.requires_grad


# --- refusals ---


def assert_refused(call, message):
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value) == message


def test_what_does_not_fit_is_refused(unchecked):
    given = Given("ragged", "sparse")
    shared, x_TD, batch = replace(given.params, indexer=None), given.x_TD, given.batch
    table = {"block_table": sfa.allocate_blocks([6, 1, 0, 5], 4), "block_size": 4}
    paged, cached = sfa.Batch.from_lengths([6, 1, 0, 5], **table), sfa.Batch.from_lengths([2, 2], [2, 4])
    rule = "a batch with cached context or a block table needs a cache; got None"

    def loss(params=given.params, x_TD=x_TD, batch=batch, **named):
        return lambda: sfa.indexer_loss(params, x_TD, batch, config=CONFIG, **named)

    def compared(params=given.params, x_TD=x_TD, batch=batch):
        return lambda: sfa.index_vectors(params, x_TD, batch, config=CONFIG)

    whole = given.selection_TK
    for call, message in [
        (loss(shared), "indexer_loss: a layer without an indexer needs compared=; got None"),
        (compared(shared), "index_vectors: the layer must have an indexer; got None"),
        (loss(batch=paged), f"indexer_loss: {rule}"),
        (loss(x_TD=x_TD[:4], batch=cached), f"indexer_loss: {rule}"),
        (compared(batch=paged), f"index_vectors: {rule}"),
        (loss(selection=whole.long()), "indexer_loss: selection must be int32; got torch.int64"),
        (loss(selection=whole[1:]), "indexer_loss: selection must have 12 rows; got (11, 4)"),
        (loss(selection=whole[:, 0]), "indexer_loss: selection must be [T, K]; got (12,)"),
        (loss(x_TD=x_TD[1:]), "indexer_loss: position_T must have 11 rows; got (12,)"),
        (compared(x_TD=x_TD[1:]), "index_vectors: position_T must have 11 rows; got (12,)"),
        (loss(x_TD=x_TD[:, 1:]), "latent_queries: x must be [T, 64]; got (12, 63)"),
        (
            loss(x_TD=x_TD.float()),
            "latent_queries: x, projections must have one dtype; got [torch.float32, torch.float64]",
        ),
    ]:
        assert_refused(call, message)


def test_vectors_of_other_rows_are_refused(unchecked):
    given = Given("ragged", "warm-up")
    compared = sfa.index_vectors(given.params, given.x_TD, given.batch, config=CONFIG)
    fewer = sfa.Compared(*(x[1:] for x in compared))
    for stage in STAGES:
        named = {"config": CONFIG, "selection": selection_for(given.rows, stage)}
        with pytest.raises(ValueError, match=r"^indexer_(loss|kl): .* must have 1[12] rows; got \(") as error:
            sfa.indexer_loss(given.params, given.x_TD, given.batch, **named, compared=fewer)
        assert len(str(error.value).splitlines()) == 1
