"""What a rollout selected is what a training run attends to, whatever happened to the indexers in between."""

import pytest
import torch

import sfa_functional as sfa
from sfa_functional.hf import attention_modules, module_config
from tests.sfa_functional.test_evaluate_model import KINDS, drawn, make
from weights import load_selections, save_selections


def disturb(model):
    """Add noise to everything that an indexer reads with."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".indexer." in name:
                p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype))


def rollout(model, ids, *, cache, topk=4, mask=None):
    """Draw six tokens greedily and record the selections."""
    steps = []
    named = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "use_cache": cache, "eos_token_id": None}
    mask = torch.ones_like(ids) if mask is None else mask
    with sfa.use_sfa(model, topk=topk, record=steps.append), torch.no_grad():
        out = model.generate(ids, attention_mask=mask, **named, output_logits=True, return_dict_in_generate=True)
    return out.sequences, torch.stack(out.logits, 1), sfa.record_selections(steps)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cache", [False, True])
def test_a_replayed_pass_attends_to_what_decoding_selected(kind, cache):
    """Whole, though it was decoded token by token and the indexers have changed since; logits come in float32."""
    model, ids = make(kind, torch.float64).eval(), drawn(2, 14)
    whole, logits, recording = rollout(model, ids, cache=cache)
    assert recording.lengths == (19, 19)
    assert list(recording.selections) == ([0, 1] if kind == "deepseek" else [0])
    disturb(model)

    def again(**named):
        with sfa.use_sfa(model, topk=4, **named), torch.no_grad():
            return model(whole[:, :-1], use_cache=False).logits[:, -6:]

    assert (again(replay=recording) - logits).abs().max() < 1e-5
    assert (again() - logits).abs().max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_a_replayed_training_step_is_that_of_the_recorded_one_to_the_bit(kind):
    model, ids = make(kind), drawn(2, 16)

    def step(**named):
        model.zero_grad()
        with sfa.use_sfa(model, topk=4, **named):
            loss = model(ids, labels=ids, use_cache=False).loss
            loss.backward()
        grads = {n: p.grad for n, p in model.named_parameters() if ".indexer." not in n and p.grad is not None}
        return loss.detach(), grads

    steps = []
    loss, grads = step(record=steps.append)
    disturb(model)
    loss_again, grads_again = step(replay=sfa.record_selections(steps))
    assert torch.equal(loss, loss_again)
    assert grads.keys() == grads_again.keys()
    assert all(torch.equal(g, grads_again[n]) for n, g in grads.items())
    assert not torch.equal(loss, step()[0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_rollout_padded_on_the_left_is_replayed_padded_on_the_right(kind):
    model, ids = make(kind, torch.float64).eval(), drawn(2, 14)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    whole, logits, recording = rollout(model, ids, cache=True, mask=mask)
    assert recording.lengths == (14, 19)
    disturb(model)
    rows = torch.stack([torch.cat([whole[0, 5:-1], whole.new_zeros(5)]), whole[1, :-1]])
    right = torch.ones_like(rows)
    right[0, 14:] = 0
    with sfa.use_sfa(model, topk=4, replay=recording), torch.no_grad():
        got = model(rows, attention_mask=right, use_cache=False).logits
    assert (got[0, 8:14] - logits[0]).abs().max() < 1e-4  # cosines are float32, and positions moved by five
    assert (got[1, 13:] - logits[1]).abs().max() < 1e-5


def test_through_a_file_in_chunks_through_a_cache(tmp_path):
    model, ids = make("glm", torch.float64).eval(), drawn(1, 14)
    whole, logits, recording = rollout(model, ids, cache=False)
    config = sfa.SFAConfig(**(vars(module_config(attention_modules(model)[0])) | {"index_topk": 4}))
    save_selections(tmp_path / "selections.safetensors", recording, config)
    disturb(model)
    with sfa.use_sfa(model, topk=4, replay=load_selections(tmp_path / "selections.safetensors", config)):
        cache, got = None, []
        for chunk in whole[:, :-1].split([9, 1, 5, 4], dim=1):
            with torch.no_grad():
                out = model(chunk, cache=cache, use_cache=True)
            cache = out.past_key_values
            got.append(out.logits)
    assert (torch.cat(got, 1)[:, -6:] - logits).abs().max() < 1e-5


def test_what_does_not_fit_is_refused():
    model, ids = make("deepseek").eval(), drawn(2, 10)
    whole, _, recording = rollout(model, ids, cache=True)
    rule = r"^use_sfa: a recording must hold 5 keys per query; got 4$"
    with pytest.raises(ValueError, match=rule), sfa.use_sfa(model, topk=5, replay=recording):
        pass
    rule = r"^use_sfa: select= and replay= exclude each other; got both$"
    with pytest.raises(ValueError, match=rule), sfa.use_sfa(model, topk=4, replay=recording, select=sfa.window):
        pass
    with sfa.use_sfa(model, topk=4, replay=recording):
        with pytest.raises(ValueError, match=r"^replay_selection: request 0 has 15 tokens recorded; got position 15$"):
            model(whole, use_cache=False)
        with pytest.raises(ValueError, match=r"^replay_selection: the batch must have the 2 requests recorded; got 1$"):
            model(whole[:1, :-1], use_cache=False)
