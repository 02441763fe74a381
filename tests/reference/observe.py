"""What a golden records of a target: logits, residual stream, chunked decoding, greedy continuation."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache
from weights import Tensors, draw_ids

SAFE_MARGIN = 1e-4  # smallest accepted distance between a choice and the runner-up


@dataclass(frozen=True)
class Text:
    """Shape of the input, and how the incremental and greedy runs cut it."""

    batch: int
    length: int
    window: int = 8
    chunks: tuple[int, ...] = (5, 1, 1, 1, 7, 11, 3, 1, 2)  # the rest of the text is one last chunk
    greedy_prefix: int = 13
    greedy_tokens: int = 24

    def all_chunks(self) -> list[int]:
        """The chunk sizes, last one included."""
        return [*self.chunks, self.length - sum(self.chunks)]

    def described(self) -> dict[str, Any]:
        """For `case.json`."""
        return asdict(self) | {"chunks": self.all_chunks()}


def full_pass(model: nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [B T V] and residual stream [L+1 B T D]: the embedding, then what each layer leaves behind.

    Hooks rather than `output_hidden_states`, whose last entry is taken after the final norm.
    """
    seen: list[torch.Tensor] = []
    modules = [model.model.embed_tokens, *model.model.layers]
    hooks = [module.register_forward_hook(lambda _m, _i, out: seen.append(_hidden(out))) for module in modules]
    logits = model(ids).logits
    for hook in hooks:
        hook.remove()
    return logits, torch.stack(seen)


def _hidden(output: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The residual stream that a layer returns, first of what it returns."""
    return output if isinstance(output, torch.Tensor) else output[0]


def incremental_pass(model: nn.Module, ids: torch.Tensor, chunks: list[int]) -> torch.Tensor:
    """Logits [B T V] when the text arrives in chunks, through the model's own cache."""
    cache = DynamicCache(config=model.config)
    pieces = [model(chunk, cache=cache, use_cache=True).logits for chunk in torch.split(ids, chunks, dim=1)]
    return torch.cat(pieces, dim=1)


def greedy(model: nn.Module, prefix: torch.Tensor, count: int) -> tuple[torch.Tensor, float]:
    """Greedy continuation [B count] by full re-evaluation, and its smallest gap between best and second logit."""
    ids, gap = prefix, float("inf")
    for _ in range(count):
        best = model(ids).logits[:, -1].topk(2)
        gap = min(gap, (best.values[:, 0] - best.values[:, 1]).min().item())
        ids = torch.cat([ids, best.indices[:, :1]], dim=1)
    return ids[:, prefix.shape[1] :], gap


def router_margin(model: nn.Module, routers: list[nn.Module], ids: torch.Tensor) -> float:
    """Smallest distance between the last chosen expert's logit and the first one left out."""
    margins: list[float] = []

    def hook(module: nn.Module, _inputs: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, ...]) -> None:
        best = output[0].topk(module.top_k + 1).values
        margins.append((best[:, -2] - best[:, -1]).min().item())

    hooks = [router.register_forward_hook(hook) for router in routers]
    model(ids)
    for handle in hooks:
        handle.remove()
    return min(margins)


def observe(
    model: nn.Module, text: Text, seed: int, routers: list[nn.Module] | None = None
) -> tuple[Tensors, dict[str, Any]]:
    """The expected tensors of a target, and figures that say how much they can be trusted."""
    ids = draw_ids(seed, "input_ids", model.config.vocab_size, (text.batch, text.length))
    logits, residuals = full_pass(model, ids)
    incremental = incremental_pass(model, ids, text.all_chunks())
    continuation, gap = greedy(model, ids[:, : text.greedy_prefix], text.greedy_tokens)
    observed = {
        "logit_std": round(logits.std().item(), 3),
        "residual_std": [round(residual.std().item(), 3) for residual in residuals],
        "greedy_gap": round(gap, 5),
        "greedy_distinct": [len(set(row.tolist())) for row in continuation],
    }
    if routers:
        margin = router_margin(model, routers, torch.cat([ids[:, : text.greedy_prefix], continuation], dim=1))
        margin = min(margin, router_margin(model, routers, ids))
        observed["router_margin"] = round(margin, 6)
        gap = min(gap, margin)
    if gap < SAFE_MARGIN:
        raise ValueError(f"a choice is a near tie ({gap:.1e}): pick another seed")
    torch.testing.assert_close(incremental, logits, rtol=0, atol=1e-5 * max(1.0, logits.std().item()))
    tensors = {
        "input_ids": ids,
        "logits": logits,
        "residuals": residuals,
        "incremental_logits": incremental,
        "greedy_ids": continuation,
    }
    return tensors, observed
