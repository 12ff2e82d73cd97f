"""Checks annotations as jaxtyping's import hook does, and binds arguments only where there are shapes to check.

The hook wraps every function of a package in `jaxtyping.jaxtyped`, which goes through `inspect.Signature.bind` at each
call. Most calls are of small functions that take and return no tensor (`precision.require`); for these beartype alone
checks as much, in a hundredth of the time. Tests that call many small functions take half as long.
"""

import functools
import typing
from collections.abc import Callable
from typing import Any

import jaxtyping
from beartype import beartype

PACKAGES = ["sfa_functional", "sharding", "weights"]
_jaxtyped = jaxtyping.jaxtyped


def check_annotations() -> None:
    """Install the hook; to be called before any of the packages is imported."""
    jaxtyping.jaxtyped = _checked
    jaxtyping.install_import_hook(PACKAGES, "beartype.beartype")


def has_shapes(annotation: Any) -> bool:
    """Say whether an annotation holds an array's shape, or is a string of which that can't be told.

    A string may name what is imported for mypy alone, which jaxtyping lets pass and beartype does not.
    """
    if isinstance(annotation, str | typing.ForwardRef):
        return True
    if isinstance(annotation, type) and issubclass(annotation, jaxtyping.AbstractArray):
        return True
    parts = [*typing.get_args(annotation), getattr(annotation, "__value__", None)]
    return any(any(map(has_shapes, part)) if isinstance(part, list) else has_shapes(part) for part in parts if part)


def _checked(*, typechecker: Any) -> Callable[[Any], Any]:
    def decorate(thing: Any) -> Any:
        plain = isinstance(thing, type(_checked))
        if (
            not plain
            or getattr(thing, "__no_type_check__", False)
            or any(map(has_shapes, thing.__annotations__.values()))
        ):
            return _jaxtyped(thing, typechecker=typechecker)
        checked = beartype(thing)
        if checked is thing:
            return thing

        @functools.wraps(thing)
        def call(*args: Any, **named: Any) -> Any:
            __tracebackhide__ = True
            return (thing if jaxtyping.config.jaxtyping_disable else checked)(*args, **named)

        return call

    return decorate
