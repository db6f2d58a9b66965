"""Rollouts: an episode depends on its start, its row and the policy, and not on other episodes or lost workers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from adapters.control import EpisodeOptions, EpisodePolicy, evaluate_policy
from adapters.control.environments.episodes import Episode, EpisodeStart
from adapters.control.environments.pools import SerialPool, WorkerLost, make_pool
from adapters.control.policy.rollouts import MAX_LOSSES_IN_A_ROW, Record
from grpo.errors import ConfigError, ContractError, GRPOWarning
from tests.support.control_environments import Chance, Crossing, Spaces, Watched, space_of_everything
from tests.support.control_episodes import Hand
from tests.support.control_policies import policy_of, rows_of
from tests.support.control_pools import starts_of
from tests.support.odd_environments import ACTED

POOLS: dict[str, Callable[[int], Any]] = {
    "native": lambda members: make_pool("CartPole-v1", members),
    "sync": lambda members: make_pool("CartPole-v1", members, vectorization="sync"),
    "pendulum": lambda members: make_pool("Pendulum-v1", members, max_episode_steps=40),
    "chance": lambda members: SerialPool([Chance(9, end_above=0.8) for _ in range(members)]),
}


def policy_on(pool: Any, **options: Any) -> EpisodePolicy:
    torch.manual_seed(5)
    policy = policy_of(pool, **{"hidden": (8,)} | options)
    with torch.no_grad():
        for value in policy.parameters():  # initial weights are so small that observations hardly matter
            value.mul_(3.0)
    return policy


def parts_of(record: Record) -> list[tuple[torch.Tensor, ...]]:
    columns = (record.observations, record.actions, record.rewards)
    return list(zip(*(column.split(record.lengths) for column in columns), record.final_observations, strict=True))


def assert_same(first: Record, second: Record, tolerance: float = 0.0) -> None:
    assert (first.lengths, first.terminated) == (second.lengths, second.terminated)
    for mine, theirs in zip(parts_of(first), parts_of(second), strict=True):
        for got, expected in zip(mine, theirs, strict=True):
            torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def test_every_member_of_a_group_gets_the_same_reset() -> None:
    pool = Watched(SerialPool([Chance() for _ in range(2)]))
    policy = policy_on(pool)
    options = {"first": 0.25}
    policy.sample_actions([EpisodeStart(), EpisodeStart(), EpisodeStart(seed=3, options=options)], 3)
    begun = [start for _, start in pool.begun]
    assert begun == [begun[0]] * 3 + [begun[3]] * 3 + [EpisodeStart(seed=3, options=options)] * 3
    assert len({None, begun[0].seed, begun[3].seed}) == 3


def test_an_episode_does_not_depend_on_the_number_of_members_or_on_other_episodes(subtests: pytest.Subtests) -> None:
    for kind, make in POOLS.items():
        with subtests.test(kind=kind):
            starts = starts_of(*range(7))
            records = [policy_on(make(members)).roll_out(starts, seed=11) for members in (1, 3, 16)]
            assert_same(records[1], records[0], tolerance=1e-6)
            assert_same(records[2], records[0], tolerance=1e-6)
            others = policy_on(make(3)).roll_out(starts_of(9, 1, 8, 3), seed=11)
            for row in (1, 3):
                for got, expected in zip(parts_of(others)[row], parts_of(records[0])[row], strict=True):
                    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
            assert not torch.equal(parts_of(others)[0][0], parts_of(records[0])[0][0])


@pytest.mark.parametrize("num_steps", [None, 20], ids=["whole episodes", "parts"])
def test_the_global_generator_decides_the_actions(num_steps: int | None) -> None:
    def actions(seed: int) -> list[list[int]]:
        policy = policy_on("CartPole-v1", num_members=2, num_steps=num_steps)
        torch.manual_seed(seed)
        return [episode.actions.tolist() for episode in rows_of(policy.sample_actions(starts_of(1, 2), 1).actions)]

    assert actions(1) == actions(1) != actions(2)


def test_noise_depends_on_the_row_and_the_step() -> None:
    """The episodes are longer than a block of noise, and one row starts in the middle of another row's block."""
    policy = policy_on(SerialPool([Chance(70) for _ in range(2)]))
    with torch.no_grad():
        policy.actor[1].mean.weight.zero_()  # action = noise
    record = policy.roll_out(starts_of(0, 0, 0), seed=1)
    assert len(record.actions.unique(dim=0)) == 3 * 70
    for row in range(3):  # blocks of 64 steps, from the row's key and the block's counter
        blocks = [np.random.Philox(key=1 + (row << 64), counter=block << 64) for block in (0, 1)]
        noise = np.concatenate([policy.distribution.noise(np.random.Generator(block), 64) for block in blocks])
        torch.testing.assert_close(record.actions[70 * row : 70 * row + 70], torch.from_numpy(noise[:70]))


def test_only_active_members_are_stepped_and_finished_ones_start_waiting_episodes() -> None:
    envs = [Chance(9, end_above=0.7) for _ in range(3)]
    pool = Watched(SerialPool(envs))
    record = policy_on(pool).roll_out(starts_of(*range(10)), seed=0)
    assert len(set(record.lengths)) > 2
    assert sum(env.num_steps for env in envs) == sum(record.lengths) == len(record.observations)
    assert sorted(start.seed or 0 for _, start in pool.begun) == list(range(10))
    assert {member for member, _ in pool.begun} == {0, 1, 2}
    assert all(len(set(members)) == len(members) for members in pool.stepped)
    # a finished member starts the next episode at once: fewer than three are active only if none waits
    all_begun = next(i for i in range(len(pool.stepped)) if len(pool.stepped[i]) < 3)
    assert all(len(members) < 3 for members in pool.stepped[all_begun:])


def test_limits_and_counts_are_in_steps_of_the_environment(subtests: pytest.Subtests) -> None:
    """A limit of 6 steps is a decision of 4 and one of 2, with 10 steps in all of an episode that nobody limits."""
    for length, limit, repeat, steps, terminated in (
        (5, 1, 1, [1], False),
        (5, 3, 1, [1, 1, 1], False),
        (5, 5, 1, [1, 1, 1, 1, 1], True),
        (5, 9, 1, [1, 1, 1, 1, 1], True),
        (10, 6, 4, [4, 2], False),
        (10, None, 4, [4, 4, 2], True),
    ):
        with subtests.test(limit=limit, repeat=repeat):
            pool = SerialPool([Chance(length) for _ in range(2)])
            policy = policy_on(pool, max_episode_steps=limit, repeat=repeat)
            sampled = policy.sample_actions(starts_of(4), 3)
            for episode in rows_of(sampled.actions):
                assert (len(episode), episode.terminated, episode.truncated) == (len(steps), terminated, not terminated)
            assert sampled.metrics["episodes/steps"] == 3 * sum(steps)
            assert sampled.metrics["episodes/terminated"] == (3 if terminated else 0)
    assert evaluate_policy(policy, num_episodes=2).lengths.tolist() == [10, 10]


@pytest.mark.parametrize("repeat", [1, 2, 3, 50])
def test_an_action_is_repeated_and_its_rewards_are_summed(repeat: int, subtests: pytest.Subtests) -> None:
    """Each episode is played again by hand. 40 steps of Pendulum are 13 decisions of 3 steps, and one of a single step."""
    environments: dict[str, Any] = {
        "native": "CartPole-v1",
        "sync": lambda: gymnasium.make("CartPole-v1"),
        "pendulum": lambda: gymnasium.make("Pendulum-v1", max_episode_steps=40),
        "chance": lambda: Chance(9, end_above=0.8),
        "nested": lambda: Spaces(space_of_everything(), ACTED["named parts"], length=7),
    }
    for kind, environment in environments.items():
        with subtests.test(kind=kind):
            policy = policy_on(environment, num_members=3, repeat=repeat)
            sampled = policy.sample_actions(starts_of(1, 2, 3, 4, 5), 1)
            ended = []
            for seed, episode in enumerate(rows_of(sampled.actions), 1):
                env = environment() if callable(environment) else gymnasium.make(environment)
                ended.append(Hand(env, policy, seed).play(episode))
            assert None not in ended
            assert sampled.metrics["episodes/steps"] == sum(steps for _, steps in ended)  # type: ignore[misc]


# Lost workers


def sample_with(pool: Any) -> tuple[list[Episode], Any]:
    policy = policy_on(pool)
    torch.manual_seed(3)
    sampled = policy.sample_actions([EpisodeStart(), EpisodeStart()], 4)
    return rows_of(sampled.actions), sampled


def test_a_lost_worker_changes_no_episode(subtests: pytest.Subtests) -> None:
    expected, whole = sample_with(POOLS["chance"](3))
    losses: list[tuple[dict[str, Any], int]] = [
        ({"lost_in": [0]}, 1),
        ({"lost_in": [6]}, 1),
        ({"lost_in": [3, 12, 14]}, 3),
        ({"lost_at_reset": True}, 3),  # three members are being reset
    ]
    for lost, num_lost in losses:
        with subtests.test(lost=lost):
            got, sampled = sample_with(Watched(POOLS["chance"](3), **lost))
            for one, other in zip(got, expected, strict=True):
                torch.testing.assert_close(one.observations, other.observations, rtol=0, atol=0)
                torch.testing.assert_close(one.actions, other.actions, rtol=1e-6, atol=1e-6)
                assert (one.rewards.tolist(), one.terminated) == (other.rewards.tolist(), other.terminated)
            torch.testing.assert_close(sampled.scores.log_probs, whole.scores.log_probs)
            assert sampled.metrics == {**whole.metrics, "episodes/lost_environments": float(num_lost)}


def test_finished_episodes_are_kept_when_a_worker_is_lost() -> None:
    envs = [Chance(3) for _ in range(2)]
    pool = Watched(SerialPool(envs), lost_in=[4])  # call 2 ends two episodes, and two others have taken one step
    policy_on(pool).roll_out(starts_of(*range(4)), seed=0)
    assert [start.seed for _, start in pool.begun] == [0, 1, 2, 3, 2, 3]


def test_losses_with_finished_episodes_in_between_are_tolerated() -> None:
    lost_in = [4, 9, 14, 19]  # three steps finish a pair of episodes, and every pair but the first is lost once
    assert len(lost_in) > MAX_LOSSES_IN_A_ROW
    policy = policy_on(Watched(SerialPool([Chance(3) for _ in range(2)]), lost_in))
    record = policy.roll_out(starts_of(*range(10)), seed=0)
    assert (record.num_lost, record.lengths) == (4, [3] * 10)


def test_an_episode_that_always_loses_its_worker_ends_the_run() -> None:
    pool = Watched(SerialPool([Chance(5) for _ in range(2)]), lost_in=range(2, 99, 3))
    with pytest.raises(
        ContractError, match=r"lost 4 times without a finished episode .* exit code 7. .*vectorization='sync'"
    ) as raised:
        policy_on(pool).roll_out(starts_of(1, 2), seed=0)
    assert isinstance(raised.value.__cause__, WorkerLost)


# Which of network and environment is at fault


@pytest.mark.filterwarnings("ignore:.*is a NaN value:UserWarning")  # Gymnasium's checker sees the NaN actions
@pytest.mark.filterwarnings("ignore:.*is not within the observation space:UserWarning")
def test_a_diverged_network_is_named_and_not_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    monkeypatch.chdir(tmp_path)  # MuJoCo writes its log in the working directory
    ids = ("CartPole-v1", "FrozenLake-v1", "Pendulum-v1", "HalfCheetah-v5")
    for env_id, distribution in (*((env_id, "auto") for env_id in ids), ("Pendulum-v1", "beta")):
        with subtests.test(env_id=env_id, distribution=distribution):
            options: dict[str, Any] = {"max_episode_steps": 5, "distribution": distribution}
            policy = policy_of(env_id, num_members=2, hidden=(4,), **options)
            with torch.no_grad():
                next(policy.parameters()).fill_(torch.nan)
            with pytest.raises(ContractError, match=r"must be finite.*Lower the learning rate") as raised:
                policy.sample_actions(starts_of(1), 2)
            assert env_id not in str(raised.value)


# Groups


class IgnoresSeed(Chance):
    def reset(self, **_: Any) -> Any:
        return super().reset()


def test_groups_of_strangers_are_named_once() -> None:
    policy = EpisodePolicy(IgnoresSeed, num_members=4)
    with pytest.warns(GRPOWarning, match=r"in 2 of 2 groups the first observations differ. .* super\(\).reset"):
        policy.sample_actions(starts_of(1, 2), 3)
    policy.sample_actions(starts_of(1, 2), 3)  # warnings are errors
    EpisodePolicy(IgnoresSeed, num_members=4).sample_actions(starts_of(1, 2), 1)  # there is nobody to compare with


@pytest.mark.parametrize("num_steps", [None, 50])
def test_an_environment_that_seeds_the_policys_generator_is_named_once(num_steps: int | None) -> None:
    class Seeds(Chance):
        def reset(self, **options: Any) -> Any:
            torch.manual_seed(7)
            return super().reset(**options)

    policy, usual = (policy_of(kind, num_members=1, num_steps=num_steps) for kind in (Seeds, Chance))
    for seed in (3, 3, 4, 5):  # two calls with one seed are alike anyway
        torch.manual_seed(seed)
        usual.sample_actions(starts_of(1), 1)
    torch.manual_seed(3)
    policy.sample_actions(starts_of(1), 1)
    with pytest.warns(GRPOWarning, match="the environment seeds torch's global generator"):
        policy.sample_actions(starts_of(1), 1)
    policy.sample_actions(starts_of(1), 1)


def test_groups_of_twins_are_named_in_the_first_iteration() -> None:
    policy = EpisodePolicy("Blackjack-v1", num_members=8, options=EpisodeOptions(max_episode_steps=20))
    with pytest.warns(GRPOWarning, match=r"of 32 are copies of another .* smaller group_size and more starts"):
        policy.sample_actions(starts_of(1, 2), 16)
    policy.sample_actions(starts_of(1, 2), 16)  # warnings are errors
    for env_id in ("CartPole-v1", "FrozenLake-v1"):
        EpisodePolicy(env_id, num_members=8).sample_actions(starts_of(1, 2), 16)


# Masks


class Silent(Crossing):
    """Has no mask in the info at the end of an episode."""

    def step(self, action: Any) -> Any:
        *step, info = super().step(action)
        return *step, {} if self.time >= self.length else info


@pytest.mark.filterwarnings("ignore:.*must have the same start:grpo.errors.GRPOWarning")  # the members' masks differ
def test_masks_are_obeyed_at_every_step(subtests: pytest.Subtests) -> None:
    masks: tuple[Any, ...] = ("info", lambda observations: observations > 0.5)
    for make, mask in ((Crossing, masks[0]), (Crossing, masks[1]), (Silent, masks[0])):
        with subtests.test(make=make.__name__, mask=mask):
            envs = [make(allows=1 + member % 3) for member in range(4)]
            policy = policy_on(SerialPool(envs, infos=True), action_mask=mask)
            sampled = policy.sample_actions(starts_of(1, 2), 6)  # the environment raises for a masked action
            episodes = rows_of(sampled.actions)
            for episode in episodes:
                assert episode.allowed is not None
                assert torch.equal(episode.allowed, episode.observations > 0.5)
                assert bool(episode.allowed.gather(1, episode.actions.unsqueeze(1)).all())
            assert sampled.scores is not None
            assert sampled.scores.entropy is not None
            assert bool(sampled.scores.log_probs.isfinite().all())
            bound = torch.cat([episode.allowed.sum(1) for episode in episodes]).log()  # type: ignore[union-attr]
            entropy = sampled.scores.entropy[sampled.mask]
            assert bool((entropy <= bound + 1e-6).all())
            assert bool((entropy[bound == 0.0].abs() < 1e-6).all())
            scored = policy.score_actions(starts_of(1, 2), episodes).log_probs
            torch.testing.assert_close(scored, sampled.scores.log_probs)


def test_masks_that_cannot_be_used_are_refused() -> None:
    narrow: Any = lambda observations: observations[:, :3] > 0.5  # noqa: E731
    policy = policy_on(SerialPool([Crossing()]), action_mask=narrow)
    with pytest.raises(ContractError, match=r"mask must be bool \[n, K\] = \[1, 5\]"):
        policy.sample_actions(starts_of(1), 1)
    policy = policy_on(SerialPool([Crossing()], infos=False), action_mask="info")
    with pytest.raises(ConfigError, match=r"make_pool\(\.\.\., infos=True\)"):
        policy.sample_actions(starts_of(1), 1)
    with pytest.raises(ConfigError, match="repeat=2 and an action mask contradict each other"):
        policy_on(SerialPool([Crossing()], infos=True), repeat=2, action_mask="info")
