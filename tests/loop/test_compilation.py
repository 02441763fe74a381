"""The compiled loop: what makes it compile, what its program holds, and that it runs without the host."""

import re
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints.text import stream_tokens
from dflash_jax import cache as caches
from dflash_jax import generate
from dflash_jax.accept import Greedy, Match
from dflash_jax.delta import library_solve, solve_unit_lower
from dflash_jax.draft_tree import chain
from dflash_jax.generate import FOREVER, Decoder
from dflash_jax.nn import argmax
from dflash_jax.plain import NoDrafter
from dflash_jax.settings import SamplingParams
from dflash_jax.tree import Tree
from tests.support.drafters import tiny_drafter
from tests.support.families import STEPS, family
from tests.support.oracle import ALL, script
from tests.support.texts import greedy, random_prompts, scripted

GREEDY = Greedy()
NAME, BLOCK, TOKENS, LENGTHS = "gpt_oss-split", 8, 40, (5, 29, 17, 1)
COMPILATION = "/jax/core/compile/backend_compile_duration"


class Compilations:
    """Counts every program that XLA compiles while it is open."""

    def __enter__(self) -> "Compilations":
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._hear)
        return self

    def __exit__(self, *_) -> None:
        jax.monitoring.unregister_event_duration_listener(self._hear)

    def _hear(self, event: str, seconds: float, **_) -> None:
        self.count += event == COMPILATION


def scripted_decoder(accept, prompts, truth) -> Decoder:
    chosen = family(NAME)
    return Decoder(chosen.target, chosen.params, scripted(chosen, BLOCK), script(truth, prompts, accept))


class TestB63NothingButShapesCompiles:
    def test_B63_lengths_budgets_stops_seeds_and_acceptance_are_values(self) -> None:
        rng, chosen = np.random.default_rng(0), family(NAME)
        prompts = random_prompts(chosen, LENGTHS)
        truth = greedy(chosen, prompts, TOKENS + BLOCK)
        for warm in (LENGTHS, (61, 61, 33, 1)):
            scripted_decoder([[ALL]], prompts, truth).generate(random_prompts(chosen, warm), TOKENS, stop=[3])
        with Compilations() as compiled:
            sizes = [generate.hear._cache_size(), generate.begin._cache_size(), generate.run_rounds._cache_size()]
            for case in range(20):
                lengths = rng.integers(1, 62, 4)
                budget = rng.integers(3, 41, 4).tolist() if case % 2 else int(rng.integers(3, 41))
                accept = rng.integers(0, BLOCK, (4, 5)).tolist()
                stop = rng.integers(0, 61, rng.integers(0, 4)).tolist()
                decoder = scripted_decoder(accept, random_prompts(chosen, lengths), truth)
                decoder.generate(random_prompts(chosen, lengths, seed=case), budget, stop=stop)
            after = [generate.hear._cache_size(), generate.begin._cache_size(), generate.run_rounds._cache_size()]
        assert after == sizes
        assert compiled.count == 0

    def test_B63_streaming_uses_the_same_program(self) -> None:
        chosen = family(NAME)
        prompts = random_prompts(chosen, LENGTHS)
        decoder = scripted_decoder([[2]], prompts, greedy(chosen, prompts, TOKENS + BLOCK))
        decoder.generate(prompts, TOKENS)
        before = generate.run_rounds._cache_size()
        for rounds in (1, 4, 2):
            list(decoder.stream(prompts, TOKENS, rounds_per_call=rounds))
        assert generate.run_rounds._cache_size() == before

    def test_B63_seeds_temperatures_filters_and_greedy_rows_are_values(self) -> None:
        rng, chosen = np.random.default_rng(0), family(NAME)
        prompts = random_prompts(chosen, LENGTHS)
        known = script(greedy(chosen, prompts, TOKENS + BLOCK), prompts, [[3, 0]])
        decoder = Decoder(chosen.target, chosen.params, scripted(chosen, BLOCK), known, rule=Match())
        decoder.generate(prompts, 8, sampling=SamplingParams(0.7, seed=1))
        mixed = [SamplingParams(), SamplingParams(1.5, top_k=3), SamplingParams(1e-3, min_p=0.5), SamplingParams(5)]
        with Compilations() as compiled:
            before = [generate.begin._cache_size(), generate.run_rounds._cache_size()]
            for one in (0, 1, 1.0, np.float32(1), np.int64(1)):
                decoder.generate(prompts, 8, sampling=SamplingParams(one, top_p=one, min_p=one, seed=3))
            for top_k in (-1, 0, 1, np.int32(5), 61, 10**6):
                seeds = rng.integers(0, 2**64, 4, np.uint64)
                rows = [SamplingParams(rng.uniform(0, 2), top_k, rng.uniform(), rng.uniform(), seed) for seed in seeds]
                decoder.generate(prompts, 8, sampling=rows)
            decoder.generate(prompts, 8, sampling=mixed)
            decoder.generate(prompts, 8)
            list(decoder.stream(prompts, 8, sampling=mixed[::-1], rounds_per_call=3))
            assert [generate.begin._cache_size(), generate.run_rounds._cache_size()] == before
        assert compiled.count == 0

    def test_B63_nor_does_a_round_of_streamed_text(self) -> None:
        prompts = random_prompts(family(NAME), LENGTHS[:1])
        truth = greedy(family(NAME), prompts, TOKENS + BLOCK)
        decoder = scripted_decoder([[1, 0, 2]], prompts, truth)
        list(stream_tokens(decoder, prompts[0], 3, ()))
        with Compilations() as compiled:
            said = [token for token, _ in stream_tokens(decoder, prompts[0], TOKENS, ())]
        assert said == truth[0][:TOKENS] and compiled.count == 0

    def test_B63_the_counter_can_count(self) -> None:
        with Compilations() as compiled:
            jax.jit(lambda x: x * 3 + 1)(np.arange(5)).block_until_ready()
        assert compiled.count >= 1


def test_the_loop_needs_no_transfer() -> None:
    """Between its arguments and its result nothing moves between host and device, explicitly or not."""
    chosen = family(NAME)
    prompts = random_prompts(chosen, LENGTHS)
    truth = greedy(chosen, prompts, TOKENS + BLOCK)
    decoder = scripted_decoder([[5, 0]], prompts, truth)
    decoder.generate(prompts, TOKENS)
    state, until = decoder.start(prompts, TOKENS), jnp.asarray(FOREVER)
    with jax.transfer_guard("disallow_explicit"):
        state = generate.run_rounds(
            decoder.target, decoder.drafter, decoder.rule, decoder.params, decoder.draft_params, state, until
        )
        jax.block_until_ready(state)
    assert np.asarray(state.tokens)[:, :TOKENS].tolist() == [text[:TOKENS] for text in truth]


CALLED = re.compile(r"custom_call @(\w+)\(")
"""Code outside the program, in lowered text."""

LAPACK = "lapack_dtrsm_ffi"


def called(step, *given) -> set[str]:
    """The names of what a program calls."""
    return set(CALLED.findall(jax.jit(step).lower(*given).as_text()))


class TestACpuComputesOnJaxsOwnThreads:
    """LAPACK's BLAS has others, which spin on CPUs that a run was told to leave alone, or take turns on its own."""

    @pytest.mark.parametrize("name", STEPS)
    def test_no_step_calls_lapack(self, name: str) -> None:
        """Neither a prompt, in more than one chunk, nor a chain, nor a tree; more tokens than are heard one by one."""
        target, params, tokens = family(name).target, family(name).params, jnp.zeros((2, 17), jnp.int32)
        cache, tree = target.init_cache(2, 256, 128), chain(2, 16)
        for given in ((jnp.tile(tokens, 5), cache), (tokens[:, :8], cache), (tokens, cache, tree)):
            assert not {call for call in called(partial(target.step, params), *given) if "lapack" in call}

    def test_the_search_can_find_it(self) -> None:
        assert called(library_solve, jnp.zeros((17, 17)), jnp.zeros((17, 3))) == {LAPACK}

    def test_an_accelerator_has_its_librarys_solve(self) -> None:
        """Of the two in one text, each platform takes its own."""
        given = jnp.zeros((17, 17), jnp.float32), jnp.zeros((17, 3), jnp.float32)
        text = jax.jit(solve_unit_lower).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
        assert "triangular_solve" in text and "while" not in text


PROGRAMS = ("hear", "begin", "run_rounds")

DRAWING = re.compile(rf"rng|threefry|{0x1BD11BDA}", re.IGNORECASE)
"""Random numbers in optimised HLO. No name is left of a draw itself, but Threefry's constant is."""


def compiled(drafter, draft_params, rule=GREEDY, logprobs: int | None = None) -> dict[str, str]:
    """The optimised HLO of every program that decoding calls, by name."""
    chosen, found = family(NAME), {}

    def noted(name: str, program):
        def call(*args, **kwargs):
            found[name] = program.lower(*args, **kwargs).compile().as_text()
            return program(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in PROGRAMS:
            patch.setattr(generate, name, noted(name, getattr(generate, name)))
        decoder = Decoder(chosen.target, chosen.params, drafter, draft_params, rule=rule)
        decoder.generate(random_prompts(chosen, LENGTHS), TOKENS, logprobs=logprobs)
    return found


def drawing(programs: dict[str, str]) -> list[str]:
    """The names of those that hold random numbers."""
    assert tuple(programs) == PROGRAMS
    return [name for name, text in programs.items() if DRAWING.search(text)]


def copied_shapes(program: str) -> set[str]:
    """Shapes of the float64 arrays that a program copies."""
    return set(re.findall(r"= f64\[([\d,]+)\]\S* copy\(", program))


@pytest.fixture(scope="module")
def programs() -> dict[str, str]:
    """Those of greedy decoding with a drafter."""
    return compiled(*tiny_drafter("mixed", NAME))


@pytest.fixture(scope="module")
def program(programs: dict[str, str]) -> str:
    """That of the rounds."""
    return programs["run_rounds"]


class TestThePrograms:
    def test_it_has_one_loop(self, program: str) -> None:
        assert len(re.findall(r"= .*\bwhile\(", program)) == 1

    def test_it_copies_no_cache(self, program: str) -> None:
        """No copy has the shape of a cache of the target or of the drafter."""
        chosen, (drafter, _) = family(NAME), tiny_drafter("mixed", NAME)
        size = (4, 256, generate.CHUNKS[-1] + 1)
        slots = (*chosen.target.init_cache(*size).layers, *drafter.init_cache(*size).layers)
        shapes = {",".join(map(str, s.k.shape)) for s in slots}
        assert len(shapes) == 4, "windowed and full, target and drafter"
        assert all(f"f64[{shape}]" in program for shape in shapes)
        assert not copied_shapes(program) & shapes

    def test_the_search_for_copies_can_find_one(self) -> None:
        """A write into slots that were not donated must copy them."""
        slots = family(NAME).target.init_cache(4, 256, 128).layers[0]
        lowered = jax.jit(lambda slots: slots.replace(k=slots.k.at[0, 0, 0].set(1.0))).lower(slots)
        assert ",".join(map(str, slots.k.shape)) in copied_shapes(lowered.compile().as_text())

    def test_greedy_decoding_draws_nothing(self, programs: dict[str, str]) -> None:
        """Neither when it hears the prompt, nor for the first token, nor in a round."""
        assert not drawing(programs)
        for logprobs in (None, 3):
            assert not drawing(compiled(NoDrafter(), None, logprobs=logprobs))

    def test_the_search_for_draws_can_find_them(self) -> None:
        """In both programs that have the rule; and one draw by itself."""
        assert drawing(compiled(*tiny_drafter("mixed", NAME), Match())) == ["begin", "run_rounds"]
        alone = jax.jit(lambda key: jax.random.gumbel(key, (3,))).lower(jax.random.key(0)).compile().as_text()
        assert DRAWING.search(alone) and not re.search("threefry", alone), "found by the constant alone"

    def test_the_search_for_loops_can_find_more(self) -> None:
        """A stacked mixture has a loop of its own over the experts in use."""
        chosen = family("gpt_oss-stacked")
        decoder = Decoder(chosen.target, chosen.params)
        state = decoder.start(random_prompts(chosen, LENGTHS), TOKENS)
        lowered = generate.run_rounds.lower(
            decoder.target, decoder.drafter, decoder.rule, decoder.params, None, state, jnp.asarray(FOREVER)
        )
        assert len(re.findall(r"stablehlo.while", lowered.as_text())) > 1


def tree_round(target, params, cache, tokens, tree):
    """Hear a tree, keep a path that depends on what was said, as any accept rule does, and roll back."""
    out = target.step(params, tokens, cache, tree)
    said = argmax(target.unembed(params, out.hidden))
    path = jnp.cumsum(said[:, :4] % 2, axis=1).at[:, 0].set(0)
    return caches.rollback(caches.follow(out.cache, cache.length, path), cache.length + 2)


def chain_round(target, params, cache, tokens, tree):
    """Hear as many tokens as a chain, keep some and roll back."""
    out = target.step(params, tokens, cache)
    said = argmax(target.unembed(params, out.hidden))
    return caches.rollback(out.cache, cache.length + said[:, 0] % 2)


def copies_of_memory(round_, name: str, rows: int) -> tuple[Counter, set[str]]:
    """How often a round whose cache is donated copies an array of the cache's shapes, and these shapes."""
    chosen, nodes = family(name), 8
    cache = chosen.target.init_cache(rows, 256, 128)
    tokens, tree = jnp.zeros((rows, nodes), jnp.int32), Tree(jnp.zeros((rows, nodes), jnp.int32))
    lowered = jax.jit(round_, static_argnums=0, donate_argnums=2).lower(
        chosen.target, chosen.params, cache, tokens, tree
    )
    shapes = {",".join(map(str, leaf.shape)) for leaf in jax.tree.leaves(cache.layers) if leaf.size and leaf.ndim > 1}
    program = lowered.compile().as_text()
    assert all(f"f64[{shape}]" in program for shape in shapes)
    copied = Counter(re.findall(r"= f64\[([\d,]+)\]\S* copy\(", program))
    return Counter({shape: copied[shape] for shape in shapes & copied.keys()}), shapes


def hasty_round(target, params, cache, tokens, tree):
    """A path that was known before the step: nothing makes the move wait for the layers that still read."""
    out = target.step(params, tokens, cache, tree)
    return caches.follow(out.cache, cache.length, tokens[:, :4]), out.hidden


class TestARoundOfATree:
    @pytest.mark.parametrize(("name", "kinds", "rows"), [(NAME, 2, 4), (NAME, 2, 1), ("glm_moe_dsa", 3, 4)])
    def test_it_copies_no_slots(self, name: str, kinds: int, rows: int) -> None:
        """Rings and whole buffers; latents, rotated keys and index keys."""
        copied, shapes = copies_of_memory(tree_round, name, rows)
        assert len(shapes) == kinds and not copied

    def test_it_copies_no_more_of_a_recurrent_memory_than_a_chain(self) -> None:
        (tree, _), (chain, _) = (copies_of_memory(kind, "qwen3_5_moe-solve", 4) for kind in (tree_round, chain_round))
        assert tree <= chain

    def test_the_search_for_copies_can_find_one(self) -> None:
        copied, shapes = copies_of_memory(hasty_round, NAME, 1)
        assert set(copied) == shapes
