"""Which code runs a function: names, callables, and why a named one can't run."""

from collections.abc import Callable
from typing import Any, Literal

Implementation = Literal["reference", "blockwise", "npu"] | Callable[..., Any] | None
"""None chooses for the tensors' device; a callable has the reference's signature."""


def explain_implementation(name: str) -> list[str]:
    """Return every reason why a named implementation can't run here; an empty list where it can.

    Args:
        name: "reference", "blockwise" or "npu".

    Returns:
        One short sentence per reason.
    """
    match name:
        case "reference" | "blockwise":
            return []
        case "npu":
            return ["the Ascend adapter is not part of this version"]
        case _:
            return ["it is unknown; 'reference', 'blockwise', 'npu', a callable or None are"]


def refuse(function: str, implementation: object) -> ValueError:
    """Build the error for an implementation that can't run, with every reason."""
    reasons = explain_implementation(implementation) if isinstance(implementation, str) else ["it is not callable"]
    return ValueError(f"{function}: implementation {implementation!r} can't run: {'; '.join(reasons)}")
