"""A callback that evaluates sparse attention while transformers' ``Trainer`` trains, and changes nothing in the run.

trainer.add_callback(sfa_callback(trainer.log, batches, topk=64))
"""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .evaluate_model import Reduce, TokenBatch, evaluate_model
from .precision import require
from .selectors import Selector

if TYPE_CHECKING:
    from transformers import TrainerCallback

PREFIX = "eval/sfa/"


def sfa_callback(
    log: Callable[[dict[str, float]], object],
    batches: Sequence[TokenBatch],
    *,
    every: int | None = None,
    select: Selector | None = None,
    topk: int | None = None,
    rows: int | None = 256,
    layers: Sequence[int] | None = None,
    reduce: Reduce | None = None,
) -> "TrainerCallback":
    """Return a ``TrainerCallback`` that logs `evaluate_model`'s numbers under ``eval/sfa/...``.

    Logged: ``loss`` and ``perplexity`` with k keys per query; every metric that is defined, over all layers
    (``mass``, ``kl``, ...) and by layer (``layer_0/mass``, ...); standard errors where rows are sampled
    (``mass_standard_error``); and what it cost: ``seconds``, and ``overhead``, these seconds over those that training
    steps took since the evaluation before. The numbers go to the log alone, not to the metrics that choose a best
    model; TensorBoard's and W&B's callbacks put ``train/`` before names that they don't know.

    Args:
        log: takes a dict of numbers: ``trainer.log``.
        batches: token batches that are not trained on; they are gone through at every evaluation. On many ranks each
            gives its own, and ``reduce``.
        every: evaluate after every so many optimizer steps, >= 1; None is whenever the trainer evaluates.
        select: as in `evaluate_model`.
        topk: as in `evaluate_model`.
        rows: as in `evaluate_model`; the same rows each time.
        layers: as in `evaluate_model`.
        reduce: as in `evaluate_model`.

    Returns:
        The callback. Weights, buffers, training flags, hooks and random states are left alone, so a run with it trains
        to the same bits as one without.

    Raises:
        ValueError: ``every`` < 1, or no batches; during training, as `evaluate_model`.

    Cost: as `evaluate_model`, per evaluation.
    Source: the callbacks of Hugging Face transformers 5.24, trainer_callback.py.
    """
    require(every is None or every >= 1, "sfa_callback", "every must be >= 1 or None", every)
    require(len(batches) > 0, "sfa_callback", "there must be at least one batch", 0)
    from transformers import TrainerCallback  # wanted by nobody else

    def evaluate(model: nn.Module, trained: float, seed: int) -> None:
        began = time.perf_counter()
        stats = evaluate_model(
            model,
            batches,
            select=select,
            topk=topk,
            rows=rows,
            layers=layers,
            generator=torch.Generator().manual_seed(seed),
            reduce=reduce,
        )
        numbers = {"loss": stats.loss, "perplexity": stats.perplexity}
        numbers |= _named("", stats.all_layers)
        for layer, part in stats.layers.items():
            numbers |= _named(f"layer_{layer}/", part)
        numbers["seconds"] = time.perf_counter() - began
        if trained > 0:
            numbers["overhead"] = numbers["seconds"] / trained
        log({PREFIX + name: number for name, number in numbers.items()})

    class SFACallback(TrainerCallback):  # type: ignore[misc]
        """Evaluates sparse attention; made by `sfa_callback`."""

        began = trained = 0.0
        done = -1  # the step of the last evaluation: a trainer evaluates each of its datasets

        def on_train_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            self.trained, self.done = 0.0, -1

        def on_step_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            self.trained += time.perf_counter() - self.began
            if every is not None and state.global_step % every == 0:
                self._evaluate(args, state, control, named["model"])

        def on_evaluate(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            if every is None and self.done != state.global_step:
                self._evaluate(args, state, control, named["model"])

        def _evaluate(self, args: Any, state: Any, control: Any, model: nn.Module) -> None:
            wanted = control.should_log  # logging takes it back, though the trainer's own entry is still to come
            evaluate(model, self.trained, args.process_index)
            control.should_log = wanted
            self.trained, self.done = 0.0, state.global_step

    return SFACallback()


def _named(prefix: str, stats: Any) -> dict[str, float]:
    numbers = {}
    for metric in stats.means():
        mean, error = stats.mean(metric)
        numbers[prefix + metric] = mean
        if error > 0:
            numbers[f"{prefix}{metric}_standard_error"] = error
    return numbers
