"""`EpisodePolicy.predict` has the signature of Stable-Baselines3's, for every kind of observation and action."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from adapters.control import EpisodeOptions, EpisodePolicy
from adapters.control.policy.observations import as_batch
from grpo.errors import ConfigError
from tests.support.control_environments import GOALS, UNIT, Crossing, Spaces, space_of_everything
from tests.support.control_policies import ACTIONS, made


def test_predict_gives_categories_for_one_observation_and_for_a_batch() -> None:
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


def test_predict_gives_box_actions_for_one_observation_and_for_a_batch() -> None:
    policy = made("gaussian")
    observation = np.array([1.0, 0.0, 0.5], dtype=np.float32)
    action, _ = policy.predict(observation, deterministic=True)
    assert (action.shape, action.dtype) == ((1,), np.float32)
    batch, _ = policy.predict(observation[None].repeat(4, 0), deterministic=True)
    np.testing.assert_allclose(batch, np.stack([action] * 4), rtol=1e-6)
    mean = float(policy.decide(torch.from_numpy(observation)[None])[0, 0].detach())
    assert action.item() == pytest.approx(2.0 * mean)  # the torque is in [-2, 2]
    wild, _ = EpisodePolicy("Pendulum-v1", options=EpisodeOptions(initial_log_std=2.0)).predict(
        observation[None].repeat(50, 0)
    )
    assert np.abs(wild).max() == 2.0  # clipped to the bounds


def test_predict_distinguishes_single_and_batched_observations_of_every_space(subtests: pytest.Subtests) -> None:
    for space in (spaces.Discrete(4, start=2), GOALS, space_of_everything()):
        with subtests.test(space=str(space)):
            policy = EpisodePolicy(lambda space=space: Spaces(space, UNIT), num_members=1)  # type: ignore[misc]
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


def test_predict_gives_nested_actions_in_the_environments_format() -> None:
    policy = EpisodePolicy(lambda: Spaces(UNIT, ACTIONS), num_members=1)
    action, _ = policy.predict(np.zeros(2, dtype=np.float32))
    assert ACTIONS.contains(action)
    batch, _ = policy.predict(np.zeros((3, 2), dtype=np.float32))
    assert [ACTIONS.contains(one) for one in batch] == [True] * 3


def test_a_mask_function_is_obeyed_and_a_mask_in_infos_is_refused() -> None:
    policy = EpisodePolicy(Crossing, action_mask=lambda observations: observations > 0.5)
    observation = np.array([0.0, 1.0, 0.0, 0.0, 0.0], dtype=np.float32)
    assert {int(policy.predict(observation)[0]) for _ in range(20)} == {1}
    assert policy.predict(observation, deterministic=True)[0] == 1
    with pytest.raises(ConfigError, match=r"predict gets no info, .* Pass action_masks=.* or use evaluate_policy"):
        EpisodePolicy(Crossing, action_mask="info").predict(observation)
