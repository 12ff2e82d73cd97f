"""Vectors that the tests read: published configs, and small public cases with their right values."""

import json
from pathlib import Path
from typing import Any

import torch


def read_vectors(name: str) -> Any:
    """Read one of the files beside this one."""
    return json.loads((Path(__file__).parent / name).read_text())


def numbers(values: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Turn nested lists, in which 'nan', 'inf' and '-inf' are strings, into a tensor."""

    def parse(x: Any) -> Any:
        return [parse(y) for y in x] if isinstance(x, list) else float(x) if isinstance(x, str) else x

    return torch.tensor(parse(values), dtype=dtype)
