"""The measurements behind `sfa eval`: windows, perplexity, masses and the recorder; the model is left as it was."""

import math

import pytest
import torch
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

from sfa_functional import hf_evaluate as measure
from sfa_functional.hf import attention_modules, layer_params, module_config
from tests.sfa_functional.test_cli import SIZES


@pytest.fixture
def model():
    """A random GLM-5 model whose second layer shares the selection of the first."""
    torch.manual_seed(0)
    config = GlmMoeDsaConfig(**SIZES, num_hidden_layers=2, indexer_types=["full", "shared"])
    return GlmMoeDsaForCausalLM(config).eval()


def snapshot(model):
    """Everything that a measurement could change."""
    live = attention_modules(model)
    return (
        {name: (x.clone(), x._version) for name, x in model.state_dict(keep_vars=True).items()},
        [sorted(vars(m)) for m in model.modules()],
        [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
        [m.indexer.index_topk for m in live if m.indexer is not None],
        torch.get_rng_state(),
        model.training,
    )


@pytest.mark.parametrize(("count", "context"), [(2, 5), (5, 5), (6, 5), (7, 5), (23, 5), (9000, 512), (2047, 2048)])
def test_windows_hold_every_token_once_but_a_lone_last_one(count, context):
    windows = measure.token_windows(torch.arange(count), context)
    tokens = torch.cat([w.flatten() for w in windows])
    kept = count - (count % context == 1)
    assert torch.equal(tokens, torch.arange(kept))
    assert all(w.shape[1] == context for w in windows[:-1])
    assert all(2 <= w.shape[1] <= context and (w.numel() <= 2048 or w.shape[0] == 1) for w in windows)


def test_dense_perplexity_is_the_exponential_of_the_mean_loss(model):
    ids = torch.randint(256, (70,))
    windows = measure.token_windows(ids, 30)
    for indexer in (m.indexer for m in attention_modules(model) if m.indexer is not None):
        indexer.index_topk = 30
    losses = []
    for rows in windows:
        with torch.no_grad():
            logits = model(rows, use_cache=False).logits.double()
        losses += (-logits.log_softmax(-1)[:, :-1].gather(2, rows[:, 1:, None])).flatten().tolist()
    config = module_config(attention_modules(model)[0])
    perplexity = measure.dense_perplexity(model, windows, config=config)
    assert perplexity == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-5)


def test_measuring_leaves_the_model_and_the_random_state_alone(model):
    windows = measure.token_windows(torch.randint(256, (60,)), 25)
    config = module_config(attention_modules(model)[0])
    before = snapshot(model)
    measure.dense_perplexity(model, windows, config=config)
    measure.parity(model, windows, k=4)
    after = snapshot(model)
    for name, (tensor, version) in before[0].items():
        assert torch.equal(tensor, after[0][name][0])
        assert version == after[0][name][1]
    assert torch.equal(before[4], after[4])
    assert before[1:4] + before[5:] == after[1:4] + after[5:]


def test_a_failing_measurement_restores_the_model(model):
    windows = [torch.full((1, 20), 300)]  # no such token
    before = snapshot(model)
    with pytest.raises(IndexError):
        measure.parity(model, windows, k=4)
    after = snapshot(model)
    assert before[1:4] == after[1:4]


def test_parity_notices_a_wrong_constant(model, monkeypatch):
    windows = measure.token_windows(torch.randint(256, (60,)), 30)
    assert measure.parity(model, windows, k=4).max_rel < 1e-5
    monkeypatch.setattr(attention_modules(model)[1], "scaling", 0.3)
    assert measure.parity(model, windows, k=4).max_rel > 1e-3


def test_untrained_indexers_differ_from_layer_to_layer_and_are_the_same_every_time(model):
    config = module_config(attention_modules(model)[0])
    module, shared = attention_modules(model)
    first = measure.untrained_indexers(model, config=config, seed=0)(module).indexer
    again = measure.untrained_indexers(model, config=config, seed=0)(module).indexer
    assert torch.equal(first.wq_b, again.wq_b)
    assert not torch.equal(first.wq_b, layer_params(module).indexer.wq_b)
    assert measure.untrained_indexers(model, config=config)(shared).indexer is None
