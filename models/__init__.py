"""The networks. A family is one file here, one in ``checkpoints/`` and one line in each table."""

from models.dflash import DFlash, DFlashConfig, DFlashDrafter
from models.glm4_moe import Glm4Moe, Glm4MoeConfig
from models.glm4_moe_lite import Glm4MoeLite, Glm4MoeLiteConfig
from models.glm_moe_dsa import GlmMoeDsa, GlmMoeDsaConfig
from models.gpt_oss import GptOss, GptOssConfig
from models.qwen3 import Qwen3, Qwen3Config
from models.qwen3_5_moe import Qwen35Moe, Qwen35MoeConfig

MODELS: dict[str, tuple[type, type]] = {
    "glm4_moe": (Glm4MoeConfig, Glm4Moe),
    "glm4_moe_lite": (Glm4MoeLiteConfig, Glm4MoeLite),
    "glm_moe_dsa": (GlmMoeDsaConfig, GlmMoeDsa),
    "gpt_oss": (GptOssConfig, GptOss),
    "qwen3": (Qwen3Config, Qwen3),
    "qwen3_5_moe": (Qwen35MoeConfig, Qwen35Moe),
}
"""``model_type`` of a target's config.json -> (its config class, its linen module)."""

DRAFTERS: dict[str, tuple[type, type, type]] = {
    "DFlashDraftModel": (DFlashConfig, DFlash, DFlashDrafter),
}
"""Architecture of a drafter's config.json -> (its config class, its linen module, its verbs)."""

__all__ = ["DRAFTERS", "MODELS"]
