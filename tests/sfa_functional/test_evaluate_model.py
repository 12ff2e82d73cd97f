"""`evaluate_model` measures what the model itself does, whatever the grouping, and leaves the model as it was."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM, GlmMoeDsaConfig, GlmMoeDsaForCausalLM

import sfa_functional as sfa
from sfa_functional.bundled import TINY_CHECKPOINT, held_out_text
from sfa_functional.hf import attention_modules, layer_params, module_config
from sfa_functional.hf_evaluate import untrained_indexers
from sfa_functional.selection_stats import METRICS
from tests.sfa_functional.test_cli import SIZES
from tests.sfa_functional.test_hf_evaluate import snapshot

KINDS = ["deepseek", "glm"]


def make(kind="glm", dtype=torch.float32):
    """A random model; GLM's second layer shares the selection of the first."""
    torch.manual_seed(0)
    if kind == "deepseek":
        return DeepseekV32ForCausalLM(DeepseekV32Config(**SIZES, num_hidden_layers=2)).to(dtype)
    config = GlmMoeDsaConfig(**SIZES, num_hidden_layers=2, indexer_types=["full", "shared"])
    return GlmMoeDsaForCausalLM(config).to(dtype)


def drawn(*shape):
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(3))


def vectors(stats):
    """All numbers of a `ModelStats`."""
    return torch.cat(
        [
            stats.loss_sum[None],
            stats.tokens[None],
            *(x.flatten() for s in stats.layers.values() for x in vars(s).values()),
        ]
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("topk", [1, 8, 100])
def test_the_loss_is_that_of_transformers_with_as_many_keys(kind, topk):
    model, ids = make(kind).eval(), drawn(2, 30)
    got = sfa.evaluate_model(model, [ids], topk=topk)
    for module in attention_modules(model):
        if module.indexer is not None:
            module.indexer.index_topk = min(topk, 30)
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits.double()
    losses = cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    assert got.loss == pytest.approx(float(losses.mean()), rel=1e-5)
    assert got.perplexity == pytest.approx(math.exp(float(losses.mean())), rel=1e-5)
    assert float(got.tokens) == 58


@pytest.mark.parametrize("kind", KINDS)
def test_a_layers_numbers_are_those_of_evaluate_layer_on_the_states_that_reach_it(kind):
    model, ids = make(kind), drawn(2, 20)
    modules, inputs = attention_modules(model), []
    hooks = [m.register_forward_pre_hook(lambda _m, _a, kw: inputs.append(kw["hidden_states"]), with_kwargs=True)
             for m in modules]  # fmt: skip
    got = sfa.evaluate_model(model, [ids], topk=5, rows=None, other=sfa.window)
    for hook in hooks:
        hook.remove()
    config, batch = module_config(modules[0]), sfa.Batch.from_lengths([20, 20])
    selection = None
    for layer, (module, x) in enumerate(zip(modules, inputs, strict=True)):
        params, x_TD = layer_params(module), x.flatten(0, 1)
        given = selection if params.indexer is None else None
        small = sfa.SFAConfig(**(vars(config) | {"index_topk": 5}))
        selection = sfa.sfa_layer(params, x_TD, batch, config=small, selection=given).selection_TK
        named = {"config": config, "k": 5, "selection": given, "other": sfa.window}
        want = sfa.evaluate_layer(params, x_TD, batch, **named)
        assert float(want.queries) == 30
        defined = set(METRICS) - ({"kl", "kl_selected", "ties"} if params.indexer is None else set())
        assert set(want.means()) == defined
        for metric, mean in want.means().items():
            assert got.layers[layer].mean(metric).mean == pytest.approx(mean, rel=1e-5), metric


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2]])
def test_any_grouping_of_batches_gives_equal_numbers(order):
    """In float64 to 1e-12; the cosines' float32 does not matter, they are the same ones."""
    model, ids = make(dtype=torch.float64), drawn(4, 25)
    whole = sfa.evaluate_model(model, [ids], topk=6, rows=None)
    apart = [sfa.evaluate_model(model, [ids[i : i + 1]], topk=6, rows=None) for i in order]
    merged = apart[0].merge(apart[1]).merge(apart[2].merge(apart[3]))
    several = sfa.evaluate_model(model, [ids[i : i + 1] for i in order], topk=6, rows=None)
    for other in (merged, several):
        assert torch.allclose(vectors(whole), vectors(other), rtol=1e-12, atol=1e-12)


def test_ranks_that_reduce_have_the_numbers_of_all():
    """Each imagined rank's vector is added to that of the others, once."""
    model, ids = make(dtype=torch.float64), drawn(4, 25)
    told = []
    for part in (ids[:1], ids[1:]):
        sfa.evaluate_model(model, [part], topk=6, rows=None, reduce=lambda x: told.append(x.clone()) or x)
    assert len(told) == 2
    total = sum(told)
    got = sfa.evaluate_model(model, [ids[:1]], topk=6, rows=None, reduce=lambda x: total)
    assert torch.allclose(vectors(got), vectors(sfa.evaluate_model(model, [ids], topk=6, rows=None)), rtol=1e-12)


def test_a_rank_without_batches_takes_part_in_the_sum():
    model, ids = make(dtype=torch.float64), drawn(2, 25)
    told = []
    sfa.evaluate_model(model, [], topk=6, reduce=lambda x: told.append(x) or x)
    sfa.evaluate_model(model, [ids], topk=6, reduce=lambda x: told.append(x) or x)
    assert told[0].shape == told[1].shape
    assert not told[0].any()
    assert math.isnan(sfa.evaluate_model(model, [], topk=6).loss)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_neither_counts_nor_is_predicted_from(side):
    model, ids = make().eval(), drawn(1, 20)
    pad = torch.zeros(1, 7, dtype=torch.long)
    padded = torch.cat([pad, ids] if side == "left" else [ids, pad], dim=1)
    mask = torch.cat([pad, torch.ones_like(ids)] if side == "left" else [torch.ones_like(ids), pad], dim=1)
    got = sfa.evaluate_model(model, [{"input_ids": padded, "attention_mask": mask}], topk=50)
    want = sfa.evaluate_model(model, [ids], topk=50)
    assert float(got.tokens) == float(want.tokens) == 19
    assert got.loss == pytest.approx(want.loss, rel=1e-5)
    for name, mean in sfa.evaluate_model(model, [ids], topk=4, rows=None).all_layers.means().items():
        padded_mean = sfa.evaluate_model(
            model, [{"input_ids": padded, "attention_mask": mask}], topk=4, rows=None
        ).all_layers.mean(name)
        assert padded_mean.mean == pytest.approx(mean, rel=1e-4), name


def test_labels_say_what_is_predicted():
    model, ids = make().eval(), drawn(2, 12)
    labels = ids.clone()
    labels[:, :9] = -100
    got = sfa.evaluate_model(model, [{"input_ids": ids, "labels": labels}])
    with torch.no_grad():
        want = model(ids, labels=labels, use_cache=False).loss
    assert float(got.tokens) == 6
    assert got.loss == pytest.approx(float(want), rel=1e-5)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_the_model_and_the_random_state_are_left_alone(training, fails):
    model = make().train(training)
    model.model.layers[1].train(not training)
    modes, before = [m.training for m in model.modules()], snapshot(model)
    ids = torch.full((1, 20), 300) if fails else drawn(1, 20)  # no such token
    named = {"topk": 4, "params_of": untrained_indexers(model, config=module_config(attention_modules(model)[0]))}
    if fails:
        with pytest.raises(IndexError):
            sfa.evaluate_model(model, [ids], **named)
    else:
        sfa.evaluate_model(model, [ids], **named)
    after = snapshot(model)
    for name, (tensor, version) in before[0].items():
        assert torch.equal(tensor, after[0][name][0])
        assert version == after[0][name][1]
    assert torch.equal(before[4], after[4])
    assert before[1:4] + before[5:] == after[1:4] + after[5:]
    assert modes == [m.training for m in model.modules()]


def test_dropout_does_not_act():
    """In eval mode; the same loss twice, though the model is in training mode."""
    model, ids = make("deepseek").train(), drawn(1, 20)
    for module in attention_modules(model):
        module.attention_dropout = 0.5
    assert sfa.evaluate_model(model, [ids]).loss == sfa.evaluate_model(model.eval(), [ids]).loss


def test_a_loader_that_shuffles_and_a_selector_that_draws_leave_the_random_state_alone():
    def select(**compared):
        torch.rand(3)
        return sfa.window(**compared)

    model = make()
    before = torch.get_rng_state()
    loader = torch.utils.data.DataLoader(list(drawn(4, 10)), batch_size=2, shuffle=True)
    sfa.evaluate_model(model, loader, topk=4, select=select)
    assert torch.equal(before, torch.get_rng_state())


def test_another_selector_that_has_no_answer_leaves_the_overlap_undefined_there():
    def other(**compared):
        return None if compared["q_TJI"] is None else sfa.window(**compared)

    got = sfa.evaluate_model(make("glm"), [drawn(1, 20)], topk=4, other=other)
    assert ["overlap" in part.means() for part in got.layers.values()] == [True, False]


@pytest.mark.parametrize("layers", [[1], [], [1, 0]])
def test_only_the_layers_asked_for_are_measured(layers):
    model, ids = make(), drawn(1, 20)
    got = sfa.evaluate_model(model, [ids], topk=4, layers=layers)
    assert sorted(got.layers) == sorted(layers)
    assert got.loss == sfa.evaluate_model(model, [ids], topk=4).loss


@pytest.fixture(scope="module")
def tiny():
    return DeepseekV32ForCausalLM.from_pretrained(TINY_CHECKPOINT, dtype=torch.float32, attn_implementation="sdpa")


@pytest.fixture(scope="module")
def exact(tiny):
    """The bundled checkpoint's numbers at k = 64, of every query."""
    return sfa.evaluate_model(tiny, [windows(2)], topk=64, rows=None)


def windows(count):
    return torch.tensor(list(held_out_text().encode()))[: count * 512].view(count, 512)


def test_sampled_numbers_are_within_three_standard_errors_of_the_exact_ones(tiny, exact):
    got = sfa.evaluate_model(tiny, [windows(2)], topk=64, rows=200)
    assert got.loss == exact.loss
    apart = []
    for layer, part in got.layers.items():
        assert float(part.measured) == 200
        assert float(part.queries) == float(exact.layers[layer].queries) == 2 * 448
        for metric in ("mass", "best_mass", "recall", "kl", "kl_selected", "entropy"):
            mean, error = part.mean(metric)
            apart.append(abs(mean - exact.layers[layer].mean(metric).mean) / error)
    assert 0.1 < max(apart) < 3


def test_no_selector_keeps_more_mass_than_the_best_keys_and_the_indexer_keeps_more_than_others(tiny, exact):
    config = module_config(attention_modules(tiny)[0])
    random = sfa.random_keys(torch.Generator().manual_seed(0))
    kept = {"indexer": exact}
    for name, select in {"best": sfa.best_keys(config.softmax_scale), "window": sfa.window, "random": random}.items():
        kept[name] = sfa.evaluate_model(tiny, [windows(1)], topk=64, rows=100, select=select)
    fresh = untrained_indexers(tiny, config=config)
    kept["untrained"] = sfa.evaluate_model(tiny, [windows(1)], topk=64, rows=100, params_of=fresh)
    for name, stats in kept.items():
        for part in stats.layers.values():
            mass, best = part.mean("mass").mean, part.mean("best_mass").mean
            assert mass <= best + 1e-6
            assert mass > best - 1e-6 if name == "best" else mass < best - 1e-4
    mass = {name: stats.all_layers.mean("mass").mean for name, stats in kept.items()}
    assert mass["indexer"] > mass["window"] > max(mass["random"], mass["untrained"])


@pytest.mark.parametrize(
    ("batch", "named", "line"),
    [
        (drawn(1, 5), {"topk": 0}, "topk must be >= 1; got 0"),
        (drawn(1, 5), {"rows": 0}, "rows must be >= 1 or None; got 0"),
        (drawn(1, 5), {"layers": [2]}, "layers must be of 0..1; got [2]"),
        (drawn(5), {}, "a batch must have input_ids [B, T], T >= 1; got (5,)"),
        (drawn(1, 0), {}, "a batch must have input_ids [B, T], T >= 1; got (1, 0)"),
        ({"ids": drawn(1, 5)}, {}, "a batch must have input_ids [B, T], T >= 1; got ['ids']"),
        ({"input_ids": drawn(1, 5), "labels": [1]}, {}, "labels must be [1, 5]; got list"),
        ({"input_ids": drawn(1, 5), "labels": drawn(1, 4)}, {}, "labels must be [1, 5]; got [1, 4]"),
    ],
)
def test_bad_input_is_one_line(batch, named, line, unchecked):
    with pytest.raises(ValueError) as error:
        sfa.evaluate_model(make(), [batch], **named)
    assert str(error.value) == f"evaluate_model: {line}"
