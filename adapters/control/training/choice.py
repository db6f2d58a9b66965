"""The preset of an environment: measured, or chosen by what a few hundred random actions show."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium
from gymnasium import spaces

from adapters.control.environments.pool_base import (
    close,
    environment_name,
    layers_in_words,
    require_environment,
    time_limit,
)
from adapters.control.environments.pools import describe_factory, environment_factory, explained
from adapters.control.policy.rollouts import MAX_STEPS
from grpo import preserved_random_state
from grpo.arguments import require_instances, require_integers, with_checked_arguments
from grpo.errors import ConfigError

from .fitted_value import MAX_TABLE
from .presets import (
    FITTED,
    FITTED_BOX,
    FITTED_PRESETS,
    FITTED_ROBOT,
    FITTED_TABLE,
    MUJOCO,
    PRESETS,
    ControlPreset,
    Credit,
)
from .probe import REPEAT, Findings, probe
from .runs import FEW_ITERATIONS

NUM_STEPS, MIN_ITERATIONS = 500_000, 50
"""A run without a preset and a given number of steps has at least this many steps and iterations."""

PROBE_STEPS = 1_000
"""Steps of a probe. A shorter run has shorter probes: a twentieth of it."""

LONG_EPISODE = 500
"""With the group's mean, episodes that may be longer are trained in one group per iteration."""

SHORT_TASK, LONG_TASK = 200, 1_000
"""Time limits in steps, at most and at least, of tasks with a smaller and a larger discount factor."""

SPARSE = 0.02
"""Fraction of steps with a reward below which a table needs more episodes per iteration."""

MANY_ACTIONS = 3
"""Numbers of an action from which on updates are smaller."""

FEW_DECISIONS = 64
"""A member takes one episode at most in an iteration. If iterations would then have fewer decisions, there are more members."""

FARTHER = 1.5
"""Actions are repeated if observations then have ranges that are larger by this factor."""

LOGGER = logging.getLogger("grpo")


@with_checked_arguments
def preset_for(
    environment: str | gymnasium.Env | Callable[[], gymnasium.Env],
    *,
    credit: Credit | None = None,
    total_steps: int | None = None,
    max_episode_steps: int | None = None,
) -> ControlPreset:
    """The preset of an environment.

    Environments in `PRESETS` and `FITTED_PRESETS` have measured settings, as they are registered. For any other, settings to
    start tuning from are chosen by what the environment is and by what up to 2,000 random actions show. `why` has the choices
    and their reasons, and the log (level INFO), too. The steps of these actions count: the preset has as many fewer. Global
    random generators do not change.

    Args:
        environment: An id, a function that creates an environment, or an environment that `gymnasium.make` can make again,
            wrappers included.
        credit: The baseline: `group`, or `fitted`. None: that of the measured preset, `PRESETS` first, or what fits.
        total_steps: Environment steps of the whole run. None: those of the preset, or at least 500,000. A number of steps that
            has fewer than 20 iterations is said.
        max_episode_steps: Maximum length of training episodes. None keeps the preset's maximum, or the environment's own
            limit. An environment without a limit should get one that fits its task: the default is 10,000.

    Raises:
        ConfigError: The environment cannot be created, or `credit="fitted"` and its observations have images.
        ContractError: The environment raised, or what it returned does not fit its spaces.
    """
    require_integers("preset_for", 1, optional=True, total_steps=total_steps, max_episode_steps=max_episode_steps)
    if credit is not None:
        require_instances("preset_for", Credit, credit=credit)
    with preserved_random_state():  # an environment may draw from them, also when it is created
        presets = {"group": PRESETS, "fitted": FITTED_PRESETS, None: FITTED_PRESETS | PRESETS}[credit]
        name, function, is_measured = _identified(environment, presets)
        if is_measured:
            preset, spec = presets[name], gymnasium.registry.get(name)
            limit = None if spec is None else spec.max_episode_steps
            if total_steps is not None:
                preset = replace(preset, total_steps=total_steps, evaluate_every=max(1, total_steps // 20))
        else:
            preset, limit = _chosen(name, function or name, credit, total_steps, max_episode_steps)
    if function is not None:
        preset = replace(preset, environment=function)
    if max_episode_steps is not None:
        preset = replace(preset, max_episode_steps=max_episode_steps)
    if total_steps is not None:
        _say_few_iterations(preset, limit)
    return preset


def _identified(
    environment: Any, presets: Mapping[str, ControlPreset]
) -> tuple[str, Callable[[], gymnasium.Env] | None, bool]:
    """The name of an environment, the function that creates it unless its name is an id, and whether it has one of the presets:
    with the same keywords, wrappers and time limit."""
    if isinstance(environment, str):
        return environment, None, environment in presets
    function = _made_again(environment) if isinstance(environment, gymnasium.Env) else environment_factory(environment)
    with explained(describe_factory(function)):
        env = function()
        require_environment(env)
    name = environment_name(env)
    is_measured = name in presets and _in_words(env) == _in_words(
        (presets[name].environment or partial(gymnasium.make, name))()
    )
    close(env)
    return name, function, is_measured


def _in_words(env: gymnasium.Env) -> tuple[list[str], int | None]:
    """An environment with its keywords and wrappers, and its time limit."""
    return layers_in_words(env), time_limit(env)


def _made_again(env: gymnasium.Env) -> Callable[[], gymnasium.Env]:
    """A function that makes an environment again, with its wrappers."""
    remedy = "Pass a function that creates it: lambda: YourEnvironment()."
    if env.spec is None:
        raise ConfigError(f"preset_for: {type(env).__name__} is not registered, so it cannot be made again. {remedy}")
    function = partial(gymnasium.make, env.spec)
    try:
        again = function()
    except Exception as error:  # recovery: what an environment's own code raises gets a name
        raise ConfigError(f"preset_for: {env} cannot be made again. {remedy} (Gymnasium: {error})") from error
    if _in_words(again) != _in_words(env):
        raise ConfigError(f"preset_for: made again, {env} is {again}. {remedy}")
    close(again)
    return function


def _chosen(
    name: str, environment: Any, credit: Credit | None, total_steps: int | None, max_episode_steps: int | None
) -> tuple[ControlPreset, int | None]:
    """Settings by what the environment is, and by what random actions show; and the time limit."""
    num_steps = PROBE_STEPS if total_steps is None else max(1, min(PROBE_STEPS, total_steps // 20))
    found = probe(environment, num_steps=num_steps, max_episode_steps=max_episode_steps)
    if credit == "fitted" and found.encoder.has_images:
        raise ConfigError(f"preset_for: {name} has images, which credit='fitted' does not support. Use credit='group'.")
    choose = _with_group_mean if credit == "group" or found.encoder.has_images else _with_fitted_values
    preset, reasons = choose(found)
    if total_steps is None:
        # episodes without a limit usually end long before the default limit, which says nothing about a run
        longest = preset.num_steps or found.limit or 0
        total_steps = max(NUM_STEPS, MIN_ITERATIONS * preset.num_groups * preset.group_size * longest)
    if found.has_masks:
        preset = replace(preset, action_mask="info")
        reasons.append("the environment's masks of allowed actions")
    why = (
        f"{found.num_steps:,} random steps, which are a part of the run's {total_steps:,}, and the spaces of {name}: "
        f"{'; '.join(reasons)}."
    )
    LOGGER.info("preset_for: there are no measured settings of this environment. Chosen by %s", why)
    steps_left = max(1, total_steps - found.num_steps)
    evaluate_every = max(1, steps_left // 20)
    preset = replace(
        preset, env_id=name, threshold=None, total_steps=steps_left, evaluate_every=evaluate_every, why=why
    )
    return preset, found.limit


def _with_group_mean(found: Findings) -> tuple[ControlPreset, list[str]]:
    """Settings with the group's mean, and their reasons."""
    preset = MUJOCO if isinstance(found.action_space, spaces.Box) else PRESETS["Acrobot-v1"]
    if found.encoder.has_images:  # their networks scale pixels
        preset = replace(preset, normalize_observations=False)
    # one group is enough if episodes may be longer: more steps per start, and more updates
    if found.limit is None or found.limit > LONG_EPISODE:
        preset = replace(preset, num_groups=1)
    what = "images" if found.encoder.has_images else "credit='group'"
    episodes = f"{preset.num_groups} x {preset.group_size} whole episodes"
    return preset, [f"the group's mean ({what})", f"{episodes} (time limit {found.limit})", _epochs(preset, found)]


def _with_fitted_values(found: Findings) -> tuple[ControlPreset, list[str]]:
    """Settings with a fitted value function, and their reasons."""
    has_box, size = isinstance(found.action_space, spaces.Box), found.encoder.shape[0]
    is_table = isinstance(found.encoder.space, spaces.Discrete) and size <= MAX_TABLE
    has_many = has_box and not is_table and spaces.flatdim(found.action_space) >= MANY_ACTIONS
    preset = FITTED_TABLE if is_table else FITTED_ROBOT if has_many else FITTED_BOX if has_box else FITTED
    if is_table and has_box:
        preset = replace(preset, num_epochs=FITTED_BOX.num_epochs, num_steps=FITTED_BOX.num_steps)
    values = "a table" if is_table else "Fourier features"
    reasons = [f"a fitted value function, {values} ({_observations(found)})", _epochs(preset, found)]
    if is_table and found.rare_rewards < SPARSE and found.common_reward == 0:
        preset = replace(preset, num_groups=2 * preset.num_groups, learning_rate=3e-4)
        reasons.append(
            f"twice as many members and learning rate 0.0003 (rewards at {found.rare_rewards:.1%} of the steps)"
        )
    if has_many:
        reasons.append(f"learning rate 0.0003 (an action has {spaces.flatdim(found.action_space)} numbers)")
    if found.reach >= FARTHER:
        preset = replace(preset, repeat=REPEAT, num_steps=2 * (preset.num_steps or 0))
        reasons.append(
            f"each action repeated {REPEAT} times (no episode terminated, all rewards are equal, and repeated actions reach "
            f"{found.reach:.1f} times as far)"
        )
    longest = None if found.longest is None else -(-found.longest // preset.repeat)
    if longest is not None and preset.num_groups * longest < FEW_DECISIONS:
        while preset.num_groups * longest < FEW_DECISIONS:
            preset = replace(preset, num_groups=2 * preset.num_groups, num_steps=(preset.num_steps or 0) // 2)
        reasons.append(f"{preset.num_groups} members (an episode had at most {longest} decisions)")
    gamma, reason = _gamma(found)
    return replace(preset, gamma=gamma), [*reasons, f"gamma {gamma:g} ({reason})"]


def _observations(found: Findings) -> str:
    return f"{type(found.encoder.space).__name__} observations of {found.encoder.shape[0]} numbers"


def _epochs(preset: ControlPreset, found: Findings) -> str:
    return f"{preset.num_epochs} epochs ({type(found.action_space).__name__} actions)"


def _gamma(found: Findings) -> tuple[float, str]:
    """The discount factor, and the reason."""
    lowest, common, ended = float(found.single.rewards.min()), found.common_reward, found.single.num_terminated
    if lowest < common < 0 and not found.is_dense:
        # standing still costs |common| / (1 - gamma): ten times as much as the worst that can happen
        gamma = min(max(1 - abs(common) / (10 * abs(lowest)), 0.99), 0.999)
        return gamma, f"steps cost {abs(common):g}, and rewards fall to {lowest:g}"
    if found.is_dense and not ended and found.limit is not None and found.limit <= SHORT_TASK:
        return 0.95, f"a reward at every step, and {found.limit} steps, of which none ends an episode"
    if found.limit is not None and found.limit >= LONG_TASK and ended:
        return 0.995, f"episodes end early, and may have {found.limit:,} steps"
    return 0.99, "the default"


def _say_few_iterations(preset: ControlPreset, limit: int | None) -> None:
    """Say it if the steps of a run may be few iterations. `limit` is the environment's time limit."""
    limits = [each for each in (preset.num_steps, preset.max_episode_steps, limit) if each is not None]
    iterations = preset.total_steps // (preset.num_groups * preset.group_size * min(limits, default=MAX_STEPS))
    if iterations < FEW_ITERATIONS:
        LOGGER.warning(
            "preset_for: %s steps of %s may be only %d iteration(s), and a policy improves once in an iteration. Use more "
            "steps, %s.",
            f"{preset.total_steps:,}",
            preset.env_id,
            max(1, iterations),
            "a smaller max_episode_steps, or (but for images) credit='fitted', which has short iterations"
            if preset.num_steps is None
            else "or a smaller num_steps: dataclasses.replace(preset, num_steps=...)",
        )
