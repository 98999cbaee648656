"""Settings that earlier versions had, and what to do instead.

Files, pickles and arguments of earlier versions have them, mostly at their old defaults. There they
are left out without a word; any other value raises an error.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from megatron_eopt.base.errors import ConfigurationError


class Retired(NamedTuple):
    """A setting that no longer exists."""

    default: Any
    hint: str  # what to do instead


_FRESH = (
    "State of another optimizer starts fresh by itself; to start with all state fresh, pass "
    "--no-load-optim"
)

RETIRED = {
    "muon_wave_mb": Retired(64.0, "It is called matrix_buffer_mb"),
    "muon_team_size": Retired(8, "It is called muon_max_ranks_per_matrix"),
    "muon_overlap_step": Retired(False, "It is called muon_overlap_dp_comm"),
    "muon_orthogonalize_excluded": Retired(False, "It is called muon_ignore_use_muon"),
    "checkpoint_fresh_state": Retired((), _FRESH),
    "ckpt_allow_missing_optim_state": Retired((), _FRESH),
    "checkpoint_momentum_from_adam": Retired(False, _FRESH),
    "muon_exempt_from_clipping": Retired(False, "It is called muon_skip_grad_clip"),
    "log_optimizer_memory": Retired(
        False, "optimizer.memory() has the bytes, and megatron-eopt plan the peak"
    ),
    "muon_check_fraction": Retired(
        0.0, "Leave it out, and look for faulty GPUs with a diagnostic such as dcgmi diag"
    ),
}
"""The settings, by their names as fields."""


def refusal(name: str, value: object, argument: str = "") -> ConfigurationError:
    """Return the error for a retired setting, which the caller calls ``argument``."""
    rule = "is no longer a setting"
    return ConfigurationError(argument or name, value, rule, RETIRED[name].hint)


def is_dropped(name: str, value: object, argument: str = "") -> bool:
    """Return whether a setting is retired, and has its old default.

    Raises:
        ConfigurationError: If it is retired, and has another value.
    """
    if name not in RETIRED:
        return False
    # YAML has no tuples
    if (tuple(value) if isinstance(value, list) else value) != RETIRED[name].default:
        raise refusal(name, value, argument)
    return True


def without_retired(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by setting, without retired settings.

    Raises:
        ConfigurationError: If a retired setting has another value than its old default.
    """
    retired = {name for name in RETIRED if name in values and is_dropped(name, values[name])}
    return {name: value for name, value in values.items() if name not in retired}
