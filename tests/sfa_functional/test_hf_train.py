"""`train_indexer` lets indexers learn from their attention, nothing else; a fresh one learns within a minute."""

from dataclasses import replace

import pytest
import torch
from transformers import DeepseekV32ForCausalLM

import sfa_functional as sfa
from sfa_functional.bundled import TINY_CHECKPOINT, held_out_text
from sfa_functional.hf import attention_modules, layer_params, load_params, module_config
from tests.sfa_functional.test_evaluate_model import KINDS, drawn, make
from weights import load_layer, open_checkpoint, save_checkpoint


def split(model):
    """Parameters of indexers and all others, by name."""
    named = dict(model.named_parameters())
    return {n: p for n, p in named.items() if ".indexer." in n}, {
        n: p for n, p in named.items() if ".indexer." not in n
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", ["warm-up", "sparse"])
@pytest.mark.parametrize("grad", [False, True])
def test_the_divergence_reaches_every_indexer_weight_and_no_other(kind, stage, grad):
    """Also where the model runs without gradients."""
    model = make(kind)
    with sfa.train_indexer(model, stage=stage, topk=5) as losses, torch.set_grad_enabled(grad):
        model(drawn(2, 20), use_cache=False)
    assert losses.rows == 40
    losses.mean.backward()
    indexers, others = split(model)
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in indexers.values())
    assert all(p.grad is None for p in others.values())


@pytest.mark.parametrize("stage", ["warm-up", "sparse"])
def test_the_models_loss_reaches_everything_but_the_indexers_and_a_coefficient_of_zero_gives_them_zeros(stage):
    model, ids = make("deepseek"), drawn(1, 20)
    with sfa.train_indexer(model, stage=stage, topk=5) as losses:
        loss = model(ids, labels=ids, use_cache=False).loss
        (loss + 0 * losses.mean).backward()
    indexers, others = split(model)
    assert all(p.grad is not None and not p.grad.any() for p in indexers.values())
    assert all(p.grad is not None and p.grad.isfinite().all() for n, p in others.items() if "self_attn" in n)
    alone = make("deepseek")
    with sfa.use_sfa(alone, topk=5 if stage == "sparse" else 20):
        alone(ids, labels=ids, use_cache=False).loss.backward()
    for name, p in split(alone)[1].items():
        if p.grad is not None:
            assert torch.allclose(p.grad, others[name].grad, rtol=1e-3, atol=1e-6), name


@pytest.mark.parametrize("stage", ["warm-up", "sparse"])
def test_the_divergence_is_indexer_loss_of_the_states_that_reach_a_layer(stage):
    model, ids, inputs = make("deepseek", torch.float64), drawn(2, 15), []
    modules = attention_modules(model)
    hooks = [m.register_forward_pre_hook(lambda _m, _a, kw: inputs.append(kw["hidden_states"]), with_kwargs=True)
             for m in modules]  # fmt: skip
    with sfa.train_indexer(model, stage=stage, topk=4) as losses, torch.no_grad():
        model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    batch, want = sfa.Batch.from_lengths([15, 15]), 0
    config = replace(module_config(modules[0]), index_topk=4)
    for layer, (module, x) in enumerate(zip(modules, inputs, strict=True)):
        params, x_TD = layer_params(module), x.flatten(0, 1)
        selection = sfa.sfa_layer(params, x_TD, batch, config=config).selection_TK if stage == "sparse" else None
        kl_T = sfa.indexer_loss(params, x_TD, batch, config=config, selection=selection)
        assert torch.allclose(kl_T, losses.layers[layer], rtol=1e-12)
        want = want + kl_T.sum() / 30
    assert torch.allclose(want, losses.mean, rtol=1e-12)


def test_layers_that_share_an_indexer_share_its_loss():
    """The mean over the layers served: the second layer's attention counts as much as the first one's."""
    model = make("glm", torch.float64)
    with sfa.train_indexer(model, stage="warm-up") as losses:
        model(drawn(1, 15), use_cache=False)
    assert losses.owners == {0: 0, 1: 0}
    first, second = losses.layers.values()
    assert second.max() > 0
    assert torch.allclose(losses.sum, (first.sum() + second.sum()) / 2, rtol=1e-12)


@pytest.mark.parametrize("stage", ["warm-up", "sparse"])
def test_micro_batches_have_the_gradients_of_the_whole(stage):
    """Sums over parts, divided by the rows of all."""
    ids, model = drawn(4, 12), make("deepseek", torch.float64)

    def gradients(parts):
        model.zero_grad()
        for part in parts:
            with sfa.train_indexer(model, stage=stage, topk=4) as losses, torch.no_grad():
                model(part, use_cache=False)
            (losses.sum / ids.numel()).backward()
        return {name: p.grad.clone() for name, p in split(model)[0].items()}

    whole = gradients([ids])
    for name, gradient in gradients([ids[:1], ids[1:]]).items():
        assert torch.allclose(gradient, whole[name], rtol=1e-9, atol=1e-14), name


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_count(side):
    """Behind a sequence it sees the sequence, and still is not learnt from."""
    ids, model = drawn(1, 12), make("deepseek", torch.float64)
    pad = torch.zeros(1, 5, dtype=torch.long)
    padded = torch.cat([pad, ids] if side == "left" else [ids, pad], 1)
    mask = torch.cat([pad, torch.ones_like(ids)] if side == "left" else [torch.ones_like(ids), pad], 1)
    with sfa.train_indexer(model, stage="warm-up") as losses, torch.no_grad():
        model(ids, use_cache=False)
        want = losses.mean
        model(padded, attention_mask=mask, use_cache=False)
    assert losses.rows == 12
    assert torch.allclose(losses.mean, want, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", ["warm-up", "sparse"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_no_gradient(kind, stage, reentrant):
    ids = drawn(1, 15)

    def gradients(checkpointing):
        model = make(kind, torch.float64).train()
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        with sfa.train_indexer(model, stage=stage, topk=4) as losses:
            loss = model(ids, labels=ids, use_cache=False).loss
            (loss + losses.mean).backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    plain, again = gradients(False), gradients(True)
    assert plain.keys() == again.keys()
    assert all(torch.allclose(x, again[name], rtol=1e-9, atol=1e-13) for name, x in plain.items())


def test_bad_input_is_one_line(unchecked):
    with (
        pytest.raises(ValueError, match=r"^train_indexer: stage must be one of .*; got 'dense'$"),
        sfa.train_indexer(make(), stage="dense"),
    ):
        pass
    with (
        pytest.raises(ValueError, match=r"^train_indexer: topk must be >= 1; got 0$"),
        sfa.train_indexer(make(), stage="sparse", topk=0),
    ):
        pass
    model, rule = make(), r"^train_indexer: gradients must be possible, .*; got torch.inference_mode\(\)$"
    with pytest.raises(ValueError, match=rule), sfa.train_indexer(model, stage="sparse"), torch.inference_mode():
        model(drawn(1, 5), use_cache=False)
    with sfa.train_indexer(make(), stage="sparse") as losses:
        pass
    with pytest.raises(ValueError, match=r"^IndexerLosses.sum: the model must have run"):
        losses.sum  # noqa: B018


def test_a_fresh_indexer_learns_within_a_minute_and_goes_back_to_transformers(tmp_path):
    """k = context / 8: at least 0.95 of the best mass in every layer, at most 0.7 before, perplexity within 3 %.

    Warm-up, then a few steps of everything with sparse attention; then through files into another model.
    """
    model = DeepseekV32ForCausalLM.from_pretrained(TINY_CHECKPOINT, dtype=torch.float32, attn_implementation="sdpa")
    modules, generator = attention_modules(model), torch.Generator().manual_seed(7)
    for layer, module in enumerate(modules):
        fresh = sfa.init_params(module_config(module), layer=layer, generator=generator)
        load_params(module, replace(layer_params(module), indexer=fresh.indexer))
    text = torch.tensor(list(held_out_text().encode()))
    held, text = text[:2048], text[4096:]

    def measured(model, topk=64):
        return sfa.evaluate_model(model, [held.view(4, 512)], topk=topk, rows=50)

    def share(stats):
        return [part.mean("mass").mean / part.mean("best_mass").mean for part in stats.layers.values()]

    def drawn_windows(count):
        first = torch.randint(len(text) - 512, (count,), generator=generator)
        return text[first[:, None] + torch.arange(512)]

    assert max(share(measured(model))) < 0.7
    learning = list(split(model)[0].values())
    optimizer, steps, rate = torch.optim.AdamW(learning, betas=(0.9, 0.95), weight_decay=0.0), 30, 1e-2
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 5) * (1 - step / steps)
        with sfa.train_indexer(model, stage="warm-up") as losses, torch.no_grad():
            model(drawn_windows(1), use_cache=False)
        optimizer.zero_grad()
        losses.mean.backward()
        torch.nn.utils.clip_grad_norm_(learning, 1.0)
        optimizer.step()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    for _ in range(3):
        ids = drawn_windows(1)
        with sfa.train_indexer(model, stage="sparse", topk=64) as losses:
            loss = model(ids, labels=ids, use_cache=False).loss
            optimizer.zero_grad()
            (loss + losses.mean).backward()
            optimizer.step()
    trained = measured(model)
    assert min(share(trained)) > 0.95
    dense = measured(model, topk=512)
    assert trained.perplexity < 1.03 * dense.perplexity

    config = module_config(modules[0])
    save_checkpoint(tmp_path / "trained", [layer_params(module) for module in modules], config)
    stored = open_checkpoint(tmp_path / "trained")
    other = DeepseekV32ForCausalLM.from_pretrained(TINY_CHECKPOINT, dtype=torch.float32, attn_implementation="sdpa")
    other.load_state_dict({n: p for n, p in model.state_dict().items() if ".self_attn." not in n}, strict=False)
    for layer, module in enumerate(attention_modules(other)):
        load_params(module, load_layer(stored, layer, config=config, dtype=torch.float32))
    assert measured(other).loss == trained.loss
