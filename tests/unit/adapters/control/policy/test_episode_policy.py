"""EpisodePolicy: scores agree however they are asked for, statistics hold still within an iteration, and errors teach."""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from adapters.control import EnvironmentReward, EpisodePolicy, FromTorch, StepReward, take_snapshot
from adapters.control.environments.episodes import Episode, EpisodeStart, episode_starts
from adapters.control.environments.pools import SerialPool, make_pool
from adapters.control.policy.episode_policy import as_batch
from adapters.control.policy.fast_forward import fast_forward
from adapters.control.policy.networks import CNNTorso
from grpo import AdvantageConfig, GRPOConfig, GRPOTrainer, ObjectiveConfig
from grpo.errors import ConfigError, ContractError
from grpo.policy_base import SplitsSteps
from tests.support.control_environments import GOALS, UNIT, Chance, Crossing, Spaces, Watched, space_of_everything

IMAGE = spaces.Box(0, 255, (36, 36, 1), np.uint8)
ACTIONS = spaces.Dict(
    {
        "arm": UNIT,
        "grip": spaces.Discrete(3),
        "rest": spaces.Tuple((spaces.MultiDiscrete([3, 2]), spaces.MultiBinary(2))),
    }
)
STARTS = [EpisodeStart(seed=1), EpisodeStart(seed=2)]

POLICIES: dict[str, Callable[[], EpisodePolicy]] = {
    "categorical": lambda: EpisodePolicy("CartPole-v1", num_members=3),
    "critic": lambda: EpisodePolicy("CartPole-v1", num_members=3, critic=True),
    "normalized": lambda: EpisodePolicy("CartPole-v1", num_members=3, normalize_observations=True),
    "gaussian": lambda: EpisodePolicy("Pendulum-v1", num_members=3, max_episode_steps=9, initial_log_std=-1.0),
    "squashed": lambda: EpisodePolicy("Pendulum-v1", num_members=3, max_episode_steps=9, distribution="squashed"),
    "beta": lambda: EpisodePolicy("Pendulum-v1", num_members=3, max_episode_steps=9, distribution="beta"),
    "by observation": lambda: EpisodePolicy("Pendulum-v1", num_members=3, max_episode_steps=9, std="observation"),
    "everything": lambda: EpisodePolicy(lambda: Spaces(space_of_everything(), ACTIONS), num_members=3),
    "masked": lambda: EpisodePolicy(Crossing, num_members=3, action_mask="info"),
    "image": lambda: EpisodePolicy(lambda: Spaces(IMAGE, spaces.Discrete(3)), num_members=2),
    "masked image": lambda: EpisodePolicy(
        lambda: Spaces(IMAGE, spaces.Discrete(3)),
        num_members=2,
        action_mask=lambda images: torch.tensor([[True, False, True]]).repeat(len(images), 1),
    ),
}


def made(kind: str) -> EpisodePolicy:
    """With weights that make a difference to what is done."""
    policy = POLICIES[kind]()
    with torch.no_grad():
        for value in policy.parameters():
            value.add_(0.1 * torch.randn_like(value))
    return policy


def rows_of(groups: Sequence[Sequence[Episode]]) -> list[Episode]:
    return [episode for group in groups for episode in group]


def trainer_of(policy: EpisodePolicy, **settings: Any) -> GRPOTrainer:
    config = GRPOConfig(group_size=3, seed=0, **{"advantage": AdvantageConfig(scale="batch"), **settings})
    return GRPOTrainer(config=config, policy=policy, reward_model=EnvironmentReward())


@pytest.mark.parametrize("kind", POLICIES)
def test_sampling_tells_what_scoring_says(kind: str) -> None:
    policy = made(kind)
    policy.sample_actions(STARTS, 2)
    with torch.no_grad():
        next(policy.actor.parameters()).mul_(1.5)  # the normaliser moves with the weights
    sampled = policy.sample_actions(STARTS, 2)
    episodes = rows_of(sampled.actions)
    assert sampled.scores is not None
    scores = policy.score_actions(STARTS, episodes)
    for name in ("log_probs", "entropy", "values", "final_values"):
        told, said = getattr(sampled.scores, name), getattr(scores, name)
        assert (told is None) == (said is None)
        if told is not None:
            torch.testing.assert_close(told, said.detach(), rtol=1e-6, atol=2e-6)
    assert torch.equal(sampled.mask, scores.mask)
    assert sampled.behaviour_log_probs is not None
    torch.testing.assert_close(sampled.behaviour_log_probs, scores.log_probs.detach(), rtol=1e-6, atol=2e-6)
    assert scores.log_probs.requires_grad
    assert not sampled.scores.log_probs.requires_grad
    for row, episode in enumerate(episodes):
        torch.testing.assert_close(
            episode.log_probs, scores.log_probs[row, : len(episode)].detach(), atol=2e-6, rtol=1e-6
        )
    totals = policy.get_log_probabilities(STARTS, episodes)
    torch.testing.assert_close(
        totals, torch.stack([episode.log_probs.sum() for episode in episodes]), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("kind", POLICIES)
def test_single_steps_score_as_in_their_episode(kind: str) -> None:
    policy = made(kind)
    sampled = policy.sample_actions(STARTS, 2)
    episodes = rows_of(sampled.actions)
    whole = policy.score_actions(STARTS, episodes)
    states, actions = policy.split_steps(STARTS, episodes)
    assert len(states) == len(actions) == sum(map(len, episodes))
    order = torch.randperm(len(states))  # as updates draw them
    split = policy.score_actions(states[order], actions[order])
    assert split.log_probs.shape == (len(states), 1)
    torch.testing.assert_close(split.log_probs.squeeze(1), whole.log_probs[whole.mask][order], rtol=1e-6, atol=2e-6)
    assert split.entropy is None or whole.entropy is not None
    if split.entropy is not None and whole.entropy is not None:
        torch.testing.assert_close(split.entropy.squeeze(1), whole.entropy[whole.mask][order], rtol=1e-6, atol=2e-6)
    if split.values is not None and whole.values is not None:
        torch.testing.assert_close(split.values.squeeze(1), whole.values[whole.mask][order], rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("kind", ["critic", "everything", "masked"])
def test_padding_does_not_matter(kind: str) -> None:
    policy = made(kind)
    episodes = sorted(rows_of(policy.sample_actions(STARTS, 4).actions), key=len)
    together = policy.score_actions(None, episodes)
    for row, episode in enumerate(episodes):
        alone = policy.score_actions(None, [episode])
        assert alone.mask.shape == (1, len(episode))
        for name in ("log_probs", "entropy", "values"):
            mine, theirs = getattr(alone, name), getattr(together, name)
            if mine is not None:
                torch.testing.assert_close(mine[0], theirs[row, : len(episode)], rtol=1e-6, atol=2e-6)
                assert not theirs[row, len(episode) :].any()


def test_entropy_and_log_probs_are_those_of_the_distribution() -> None:
    policy = made("categorical")
    episodes = rows_of(policy.sample_actions(STARTS, 2).actions)
    scores = policy.score_actions(STARTS, episodes)
    observations = torch.cat([episode.observations for episode in episodes])
    expected = torch.distributions.Categorical(logits=policy.actor(observations))
    torch.testing.assert_close(scores.entropy[scores.mask], expected.entropy())  # type: ignore[index]
    actions = torch.cat([episode.actions for episode in episodes])
    torch.testing.assert_close(scores.log_probs[scores.mask], expected.log_prob(actions))
    assert made("squashed").sample_actions(STARTS, 1).scores.entropy is None  # type: ignore[union-attr]


@pytest.mark.parametrize("is_cut_off", [True, False])
def test_final_values(is_cut_off: bool) -> None:
    policy = EpisodePolicy(lambda: Spaces(UNIT, spaces.Discrete(2), is_cut_off=is_cut_off), critic=True, hidden=(4,))
    episodes = rows_of(policy.sample_actions(STARTS, 2).actions)
    scores = policy.score_actions(STARTS, episodes)
    assert policy.critic is not None
    expected = policy.critic(torch.stack([episode.final_observation for episode in episodes])).squeeze(1)
    assert expected.abs().min() > 1e-3
    torch.testing.assert_close(scores.final_values, expected if is_cut_off else torch.zeros(4))
    observations = torch.stack([episode.observations for episode in episodes])
    torch.testing.assert_close(scores.values, policy.critic(observations).squeeze(-1))


def test_final_values_where_both_happen() -> None:
    """Cut off at 6 steps by the policy: some episodes have terminated by then."""
    policy = EpisodePolicy(lambda: Chance(99, end_above=0.9), critic=True, hidden=(4,), max_episode_steps=6)
    episodes = rows_of(policy.sample_actions([EpisodeStart(seed=seed) for seed in range(8)], 1).actions)
    assert len({episode.terminated for episode in episodes}) == 2
    final_values = policy.score_actions(None, episodes).final_values
    assert final_values is not None
    assert [bool(value == 0.0) for value in final_values] == [episode.terminated for episode in episodes]


def test_a_critic_of_ones_own() -> None:
    critic = nn.Linear(3, 1)
    policy = EpisodePolicy(Chance, critic=critic)
    episodes = rows_of(policy.sample_actions(STARTS, 1).actions)
    values = policy.score_actions(STARTS, episodes).values
    torch.testing.assert_close(values[0], critic(episodes[0].observations).squeeze(1))  # type: ignore[index]
    assert {"critic.weight", "critic.bias"} <= set(policy.get_parameters())


def test_actor_and_critic_share_no_weights() -> None:
    policy = EpisodePolicy(Chance, torso=nn.Sequential(nn.Linear(3, 4), nn.Tanh()), critic=True)
    assert policy.critic is not None
    policy.critic(torch.ones(1, 3)).sum().backward()
    assert all(value.grad is None for value in policy.actor.parameters())
    assert all(value.grad is not None for value in policy.critic.parameters())


def test_state_keys_by_hand() -> None:
    def episode(rows: list[list[float]]) -> Episode:
        length = len(rows)
        return Episode(
            observations=torch.tensor(rows),
            actions=torch.zeros(length),
            rewards=torch.zeros(length, dtype=torch.float64),
            terminated=True,
            truncated=False,
            final_observation=torch.zeros(2),
            log_probs=torch.zeros(length),
        )

    policy = EpisodePolicy(lambda: Spaces(UNIT, spaces.Discrete(2)), state_key_decimals=2)
    first, second = episode([[0.1, 0.2], [0.104, 0.2], [0.2, 0.1]]), episode([[0.11, 0.2], [-0.001, 0.0]])
    keys = policy.state_keys(None, [first, second, episode([[0.0, 0.0]])])
    assert keys.shape == (3, 3)
    assert keys[0, 0] == keys[0, 1]  # agree to two decimals
    assert len({int(keys[0, 0]), int(keys[0, 2]), int(keys[1, 0])}) == 3
    assert keys[1, 1] == keys[2, 0]  # -0.001 rounds to 0
    alone = policy.state_keys(None, [second])
    assert alone[0].tolist() == keys[1, :2].tolist()  # of the row alone
    other = EpisodePolicy(lambda: Spaces(UNIT, spaces.Discrete(2)), state_key_decimals=2)
    assert torch.equal(other.state_keys(None, [second]), alone)  # and the same in another process


# Capabilities, parts, copies


def test_whole_episodes_only() -> None:
    assert isinstance(EpisodePolicy(Chance), SplitsSteps)
    policy = EpisodePolicy(Chance, split_steps=False)
    assert not isinstance(policy, SplitsSteps)
    assert not isinstance(copy.deepcopy(policy), SplitsSteps)
    policies = (EpisodePolicy(lambda: Spaces(UNIT, UNIT), split_steps=split) for split in (False, True))
    for kind, num_updates in zip(policies, (2, 8), strict=True):  # of 3 rows each: 6 episodes, or 24 steps
        trainer = trainer_of(kind, batch_size=3)
        trainer.step(STARTS)
        assert int(next(iter(trainer.optimizer_step.optimizer.state.values()))["step"]) == num_updates  # type: ignore[union-attr]


def test_a_copy_has_weights_of_its_own_and_the_same_environments() -> None:
    policy = made("normalized")
    episodes = rows_of(policy.sample_actions(STARTS, 1).actions)
    twin = copy.deepcopy(policy)
    assert twin.pool is policy.pool
    assert isinstance(twin, SplitsSteps)
    before = policy.score_actions(STARTS, episodes).log_probs
    with torch.no_grad():
        for value in twin.parameters():
            value.add_(0.1)
    assert twin.normalizer is not policy.normalizer
    torch.testing.assert_close(policy.score_actions(STARTS, episodes).log_probs, before, rtol=0, atol=0)
    assert not torch.allclose(twin.score_actions(STARTS, episodes).log_probs, before)
    states, actions = twin.split_steps(STARTS, episodes)
    mine, theirs = (one.score_actions(states, actions).log_probs for one in (policy, twin))
    assert not torch.allclose(theirs, mine)
    assert torch.equal(policy.split_steps(STARTS, episodes)[0], states)


def test_starts_from_a_snapshot() -> None:
    env = gymnasium.make("Pendulum-v1")
    env.reset(seed=3)
    for _ in range(5):
        observation, *_ = env.step(np.array([1.0], dtype=np.float32))
    start = EpisodeStart(snapshot=take_snapshot(env, observation))
    policy = EpisodePolicy("Pendulum-v1", num_members=2, max_episode_steps=4)
    ((first, second),) = policy.sample_actions([start], 2).actions
    for episode in (first, second):
        torch.testing.assert_close(episode.observations[0], torch.from_numpy(observation), rtol=0, atol=0)
    assert not torch.equal(first.actions, second.actions)


def test_the_initial_spread() -> None:
    for std in ("shared", "observation"):
        policy = EpisodePolicy("Pendulum-v1", std=std, initial_log_std=-1.5)  # type: ignore[arg-type]
        parameters = policy.decide(torch.randn(5, 3))
        torch.testing.assert_close(parameters[:, 1], torch.full((5,), -1.5), atol=0.05, rtol=0)
        assert bool((parameters[:, 0].abs() < 0.1).all())


# Normaliser


def test_statistics_are_those_of_all_observations_and_hold_still_within_an_iteration() -> None:
    policy = EpisodePolicy("Pendulum-v1", num_members=3, max_episode_steps=9, normalize_observations=True)
    assert policy.normalizer is not None
    trainer = trainer_of(policy)
    seen: list[Tensor] = []
    x = torch.tensor([[0.5, -0.5, 3.0]])
    for iteration in range(3):
        batch = trainer.collect(episode_starts(2)(iteration))
        if seen:
            everything = torch.cat(seen).double().numpy()
            np.testing.assert_allclose(policy.normalizer.mean, everything.mean(0), rtol=1e-12)
            np.testing.assert_allclose(
                policy.normalizer.squares / policy.normalizer.count, everything.var(0), rtol=1e-9
            )
        else:
            assert torch.equal(policy.normalizer(x), x)
        seen += [episode.observations for episode in batch.actions]
        before = policy.normalizer(x)
        assert trainer.update(batch)["train/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
        assert torch.equal(policy.normalizer(x), before)
    assert float(policy.normalizer.count) == 2 * 2 * 3 * 9


def test_sampling_twice_within_an_iteration_scores_alike() -> None:
    """Dynamic sampling, or an evaluation between the halves of an iteration: the first rows' ratio is still 1."""
    policy = EpisodePolicy("Pendulum-v1", num_members=3, max_episode_steps=9, normalize_observations=True)
    with torch.no_grad():
        for value in policy.parameters():
            value.mul_(5.0)
    trainer = trainer_of(policy)
    trainer.step(STARTS)
    batch = trainer.collect(STARTS)
    trainer.evaluate(STARTS)
    metrics = trainer.update(batch)
    assert metrics["train/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["train/ratio_std"] < 1e-5


def test_statistics_move_with_the_weights_and_only_then() -> None:
    policy = EpisodePolicy("Pendulum-v1", num_members=3, max_episode_steps=9, normalize_observations=True)
    assert policy.normalizer is not None
    for _ in range(3):
        policy.sample_actions(STARTS, 3)
        policy.train()
        policy.eval()
    assert float(policy.normalizer.count) == 0.0
    with torch.no_grad():
        next(policy.actor.parameters()).add_(0.1)
    twin = EpisodePolicy("Pendulum-v1", num_members=3, max_episode_steps=9, normalize_observations=True)
    twin.load_state_dict(policy.state_dict())
    for either in (policy, copy.deepcopy(policy), twin):
        either.sample_actions(STARTS, 3)
        either.sample_actions(STARTS, 3)
        assert either.normalizer is not None
        assert float(either.normalizer.count) == 3 * len(STARTS) * 3 * 9


@pytest.mark.parametrize("env_id", ["Pendulum-v1", "HalfCheetah-v5"])
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(env_id: str, tmp_path: Path) -> None:
    def trainer() -> GRPOTrainer:
        policy = EpisodePolicy(
            env_id, num_members=3, hidden=(8,), max_episode_steps=12, normalize_observations=True, critic=True
        )
        return trainer_of(policy, batch_size=20, num_epochs_per_update=2, advantage=AdvantageConfig(credit="gae"))

    def untimed(metrics: dict[str, float]) -> dict[str, float]:
        return {name: value for name, value in metrics.items() if not name.startswith("time/")}

    starts = episode_starts(2)
    torch.manual_seed(1)
    unbroken = trainer()
    history = [untimed(unbroken.step(starts(iteration))) for iteration in range(4)]
    torch.manual_seed(1)
    first = trainer()
    for iteration in range(2):
        assert untimed(first.step(starts(iteration))) == history[iteration]
    first.save_checkpoint(tmp_path / "half")
    torch.manual_seed(99)
    second = trainer()
    second.load_checkpoint(tmp_path / "half")
    assert second.iteration == 2
    for iteration in range(2, 4):
        assert untimed(second.step(starts(iteration))) == history[iteration]
    for name, value in unbroken.policy.state_dict().items():
        assert torch.equal(second.policy.state_dict()[name], value), name


# Acting


def test_predict_in_the_form_of_stable_baselines() -> None:
    policy = made("categorical")
    observation = np.array([0.1, 0.2, -0.3, 0.4], dtype=np.float32)
    action, state = policy.predict(observation, deterministic=True)
    assert np.shape(action) == ()
    assert state is None
    batch, state = policy.predict(np.stack([observation] * 3), state=("kept",), deterministic=True)
    assert batch.tolist() == [int(action)] * 3
    assert state == ("kept",)
    assert int(action) == int(policy.decide(torch.from_numpy(observation)[None]).argmax())
    drawn, _ = policy.predict(np.stack([observation] * 200))
    assert set(drawn.tolist()) == {0, 1}
    torch.manual_seed(7)
    first, _ = policy.predict(np.stack([observation] * 20))
    torch.manual_seed(7)
    assert policy.predict(np.stack([observation] * 20))[0].tolist() == first.tolist()


def test_predict_a_box() -> None:
    policy = made("gaussian")
    observation = np.array([1.0, 0.0, 0.5], dtype=np.float32)
    action, _ = policy.predict(observation, deterministic=True)
    assert (action.shape, action.dtype) == ((1,), np.float32)
    batch, _ = policy.predict(observation[None].repeat(4, 0), deterministic=True)
    np.testing.assert_allclose(batch, np.stack([action] * 4), rtol=1e-6)
    assert action.item() == pytest.approx(float(policy.decide(torch.from_numpy(observation)[None])[0, 0].detach()))
    wild, _ = EpisodePolicy("Pendulum-v1", initial_log_std=2.0).predict(observation[None].repeat(50, 0))
    assert np.abs(wild).max() == 2.0  # clipped to the box


@pytest.mark.parametrize("space", [spaces.Discrete(4, start=2), GOALS, space_of_everything()], ids=str)
def test_predict_from_any_observation(space: spaces.Space) -> None:
    policy = EpisodePolicy(lambda: Spaces(space, UNIT), num_members=1)
    space.seed(1)
    samples = [space.sample() for _ in range(3)]
    one_by_one = np.stack([policy.predict(sample, deterministic=True)[0] for sample in samples])
    batch = gymnasium.vector.utils.concatenate(
        space, samples, gymnasium.vector.utils.create_empty_array(space, len(samples))
    )
    together, _ = policy.predict(batch, deterministic=True)
    assert together.shape == (3, 2)
    np.testing.assert_allclose(together, one_by_one, rtol=1e-6, atol=1e-7)
    assert as_batch(space, samples[0])[1]
    assert not as_batch(space, batch)[1]


def test_predict_any_action() -> None:
    policy = EpisodePolicy(lambda: Spaces(UNIT, ACTIONS), num_members=1)
    action, _ = policy.predict(np.zeros(2, dtype=np.float32))
    assert ACTIONS.contains(action)
    batch, _ = policy.predict(np.zeros((3, 2), dtype=np.float32))
    assert [ACTIONS.contains(one) for one in batch] == [True] * 3


def test_predict_obeys_a_mask() -> None:
    policy = EpisodePolicy(Crossing, action_mask=lambda observations: observations > 0.5)
    observation = np.array([0.0, 1.0, 0.0, 0.0, 0.0], dtype=np.float32)
    assert {int(policy.predict(observation)[0]) for _ in range(20)} == {1}
    assert policy.predict(observation, deterministic=True)[0] == 1
    with pytest.raises(
        ConfigError, match=r"predict sees no info, .* Pass a callable as action_mask, or use evaluate_policy"
    ):
        EpisodePolicy(Crossing, action_mask="info").predict(observation)


# Bad input


def test_a_state_that_is_none() -> None:
    with pytest.raises(
        ContractError, match=r"States of an EpisodePolicy are EpisodeStarts; got int. Use episode_starts"
    ):
        EpisodePolicy(Chance).sample_actions([3], 2)  # type: ignore[list-item]


def test_a_wrong_torso() -> None:
    with pytest.raises(ConfigError, match=r"Flatten: a torso must turn \[n, \*observation\] into features \[n, F\]"):
        EpisodePolicy(Chance, torso=nn.Flatten(0))


def test_a_wrong_word_for_std() -> None:
    with pytest.raises(ConfigError, match="std must be 'shared' or 'observation'; got 'common'"):
        EpisodePolicy(Chance, std="common")  # type: ignore[arg-type]


def test_images_are_not_normalised() -> None:
    with pytest.raises(ConfigError, match="normalize_observations=True is not for images"):
        EpisodePolicy(lambda: Spaces(IMAGE, spaces.Discrete(2)), num_members=1, normalize_observations=True)


def test_keywords_of_a_pool_that_is_made() -> None:
    with pytest.raises(ConfigError, match=r"the pool is made already.*\['vectorization'\] would be read by nothing"):
        EpisodePolicy(SerialPool([Chance()]), vectorization="sync")
    with pytest.raises(ConfigError, match=r"the pool is made already, with 1 members; num_members=3"):
        EpisodePolicy(SerialPool([Chance()]), num_members=3)
    assert EpisodePolicy(SerialPool([Chance(), Chance()])).pool.num_members == 2
    assert EpisodePolicy(gymnasium.make_vec("CartPole-v1", 3)).pool.num_members == 3


def test_off_the_cpu_the_network_is_asked_where_it_is() -> None:
    policy = EpisodePolicy("Pendulum-v1", num_members=1, normalize_observations=True).to("meta")
    assert fast_forward(policy.normalizer, policy.actor) is None
    assert policy.decide(torch.zeros(2, 3)).device.type == "meta"


def test_a_moved_reference_normalises_as_the_policy_does() -> None:
    policy = EpisodePolicy("Pendulum-v1", num_members=3, max_episode_steps=9, normalize_observations=True)
    trainer = GRPOTrainer(
        config=GRPOConfig(group_size=3, seed=0, reference_sync_every=1, objective=ObjectiveConfig(kl_coef=0.1)),
        policy=policy,
        reward_model=EnvironmentReward(),
        reference_policy=(reference := copy.deepcopy(policy)),
    )
    for iteration in range(3):
        trainer.step(episode_starts(2)(iteration))
    x = torch.randn(5, 3)
    torch.testing.assert_close(reference.decide(x), policy.decide(x))


def test_a_critic_gives_one_value() -> None:
    with pytest.raises(ConfigError, match=r"a critic must turn observations"):
        EpisodePolicy("CartPole-v1", num_members=1, critic=nn.Linear(4, 3))


def test_no_mask_for_actions_without_categories() -> None:
    policy = EpisodePolicy(Chance, action_mask=lambda observations: observations > 0)
    with pytest.raises(ContractError, match="Gaussian has no categories that a mask could exclude"):
        policy.sample_actions(STARTS, 1)


def test_images_go_through_convolutions_as_bytes() -> None:
    policy = made("image")
    assert isinstance(policy.actor[0], CNNTorso)
    (episode, *_) = rows_of(policy.sample_actions(STARTS, 1).actions)
    assert episode.observations.dtype == torch.uint8


def test_a_distribution_of_ones_own() -> None:
    laplace = FromTorch(UNIT, 2, lambda mean: torch.distributions.Laplace(mean, 0.5))
    policy = EpisodePolicy(lambda: Spaces(UNIT, UNIT), distribution=laplace, hidden=(4,))
    episodes = rows_of(policy.sample_actions(STARTS, 2).actions)
    scores = policy.score_actions(STARTS, episodes)
    means = policy.actor(torch.cat([episode.observations for episode in episodes]))
    actions = torch.cat([episode.actions for episode in episodes])
    torch.testing.assert_close(
        scores.log_probs[scores.mask], torch.distributions.Laplace(means, 0.5).log_prob(actions).sum(1)
    )


def test_a_pool_of_ones_own() -> None:
    pool = Watched(make_pool("CartPole-v1", 3))
    policy = EpisodePolicy(pool)
    assert policy.pool is pool
    sampled = policy.sample_actions(STARTS, 2)
    assert sum(map(len, pool.stepped)) == sampled.metrics["episodes/steps"]


def test_the_reward_sees_the_episodes_of_its_states() -> None:
    policy = EpisodePolicy(Chance)
    seen: list[tuple[EpisodeStart, float]] = []

    def term(episode: Episode) -> Tensor:
        seen.append((EpisodeStart(), float(episode.observations[0, 0])))
        return episode.rewards

    config = GRPOConfig(group_size=2, seed=0)
    GRPOTrainer(config=config, policy=policy, reward_model=StepReward(term)).step(
        [EpisodeStart(seed=1, options={"first": 0.25}), EpisodeStart(seed=1, options={"first": 0.75})]
    )
    assert [first for _, first in seen] == [0.25, 0.25, 0.75, 0.75]
