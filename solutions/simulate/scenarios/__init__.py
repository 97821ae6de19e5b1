"""The failure modes of section 6, step 7, and what helps against each; by name in `SCENARIOS`."""

from __future__ import annotations

from .experts import SCENARIO as EXPERTS
from .kv_transfer import SCENARIO as KV_TRANSFER
from .long_prompts import SCENARIO as LONG_PROMPTS
from .output_tails import SCENARIO as OUTPUT_TAILS
from .overload import OVERLOAD, PRIORITIES
from .prefix_mix import SCENARIO as PREFIX_MIX
from .prefix_routing import HOT, THRASH
from .scenario import Case, Column, Role, Scenario
from .stragglers import SCENARIO as STRAGGLERS

SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        LONG_PROMPTS, OUTPUT_TAILS, KV_TRANSFER, PREFIX_MIX, THRASH, HOT, STRAGGLERS, EXPERTS, OVERLOAD, PRIORITIES,
    )
}  # fmt: skip

__all__ = ["SCENARIOS", "Case", "Column", "Role", "Scenario"]
