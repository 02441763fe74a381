"""Speed peers in PyTorch, for `python -m experiments.bench`: transformers, its own DFlash path, and z-lab's `dflash`.

Runs in the reference environment as a child of the benchmark and answers its requests (`experiments.benchmark.pipe`).

* The target is loaded in float32, MXFP4 experts decoded to float32.
* `transformers_dflash` is `generate(speculation_type="dflash")`. Its drafter class, `MuseGlimmerAssistantModel`, has
  the mathematics of z-lab's `DFlashDraftModel` with full bidirectional layers: `fc` and `hidden_norm` are renamed,
  every other tensor keeps its name. What has no counterpart there is refused (`why_no_assistant`), and the converted
  drafter is held against z-lab's on random inputs before it is used. An output multiplier or soft cap is left out: it
  moves no argmax.
* `dflash` 0.1.0 pins an older transformers but needs no patch on 5.24: only `return_stats=True` wants CUDA, so rounds
  are counted here, for every method alike: calls of the target after the one that hears the prompt.
"""

import contextlib
import importlib.metadata
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from dflash.model import DFlashDraftModel, dflash_generate
from transformers import AutoModelForCausalLM, Mxfp4Config
from transformers.cache_utils import DFlashCache
from transformers.models.muse_glimmer_assistant.configuration_muse_glimmer_assistant import MuseGlimmerAssistantConfig
from transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant import MuseGlimmerAssistantModel

from experiments.benchmark.pipe import serve

EXPERTS = ("eager", "grouped_mm", "batched_mm")
PROMPT_EXPERTS = "grouped_mm"
AGREEMENT = 1e-4  # between the two drafters' hidden states, whose entries are about 1


def why_no_assistant(config: dict[str, Any], taps: list[int], target_layers: int) -> str | None:
    """Why a z-lab drafter cannot be a `MuseGlimmerAssistantModel` without changing what it computes; None: it can."""
    config = {**config, **(config.get("dflash_config") or {})}
    layers = config["num_hidden_layers"]
    causal = config.get("is_causal", config.get("causal"))
    reasons = {
        "its attention has biases, the class has none": config.get("attention_bias"),
        "its sliding layers see |q - k| < window in z-lab's code and <= window in transformers'": "sliding_attention"
        in (config.get("layer_types") or ["full_attention"] * layers),
        "its blocks are causal, the class is bidirectional": causal,
        "it scales the embeddings, transformers does not": (config.get("input_embedding_scale") or 1.0) != 1.0,
        "its width differs from the target's": config.get("target_hidden_size", config["hidden_size"])
        != config["hidden_size"],
        "it taps the last layer, which transformers hands over after the final norm": target_layers - 1 in taps,
    }
    found = [reason for reason, holds in reasons.items() if holds]
    return "; ".join(found) or None


def as_assistant(drafter: DFlashDraftModel, config: dict[str, Any]) -> MuseGlimmerAssistantModel:
    """The same weights in transformers' drafter class."""
    same = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    settings = {key: config[key] for key in (*same, "head_dim", "rms_norm_eps")}
    rope = config.get("rope_scaling") or {}
    made = MuseGlimmerAssistantConfig(
        **settings,
        rope_parameters={"rope_type": "default", **rope, "rope_theta": config["rope_theta"]},
        max_position_embeddings=config.get("max_position_embeddings", 40960),
        layer_types=["full_attention"] * config["num_hidden_layers"],
        block_size=drafter.block_size,
        mask_token_id=drafter.mask_token_id,
        target_layer_ids=list(drafter.target_layer_ids),
    )
    names = {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."}
    weights = {}
    for name, tensor in drafter.state_dict().items():
        prefix = next((old for old in names if name.startswith(old)), "")
        weights[names.get(prefix, "") + name.removeprefix(prefix)] = tensor
    assistant = MuseGlimmerAssistantModel(made).eval()
    assistant.load_state_dict(weights, strict=True)
    return assistant


@torch.inference_mode()
def drafter_distance(drafter: DFlashDraftModel, assistant: MuseGlimmerAssistantModel, context: int = 9) -> float:
    """Largest difference between the two drafters' hidden states on one random context and block."""
    draw = torch.Generator().manual_seed(0)
    width = assistant.config.hidden_size
    features = torch.randn(1, context, width * len(drafter.target_layer_ids), generator=draw)
    block = torch.randn(1, drafter.block_size, width, generator=draw)
    positions = torch.arange(context + drafter.block_size)[None]
    cache = DFlashCache(config=assistant.config)
    cache.set_previous_accepted_tokens(context)
    theirs = drafter(position_ids=positions, noise_embedding=block, target_hidden=features)
    mine = assistant(noise_embeds=block, context_hidden_states=features, position_ids=positions, cache=cache)
    return (theirs - mine.last_hidden_state).abs().max().item()


class Peers:
    """The loaded models and the commands that the benchmark sends."""

    def load(self, target: str, drafter: str, threads: int) -> dict[str, Any]:
        """Load both networks; says the versions, the choices there are, and which methods are refused and why."""
        torch.set_num_threads(threads)
        quantised = json.loads((Path(target) / "config.json").read_text()).get("quantization_config")
        if quantised and quantised["quant_method"] != "mxfp4":
            method = quantised["quant_method"]
            raise ValueError(
                f"{target}/config.json: quant_method {method!r}; the PyTorch contestants read mxfp4 or none"
            )
        options = {"quantization_config": Mxfp4Config(dequantize=True)} if quantised else {}
        self.target = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, **options).eval()
        self.target.generation_config.eos_token_id = None
        self.forwards = 0
        self.target.register_forward_pre_hook(self._count)
        self._switch_experts_after_prompt()
        config = json.loads((Path(drafter) / "config.json").read_text())
        self.drafter = DFlashDraftModel.from_pretrained(drafter, dtype=torch.float32).eval()
        refused = {}
        taps = list(self.drafter.target_layer_ids)
        if reason := why_no_assistant(config, taps, self.target.config.num_hidden_layers):
            refused["transformers_dflash"] = f"no faithful conversion of the drafter: {reason}"
        else:
            self.assistant = as_assistant(self.drafter, config)
            distance = drafter_distance(self.drafter, self.assistant)
            if distance > AGREEMENT:
                refused["transformers_dflash"] = f"the converted drafter differs from z-lab's by {distance:.1e}"
        versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "dflash")}
        return {"versions": versions, "refused": refused, "options": self._options()}

    def generate(
        self,
        method: str,
        prompt: list[int],
        tokens: int,
        experts: str | None = None,
        attention: str | None = None,
        block: int | None = None,
    ) -> dict[str, Any]:
        """Greedy ids after `prompt`, stop ids off, and what they took."""
        decode = {"transformers": self._plain, "transformers_dflash": self._assisted, "zlab_dflash": self._zlab}[method]
        if attention and attention != self.target.config._attn_implementation:
            self.target.set_attn_implementation(attention)
        self.experts, self.forwards = experts, 0
        if experts:
            self.target.set_experts_implementation(PROMPT_EXPERTS if method == "transformers" else experts)
        ids = torch.tensor([prompt])
        cpu, started = time.process_time(), time.perf_counter()
        with torch.inference_mode():
            said = decode(ids, tokens, block)[0, len(prompt) :].tolist()
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
        return {"tokens": said, "seconds": seconds, "cpu_seconds": cpu, "rounds": self.forwards - 1}

    def _plain(self, ids: torch.Tensor, tokens: int, _block: int | None, **more: Any) -> torch.Tensor:
        return self.target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            **more,
        )

    def _assisted(self, ids: torch.Tensor, tokens: int, block: int | None) -> torch.Tensor:
        self.assistant.config.block_size = block or self.drafter.block_size
        return self._plain(ids, tokens, block, assistant_model=self.assistant, speculation_type="dflash")

    def _zlab(self, ids: torch.Tensor, tokens: int, block: int | None) -> torch.Tensor:
        return dflash_generate(self.drafter, self.target, ids, tokens, stop_token_ids=None, block_size=block)

    def _options(self) -> dict[str, list[str]]:
        """Implementations that the target's class accepts."""
        found: dict[str, list[str]] = {"attention": [], "experts": []}
        if self.target._can_set_experts_implementation():
            found["experts"] = list(EXPERTS)
        for name in ("eager", "sdpa"):
            with contextlib.suppress(ValueError):
                self.target.set_attn_implementation(name)
                if self.target.config._attn_implementation == name:
                    found["attention"].append(name)
        self.target.set_attn_implementation(found["attention"][0])
        return found

    def _switch_experts_after_prompt(self) -> None:
        """Hear prompts by `grouped_mm` and decode by `self.experts`: what transformers does on accelerators only.

        `batched_mm` copies the experts of every token, so that a prompt takes seconds; a single token may gain.
        """
        original = self.target._optimize_model_for_decode

        @contextlib.contextmanager
        def decoding() -> Iterator[None]:
            if self.experts and self.target.config._experts_implementation != self.experts:
                self.target.set_experts_implementation(self.experts)
            with original():
                yield

        self.target._optimize_model_for_decode = decoding

    def _count(self, *_: Any) -> None:
        self.forwards += 1


if __name__ == "__main__":
    peers = Peers()
    serve({"load": peers.load, "generate": peers.generate})
