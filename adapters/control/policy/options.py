"""Options of `EpisodePolicy`."""

from dataclasses import dataclass
from typing import Literal

from grpo.arguments import Settings, setting

from .networks import Activation


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeOptions(Settings):
    """Options of an `EpisodePolicy` that are not objects of their own.

    Raises:
        ConfigError: A value is not allowed.
    """

    hidden: tuple[int, ...] = (64, 64)
    """Widths of the default torso. Larger widths can represent more and cost more per step."""
    activation: Activation = "tanh"
    """Activation of the default torso."""
    std: Literal["shared", "observation"] = "shared"
    """Standard deviation of a box's Gaussian actions: `shared` by all observations, or per `observation`."""
    initial_log_std: float = 0.0
    """Initial log standard deviation, in units of half the width of a finite box. A larger value explores more."""
    normalize_observations: bool = False
    """Whether to normalise observations by running statistics. Use it if their parts differ in scale."""
    max_episode_steps: int | None = setting(None, at_least=1)
    """Maximum length of training episodes, in addition to the environment's own limit. It is required if the environment has no
    limit of its own, and is then the default for evaluations and videos, too."""
    repeat: int = setting(1, at_least=1)
    """Number of environment steps for which each action is repeated. A larger value decides less often: cheaper, and easier to
    learn where reward needs the same action for long, but coarser. Rewards of the steps are summed, limits and budgets count
    steps of the environment, and `gamma` is per decision."""
    num_steps: int | None = setting(None, at_least=1)
    """Number of environment steps that each member takes in an iteration, in one episode at most. A longer episode goes on in
    the next iteration from where it stood. None: episodes are whole. A smaller number updates more often. It needs groups of
    one, a member per state, and advantages that compare nothing within a group: `FittedAdvantages`, or a critic."""
    split_steps: bool = True
    """Whether updates use single steps. False updates whole episodes and supports row-level ratios."""
    state_key_decimals: int = setting(3, at_least=0)
    """Observations that agree to this many decimals are one state for `credit="gigpo"`."""
