"""Running a model of transformers wholly in float64, its own casts to float32 included."""

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch


class WideTorch:
    """torch, whose float32 is float64."""

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name in ("float32", "float") else getattr(torch, name)


@contextlib.contextmanager
def wide(model: torch.nn.Module) -> Iterator[None]:
    """Norms, routers, softmaxes, delta rule and index of the model's module run in float64."""
    module = importlib.import_module(type(model).__module__)
    with mock.patch.object(module, "torch", WideTorch()), mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        yield
