"""Checks and conversions of arguments, and checked settings: the door for code that adds a domain.

The adapters use these names, and a domain of your own can use them.
"""

from ._common.checks import require_count
from ._common.conversion import (
    are_rows,
    as_advantages,
    as_float32,
    as_log_probs,
    as_mask,
    as_rewards,
    as_state_keys,
    as_tensor,
    describe,
    pad_steps,
    require_lengths,
    require_rows,
    reward_name,
    widest_float,
)
from ._common.domain_checks import (
    is_finite,
    require_each,
    require_instances,
    require_integers,
    require_numbers,
    require_widths,
    with_checked_arguments,
)
from ._common.installation import install_command
from ._common.names import nearest_name
from ._common.settings import Settings, setting
from ._common.settings_by_name import flattened, refuse_options

__all__ = [
    "Settings", "are_rows", "as_advantages", "as_float32", "as_log_probs", "as_mask", "as_rewards",
    "as_state_keys", "as_tensor", "describe", "flattened", "install_command", "is_finite", "nearest_name", "pad_steps",
    "refuse_options", "require_count", "require_each", "require_instances", "require_integers", "require_lengths",
    "require_numbers", "require_rows", "require_widths", "reward_name", "setting", "widest_float",
    "with_checked_arguments",
]  # fmt: skip
