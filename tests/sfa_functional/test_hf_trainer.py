"""The callback logs its numbers and the run does not notice: the same weights, bit for bit, as without it."""

import pytest
import torch
import transformers

import sfa_functional as sfa
from tests.sfa_functional.test_evaluate_model import drawn, make

STEPS, EVERY = 6, 2


def trained(tmp_path, add):
    """Train a small model, the callback added by ``add(trainer)``, and return the trainer."""
    transformers.set_seed(0)
    model = make("deepseek").train()
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    data = [{"input_ids": row, "labels": row} for row in drawn(24, 24)]
    options = {"max_steps": STEPS, "eval_steps": EVERY, "eval_strategy": "steps", "logging_steps": EVERY}
    quiet = {"report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
    arguments = transformers.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=4, learning_rate=1e-2, **options, **quiet
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=data, eval_dataset=data[:4])
    trainer.remove_callback(transformers.PrinterCallback)
    add(trainer)
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("plain"), lambda trainer: None)


@pytest.mark.parametrize("every", [None, 2, 3])
def test_a_run_with_the_callback_trains_to_the_same_bits_and_logs_numbers_and_their_cost(every, plain, tmp_path):
    batches = [drawn(2, 30), {"input_ids": drawn(1, 24)}]

    def add(trainer):
        trainer.add_callback(sfa.sfa_callback(trainer.log, batches, every=every, topk=5, rows=20))

    trainer = trained(tmp_path, add)
    for name, x in plain.model.state_dict().items():
        assert torch.equal(x, trainer.model.state_dict()[name]), name
    logged = [entry for entry in trainer.state.log_history if "eval/sfa/mass" in entry]
    assert [entry["step"] for entry in logged] == ([3, 6] if every == 3 else [2, 4, 6])
    for entry in logged:
        assert entry["eval/sfa/seconds"] > 0 < entry["eval/sfa/overhead"]
        assert entry["eval/sfa/layer_1/mass"] <= entry["eval/sfa/layer_1/best_mass"] + 1e-6
        assert entry["eval/sfa/mass_standard_error"] > 0
    own, own_plain = ([e["loss"] for e in t.state.log_history if "loss" in e] for t in (trainer, plain))
    assert own == own_plain  # the trainer's entries are all there
    want = sfa.evaluate_model(trainer.model, batches, topk=5, rows=20)
    assert logged[-1]["eval/sfa/loss"] == want.loss
    assert logged[-1]["eval/sfa/layer_0/recall"] == want.layers[0].mean("recall").mean
    assert logged[0]["eval/sfa/loss"] != logged[-1]["eval/sfa/loss"]


def test_bad_input_is_one_line():
    with pytest.raises(ValueError, match=r"^sfa_callback: every must be >= 1 or None; got 0$"):
        sfa.sfa_callback(print, [drawn(1, 5)], every=0)
    with pytest.raises(ValueError, match=r"^sfa_callback: there must be at least one batch; got 0$"):
        sfa.sfa_callback(print, [])
