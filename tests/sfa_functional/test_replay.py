"""What was selected once is selected again: replayed runs have the bits of recorded ones, however they are cut."""

import itertools
import json
import random
from dataclasses import replace

import pytest
import torch
from torch.utils._pytree import tree_map

import sfa_functional as sfa
from sfa_functional.hf import mask_to_batch
from sfa_functional.params import named_fields
from sfa_functional.replay import config_hash, config_text, different_field
from sharding import MeshShape, P, TokenSplit, context_parallel_layer, shard_map, simulated_mesh, split_tokens
from tests.sharding.test_tensor_parallel import LENGTHS, summable

CONFIG = replace(sfa.TINY, index_topk=5, indexer_types=("full", "shared", "full"))
BLOCK = 4
NOISES = ("weights", "inputs")
BATCHES = {
    "ragged": ((13, 3, 7), None),
    "empty request": ((9, 0, 8), None),
    "padding between": ((9, 3, 8), (9, 0, 8)),
    "padding last": ((9, 8, 3), (9, 8, 0)),
    "nothing last": ((9, 8, 0, 0), None),
    "one token": ((1,), None),
}


def model(dtype=torch.float64, config=CONFIG, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [sfa.init_params(config, layer=i, generator=generator, dtype=dtype) for i in range(config.num_layers)]


def drawn(*shape, seed=2, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def with_noise(layers, seed=3):
    """Change every weight of every indexer by as much as it weighs."""
    generator = torch.Generator().manual_seed(seed)

    def changed(x):
        return x + torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) * (x.std() + 0.1)

    return [p if p.indexer is None else replace(p, indexer=tree_map(changed, p.indexer)) for p in layers]


def noisy_select(seed):
    """Return a selector: the lightning indexer, with noise of its own in every call on what it compares."""
    generator = torch.Generator().manual_seed(seed)

    def select(*, q_TJI, k_SI, w_TJ, start_T, end_T, k, row_S, **_):
        q_TJI, k_SI = (x + torch.randn(x.shape, generator=generator).to(x.dtype) for x in (q_TJI, k_SI))
        return sfa.lightning_indexer(q_TJI, k_SI, w_TJ, start_T, end_T, k=k, row_S=row_S)

    return select


def forward(layers, x_TD, batch, *, caches=None, recording=None, select=None, rope=None, layer_function=sfa.sfa_layer):
    """Run a stack of layers with residuals; return hidden states, what chose, and the caches."""
    steps, selection, after = [], None, []
    for i, params in enumerate(layers):
        if recording is not None:
            selection = sfa.replay_selection(recording, i, batch)
        elif params.indexer is not None:
            selection = None
        given = {"selection": selection, "select": select if selection is None else None, "rope": rope}
        out = layer_function(params, x_TD, batch, config=CONFIG, cache=None if caches is None else caches[i], **given)
        if params.indexer is not None:
            steps.append(sfa.Step(i, batch, out.selection_TK))
        x_TD, selection = x_TD + out.y_TD, out.selection_TK
        after.append(out.cache)
    return x_TD, steps, after


def gradients(run, layers, x_TD):
    """Return the hidden states of ``run(layers, x_TD)``, gradients of all that they depend on, and what else came."""
    layers, x_TD = tree_map(lambda x: x.detach().clone().requires_grad_(), (layers, x_TD))
    y_TD, other = run(layers, x_TD)
    leaves = {f"{i}.{name}": x for i, params in enumerate(layers) for name, x in named_fields(params)} | {"x": x_TD}
    (y_TD * drawn(*y_TD.shape, seed=9, dtype=y_TD.dtype)).sum().backward()
    found = {name: x.grad for name, x in leaves.items()}
    assert not any(x is not None and x.any() for name, x in found.items() if "indexer" in name)
    return y_TD.detach(), {name: x for name, x in found.items() if "indexer" not in name}, other


def assert_same_bits(got, want):
    """Equal hidden states and gradients, none missing."""
    assert torch.equal(got[0], want[0])
    assert got[1].keys() == want[1].keys()
    for name, x in want[1].items():
        assert x is not None, name
        assert torch.equal(got[1][name], x), name


def assert_near(got, want, tolerance=1e-12):
    """Refuse what is further apart than a part of the largest value."""
    for name, x in {"y": want[0], **want[1]}.items():
        y = got[0] if name == "y" else got[1][name]
        assert (y - x).abs().max() <= tolerance * x.abs().max(), name


def tokens_of(steps):
    """Spell steps token by token, in plain integers: (layer, request, position) -> positions selected."""
    found = {}
    for layer, batch, selection_TK in steps:
        columns = batch.request_T.tolist(), batch.position_T.tolist(), selection_TK.tolist()
        for request, position, selected in zip(*columns, strict=True):
            if request >= 0:
                assert (layer, request, position) not in found
                found[layer, request, position] = selected
    return found


def tokens_in(recording):
    places = [(b, p) for b, length in enumerate(recording.lengths) for p in range(length)]
    return {
        (layer, *place): selected
        for layer, selection_TK in recording.selections.items()
        for place, selected in zip(places, selection_TK.tolist(), strict=True)
    }


def each_in_turn(names):
    """Pair every name with both noises and with one dtype after the other."""
    dtypes = itertools.cycle([torch.float64, torch.bfloat16, torch.float32])
    return [(name, noise, next(dtypes)) for name, noise in itertools.product(names, NOISES)]


# --- one batch ---


@pytest.mark.parametrize(("name", "noise", "dtype"), each_in_turn(BATCHES))
def test_a_replayed_batch_has_the_bits_of_the_recorded_one(name, noise, dtype):
    """The indexers that choose while recording are not those of the replayed model: noise does not come back."""
    batch, layers = sfa.Batch.from_lengths(*BATCHES[name]), model(dtype)
    x_TD = drawn(batch.position_T.shape[0], 64, dtype=dtype)
    select = noisy_select(5) if noise == "inputs" else None
    want = gradients(lambda layers, x: forward(layers, x, batch, select=select)[:2], layers, x_TD)
    recording = sfa.record_selections(want[2])
    assert list(recording.selections) == [0, 2]
    changed = with_noise(layers) if noise == "weights" else layers
    got = gradients(lambda layers, x: forward(layers, x, batch, recording=recording)[:2], changed, x_TD)
    assert_same_bits(got, want)
    for (_, _, mine), (_, _, recorded) in zip(got[2], want[2], strict=True):
        assert torch.equal(mine, recorded)
    alone = forward(changed, x_TD, batch)[0]
    assert torch.equal(alone, want[0]) == (name == "one token")


def test_noise_changes_what_is_selected_and_recordings_of_two_runs_differ():
    batch, layers, x_TD = sfa.Batch.from_lengths([30]), model(), drawn(30, 64)
    runs = [forward(layers, x_TD, batch, select=noisy_select(seed))[1] for seed in range(3)]
    runs += [forward(with_noise(layers), x_TD, batch)[1], forward(layers, x_TD, batch)[1]]
    first = [sfa.record_selections(steps).selections[0] for steps in runs]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(first, 2))


def test_layers_that_share_replay_what_the_layer_before_them_recorded():
    batch, layers, x_TD = sfa.Batch.from_lengths([9, 12]), model(), drawn(21, 64)
    recording = sfa.record_selections(forward(layers, x_TD, batch)[1])
    replayed = [sfa.replay_selection(recording, layer, batch) for layer in range(6)]
    assert torch.equal(replayed[0], replayed[1])
    assert all(torch.equal(replayed[2], x) for x in replayed[3:])
    assert not torch.equal(replayed[0], replayed[2])


# --- steps of plain numbers ---


def paged(lengths, block=BLOCK):
    return {"block_table": sfa.allocate_blocks(list(lengths), block), "block_size": block}


def random_steps(dice, lengths, layers=(0, 3)):
    """Cut requests into steps at random and let each token select random positions, some of them out of its sight."""
    done, batch, steps, width = [0] * len(lengths), None, [], dice.randint(1, 4)
    while batch is None or done != list(lengths):
        new = [dice.randint(0, n - d) for n, d in zip(lengths, done, strict=True)]
        done = [d + n for d, n in zip(done, new, strict=True)]
        batch = sfa.Batch.from_lengths(new, done, **paged(lengths))
        for layer in layers:
            selection = [[dice.randint(-1, 20) for _ in range(width)] for _ in range(sum(new))]
            steps.append(sfa.Step(layer, batch, torch.tensor(selection, dtype=torch.int32).view(sum(new), width)))
    return steps


def test_steps_in_any_order_make_one_recording():
    dice = random.Random(0)
    for _ in range(20):
        lengths = [dice.randint(0, 7) for _ in range(dice.randint(1, 4))]
        steps = random_steps(dice, lengths)
        want = tokens_of(steps)
        dice.shuffle(steps)
        recording = sfa.record_selections(iter(steps))
        assert recording.lengths == tuple(lengths)
        assert list(recording.selections) == [0, 3]
        assert tokens_in(recording) == want
        assert recording.topk == steps[0].selection_TK.shape[1]


def test_any_part_of_the_tokens_replays_its_own():
    """Chunks, decoded tokens, and what ranks hold, padding rows among it: looked up in a plain dictionary."""
    dice = random.Random(1)
    for _ in range(15):
        lengths = [dice.randint(0, 7) for _ in range(dice.randint(1, 4))]
        recording = sfa.record_selections(random_steps(dice, lengths))
        want, width = tokens_in(recording), recording.topk
        whole = sfa.Batch.from_lengths(lengths)
        owner_T = torch.tensor([dice.randrange(3) for _ in range(sum(lengths))], dtype=torch.int64)
        split = TokenSplit.from_owner(owner_T, 3, rows=sum(lengths) + 1)
        parts = [whole, *(split.local_batch(whole, rank) for rank in range(3))]
        new = [dice.randint(0, n) for n in lengths]
        parts.append(sfa.Batch.from_lengths(new, lengths, **paged(lengths)))
        for batch, (layer, recorded_as) in itertools.product(parts, ((0, 0), (2, 0), (3, 3), (5, 3))):
            got = sfa.replay_selection(recording, layer, batch)
            assert (got.dtype, got.shape) == (torch.int32, (len(batch.position_T), width))
            columns = batch.request_T.tolist(), batch.position_T.tolist(), got.tolist()
            for request, position, selected in zip(*columns, strict=True):
                assert selected == (want[recorded_as, request, position] if request >= 0 else [-1] * width)


def test_requests_without_tokens_keep_their_place():
    """Padding, or a request that ended before: in front, between and behind."""
    for lens in itertools.product((0, 2), repeat=3):
        for padding in (False, True):
            query = [n or (3 if padding else 0) for n in lens]
            batch = sfa.Batch.from_lengths(query, list(lens))
            selection_TK = torch.where(batch.request_T >= 0, batch.position_T, -1)[:, None].to(torch.int32)
            recording = sfa.record_selections([sfa.Step(0, batch, selection_TK)])
            assert recording.lengths == lens
            assert torch.equal(sfa.replay_selection(recording, 0, batch), selection_TK)


def test_no_requests_and_no_tokens_are_a_recording_too():
    for lengths in ([], [0], [0, 0]):
        batch = sfa.Batch.from_lengths(lengths)
        recording = sfa.record_selections([sfa.Step(0, batch, torch.empty(0, 3, dtype=torch.int32))])
        assert recording.lengths == tuple(lengths)
        assert sfa.replay_selection(recording, 0, batch).shape == (0, 3)


def test_recording_and_replay_leave_their_arguments_alone_and_share_no_memory():
    batch = sfa.Batch.from_lengths([3, 2])
    selection_TK = torch.tensor([[0, -1], [1, 0], [2, 1], [0, -1], [1, 0]], dtype=torch.int32)
    before = selection_TK.clone()
    recording = sfa.record_selections([sfa.Step(0, batch, selection_TK)])
    replayed = sfa.replay_selection(recording, 0, batch)
    assert torch.equal(selection_TK, before)
    replayed.fill_(7)
    selection_TK.fill_(8)
    assert torch.equal(recording.selections[0], before)


# --- chunks and decoding through a paged cache ---


def run_steps(layers, x_TD, batches, *, recording=None, select=None):
    """Run the steps of a paged cache one after the other; return each token's hidden state in the order of steps."""
    pages = int(batches[0].block_table_BU.max()) + 1
    kind = {"num_blocks": pages, "block_size": BLOCK, "dtype": x_TD.dtype}
    caches = [sfa.init_cache(CONFIG, layer=i, **kind) for i in range(len(layers))]
    results, steps = [], []
    first = 0
    for batch in batches:
        last = first + len(batch.position_T)
        y_TD, new, caches = forward(layers, x_TD[first:last], batch, caches=caches, recording=recording, select=select)
        results.append(y_TD)
        steps += new
        first = last
    return torch.cat(results), steps


def chunked(lengths, cuts):
    """Return a batch for each chunk: ``cuts`` are the new tokens of each request, step by step."""
    batches = [sfa.Batch.from_lengths(cuts[0], **paged(lengths))]
    for new in cuts[1:]:
        batches.append(batches[-1].next(new))
    assert batches[-1].seq_len_B.tolist() == list(lengths)
    return batches


def in_steps_order(x_TD, lengths, batches):
    """Put the rows of requests laid one after the other into the order in which steps take them."""
    first = [sum(lengths[:b]) for b in range(len(lengths))]
    columns = [zip(b.request_T.tolist(), b.position_T.tolist(), strict=True) for b in batches]
    return x_TD[[first[request] + position for column in columns for request, position in column]]


CUTS = {
    "chunks": ((9, 14), [(4, 6), (0, 7), (5, 1)]),
    "prompt, then token by token": ((9, 14), [(4, 8), *[(1, 1)] * 5, (0, 1)]),
    "token by token": ((6, 6), [(1, 1)] * 6),
}


@pytest.mark.parametrize(("name", "noise", "dtype"), each_in_turn(CUTS))
def test_steps_through_a_paged_cache_replay_to_the_bit(name, noise, dtype):
    lengths, cuts = CUTS[name]
    batches, layers = chunked(lengths, cuts), model(dtype)
    x_TD = drawn(sum(lengths), 64, dtype=dtype)
    select = noisy_select(5) if noise == "inputs" else None
    want = gradients(lambda layers, x: run_steps(layers, x, batches, select=select), layers, x_TD)
    recording = sfa.record_selections(want[2])
    assert recording.lengths == lengths
    changed = with_noise(layers) if noise == "weights" else layers
    got = gradients(lambda layers, x: run_steps(layers, x, batches, recording=recording), changed, x_TD)
    assert_same_bits(got, want)
    assert not torch.equal(run_steps(changed, x_TD, batches)[0], want[0])


@pytest.mark.parametrize("name", CUTS)
def test_a_rollout_in_steps_is_replayed_in_one_batch_and_the_other_way_round(name):
    """A training run over whole sequences selects what the rollout did, token by token; sums may round otherwise."""
    lengths, cuts = CUTS[name]
    batches, layers, whole = chunked(lengths, cuts), model(), sfa.Batch.from_lengths(lengths)
    changed, x_TD = with_noise(layers), drawn(sum(lengths), 64)
    x_steps_TD = in_steps_order(x_TD, lengths, batches)

    for rollout in (True, False):
        if rollout:
            steps = run_steps(layers, x_steps_TD, batches, select=noisy_select(6))[1]
        else:
            steps = forward(layers, x_TD, whole, select=noisy_select(7))[1]
        recording = sfa.record_selections(steps)

        def in_one(layers, x_TD, recording=recording):
            y_TD, steps, _ = forward(layers, x_TD, whole, recording=recording)
            return in_steps_order(y_TD, lengths, batches), steps

        def in_steps(layers, x_TD, recording=recording):
            return run_steps(layers, in_steps_order(x_TD, lengths, batches), batches, recording=recording)

        one, parts = gradients(in_one, changed, x_TD), gradients(in_steps, changed, x_TD)
        assert tokens_of(one[2]) == tokens_of(parts[2]) == tokens_of(steps)
        assert_near(one, parts)


# --- ranks ---


def on_ranks(batch, split, *, recording=None, select=None):
    """Return a function of layers and hidden states that runs the stack on simulated ranks; results in batch order."""

    def body(comm, layers, x_tD):
        local = split.local_batch(batch, comm["cp"].rank)

        def layer_function(params, x_tD, _, **named):
            return context_parallel_layer(params, x_tD, batch, comm["cp"], split=split, **named)

        y_tD, steps, _ = forward(layers, x_tD, local, recording=recording, select=select, layer_function=layer_function)
        return y_tD, [step.selection_TK for step in steps]

    ranks = shard_map(body, simulated_mesh(MeshShape(cp=split.num_ranks)), in_specs=(P(), P("cp")), out_specs=P("cp"))

    def run(layers, x_TD):
        y_MD, selections = ranks(layers, split.scatter(x_TD))
        full = [i for i, params in enumerate(layers) if params.indexer is not None]
        steps = [
            sfa.Step(layer, split.local_batch(batch, rank), rows)
            for layer, selection in zip(full, selections, strict=True)
            for rank, rows in enumerate(selection.chunk(split.num_ranks))
        ]
        return split.gather(y_MD), steps

    return run


RANK_CASES = [(1, "contiguous"), (2, "zigzag"), (4, "balanced"), (4, "contiguous"), (7, "striped")]


@pytest.mark.parametrize(("case", "noise"), list(zip(RANK_CASES, itertools.cycle(NOISES))))
def test_ranks_replay_what_ranks_recorded_to_the_bit(case, noise):
    """Each rank's rows are a step of the recording, padding rows among them."""
    ranks, layout = case
    lengths = (13, 3, 7)
    batch, layers, x_TD = sfa.Batch.from_lengths(lengths), model()[:2], drawn(23, 64)
    split = split_tokens(lengths, ranks, layout=layout)
    select = noisy_select(5) if noise == "inputs" else None
    want = gradients(on_ranks(batch, split, select=select), layers, x_TD)
    recording = sfa.record_selections(want[2])
    assert (recording.lengths, list(recording.selections)) == (lengths, [0])
    changed = with_noise(layers) if noise == "weights" else layers
    assert_same_bits(gradients(on_ranks(batch, split, recording=recording), changed, x_TD), want)


@pytest.mark.parametrize(("ranks", "layout"), [RANK_CASES[1], RANK_CASES[2], RANK_CASES[4]])
def test_ranks_replay_what_one_rank_recorded_and_the_other_way_round(ranks, layout):
    lengths, seq_lens = (9, 3, 8), (9, 0, 8)
    batch, layers, x_TD = sfa.Batch.from_lengths(lengths, seq_lens), model()[:2], drawn(20, 64)
    split = split_tokens(lengths, ranks, layout=layout, seq_lens=seq_lens)
    changed = with_noise(layers)
    one_rank = lambda recording: lambda layers, x: forward(layers, x, batch, recording=recording)[:2]  # noqa: E731
    for steps in (forward(layers, x_TD, batch)[1], on_ranks(batch, split)(layers, x_TD)[1]):
        recording = sfa.record_selections(steps)
        assert recording.lengths == seq_lens
        one = gradients(one_rank(recording), changed, x_TD)
        many = gradients(on_ranks(batch, split, recording=recording), changed, x_TD)
        assert tokens_of(one[2]) == tokens_of(many[2]) == tokens_of(steps)
        assert_near(many, one)


@pytest.mark.parametrize(("ranks", "layout"), RANK_CASES)
def test_exactly_summable_inputs_replay_on_ranks_with_the_bits_of_the_one_that_recorded(ranks, layout):
    config, params, x_TD, seed_TD = summable()
    batch = sfa.Batch.from_lengths(LENGTHS)
    params = replace(params, o_proj=params.o_proj.requires_grad_(), kv_b_proj=params.kv_b_proj.requires_grad_())
    random = sfa.random_keys(torch.Generator().manual_seed(4))
    want = sfa.sfa_layer(params, x_TD, batch, config=config, select=random)
    recording = sfa.record_selections([sfa.Step(0, batch, want.selection_TK)])
    split = split_tokens(LENGTHS, ranks, layout=layout)

    def body(comm, params, x_tD):
        selection = sfa.replay_selection(recording, 0, split.local_batch(batch, comm["cp"].rank))
        named = {"config": config, "split": split, "selection": selection}
        return context_parallel_layer(params, x_tD, batch, comm["cp"], **named).y_TD

    run = shard_map(body, simulated_mesh(MeshShape(cp=ranks)), in_specs=(P(), P("cp")), out_specs=P("cp"))
    y_TD = split.gather(run(params, split.scatter(x_TD)))
    assert torch.equal(y_TD, want.y_TD)
    leaves = params.o_proj, params.kv_b_proj
    ours, theirs = (torch.autograd.grad(out, leaves, seed_TD) for out in (y_TD, want.y_TD))
    assert all(map(torch.equal, ours, theirs))
    assert not torch.equal(sfa.sfa_layer(params, x_TD, batch, config=config).y_TD, want.y_TD)


def test_a_rank_decodes_over_pages_with_its_own_rows_replayed():
    """New tokens of requests with context, dealt out; recorded on one rank with the context that they stand behind."""
    lengths, cuts = (9, 14, 6), [(4, 10, 6), (5, 4, 0)]
    batches, layers = chunked(lengths, cuts), model()[:1]
    x_TD = drawn(29, 64)
    pages = int(batches[0].block_table_BU.max()) + 1
    cache = sfa.init_cache(CONFIG, num_blocks=pages, block_size=BLOCK, dtype=torch.float64)
    first = sfa.sfa_layer(layers[0], x_TD[:20], batches[0], config=CONFIG, cache=cache, select=noisy_select(1))
    want = sfa.sfa_layer(layers[0], x_TD[20:], batches[1], config=CONFIG, cache=first.cache, select=noisy_select(2))
    steps = [sfa.Step(0, batch, out.selection_TK) for batch, out in zip(batches, (first, want), strict=True)]
    recording = sfa.record_selections(steps)
    for ranks, layout in ((2, "zigzag"), (4, "striped")):
        split = split_tokens(cuts[1], ranks, layout=layout, seq_lens=lengths)

        def body(comm, params, x_tD, cache, split=split):
            selection = sfa.replay_selection(recording, 0, split.local_batch(batches[1], comm["cp"].rank))
            named = {"config": CONFIG, "split": split, "selection": selection, "cache": cache}
            return context_parallel_layer(params, x_tD, batches[1], comm["cp"], **named)[:2]

        mesh = simulated_mesh(MeshShape(cp=ranks))
        run = shard_map(body, mesh, in_specs=(P(), P("cp"), P()), out_specs=P("cp"))
        y_TD, selection_TK = map(split.gather, run(layers[0], split.scatter(x_TD[20:]), first.cache))
        assert torch.equal(selection_TK, want.selection_TK)
        torch.testing.assert_close(y_TD, want.y_TD, rtol=1e-12, atol=1e-12)


# --- padding ---


def padded(lengths, width, side):
    """Return what `use_sfa` makes of a padded batch, and where its tokens lie: as a mask of [B·width] rows."""
    real = torch.zeros(len(lengths), width, dtype=torch.bool)
    for b, length in enumerate(lengths):
        real[b, width - length if side == "left" else 0 : width if side == "left" else length] = True
    causal = torch.ones(width, width, dtype=torch.bool).tril()
    mask = causal & real[:, None, :, None] & real[:, None, None, :]
    return mask_to_batch(mask, len(lengths), width), real.flatten()


SIDES = ("left", "right", "none")


def run_padded(layers, x_TD, lengths, width, side, **named):
    """Run requests padded on a side with their own positions; return their tokens' hidden states, and the steps."""
    if side == "none":
        batch, real_M = sfa.Batch.from_lengths(lengths), torch.ones(sum(lengths), dtype=torch.bool)
    else:
        batch, real_M = padded(lengths, width, side)
    position_M = torch.zeros(len(real_M), dtype=torch.int64)
    position_M[real_M] = torch.cat([torch.arange(n) for n in lengths])
    x_MD = torch.full((len(real_M), 64), torch.nan, dtype=x_TD.dtype).index_put((real_M,), x_TD)
    rope = sfa.rope_cos_sin(position_M, CONFIG)
    y_MD, steps, _ = forward(layers, x_MD, batch, rope=rope, **named)
    return y_MD[real_M], steps


@pytest.mark.parametrize("recorded", SIDES)
@pytest.mark.parametrize("replayed", SIDES)
def test_what_was_padded_on_one_side_is_replayed_on_another(recorded, replayed):
    lengths, layers, x_TD = (7, 0, 12, 1), model(), drawn(20, 64)
    changed = with_noise(layers)

    def record(layers, x):
        return run_padded(layers, x, lengths, 13, recorded, select=noisy_select(4))

    want = gradients(record, layers, x_TD)
    recording = sfa.record_selections(want[2])
    assert recording.lengths == lengths
    got = gradients(lambda m, x: run_padded(m, x, lengths, 15, replayed, recording=recording), changed, x_TD)
    assert sfa.record_selections(got[2]).lengths == lengths
    for layer, selection_TK in sfa.record_selections(got[2]).selections.items():
        assert torch.equal(selection_TK, recording.selections[layer])
    assert_near(got, want)
    if (recorded, replayed) in [(side, side) for side in SIDES]:
        again = gradients(lambda m, x: run_padded(m, x, lengths, 13, replayed, recording=recording), changed, x_TD)
        assert_same_bits(again, want)


def test_padding_in_front_is_counted_off_exactly():
    """Three keys in front of a request's first token: position 0 of the recording is key 3 of the batch."""
    left, real_M = padded([2, 4], 5, "left")
    selection_TK = torch.full((10, 2), -1, dtype=torch.int32)
    selection_TK[real_M] = torch.tensor([[3, -1], [4, 3], [1, -1], [2, 1], [1, 3], [4, 2]], dtype=torch.int32)
    recording = sfa.record_selections([sfa.Step(0, left, selection_TK)])
    assert recording.lengths == (2, 4)
    assert recording.selections[0].tolist() == [[0, -1], [1, 0], [0, -1], [1, 0], [0, 2], [3, 1]]
    right, real_M = padded([2, 4], 6, "right")
    got = sfa.replay_selection(recording, 0, right)
    assert got[real_M].tolist() == recording.selections[0].tolist()
    assert (got[~real_M] == -1).all()
    assert torch.equal(sfa.replay_selection(recording, 0, left), selection_TK)


@pytest.mark.parametrize("side", ["left", "right"])
def test_ranks_replay_their_part_of_a_padded_batch(side):
    lengths = (7, 3, 12)
    batch, _ = padded(lengths, 13, side)
    plain = sfa.Batch.from_lengths(lengths)
    selection_TK = drawn(22, 4).argsort(1).to(torch.int32) - 1
    recording = sfa.record_selections([sfa.Step(0, plain, selection_TK)])
    whole = sfa.replay_selection(recording, 0, batch)
    for ranks, layout in ((2, "zigzag"), (4, "striped"), (7, "contiguous")):
        split = split_tokens([13, 13, 13], ranks, layout=layout)
        parts = [sfa.replay_selection(recording, 0, split.local_batch(batch, rank)) for rank in range(ranks)]
        assert torch.equal(split.gather(torch.cat(parts)), whole)


def test_documents_packed_into_one_request_are_replayed_in_whole_batches():
    """One row of two documents: tokens of the second see none of the first; the row's padding in front is left out."""
    seen = torch.zeros(1, 1, 8, 8, dtype=torch.bool)
    seen[0, 0, 1:4, 1:4], seen[0, 0, 4:, 4:] = True, True
    batch = mask_to_batch(seen.tril(), 1, 8)
    selection_TK = torch.where(batch.position_T[:, None] >= 0, batch.position_T[:, None], -1).to(torch.int32)
    recording = sfa.record_selections([sfa.Step(0, batch, selection_TK)])
    assert recording.lengths == (7,)
    assert torch.equal(sfa.replay_selection(recording, 0, batch), selection_TK)


# --- refusals ---


def step(query_lens, seq_lens=None, *, layer=0, width=2, room=(8, 8), dtype=torch.int32):
    seq_lens = query_lens if seq_lens is None else seq_lens
    batch = sfa.Batch.from_lengths(query_lens, seq_lens, **paged(room[: len(query_lens)]))
    return sfa.Step(layer, batch, torch.zeros(sum(query_lens), width, dtype=dtype))


def assert_refused(call, message):
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value) == message


def with_other_keys(step):
    return step._replace(selection_TK=step.selection_TK + 1)


def test_tokens_may_come_again_with_the_same_selection():
    """As they do in decoding without a cache."""
    once = sfa.record_selections([step([2, 3], layer=4)])
    again = sfa.record_selections([step([1, 2], layer=4), step([2, 3], layer=4), step([2, 3], layer=4)])
    assert once.lengths == again.lengths == (2, 3)
    assert torch.equal(once.selections[4], again.selections[4])


WRONG_STEPS = {
    "nothing": ([], "there must be at least one step; got 0"),
    "another dtype": (
        [step([2, 2], dtype=torch.int64)],
        "a selection must be int32 [4, K]; got (torch.int64, (4, 2))",
    ),
    "other rows": (
        [step([2, 2])._replace(selection_TK=torch.zeros(3, 2, dtype=torch.int32))],
        "a selection must be int32 [4, K]; got (torch.int32, (3, 2))",
    ),
    "one dim": (
        [step([2, 2])._replace(selection_TK=torch.zeros(4, dtype=torch.int32))],
        "a selection must be int32 [4, K]; got (torch.int32, (4,))",
    ),
    "other widths": ([step([2, 2]), step([1, 1], [3, 3], width=3)], "all selections must have one width K; got [2, 3]"),
    "another layer's width": (
        [step([2]), step([2], layer=1, width=5)],
        "all selections must have one width K; got [2, 5]",
    ),
    "a first token missing": (
        [step([2, 2], [2, 5])],
        "every token must be recorded; got none at position 0 of request 1 in layer 0",
    ),
    "a token missing between": (
        [step([2, 2]), step([3, 1], [5, 4])],
        "every token must be recorded; got none at position 2 of request 1 in layer 0",
    ),
    "a token that selects other keys when it comes again": (
        [step([2, 3]), with_other_keys(step([2, 1], [4, 3]))],
        "a token must select the same keys each time; got others at position 2 of request 1 in layer 0",
    ),
    "other tokens in another layer": (
        [step([2, 3]), step([1, 0], [3, 3]), step([2, 3], layer=7)],
        "layer 7 must have recorded the tokens that layer 0 did; got requests of [2, 3] tokens",
    ),
}


@pytest.mark.parametrize("name", WRONG_STEPS)
def test_recording_refuses(name, unchecked):
    steps, message = WRONG_STEPS[name]
    assert_refused(lambda: sfa.record_selections(steps), f"record_selections: {message}")
    assert_refused(lambda: sfa.record_selections(reversed(steps)), f"record_selections: {message}")


WRONG_REPLAYS = {
    "fewer requests": (3, step([4]).batch, "the batch must have the 2 requests recorded; got 1"),
    "more requests": (
        3,
        sfa.Batch.from_lengths([4, 2, 1]),
        "the batch must have the 2 requests recorded; got 3",
    ),
    "a longer request": (3, step([4, 4]).batch, "request 1 has 3 tokens recorded; got position 3"),
    "a decoded token more": (3, step([1, 1], [5, 3]).batch, "request 0 has 4 tokens recorded; got position 4"),
    "an earlier layer": (2, step([4, 3]).batch, "layer 2, or one before it, must be recorded; got [3, 5]"),
}


@pytest.mark.parametrize("name", WRONG_REPLAYS)
def test_replay_refuses(name):
    recording = sfa.record_selections([step([4, 3], layer=3), step([4, 3], layer=5)])
    layer, batch, message = WRONG_REPLAYS[name]
    assert_refused(lambda: sfa.replay_selection(recording, layer, batch), f"replay_selection: {message}")


def test_a_shorter_batch_is_a_part_and_replays():
    recording = sfa.record_selections([step([4, 3])])
    assert sfa.replay_selection(recording, 0, step([2, 0]).batch).shape == (2, 2)


# --- the config's hash ---


def test_a_hash_changes_with_every_field_and_with_nothing_else():
    yarn = sfa.Yarn(factor=40.0, original_max_position_embeddings=4096)
    base = replace(sfa.TINY, yarn=yarn)
    other = {"rope_pairing": "half", "index_rope_pairing": "interleaved", "indexer_types": ("full", "shared")}
    other |= {"yarn": None, "qk_rope_head_dim": 6, "index_head_dim": 18}
    seen = {config_hash(base)}
    for name, value in vars(base).items():
        changed = replace(base, **{name: other.get(name) if name in other else value * 2})
        assert different_field(config_text(base), changed)[0] == name
        seen.add(config_hash(changed))
    for name, value in vars(yarn).items():
        changed = replace(base, yarn=replace(yarn, **{name: value * 2 if value else 1.0}))
        assert different_field(config_text(base), changed)[0] == "yarn"
        seen.add(config_hash(changed))
    assert len(seen) == 1 + len(vars(base)) + len(vars(yarn))
    assert config_hash(replace(base, yarn=replace(yarn))) == config_hash(base)
    assert different_field(config_text(base), replace(base)) is None


def test_equal_configs_have_equal_hashes_whatever_kind_of_number_they_were_given(unchecked):
    whole = replace(sfa.TINY, rope_theta=10000, yarn=sfa.Yarn(factor=40, original_max_position_embeddings=64))
    real = replace(sfa.TINY, rope_theta=1e4, yarn=sfa.Yarn(factor=40.0, original_max_position_embeddings=64))
    assert whole == real
    assert config_hash(whole) == config_hash(real)


def test_a_text_that_spells_no_config_is_refused():
    for text in ("", "[1]", "null", "7", '"index_topk"', "{"):
        with pytest.raises(ValueError):
            different_field(text, sfa.TINY)
    assert different_field("{}", sfa.TINY) == ("hidden_size", None, 64)
    more = json.loads(config_text(sfa.TINY)) | {"a_new_field": 3}
    assert different_field(json.dumps(more), sfa.TINY) == ("a_new_field", 3, None)
