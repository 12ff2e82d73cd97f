"""Counting matrix products where they happen: inside of a rank's thread, and inside of an op's Python kernel."""

from contextlib import ExitStack
from typing import Any

import torch
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from sfa_functional.operators import PLAIN

PRODUCTS = {
    linear,
    torch.matmul,
    torch.mm,
    torch.bmm,
    torch.addmm,
    torch.baddbmm,
    torch.einsum,
    torch.Tensor.matmul,
    torch.Tensor.mm,
    torch.Tensor.bmm,
    torch.Tensor.__matmul__,
    torch.Tensor.__rmatmul__,
}


class ProductCounter(ExitStack):
    """Adds up the operations of all products called from Python while it is entered, in this thread.

    ``FlopCounterMode`` alone sees the ops that reach the dispatcher from outside, and nothing of a product inside of
    one of the library's own operators. This counts calls, each with ``FlopCounterMode``, and calls the plain function
    behind an operator in its place. Neither sees what is no product: norms, rope, softmax, selections.
    """

    flops = 0

    def __enter__(self) -> "ProductCounter":
        self._inside = False
        self.enter_context(_Watch(self))
        return self

    def call(self, function: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Call a function, counting it if it is a product that is not part of another one."""
        if function in PLAIN:
            with _Watch(self):  # a mode is off while it handles a call: another one sees what is inside
                return PLAIN[function](*args, **named)
        if self._inside or function not in PRODUCTS:
            return function(*args, **named)
        self._inside = True
        try:
            with FlopCounterMode(display=False) as counter:
                result = function(*args, **named)
        finally:
            self._inside = False
        self.flops += counter.get_total_flops()
        return result


class _Watch(TorchFunctionMode):
    def __init__(self, counter: ProductCounter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._counter.call(func, args, kwargs or {})
