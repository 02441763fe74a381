"""A target and a drafter together: greedy speculative decoding by the authors' own loop."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import drafters
import gpt_oss
import qwen3
import torch
from dflash import model as dflash
from drafters import DrafterCase
from gpt_oss import GptOssCase
from observe import SAFE_MARGIN, Text, greedy
from qwen3 import Qwen3Case
from weights import Tensors, check_distinct, draw_ids, sizes, write_golden


@dataclass(frozen=True)
class PairCase:
    """A target, a drafter of the same width, and prompts to continue."""

    about: str
    seed: int
    target: Qwen3Case | GptOssCase
    drafter: DrafterCase
    prompts: int = 3
    prompt_length: int = 17
    max_new_tokens: int = 64


# A random drafter is right one time in `loud_tokens`, since both borrow the head and its loud rows win.
PAIR_CASES = {
    "pair_qwen3": PairCase(
        about="Qwen3 target and a drafter with sliding and full layers; the window is shorter than the prompt",
        seed=41,
        target=Qwen3Case(
            about="the target of pair_qwen3",
            seed=71,
            text=Text(batch=3, length=17),
            sizes=sizes(hidden=48, inner=72, layers=7, heads=10, kv_heads=2, head_dim=12, vocab=101),
            rope={"rope_theta": 1000000, "rope_scaling": None},
            tied=False,
            loud_tokens=2,
        ),
        drafter=DrafterCase(
            about="the drafter of pair_qwen3",
            seed=171,
            block=5,
            taps=(1, 3, 4),
            target_layers=7,
            layer_types=(drafters.SLIDING, drafters.FULL),
            sizes=sizes(hidden=48, inner=60, layers=2, heads=4, kv_heads=2, head_dim=14, vocab=101),
        ),
    ),
    "pair_gpt_oss": PairCase(
        about="gpt-oss target, window shorter than the prompt, and a drafter with attention biases and YaRN",
        seed=51,
        target=GptOssCase(
            about="the target of pair_gpt_oss",
            seed=74,
            text=Text(batch=3, length=17),
            sizes=sizes(hidden=56, inner=36, layers=6, heads=10, kv_heads=2, head_dim=14, vocab=103)
            | {"num_local_experts": 5, "num_experts_per_tok": 2},
            rope=gpt_oss.OLD_ROPE,
            loud_tokens=2,
        ),
        drafter=DrafterCase(
            about="the drafter of pair_gpt_oss",
            seed=174,
            block=7,
            taps=(1, 2, 4),
            target_layers=6,
            rope=drafters.DRAFTER_CASES["drafter_bias_yarn"].rope,
            extra=drafters.DRAFTER_CASES["drafter_bias_yarn"].extra,
            sizes=sizes(hidden=56, inner=64, layers=2, heads=8, kv_heads=4, head_dim=18, vocab=103),
        ),
    ),
}


def generate(
    target: torch.nn.Module,
    drafter: dflash.DFlashDraftModel,
    prompt: torch.Tensor,
    count: int,
    stop_ids: list[int] | None = None,
) -> SimpleNamespace:
    """The authors' greedy loop on one prompt [1 T], with the proposals of every round noted beside its result."""
    proposals, gaps = [], []
    compute_logits = drafter.compute_logits

    def spy(hidden: torch.Tensor, head: torch.nn.Module) -> torch.Tensor:
        logits = compute_logits(hidden, head)
        best = logits[0].topk(2)
        proposals.append(best.indices[:, 0])
        gaps.append((best.values[:, 0] - best.values[:, 1]).min().item())
        return logits

    with mock.patch.object(drafter, "compute_logits", spy), mock.patch.object(dflash, "_cuda_time", return_value=0.0):
        result = dflash.dflash_generate(
            drafter, target, prompt, count, stop_token_ids=stop_ids, temperature=0.0, return_stats=True
        )
    result.proposals, result.gap = proposals, min(gaps)
    return result


def full_rounds(acceptance: list[int], prompt: int, count: int, block: int) -> int:
    """How many leading rounds had room for a whole block; the loop shortens the block in the others."""
    start, rounds = prompt, 0
    for produced in acceptance:
        if prompt + count - start < block:
            break
        start, rounds = start + produced, rounds + 1
    return rounds


def decode_prompts(
    target: torch.nn.Module, drafter: dflash.DFlashDraftModel, prompts: torch.Tensor, case: PairCase
) -> tuple[Tensors, float]:
    """Ids, acceptance lengths and proposals of every prompt, checked against plain greedy decoding."""
    plain, gap = greedy(target, prompts, case.max_new_tokens)
    runs = [generate(target, drafter, prompt[None], case.max_new_tokens) for prompt in prompts]
    ids = torch.cat([run.output_ids[:, case.prompt_length :] for run in runs])
    if not torch.equal(ids, plain):
        raise ValueError("speculative decoding changed the text")
    accepted = [run.acceptance_lengths for run in runs]
    rounds, drafts = max(map(len, accepted)), case.drafter.block - 1
    proposals = torch.full((case.prompts, rounds, drafts), -1)
    for row, run in enumerate(runs):
        for turn, drafted in enumerate(run.proposals):
            proposals[row, turn, : len(drafted)] = drafted
    full = [full_rounds(row, case.prompt_length, case.max_new_tokens, case.drafter.block) for row in accepted]
    tensors = {
        "prompt_ids": prompts,
        "greedy_ids": ids,
        "acceptance_lengths": torch.tensor([row + [0] * (rounds - len(row)) for row in accepted]),
        "proposals": proposals,
        "full_rounds": torch.tensor(full),
    }
    return tensors, min(gap, *(run.gap for run in runs))


def decode_until_stop(
    target: torch.nn.Module, drafter: dflash.DFlashDraftModel, tensors: Tensors, case: PairCase
) -> Tensors:
    """The first prompt again, with a stop token that falls inside an accepted run, before its last token."""
    ids, accepted = tensors["greedy_ids"][0].tolist(), tensors["acceptance_lengths"][0].tolist()
    position = 1  # ids[0] comes from the prompt pass, before the first round
    for produced in accepted:
        inside = [ids[index] for index in range(position, position + produced - 1)]
        fresh = [token for offset, token in enumerate(inside) if token not in ids[: position + offset]]
        if fresh:
            run = generate(target, drafter, tensors["prompt_ids"][:1], case.max_new_tokens, [fresh[0]])
            stopped = run.output_ids[0, case.prompt_length :]
            return {"stop_id": torch.tensor([fresh[0]]), "stopped_ids": stopped}
        position += produced
    raise ValueError("no token first appears inside an accepted run: pick another seed")


@torch.inference_mode()
def build(name: str, folder: Path) -> None:
    """Write one pair: `target/`, `drafter/` and what they say together."""
    case = PAIR_CASES[name]
    dims = {"prompts": case.prompts, "prompt": case.prompt_length, "layers": case.target.sizes["num_hidden_layers"]}
    check_distinct(dims | qwen3.dimensions(case.target.sizes))
    check_distinct({"block": case.drafter.block} | qwen3.dimensions(case.drafter.sizes))
    family = qwen3 if isinstance(case.target, Qwen3Case) else gpt_oss
    target = family.write_and_load(case.target, folder / "target")
    drafter = drafters.write_and_load(case.drafter, folder / "drafter")
    vocab = case.target.sizes["vocab_size"]
    prompts = draw_ids(case.seed, "prompt_ids", vocab - 2, (case.prompts, case.prompt_length))
    tensors, gap = decode_prompts(target, drafter, prompts, case)
    if gap < SAFE_MARGIN:
        raise ValueError(f"{name}: a choice is a near tie ({gap:.1e}): pick another seed")
    tensors |= decode_until_stop(target, drafter, tensors, case)
    counts = torch.bincount(tensors["acceptance_lengths"].flatten(), minlength=case.drafter.block + 1)
    details = {
        "settings": drafters.settings_of(case.drafter),
        "dims": dims | {"max_new_tokens": case.max_new_tokens, "block": case.drafter.block},
        "observed": {"smallest_gap": round(gap, 5), "rounds_by_acceptance": counts[1:].tolist()},
    }
    write_golden(folder, "pair", case.about, tensors, 0.0, **details)
