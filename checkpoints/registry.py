"""Model types whose checkpoints can be read."""

from checkpoints import dflash, glm, gpt_oss, qwen3, qwen3_5_moe
from checkpoints.family import Family, Rules

RULES: dict[str, Family] = {
    "glm4_moe": glm.GLM4_MOE,
    "glm4_moe_lite": glm.GLM4_MOE_LITE,
    "glm_moe_dsa": glm.GLM_MOE_DSA,
    "gpt_oss": gpt_oss.FAMILY,
    "qwen3": qwen3.FAMILY,
    "qwen3_5_moe": qwen3_5_moe.FAMILY,
}
"""``model_type`` of a target's config.json -> its family."""

DRAFTER_RULES: Rules = dflash.RULES


def family_of(model_type: str | None) -> Family:
    """The family of a ``model_type``.

    Raises:
        ValueError: listing the known ones.
    """
    if model_type not in RULES:
        raise ValueError(f"config.json: model_type {model_type!r} is not known; known: {', '.join(sorted(RULES))}")
    return RULES[model_type]
