"""Rollouts: an episode depends on its start, its row and the policy, and on nothing that happens beside it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from adapters.control import EpisodePolicy
from adapters.control.environments.episodes import Episode, EpisodeStart
from adapters.control.environments.pools import PoolStep, SerialPool, WorkerLost, make_pool
from adapters.control.policy.rollouts import MAX_LOSSES_IN_A_ROW, Record
from grpo.errors import ConfigError, ContractError
from tests.support.control_environments import Chance, Crossing, Watched

POOLS: dict[str, Callable[[int], Any]] = {
    "native": lambda members: make_pool("CartPole-v1", members),
    "sync": lambda members: make_pool("CartPole-v1", members, vectorization="sync"),
    "pendulum": lambda members: make_pool("Pendulum-v1", members, max_episode_steps=40),
    "chance": lambda members: SerialPool([Chance(9, end_above=0.8) for _ in range(members)]),
}


def starts_of(*seeds: int) -> list[EpisodeStart]:
    return [EpisodeStart(seed=seed) for seed in seeds]


def policy_on(pool: Any, **options: Any) -> EpisodePolicy:
    torch.manual_seed(5)
    policy = EpisodePolicy(pool, hidden=(8,), **options)
    with torch.no_grad():
        for value in policy.parameters():  # HEAD_GAIN would have it ignore what it observes
            value.mul_(3.0)
    return policy


def rows_of(record: Record) -> list[tuple[torch.Tensor, ...]]:
    columns = (record.observations, record.actions, record.rewards)
    return list(zip(*(column.split(record.lengths) for column in columns), record.final_observations, strict=True))


def assert_same(first: Record, second: Record, tolerance: float = 0.0) -> None:
    assert (first.lengths, first.terminated) == (second.lengths, second.terminated)
    for mine, theirs in zip(rows_of(first), rows_of(second), strict=True):
        for got, expected in zip(mine, theirs, strict=True):
            torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def flat(groups: Sequence[Sequence[Episode]]) -> list[Episode]:
    return [episode for group in groups for episode in group]


@pytest.mark.parametrize("kind", POOLS)
def test_the_same_seed_gives_the_same_episodes_bit_for_bit(kind: str) -> None:
    policy = policy_on(POOLS[kind](4))

    def sample(seed: int) -> list[Episode]:
        torch.manual_seed(seed)
        return flat(policy.sample_actions([EpisodeStart(), EpisodeStart(seed=7)], 3).actions)

    first, again, other = sample(1), sample(1), sample(2)
    for mine, theirs in zip(first, again, strict=True):
        for field in ("observations", "actions", "rewards", "log_probs", "final_observation"):
            torch.testing.assert_close(getattr(mine, field), getattr(theirs, field), rtol=0, atol=0)
        assert (mine.terminated, mine.truncated) == (theirs.terminated, theirs.truncated)
    assert [e.actions.tolist() for e in first] != [e.actions.tolist() for e in other]
    assert not torch.equal(first[0].observations[0], other[0].observations[0])  # a start without a seed is drawn anew
    assert torch.equal(first[3].observations[0], other[3].observations[0])


@pytest.mark.parametrize("kind", POOLS)
def test_a_group_begins_alike_and_differs_by_its_actions(kind: str) -> None:
    policy = policy_on(POOLS[kind](4))
    for group in policy.sample_actions([EpisodeStart(), EpisodeStart()], 5).actions:
        for episode in group:
            assert torch.equal(episode.observations[0], group[0].observations[0])
        assert len({tuple(episode.actions[:4].flatten().tolist()) for episode in group}) > 1
    groups = policy.sample_actions([EpisodeStart(), EpisodeStart()], 2).actions
    assert not torch.equal(groups[0][0].observations[0], groups[1][0].observations[0])


def test_every_member_of_a_group_gets_the_same_reset() -> None:
    pool = Watched(SerialPool([Chance() for _ in range(2)]))
    policy = policy_on(pool)
    options = {"first": 0.25}
    policy.sample_actions([EpisodeStart(), EpisodeStart(seed=3, options=options)], 3)
    begun = [start for _, start in pool.begun]
    assert begun[0].seed is not None
    assert begun[:3] == [begun[0]] * 3
    assert begun[3:] == [EpisodeStart(seed=3, options=options)] * 3


def test_noise_of_the_environment_is_common_within_a_group() -> None:
    policy = policy_on(POOLS["chance"](5))
    first, second = policy.sample_actions([EpisodeStart(), EpisodeStart()], 4).actions
    for group in (first, second):
        assert len({tuple(episode.rewards.tolist()) for episode in group}) == 1  # what was drawn at each step
    assert first[0].rewards.tolist() != second[0].rewards.tolist()


@pytest.mark.parametrize("kind", POOLS)
def test_an_episode_does_not_depend_on_how_many_members_there_are(kind: str) -> None:
    starts = starts_of(*range(7))
    records = [policy_on(POOLS[kind](members)).roll_out(starts, seed=11) for members in (1, 3, 16)]
    assert_same(records[1], records[0], tolerance=1e-6)
    assert_same(records[2], records[0], tolerance=1e-6)


@pytest.mark.parametrize("kind", POOLS)
def test_an_episode_does_not_depend_on_which_others_run(kind: str) -> None:
    policy = policy_on(POOLS[kind](3))
    first, second = (policy.roll_out(starts, seed=11) for starts in (starts_of(1, 2, 3, 4), starts_of(9, 2, 8, 4)))
    for row in (1, 3):
        for got, expected in zip(rows_of(first)[row], rows_of(second)[row], strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    assert not torch.equal(rows_of(first)[0][0], rows_of(second)[0][0])


def test_noise_is_of_the_row_and_of_the_step() -> None:
    """More steps than are drawn ahead, and a row that begins in between: the noise neither repeats nor is shared."""
    policy = policy_on(SerialPool([Chance(70) for _ in range(2)]))
    with torch.no_grad():
        policy.actor[1].mean.weight.zero_()  # action = noise
    record = policy.roll_out(starts_of(0, 0, 0), seed=1)
    assert len(record.actions.unique(dim=0)) == 3 * 70
    for row in range(3):  # drawn 64 steps at a time, from the row's key and the block's counter
        blocks = [np.random.Philox(key=1 + (row << 64), counter=block << 64) for block in (0, 1)]
        noise = np.concatenate([policy.distribution.noise(np.random.Generator(block), 64) for block in blocks])
        torch.testing.assert_close(record.actions[70 * row : 70 * row + 70], torch.from_numpy(noise[:70]))


def test_only_the_living_are_stepped_and_the_finished_replaced() -> None:
    envs = [Chance(9, end_above=0.7) for _ in range(3)]
    pool = Watched(SerialPool(envs))
    record = policy_on(pool).roll_out(starts_of(*range(10)), seed=0)
    assert len(set(record.lengths)) > 2
    assert sum(env.num_steps for env in envs) == sum(record.lengths) == len(record.observations)
    assert sorted(start.seed or 0 for _, start in pool.begun) == list(range(10))
    assert {member for member, _ in pool.begun} == {0, 1, 2}
    assert all(len(set(members)) == len(members) for members in pool.stepped)
    # a finished member begins the next at once: only while none waits are there fewer than three
    all_begun = next(i for i in range(len(pool.stepped)) if len(pool.stepped[i]) < 3)
    assert all(len(members) < 3 for members in pool.stepped[all_begun:])


def test_what_happened_by_hand() -> None:
    env = Chance(3)
    policy = policy_on(SerialPool([env]))
    ((episode,),) = policy.sample_actions([EpisodeStart(seed=4)], 1).actions
    rng = np.random.default_rng(4)
    first = rng.random()
    drawn = [rng.random() for _ in range(3)]
    expected = [[first, 0.0, 0.0], [first, 1.0, drawn[0]], [first, 2.0, drawn[1]]]
    torch.testing.assert_close(episode.observations, torch.tensor(expected))
    torch.testing.assert_close(episode.final_observation, torch.tensor([first, 3.0, drawn[2]], dtype=torch.float32))
    assert episode.rewards.tolist() == drawn
    assert (len(episode), episode.terminated, episode.truncated) == (3, True, False)


@pytest.mark.parametrize(("limit", "length", "terminated"), [(3, 3, False), (5, 5, True), (9, 5, True), (1, 1, False)])
def test_cut_off(limit: int, length: int, terminated: bool) -> None:
    policy = policy_on(SerialPool([Chance(5) for _ in range(2)]), max_episode_steps=limit)
    sampled = policy.sample_actions([EpisodeStart(seed=4)], 3)
    for episode in flat(sampled.actions):
        assert (len(episode), episode.terminated, episode.truncated) == (length, terminated, not terminated)
    assert sampled.metrics["episodes/steps"] == 3 * length
    assert sampled.metrics["episodes/terminated"] == (3 if terminated else 0)


def test_the_environments_own_limit_is_a_truncation() -> None:
    policy = policy_on(make_pool("Pendulum-v1", 2, max_episode_steps=4))
    (episode,) = flat(policy.sample_actions([EpisodeStart(seed=4)], 1).actions)
    assert (len(episode), episode.terminated, episode.truncated) == (4, False, True)


# Lost workers


def sample_with(pool: Any) -> tuple[list[Episode], Any]:
    policy = policy_on(pool)
    torch.manual_seed(3)
    sampled = policy.sample_actions([EpisodeStart(), EpisodeStart()], 4)
    return flat(sampled.actions), sampled


@pytest.mark.parametrize(
    "lost", [{"lost_in": [0]}, {"lost_in": [6]}, {"lost_in": [3, 12, 14]}, {"lost_at_reset": True}]
)
def test_a_lost_worker_changes_no_episode(lost: dict[str, Any]) -> None:
    expected, whole = sample_with(POOLS["chance"](3))
    got, sampled = sample_with(Watched(POOLS["chance"](3), **lost))
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine.observations, theirs.observations, rtol=0, atol=0)
        torch.testing.assert_close(mine.actions, theirs.actions, rtol=1e-6, atol=1e-6)
        assert (mine.rewards.tolist(), mine.terminated) == (theirs.rewards.tolist(), theirs.terminated)
    torch.testing.assert_close(sampled.scores.log_probs, whole.scores.log_probs)
    num_lost = len(lost.get("lost_in", [0, 1, 2]))  # at the reset, three members were being reset
    assert sampled.metrics == {**whole.metrics, "episodes/lost_environments": float(num_lost)}


def test_finished_episodes_are_kept_when_a_worker_is_lost() -> None:
    envs = [Chance(3) for _ in range(2)]
    pool = Watched(SerialPool(envs), lost_in=[4])  # two episodes ended with call 2; two more are one step old
    policy_on(pool).roll_out(starts_of(*range(4)), seed=0)
    assert [start.seed for _, start in pool.begun] == [0, 1, 2, 3, 2, 3]


def test_losses_with_progress_in_between_are_borne() -> None:
    lost_in = [4, 9, 14, 19]  # three steps end a pair of episodes; every pair but the first is lost once
    assert len(lost_in) > MAX_LOSSES_IN_A_ROW
    record = policy_on(Watched(SerialPool([Chance(3) for _ in range(2)]), lost_in)).roll_out(
        starts_of(*range(10)), seed=0
    )
    assert (record.num_lost, record.lengths) == (4, [3] * 10)


class Fatal(Watched):
    """An episode that kills its worker in its third step, always; those beside it are fine."""

    age = 0

    def reset(self, members: Sequence[int], starts: Sequence[EpisodeStart]) -> tuple[Any, list[dict[str, Any]]]:
        self.age = 0
        return super().reset(members, starts)

    def step(self, members: Any, actions: Any) -> PoolStep:
        self.age += 1
        if self.age == 3:
            raise WorkerLost([0], "member 0, which raised ArithmeticError: out of paper")
        return super().step(members, actions)


def test_an_episode_that_always_kills_its_worker_is_given_up() -> None:
    pool = Fatal(SerialPool([Chance(5) for _ in range(2)]))
    with pytest.raises(ContractError, match=r"lost 4 times .* out of paper. .*vectorization='sync'") as raised:
        policy_on(pool).roll_out(starts_of(1, 2), seed=0)
    assert isinstance(raised.value.__cause__, WorkerLost)


# Blame


@pytest.mark.filterwarnings(
    "ignore:.*is a NaN value:UserWarning"
)  # Gymnasium's checker looks at what is meant to be seen
@pytest.mark.filterwarnings("ignore:.*is not within the observation space:UserWarning")
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "FrozenLake-v1", "HalfCheetah-v5"])
@pytest.mark.parametrize("distribution", ["auto", "beta"])
def test_a_diverged_network_is_named_and_not_the_environment(
    env_id: str, distribution: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # MuJoCo writes a log where it is
    policy = EpisodePolicy(env_id, num_members=2, hidden=(4,), max_episode_steps=5, distribution=distribution)  # type: ignore[arg-type]
    with torch.no_grad():
        next(policy.parameters()).fill_(torch.nan)
    with pytest.raises(ContractError, match=r"(network gave|Lower the learning rate)") as raised:
        policy.sample_actions(starts_of(1), 2)
    assert env_id not in str(raised.value)


class Broken(Chance):
    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, *rest = super().step(action)
        return (observation * np.nan, *rest)  # type: ignore[return-value]


def test_a_broken_environment_is_named_and_not_the_network() -> None:
    with pytest.raises(ContractError, match=r"Broken, member 0, step 1: the observation holds NaN"):
        policy_on(SerialPool([Broken()])).roll_out(starts_of(1), seed=0)


# Masks


class Silent(Crossing):
    """Tells no mask where the episode ends."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, terminated, truncated, {} if terminated else info


@pytest.mark.parametrize("make", [Crossing, Silent])
@pytest.mark.parametrize("mask", ["info", lambda observations: observations > 0.5])
def test_masks_are_respected_at_every_step(make: type[Crossing], mask: Any) -> None:
    policy = policy_on(SerialPool([make(allows=1 + member % 3) for member in range(4)], infos=True), action_mask=mask)
    sampled = policy.sample_actions(starts_of(1, 2), 6)  # the environment raises where it is not obeyed
    for episode in flat(sampled.actions):
        assert episode.allowed is not None
        assert torch.equal(episode.allowed, episode.observations > 0.5)
        assert bool(episode.allowed.gather(1, episode.actions.unsqueeze(1)).all())
    assert sampled.scores is not None
    assert sampled.scores.entropy is not None
    assert bool(sampled.scores.log_probs.isfinite().all())
    bound = torch.cat([episode.allowed.sum(1) for episode in flat(sampled.actions)]).log()  # type: ignore[union-attr]
    entropy = sampled.scores.entropy[sampled.mask]
    assert bool((entropy <= bound + 1e-6).all())
    assert bool((entropy[bound == 0.0].abs() < 1e-6).all())
    torch.testing.assert_close(
        policy.score_actions(starts_of(1, 2), flat(sampled.actions)).log_probs, sampled.scores.log_probs
    )


def test_a_mask_that_is_missing() -> None:
    policy = policy_on(SerialPool([Crossing(tells=False)], infos=True), action_mask="info")
    with pytest.raises(ContractError, match=r"action_mask='info' needs info\['action_mask'\] .* Pass a callable"):
        policy.sample_actions(starts_of(1), 1)


def test_a_pool_that_keeps_no_infos() -> None:
    policy = policy_on(SerialPool([Crossing()]), action_mask="info")
    with pytest.raises(ConfigError, match=r"make_pool\(..., infos=True\)"):
        policy.sample_actions(starts_of(1), 1)


def test_an_environment_without_a_limit_comes_to_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adapters.control.policy.rollouts.LONGEST", 40)
    policy = EpisodePolicy("CliffWalking-v1", num_members=2)
    assert gymnasium.spec("CliffWalking-v1").max_episode_steps is None
    assert max(policy.roll_out(starts_of(1, 2), seed=0).lengths) == 40


def test_nothing_allowed() -> None:
    policy = policy_on(SerialPool([Crossing(allows=0)], infos=True), action_mask="info")
    with pytest.raises(ContractError, match=r"must allow an action; row 0 allows none. Correct the mask"):
        policy.sample_actions(starts_of(1), 1)


def test_a_mask_of_the_wrong_form() -> None:
    policy = policy_on(SerialPool([Crossing()]), action_mask=lambda observations: observations[:, :3] > 0.5)
    with pytest.raises(ContractError, match=r"mask must be bool \[n, K\] = \[1, 5\]"):
        policy.sample_actions(starts_of(1), 1)


def test_settings_that_mean_nothing() -> None:
    with pytest.raises(ConfigError, match="max_episode_steps must be >= 1, or None; got 0"):
        EpisodePolicy(Chance, max_episode_steps=0)
    with pytest.raises(ConfigError, match=r"action_mask must be 'info', a callable .* got 'infos'"):
        EpisodePolicy(Chance, action_mask="infos")  # type: ignore[arg-type]
