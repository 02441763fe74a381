"""What the benchmark measures of our own loop, on a network small enough to know the answers."""

import jax
import jax.numpy as jnp
import pytest

from dflash_jax.generate import Decoder
from experiments.benchmark import probes
from experiments.benchmark.ours import AllExperts
from models.dflash import DFlash, DFlashDrafter
from models.gpt_oss import GptOss
from models.target import FlaxTarget
from tests.experiments.random_pair import DRAFTER, FLOAT, TARGET, random_like

HLO = """
  %copy.1 = f32[1,2,256,64]{3,2,1,0} copy(%p.1)
  ROOT %copy.2 = f32[2,256,64]{1,2,0} copy(%p.2), metadata={op_name="x"}
  %copy-start.3 = (f32[1,2,256,64]{3,2,1,0}, f32[1,2,256,64]{3,2,1,0}, u32[]) copy-start(%p.3)
  %copy.4 = f32[384,512]{1,0} copy(%p.4)
  %copy.5 = s32[] copy(%p.5)
  %add.6 = f32[1,2,256,64]{3,2,1,0} add(%copy.1, %copy.1)
  %fusion.7 = f32[1,2,256,64]{3,2,1,0} fusion(%copy.1), kind=kLoop, calls=%copy_fusion
"""


def test_copies_of_a_shape_are_counted_in_any_layout():
    assert probes.count_copies(HLO, ["f32[1,2,256,64]"]) == 3
    assert probes.count_copies(HLO, ["f32[1,1,384,512]", "pred[1]"]) == 1
    assert probes.count_copies(HLO, ["bf16[1,2,256,64]"]) == 0


def test_the_counter_sees_a_copy_that_must_be_made():
    x = jnp.zeros((7, 300), FLOAT)
    shape = [probes.hlo_shape(x)]
    assert shape == ["f32[7,300]"]

    def program(donate):
        return jax.jit(lambda x: x.at[3, 5].set(1.0), donate_argnums=donate).lower(x).compile().as_text()

    assert probes.count_copies(program(()), shape) > 0
    assert probes.count_copies(program((0,)), shape) == 0


@pytest.fixture(scope="module")
def decoders():
    target = FlaxTarget(GptOss(TARGET, taps=DRAFTER.taps, dtype=FLOAT))
    params = random_like(target.abstract_params())
    drafter = DFlashDrafter(DFlash(DRAFTER, dtype=FLOAT), 4)
    draft_params = random_like(drafter.abstract_params())
    return Decoder(target, params), Decoder(target, params, drafter, draft_params)


@pytest.mark.parametrize("which", [0, 1], ids=["plain", "spec"])
def test_the_loop_copies_no_cache(decoders, which):
    assert probes.loop_copies(decoders[which], [3, 4, 5], 20) == 0


def test_token_bytes_counts_the_experts_in_use(decoders):
    target, params = decoders[0].target, decoders[0].params
    experts = sum(leaf.nbytes for layer in (0, 1) for leaf in jax.tree.leaves(params[f"moe_{layer}"]["experts"]))
    rest = sum(leaf.nbytes for leaf in jax.tree.leaves(params)) - experts - params["embed"].nbytes
    assert probes.token_bytes(target, params, TARGET.experts) == rest + experts
    assert probes.token_bytes(target, params, 2) == rest + experts * 2 // TARGET.experts


def test_a_copy_has_a_bandwidth():
    assert probes.copy_bandwidth(2, size=2**20, repeats=1) > 1e6


def test_a_run_within_one_capacity_is_cut_into_slices(decoders):
    found = probes.flatness(decoders[0], [3, 4, 5], 60, repeats=2)
    assert found["lengths"] == [19, 35]
    assert found["capacity"] == 256
    assert found["flatness"] == max(found["token_s"]) / min(found["token_s"]) >= 1


def test_the_parts_of_a_round_are_timed_beside_it(decoders):
    probe = probes.RoundProbe(decoders[1], [3, 4, 5], 60)
    found = probe.measure(turns=2)
    assert all(found[name] > 0 for name in ("plain_step_s", "verify_s", "draft_s", "verify_ratio", "round_s"))
    low, high = found["overhead_spread"]
    assert low <= found["overhead"] <= high


def test_computing_every_expert_changes_no_token(decoders):
    plain = decoders[0]
    everything = Decoder(AllExperts(plain.target.module), plain.params)
    assert everything.target.experts == TARGET.experts
    assert everything.generate([[3, 4, 5]], 12).tokens == plain.generate([[3, 4, 5]], 12).tokens
