"""A callback that evaluates sparse attention while transformers' ``Trainer`` trains, and changes nothing in the run.

trainer.add_callback(sfa_callback(trainer.log, batches, topk=64))
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

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
    (``mass_standard_error``); and what it cost: ``seconds``, and ``overhead``, these seconds over the seconds of
    training since the evaluation before.

    Args:
        log: takes a dict of numbers: ``trainer.log``.
        batches: token batches that are not trained on; they are gone through at every evaluation.
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

    def evaluate(model: nn.Module, trained: float) -> None:
        began = time.perf_counter()
        stats = evaluate_model(model, batches, select=select, topk=topk, rows=rows, layers=layers, reduce=reduce)
        numbers = {"loss": stats.loss, "perplexity": stats.perplexity}
        numbers |= _named("", stats.all_layers)
        for layer, part in stats.layers.items():
            numbers |= _named(f"layer_{layer}/", part)
        seconds = time.perf_counter() - began
        numbers |= {"seconds": seconds, "overhead": seconds / trained if trained > 0 else math.nan}
        log({PREFIX + name: number for name, number in numbers.items() if not math.isnan(number)})

    class SFACallback(TrainerCallback):  # type: ignore[misc]
        """Evaluates sparse attention; made by `sfa_callback`."""

        began = time.perf_counter()

        def on_train_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            if every is not None and state.global_step % every == 0:
                self._evaluate(named["model"])

        def on_evaluate(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            if every is None:
                self._evaluate(named["model"])

        def _evaluate(self, model: nn.Module) -> None:
            evaluate(model, time.perf_counter() - self.began)
            self.began = time.perf_counter()

    return SFACallback()


def _named(prefix: str, stats: Any) -> dict[str, float]:
    numbers = {}
    for metric in stats.means():
        mean, error = stats.mean(metric)
        numbers[prefix + metric] = mean
        if error != 0:
            numbers[f"{prefix}{metric}_standard_error"] = error
    return numbers
