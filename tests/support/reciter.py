"""A target that recites one text, whatever it hears, and a byte tokenizer to write that text with."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from dflash_jax.cache import Cache, step_positions
from dflash_jax.protocols import StepOut


@dataclass(frozen=True)
class Reciter:
    """After the token at position p comes ``text[p + 1]``; its hidden state is the position. At position ``sick`` and
    after it the logits are not numbers."""

    text: tuple[int, ...]
    vocab: int
    sick: int = 2**30
    mixture_layers: int = 0
    experts: int = 0

    def init_cache(self, batch: int, capacity: int, undo: int) -> Cache:
        return Cache(length=jnp.zeros(batch, jnp.int32), layers=())

    def embed(self, params, tokens: jax.Array) -> jax.Array:
        return jnp.zeros((*tokens.shape, 1))

    def step(self, params, tokens: jax.Array, cache: Cache, tree=None) -> StepOut:
        rows, width = tokens.shape
        return StepOut(
            hidden=step_positions(cache, width)[..., None].astype(jnp.float32),
            features=jnp.zeros((rows, width, 0, 1)),
            experts=jnp.zeros((rows, width, 0, 0), jnp.int32),
            cache=cache.replace(length=cache.length + width),
        )

    def unembed(self, params, hidden: jax.Array) -> jax.Array:
        position = hidden[..., 0].astype(jnp.int32)
        logits = 10.0 * jax.nn.one_hot(jnp.array(self.text)[jnp.minimum(position + 1, len(self.text) - 1)], self.vocab)
        return jnp.where((position >= self.sick)[..., None], jnp.nan, logits)


def byte_tokenizer(merges: Sequence[tuple[str, str]] = ()) -> Tokenizer:
    """One token per byte, and one per merge."""
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def fallback_tokenizer() -> Tokenizer:
    """As of sentencepiece: a token per letter of a few, ``▁`` for a space, and bytes for every other character."""
    words = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghij(!"]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer
