"""Which code runs a function: names, callables, and why a named one can't run."""

from collections.abc import Callable
from typing import Any, Literal

Implementation = Literal["reference", "blockwise", "npu"] | Callable[..., Any] | None
"""None chooses for the tensors' device; a callable has the reference's signature."""


def explain_implementation(
    name: str, function: str | Callable[..., Any] | None = None, /, *arguments: Any, **named: Any
) -> list[str]:
    """Return every reason why a named implementation can't run here; an empty list where it can.

    Args:
        name: "reference", "blockwise" or "npu".
        function: what it should run, for example `sparse_attention` or its name; None asks only whether the
            implementation is there at all.
        arguments: of the function, as in the call, but for ``implementation``.
        named: likewise.

    Returns:
        One short sentence per reason: the list that a call with ``implementation=name`` refuses with.
    """
    match name:
        case "reference" | "blockwise":
            return []
        case "npu":
            from . import npu_rules  # which reads files that read this one

            asked = function if function is None or isinstance(function, str) else function.__name__
            return npu_rules.explain(asked, *arguments, **named)
        case _:
            return ["it is unknown; 'reference', 'blockwise', 'npu', a callable or None are"]


def choose(function: str, implementation: Implementation, *arguments: Any, **named: Any) -> Any:
    """Return what is to run a call: never None, and nothing that can't.

    None becomes "npu" where the tensors' device has its operators and no rule is broken, else "blockwise".

    Args:
        function: the public function's name.
        implementation: as its caller gave it.
        arguments: of the call.
        named: likewise.

    Returns:
        A callable as it came, or a name.

    Raises:
        ValueError: a named implementation that can't run, with every reason.
    """
    if callable(implementation):
        return implementation
    if implementation is None:
        from . import npu, npu_rules  # as above

        fits = npu.has_operators(function, *arguments) and not npu_rules.explain(function, *arguments, **named)
        return "npu" if fits else "blockwise"
    if not isinstance(implementation, str):
        raise refuse(function, implementation, ["it is not callable"])
    reasons = explain_implementation(implementation, function, *arguments, **named)
    if reasons:
        raise refuse(function, implementation, reasons)
    return implementation


def refuse(function: str, implementation: object, reasons: list[str]) -> ValueError:
    """Build the error for an implementation that can't run, with every reason."""
    return ValueError(f"{function}: implementation {implementation!r} can't run: {'; '.join(reasons)}")
