"""Checks of an environment before training: seeds, resets, snapshots, observations, rewards and a time limit."""

import copy
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.utils.env_checker import data_equivalence

from grpo import preserved_random_state
from grpo.arguments import require_integers, with_checked_arguments
from grpo.checks import CheckReport
from grpo.checks.report import Rule, Verdict, absent, failed, note, passed, run_rules

from .masks import flat_mask, mask_form, mask_of, sample_mask
from .pool_base import (
    checked_reset,
    close,
    environment_name,
    find_misfit,
    finite_rows,
    five_values,
    misfit_fault,
    require_environment,
    require_equal_members,
    require_fixed_shape,
    time_limit,
)
from .pools import environment_factory
from .snapshots import is_supported, restore_snapshot, take_snapshot

NUM_GROUPS, GROUP_SIZE = 4, 8
"""Number of seeds, and of episodes of random actions with each seed, that are compared with one another."""

SEED_REMEDY = (
    "Let reset() call super().reset(seed=seed), set every attribute that a step changes, and draw all random numbers from "
    "self.np_random."
)


@with_checked_arguments
def check_environment(
    environment: str | Callable[[], gymnasium.Env],
    *,
    max_episode_steps: int | None = None,
    num_steps: int = 200,
    seed: int = 0,
    strict: bool = False,
    skip: Collection[str] = (),
) -> CheckReport:
    """Check what training requires of an environment, with random actions in three instances.

    The rules are: it can be created, no wrapper keeps statistics, it has a time limit, observations, masks and rewards are what
    the spaces say, equal seeds give equal episodes, a reset forgets the episode before it, instances do not
    influence one another, the episodes of a group differ, and a
    restored snapshot continues exactly. Global random generators are restored.

    Args:
        environment: An id, or a function that creates an environment.
        max_episode_steps: The limit that `EpisodePolicy` will get. None: the environment's own, or 10,000.
        num_steps: Maximum number of steps per episode. More steps find more mistakes.
        seed: Seed of the resets and of the actions.
        strict: Raise if a rule is broken.
        skip: Names of rules to leave out.

    Returns:
        One result per rule. Use `print(report)` and `report.ok`.

    Raises:
        ConfigError: A number is below 1, or `skip` contains an unknown name.
        ContractError: `strict` is set and a rule is broken. The message lists all failures.

    Example:
        >>> check_environment("FrozenLake-v1").ok
        True
    """
    require_integers("check_environment", 1, num_steps=num_steps)
    require_integers("check_environment", 0, seed=seed)
    require_integers("check_environment", 1, optional=True, max_episode_steps=max_episode_steps)
    probe = EnvironmentProbe(environment, max_episode_steps, num_steps, seed)
    with preserved_random_state():
        results = run_rules(ENVIRONMENT_RULES, probe, prepare=lambda: None, skip=skip)
    for env in probe.created:
        if isinstance(env, gymnasium.Env):
            close(env)
    subject = (
        environment if isinstance(environment, str) else getattr(environment, "__name__", type(environment).__name__)
    )
    report = CheckReport(subject=f"check_environment({subject})", results=results)
    if strict:
        report.raise_for_failures()
    return report


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What an environment returned at a reset or a step."""

    observation: Any
    reward: Any
    terminated: Any
    truncated: Any

    @property
    def is_last(self) -> bool:
        return bool(self.terminated or self.truncated)

    def difference(self, other: "Moment") -> str | None:
        """The name of the first field that differs. None if all are equal."""
        names = ("observation", "reward", "terminated", "truncated")
        return next(
            (name for name in names if not data_equivalence(getattr(self, name), getattr(other, name), exact=True)),
            None,
        )


@dataclass
class EnvironmentProbe:
    """An environment under test: three instances, and one episode of random actions to compare others with."""

    environment: Any
    max_episode_steps: int | None
    num_steps: int
    seed: int
    created: list[Any] = field(default_factory=list)
    first_spaces: Any = None
    """The spaces of the first instance when it was created."""

    @cached_property
    def instances(self) -> tuple[Any, Any, Any]:
        """One to draw episodes in, one for the reference episode, and one to compare with it."""
        factory = environment_factory(self.environment)
        for _ in range(3):
            self.created.append(factory())
        scout, first, second = self.created
        self.first_spaces = _spaces(scout)
        return scout, first, second

    @cached_property
    def reference(self) -> tuple[list[Any], list[Moment]]:
        """The longest of several random episodes: its actions, and what a new instance returns for them, one moment more."""
        scout, first, _ = self.instances
        actions: list[Any] = []
        for number in range(GROUP_SIZE):
            if len(actions) < self.num_steps:
                actions = max(actions, self.episode(scout, self.seed, self.seed + number, self.num_steps)[0], key=len)
        observation, _ = checked_reset(first.reset(seed=self.seed))
        moments = [_moment(observation, 0.0, False, False)]
        while len(moments) <= len(actions) and not moments[-1].is_last:
            moments.append(_moment(*five_values(first.step(copy.deepcopy(actions[len(moments) - 1])))[:4]))
        return actions[: len(moments) - 1], moments

    def episode(self, env: Any, seed: int, action_seed: int, num_steps: int) -> tuple[list[Any], list[Moment]]:
        """An episode of random actions. Actions respect `info["action_mask"]`."""
        observation, info = checked_reset(env.reset(seed=seed))
        actions: list[Any] = []
        moments = [_moment(observation, 0.0, False, False)]
        env.action_space.seed(action_seed)
        while len(actions) < num_steps and not moments[-1].is_last:
            action = env.action_space.sample(sample_mask(env.action_space, mask_of(env, observation, info)))
            actions.append(copy.deepcopy(action))
            observation, reward, terminated, truncated, info = five_values(env.step(action))
            moments.append(_moment(observation, reward, terminated, truncated))
        return actions, moments

    def replay(self, *envs: Any) -> str | None:
        """Play the reference episode in instances that take turns. Returns the first difference, or None if there is none."""
        for env in envs:
            observation, _ = env.reset(seed=self.seed)
            if not data_equivalence(observation, self.reference[1][0].observation, exact=True):
                return "the first observation differs"
        return self.follow(0, *envs)

    def follow(self, first_step: int, *envs: Any) -> str | None:
        """Take the actions of the reference episode from `first_step` on. Returns the first difference, or None."""
        for number, (action, expected) in enumerate(zip(self.reference[0], self.reference[1][1:], strict=True)):
            for env in envs if number >= first_step else ():
                got = _moment(*env.step(copy.deepcopy(action))[:4])
                if differs := got.difference(expected):
                    return f"{differs} differs at step {number + 1}"
        return None


def _spaces(env: Any) -> dict[str, Any]:
    return {name: getattr(env, name, None) for name in ("observation_space", "action_space")}


def _moment(observation: Any, reward: Any, terminated: Any, truncated: Any) -> Moment:
    """A copy, because environments may overwrite their observations."""
    return Moment(observation=copy.deepcopy(observation), reward=reward, terminated=terminated, truncated=truncated)


def _check_creation(probe: EnvironmentProbe) -> Verdict:
    first, *others = probe.instances
    require_environment(first)
    if any(other is first for other in others):
        return failed(
            "Each call must create a new environment; two calls returned the same. Create it inside the function."
        )
    require_fixed_shape(first.observation_space)
    return passed(f"{environment_name(first)}, observations {first.observation_space}, actions {first.action_space}.")


def _check_statistics(probe: EnvironmentProbe) -> Verdict:
    require_equal_members(probe.instances[0])
    return passed("No wrapper keeps running statistics.")


def _check_time_limit(probe: EnvironmentProbe) -> Verdict:
    own = time_limit(probe.instances[0])
    limit = own if probe.max_episode_steps is None else probe.max_episode_steps
    if limit is None:
        ended = [
            probe.episode(probe.instances[0], probe.seed + number, probe.seed + number, probe.num_steps)[1][-1].is_last
            for number in range(NUM_GROUPS * GROUP_SIZE)
        ]
        if all(ended):
            return note(
                f"There is no time limit, and all of {len(ended)} episodes of random actions ended within {probe.num_steps} "
                "steps. A trained policy may learn not to end them: pass EpisodeOptions(max_episode_steps=...)."
            )
        return note(
            f"There is no time limit, neither in the registration nor as gymnasium.wrappers.TimeLimit, and only {sum(ended)} "
            f"of {len(ended)} episodes of random actions ended within {probe.num_steps} steps. Episodes are truncated after "
            "10,000 steps: pass EpisodeOptions(max_episode_steps=...), and the same number here."
        )
    return passed(f"At most {limit:,} steps.")


def _check_observations(probe: EnvironmentProbe) -> Verdict:
    space = probe.instances[0].observation_space
    for step, moment in enumerate(probe.reference[1]):
        if misfit := find_misfit(space, moment.observation):
            return failed(f"Step {step}: {misfit_fault(misfit)}")
        if outside := _outside(space, moment.observation):
            return failed(
                f"Step {step}: the observation must lie within its space {space}; got {outside}. Correct what the environment "
                "returns, or its observation_space."
            )
    for name, now in _spaces(probe.instances[0]).items():
        if now != probe.first_spaces[name]:
            return failed(
                f"{name} must stay what it is when the environment is created, because networks are built for it; it was "
                f"{probe.first_spaces[name]}, and is {now} after a reset. Make it large enough for all episodes."
            )
    return passed(f"{len(probe.reference[1])} observations lie in their space.")


def _outside(space: spaces.Space, observation: Any) -> str | None:
    """The first part of an observation that lies outside its space. Numbers may be narrowed, as pools do."""
    match space:
        case spaces.Dict():
            parts = [(part, observation[name]) for name, part in space.spaces.items()]
        case spaces.Tuple():
            parts = list(zip(space.spaces, observation, strict=True))
        case _:
            array = np.asarray(observation).astype(space.dtype)
            is_inside = space.contains(array[()] if isinstance(space, spaces.Discrete) else array)
            return None if is_inside and finite_rows(array[None], 1).all() else str(observation)
    return next((found for part, value in parts if (found := _outside(part, value))), None)


def _check_masks(probe: EnvironmentProbe) -> Verdict:
    env = probe.instances[0]
    observation, info = env.reset(seed=probe.seed)
    mask = mask_of(env, observation, info)
    if mask is None:
        return passed("The environment gives no masks of allowed actions.")
    row = flat_mask(env.action_space, mask)
    where = {"method": "action_masks()", "observation": "observation['action_mask']", None: "info['action_mask']"}
    return passed(
        f"Masks of {len(row)} categories in {where[mask_form(env)]}: EpisodePolicy(action_mask='info') uses them, and "
        "ignores them by default."
    )


def _check_rewards(probe: EnvironmentProbe) -> Verdict:
    for step, moment in enumerate(probe.reference[1]):
        is_number = False
        with suppress(TypeError, ValueError, OverflowError):
            is_number = bool(np.isfinite(float(moment.reward)))
        if not is_number:
            return failed(f"Step {step}: the reward must be a finite number; got {moment.reward!r}. Correct step().")
        for name, value in (("terminated", moment.terminated), ("truncated", moment.truncated)):
            if not isinstance(value, bool | np.bool_):
                return failed(f"Step {step}: {name} must be True or False; got {value!r}. Correct step().")
    return passed(f"Rewards of {len(probe.reference[0])} steps are finite numbers.")


def _check_seeded(probe: EnvironmentProbe) -> Verdict:
    if difference := probe.replay(probe.instances[2]):
        return failed(
            f"Two instances with equal seeds and actions must have equal episodes; {difference}. The episodes of a group would "
            f"have different starts or random events. {SEED_REMEDY}"
        )
    return passed(f"Two instances with equal seeds have equal episodes of {len(probe.reference[0])} steps.")


def _check_resettable(probe: EnvironmentProbe) -> Verdict:
    env = probe.instances[2]
    for num_steps in (0, 1, (len(probe.reference[0]) + 1) // 2, probe.num_steps):
        probe.episode(env, probe.seed + 1, probe.seed, num_steps)
        if difference := probe.replay(env):
            return failed(
                f"A reset with a seed must give the same episode, whatever was run before; after another episode {difference}. "
                f"A part of the state survives the reset. {SEED_REMEDY}"
            )
    return passed("Resets forget the episode before them, also in its middle.")


def _check_independent(probe: EnvironmentProbe) -> Verdict:
    if difference := probe.replay(*probe.instances[1:]):
        return failed(
            f"Instances must not influence one another; if two take turns, {difference}. They share a generator or another "
            f"object, of the module or of the class. {SEED_REMEDY}"
        )
    return passed("Two instances that take turns have the episodes that they have alone.")


def _check_group(probe: EnvironmentProbe) -> Verdict:
    num_different = 0
    for group in range(NUM_GROUPS):
        different: list[list[Moment]] = []
        for number in range(GROUP_SIZE):
            _, moments = probe.episode(probe.instances[0], probe.seed + group, probe.seed + number, probe.num_steps)
            different += [] if any(_are_equal(moments, other) for other in different) else [moments]
        num_different += len(different)
    found = f"{num_different} of {NUM_GROUPS * GROUP_SIZE} episodes of random actions differ from the others with their seed."
    if 2 * num_different <= NUM_GROUPS * GROUP_SIZE:
        return note(
            f"Only {found} The seed fixes all random events, and episodes are short, so a group has many copies, which add "
            "nothing. Use a smaller group_size and more starts per iteration."
        )
    return passed(found)


def _are_equal(one: list[Moment], other: list[Moment]) -> bool:
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) and all(mine.difference(theirs) is None for mine, theirs in pairs)


def _check_snapshots(probe: EnvironmentProbe) -> Verdict:
    _, first, second = probe.instances
    if not is_supported(first):
        return absent("snapshot")
    middle = len(probe.reference[0]) // 2
    observation, _ = first.reset(seed=probe.seed)
    for action in probe.reference[0][:middle]:
        observation, *_ = first.step(copy.deepcopy(action))
    snapshot = take_snapshot(first, observation)
    second.reset(seed=probe.seed + 1)
    for env, where in (
        (first, "the same instance"),
        (second, "another instance"),
        (second, "an instance that restored it before"),
    ):
        if env is first and (difference := probe.follow(middle, first)):
            return failed(
                f"Taking a snapshot must not change the environment; {difference}. Copy the state in snapshot()."
            )
        if not data_equivalence(restore_snapshot(env, snapshot), probe.reference[1][middle].observation, exact=True):
            return failed(
                f"The observation of a snapshot restored in {where} must be that of the snapshot; it differs."
            )
        if difference := probe.follow(middle, env):
            return failed(
                f"A snapshot restored in {where} must continue exactly; {difference}. Return everything that determines the "
                "future from snapshot(), as copies, and set all of it in restore()."
            )
    return passed(f"A snapshot of step {middle} continues exactly, in both instances.")


ENVIRONMENT_RULES: tuple[Rule, ...] = (
    Rule("creation", _check_creation),
    Rule("statistics", _check_statistics, ("creation",)),
    Rule("time limit", _check_time_limit, ("creation",)),
    Rule("observations", _check_observations, ("creation",)),
    Rule("masks", _check_masks, ("observations",)),
    Rule("rewards", _check_rewards, ("observations",)),
    Rule("seeded", _check_seeded, ("rewards", "statistics")),
    Rule("resettable", _check_resettable, ("seeded",)),
    Rule("independent", _check_independent, ("resettable",)),
    Rule("group", _check_group, ("independent",)),
    Rule("snapshots", _check_snapshots, ("independent",)),
)
"""The rules in order. Each rule comes after the rules that it needs."""
