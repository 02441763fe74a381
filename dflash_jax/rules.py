"""The table of accept rules. A new rule is a frozen dataclass and a line here."""

from dflash_jax.accept import Block, Greedy, Match, OneHot, Rejection
from dflash_jax.draft_tree import TreeMatch
from dflash_jax.protocols import AcceptRule
from dflash_jax.relaxed import Threshold, TopKRelaxed, Typical

ACCEPT: dict[str, AcceptRule] = {
    rule.name: rule
    for rule in (
        *(Greedy(), Match(), OneHot(), Rejection(), Block(), TreeMatch()),
        *(Typical(), Threshold(), TopKRelaxed()),
    )
}
"""name -> the rule with its usual parameters."""
