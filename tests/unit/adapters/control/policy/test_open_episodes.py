"""Short iterations: an episode goes on where it stood, also after a resume, an evaluation, a lost worker and an exception."""

import copy
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from adapters.control import (
    Episode,
    EpisodeOptions,
    EpisodePolicy,
    EpisodeStart,
    SerialPool,
    evaluate_policy,
    make_pool,
)
from grpo.errors import ConfigError, ContractError, GRPOWarning
from tests.support.control_environments import Chance, Crossing, Watched
from tests.support.control_episodes import Hand
from tests.support.control_policies import policy_of

STARTS = [EpisodeStart(seed=seed) for seed in (3, 4, 5)]

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "native": ("CartPole-v1", {"num_members": 3, "num_steps": 7}),
    "sync": ("CartPole-v1", {"num_members": 4, "num_steps": 7, "vectorization": "sync"}),
    "repeated": ("Pendulum-v1", {"num_members": 3, "num_steps": 8, "repeat": 3, "max_episode_steps": 40}),
    "normalised": (
        "MountainCarContinuous-v0",
        {"num_members": 3, "num_steps": 20, "max_episode_steps": 45, "normalize_observations": True},
    ),
    "masked": ("Taxi-v4", {"num_members": 3, "num_steps": 30, "action_mask": "info"}),
    "chance": (lambda: Chance(9, end_above=0.9), {"num_members": 3, "num_steps": 4}),
}


def made(kind: str) -> EpisodePolicy:
    torch.manual_seed(0)
    environment, settings = KINDS[kind]
    return policy_of(environment, **settings)


def sampled(policy: EpisodePolicy, seed: int) -> tuple[list[Episode], dict[str, float]]:
    torch.manual_seed(seed)
    got = policy.sample_actions(STARTS, 1)
    return [episode for [episode] in got.actions], dict(got.metrics)


def assert_same(first: list[Episode], second: list[Episode]) -> None:
    for one, other in zip(first, second, strict=True):
        for field in ("observations", "actions", "rewards", "log_probs", "final_observation", "allowed"):
            torch.testing.assert_close(getattr(one, field), getattr(other, field), rtol=0, atol=0)
        assert (one.terminated, one.truncated) == (other.terminated, other.truncated)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_are_the_episode_that_single_environments_play(kind: str) -> None:
    """Its actions are played again by hand, from the seed of its start."""
    policy, (environment, _) = made(kind), KINDS[kind]
    envs = [environment() if callable(environment) else gymnasium.make(environment) for _ in STARTS]
    hands = [Hand(env, policy, start.seed or 0) for env, start in zip(envs, STARTS, strict=True)]
    num_ended = 0
    for number in range(12):
        before = sum(hand.all_steps for hand in hands)
        episodes, metrics = sampled(policy, number)
        assert all(1 <= len(episode) <= -(-(policy.num_steps or 0) // policy.repeat) for episode in episodes)
        ended = [end for hand, episode in zip(hands, episodes, strict=True) if (end := hand.play(episode))]
        assert metrics["episodes/steps"] == sum(hand.all_steps for hand in hands) - before
        assert metrics["episodes/ended"] == len(ended)
        if ended:
            np.testing.assert_allclose(metrics["episodes/return"], np.mean([total for total, _ in ended]))
            assert metrics["episodes/length"] == np.mean([length for _, length in ended])
        else:
            assert "episodes/return" not in metrics
        num_ended += len(ended)
    assert num_ended > 0


def is_over(episode: Episode) -> bool:
    return episode.terminated or episode.truncated


@pytest.mark.parametrize("kind", KINDS)
def test_another_process_goes_on_with_the_same_episodes(kind: str) -> None:
    policy = made(kind)
    for number in range(3):
        sampled(policy, number)
    state = copy.deepcopy(policy.state_dict())
    expected = [sampled(policy, number)[0] for number in (10, 11)]
    other = made(kind)
    other.load_state_dict(state)
    got = [sampled(other, number)[0] for number in (10, 11)]
    assert any(not is_over(episode) for episode in expected[0])
    for one, two in zip(got, expected, strict=True):
        assert_same(one, two)


def test_another_number_of_members_goes_on_with_those_that_it_has() -> None:
    def of_members(count: int) -> EpisodePolicy:
        return EpisodePolicy(lambda: Chance(9), num_members=count, options=EpisodeOptions(num_steps=4))

    policy = of_members(3)
    first = sampled(policy, 0)[0]
    for count in (2, 5):
        other = of_members(count)
        other.load_state_dict(policy.state_dict())
        starts = [EpisodeStart(seed=seed) for seed in range(count)]
        second = [episode for [episode] in other.sample_actions(starts, 1).actions]
        assert [float(episode.observations[0, 1]) for episode in second] == [4, 4, 4, 0, 0][:count]
        for before, after in zip(first, second, strict=False):
            assert torch.equal(before.final_observation, after.observations[0])


def test_evaluations_leave_the_episodes_where_they_are() -> None:
    """A pool of the user's cannot be made again, so its episodes are played again; others have a pool for evaluations."""
    for pool in ("CartPole-v1", None):

        def policy(pool: Any = pool) -> EpisodePolicy:
            torch.manual_seed(0)
            given = pool or make_pool("CartPole-v1", 3)
            members = 3 if pool else None
            return EpisodePolicy(given, num_members=members, options=EpisodeOptions(num_steps=5))

        one, other = policy(), policy()
        for number in range(4):
            expected, got = sampled(one, number)[0], sampled(other, number)[0]
            assert_same(got, expected)
            assert evaluate_policy(other, num_episodes=4).returns.min() > 5


def test_copies_share_the_episodes() -> None:
    policy = made("chance")
    twin = copy.deepcopy(policy)
    parts = [sampled(policy, 0)[0], sampled(twin, 1)[0]]
    assert any(part.final_observation[1] == 4 for part in parts[0])
    for first, second in zip(*parts, strict=True):
        assert is_over(first) or torch.equal(first.final_observation, second.observations[0])


class Drifting(Chance):
    """Draws from its own generator, which no seed fixes, after the first step of an episode."""

    made = 0

    def step(self, action: Any) -> Any:
        Drifting.made += 1
        observation, *rest = super().step(action)
        return (observation + np.float32(Drifting.made), *rest)


def test_an_environment_that_does_not_repeat_itself_begins_anew_and_is_counted() -> None:
    policy = EpisodePolicy(SerialPool([Drifting(50) for _ in range(3)]), options=EpisodeOptions(num_steps=4))
    first, metrics = sampled(policy, 0)
    assert metrics["episodes/lost_environments"] == 0
    policy.load_state_dict(copy.deepcopy(policy.state_dict()))
    with pytest.warns(GRPOWarning, match="3 of 3 unfinished episodes could not be repeated"):
        second, metrics = sampled(policy, 1)
    assert metrics["episodes/lost_environments"] == 3
    assert [float(episode.observations[0, 1]) for episode in second] == [0, 0, 0]
    assert not any(map(is_over, first))
    third, metrics = sampled(policy, 2)
    assert metrics["episodes/lost_environments"] == 0
    for one, two in zip(second, third, strict=True):
        assert torch.equal(one.final_observation, two.observations[0])


def test_a_lost_worker_or_an_interrupt_changes_nothing_but_the_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def policy(lost_in: tuple[int, ...]) -> EpisodePolicy:
        torch.manual_seed(0)
        pool = Watched(SerialPool([Chance(9, end_above=0.9) for _ in range(3)]), lost_in=lost_in)
        return EpisodePolicy(pool, options=EpisodeOptions(num_steps=4))

    unbroken, broken = policy(()), policy((1, 9))

    def interrupted(action: Any) -> Any:
        raise KeyboardInterrupt

    counts = []
    for number in range(4):
        if number == 2:  # a collection that is given up when two of three environments have moved
            monkeypatch.setattr(broken.pool.pool._envs[2], "step", interrupted)
            with pytest.raises(KeyboardInterrupt):
                sampled(broken, number)
            monkeypatch.undo()
        expected, (got, metrics) = sampled(unbroken, number)[0], sampled(broken, number)
        assert_same(got, expected)
        counts.append(metrics["episodes/lost_environments"])
    assert sum(counts) == 2
    with pytest.raises(ContractError, match=r"lost 4 times in one iteration.*exit code 7.*vectorization='sync'"):
        sampled(policy(tuple(range(9))), 0)


def test_groups_and_states_without_a_member_are_refused() -> None:
    policy = made("chance")
    with pytest.raises(ConfigError, match=r"num_steps=4 lets episodes go on.*groups of 2\. Use group_size=1"):
        policy.sample_actions(STARTS, 2)
    with pytest.raises(ConfigError, match=r"needs a member per state.*4 states and num_members=3"):
        policy.sample_actions([*STARTS, EpisodeStart(seed=9)], 1)


def test_a_file_of_the_policy_holds_no_episodes(tmp_path: Path) -> None:
    policy = made("chance")
    sampled(policy, 0)
    loaded = EpisodePolicy.load(policy.save(tmp_path / "policy"), environment=lambda: Chance(9, end_above=0.9))
    first = sampled(loaded, 1)[0]
    assert [float(episode.observations[0, 1]) for episode in first] == [0, 0, 0]


def test_a_mask_goes_on_with_its_episode() -> None:
    policy = EpisodePolicy(Crossing, num_members=3, action_mask="info", options=EpisodeOptions(num_steps=1))
    for number in range(6):  # an action that is not allowed is an error of this environment
        sampled(policy, number)
