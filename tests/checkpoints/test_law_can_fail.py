"""Each part of the checkpoint law fails when the table is wrong."""

import dataclasses

import jax.numpy as jnp
import pytest

from checkpoints import config as configs
from checkpoints import dflash, export, qwen3
from checkpoints.errors import CheckpointError
from checkpoints.load import fill, plan_target
from checkpoints.reader import open_checkpoint
from checkpoints.rules import Rule, Skip, assign, flatten, plan
from checkpoints.transforms import IDENTITY, TRANSPOSE
from tests.checkpoints.tiny_checkpoints import (
    LAYERS,
    drafter_hf,
    equal,
    write_drafter,
    write_qwen3,
)


def broken(rules, **changes):
    """Rules by parameter path, one of them dropped (None), replaced or added to."""
    kept = [
        rule for rule in rules if not (isinstance(rule, Rule) and rule.path in changes and changes[rule.path] is None)
    ]
    return [changes.get(rule.path, rule) if isinstance(rule, Rule) else rule for rule in kept]


def plan_with(folder, rules):
    target, tree, _, _ = plan_target(open_checkpoint(folder), configs.read_config(folder))
    return tree, plan(open_checkpoint(folder), rules, tree, layers=target.config.layers)


def test_mutation_a_dropped_rule_is_found(tmp_path):
    write_qwen3(tmp_path)
    with pytest.raises(CheckpointError) as raised:
        plan_with(tmp_path, broken(qwen3.RULES, **{"mlp_{i}/up": None}))
    assert "parameter mlp_0/up has no rule" in str(raised.value)
    assert "'model.layers.2.mlp.up_proj.weight' [52, 64] in model.safetensors is unexpected" in str(raised.value)
    assert len(raised.value.problems) == 2 * LAYERS


def test_mutation_a_doubled_rule_is_found(tmp_path):
    write_qwen3(tmp_path)
    with pytest.raises(CheckpointError, match="parameter final_norm is assigned twice"):
        plan_with(tmp_path, [*qwen3.RULES, Rule(("model.norm.weight",), "final_norm")])


def test_mutation_two_parameters_from_one_tensor_are_found(tmp_path):
    write_qwen3(tmp_path)
    name = "model.layers.{i}.mlp.gate_proj.weight"
    with pytest.raises(
        CheckpointError, match=r"gate_proj.weight' is used twice, for mlp_0/(gate|up) and mlp_0/(gate|up)"
    ):
        plan_with(tmp_path, broken(qwen3.RULES, **{"mlp_{i}/up": Rule((name,), "mlp_{i}/up", TRANSPOSE)}))


@pytest.mark.parametrize("path", ["attention_{i}/q", "attention_{i}/o", "mlp_{i}/down", "head"])
def test_mutation_a_transpose_too_few_is_found(tmp_path, path):
    write_qwen3(tmp_path)
    rule = next(rule for rule in qwen3.RULES if isinstance(rule, Rule) and rule.path == path)
    wrong = dataclasses.replace(rule, transform=IDENTITY)
    with pytest.raises(CheckpointError, match="has shape"):
        plan_with(tmp_path, broken(qwen3.RULES, **{path: wrong}))


def test_mutation_swapped_names_of_one_shape_fail_the_round_trip(tmp_path):
    """Gate and up have one shape: only the values can tell, and the round trip against known parameters does."""
    _, params = write_qwen3(tmp_path)
    swapped = {
        "mlp_{i}/up": Rule(("model.layers.{i}.mlp.gate_proj.weight",), "mlp_{i}/up", TRANSPOSE),
        "mlp_{i}/gate": Rule(("model.layers.{i}.mlp.up_proj.weight",), "mlp_{i}/gate", TRANSPOSE),
    }
    tree, made = plan_with(tmp_path, broken(qwen3.RULES, **swapped))
    assert not equal(fill(open_checkpoint(tmp_path), made, tree, ""), params)


def test_mutation_a_skip_too_many_is_found(tmp_path):
    """A skip never hides a tensor that a parameter needs."""
    _, params = write_qwen3(tmp_path)
    tree, made = plan_with(tmp_path, [*qwen3.RULES, Skip("*", "everything")])
    assert made.skipped == {}
    assert equal(fill(open_checkpoint(tmp_path), made, tree, ""), params)


def test_mutation_an_export_with_a_table_that_is_no_bijection_is_refused(tmp_path):
    _, params = write_drafter(tmp_path / "d")
    shapes = {path: leaf.shape for path, leaf in flatten(params)[0].items()}
    assert assign(dflash.RULES, shapes)[1] == []
    params["surprise"] = jnp.ones(3)
    with pytest.raises(CheckpointError, match="parameter surprise has no rule"):
        export.export_drafter(params, drafter_hf(write_drafter(tmp_path / "e")[0].config), tmp_path / "f")
