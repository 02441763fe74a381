"""A random target and drafter as checkpoint folders, with a tokenizer of bytes: a pair that needs no training."""

import json
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from checkpoints import dflash, export, gpt_oss
from dflash_jax.nn import plain_rope, yarn_rope
from models.dflash import DFlash, DFlashConfig, DFlashDrafter
from models.gpt_oss import GptOss, GptOssConfig
from models.target import FlaxTarget

END, MASK, VOCABULARY = 256, 257, 258
BLOCK = 5
FLOAT = jnp.dtype("float32")
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 64,
    "truncate": False,
}
PROMPTS = (
    {"split": "modeling", "text": "def forward(self, x):\n    return x"},
    {"split": "modeling", "text": "class Né:\n    '''漢字 🎉'''\n"},
    {"split": "modeling", "text": "import math\nfrom os import path\n\n"},
    {"split": "stdlib", "text": "while True:\n    pass\n"},
)

TARGET = GptOssConfig(
    vocab_size=VOCABULARY,
    hidden_size=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    intermediate_size=32,
    experts=5,
    experts_per_token=2,
    windows=(16, None),
    rope=yarn_rope(1000.0, 8, factor=4.0, original_max_position=64, truncate=False),
)
DRAFTER = DFlashConfig(
    hidden_size=32,
    target_hidden_size=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    windows=(None, None),
    causal=(False, False),
    rope=plain_rope(1000.0, 8),
    taps=(0, 1),
    mask_token_id=MASK,
    block_size=BLOCK,
)


def random_like(abstract: dict) -> dict:
    """Normal values for every parameter, loud enough that greedy text does not stand still."""

    def draw(path, leaf):
        name = jax.tree_util.keystr(path)
        values = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(leaf.shape)
        if "norm" in name:
            values = 1 + 0.3 * values
        elif leaf.ndim == 1 or "bias" in name:
            values = 0.3 * values
        else:
            values = values * 2.0 / np.sqrt(leaf.shape[-2])
        return jnp.asarray(values, leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, abstract)


def byte_tokenizer() -> Tokenizer:
    """Every byte is a token; the end and the mask come after them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|mask|>"])
    return tokenizer


def write_random_pair(root: Path, name: str = "random") -> tuple[Path, Path]:
    """Write ``root/name`` and ``root/name-dflash``; returns both folders."""
    target, drafter = root / name, root / f"{name}-dflash"
    settings = dict(rope_theta=1000.0, rope_scaling=YARN, eos_token_id=END, max_position_embeddings=256)
    export.export_target(
        random_like(FlaxTarget(GptOss(TARGET, dtype=FLOAT)).abstract_params()),
        gpt_oss.hf_config(TARGET, **settings),
        target,
    )
    byte_tokenizer().save(str(target / "tokenizer.json"))
    (target / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    settings = dict(rope_theta=1000.0, vocab_size=VOCABULARY, target_layers=TARGET.layers)
    params = random_like(DFlashDrafter(DFlash(DRAFTER, dtype=FLOAT), BLOCK).abstract_params())
    export.export_drafter(params, dflash.hf_config(DRAFTER, **settings), drafter)
    return target, drafter
