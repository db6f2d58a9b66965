"""Odd environments are trained on as they are, or refused by an error that says what to do. None is misread in silence."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from adapters.control import (
    PRESETS,
    Bernoulli,
    Categorical,
    EnvironmentReward,
    EpisodeOptions,
    EpisodePolicy,
    EpisodeStart,
    Evaluation,
    FromTorch,
    Gaussian,
    MultiCategorical,
    StepReward,
    check_environment,
    distribution_for,
    episode_starts,
    evaluate_policy,
    make_pool,
    mlp_torso,
    preset_for,
    restore_snapshot,
    take_snapshot,
)
from adapters.control.policy.networks import CNNTorso, MixedTorso
from grpo.errors import ArgumentError, ConfigError, ContractError, GRPOError
from tests.support.control_policies import trainer_of
from tests.support.odd_environments import (
    BOX,
    FAULTS,
    IMAGES,
    MASKS,
    WORK,
    WRONG_MASKS,
    MaskedPart,
    Odd,
    Writes,
)

OPTIONS = EpisodeOptions(hidden=(4,))

pytestmark = [
    pytest.mark.usefixtures("without_type_checks"),
    pytest.mark.filterwarnings("ignore:.*episodes of a group should differ:grpo.errors.GRPOWarning"),
]


def made(environment: Any, **arguments: Any) -> EpisodePolicy:
    torch.manual_seed(0)
    return EpisodePolicy(environment, num_members=2, options=OPTIONS, **arguments)


def test_environments_that_are_only_odd_are_trained_on(subtests: pytest.Subtests) -> None:
    for name, environment in WORK.items():
        with subtests.test(name):
            policy = made(environment)
            metrics = trainer_of(policy, batch_size=6).step([EpisodeStart(seed=1), EpisodeStart(seed=2)])
            assert metrics["rewards/mean"] == metrics["steps/mean"] == (2 if "by a limit" in name else 3)
            assert all(bool(value.isfinite().all()) for value in policy.parameters())


def test_environments_that_cannot_be_read_are_refused_in_words(subtests: pytest.Subtests) -> None:
    for name, (environment, words) in FAULTS.items():
        with subtests.test(name), pytest.raises((ContractError, ConfigError), match=words):
            made(environment).generate_actions([EpisodeStart(seed=1)], 2)


def test_presets_chosen_for_them_train_too_or_the_error_is_the_same(subtests: pytest.Subtests) -> None:
    for name, environment in WORK.items():
        with subtests.test(name):
            preset = preset_for(environment, total_steps=120)
            trainer = preset.make_trainer(preset.make_policy(seed=0, num_members=preset.num_groups), seed=0)
            metrics = trainer.step(episode_starts(preset.num_groups)(0))
            assert metrics["episodes/steps"] >= 2 * preset.num_groups
            assert all(bool(value.isfinite().all()) for value in trainer.policy.parameters())
    for name, (environment, words) in FAULTS.items():
        with subtests.test(name), pytest.raises((ContractError, ConfigError), match=words):
            preset_for(environment, total_steps=120).make_policy().generate_actions([EpisodeStart(seed=1)], 1)


def test_an_environment_that_cannot_be_closed_is_said_and_the_others_are_closed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    closed = []

    class Stuck(Odd):
        def close(self) -> None:
            closed.append(self)
            raise RuntimeError("no window")

    made(Stuck).pool.close()
    assert len(closed) == 2
    assert caplog.messages == ["Stuck: close() raised RuntimeError: no window"] * 2
    assert preset_for(Stuck, total_steps=20).env_id == "Stuck"
    assert check_environment(Stuck, num_steps=3)["creation"].status == "passed"


def test_images_get_a_network_that_fits_or_a_row_and_this_is_said(
    subtests: pytest.Subtests, caplog: pytest.LogCaptureFixture
) -> None:
    for name, space in IMAGES.items():
        with subtests.test(name):
            caplog.clear()
            policy = made(lambda space=space: Odd(space))
            torso = policy.actor[0]  # type: ignore[index]
            is_small = name in ("MiniGrid", "MinAtar", "small floats")
            expected = MixedTorso if "with pixels" in name else CNNTorso if not is_small else torch.nn.Sequential
            assert isinstance(torso, expected) or name in ("a matrix", "a dict with MiniGrid")
            assert any("takes it as a row of" in line for line in caplog.messages) == is_small


def test_an_action_that_is_repeated_is_the_same_although_the_environment_writes_into_it() -> None:
    torch.manual_seed(0)
    policy = EpisodePolicy(Writes, num_members=1, options=EpisodeOptions(hidden=(4,), repeat=2))
    ((episode,),) = policy.generate_actions([EpisodeStart(seed=1)], 1)
    first, second, third = policy.pool._envs[0].taken
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal([first, third], episode.actions.clamp(-1, 1).numpy())


def test_an_environment_without_a_limit_is_cut_as_truncated_and_this_is_said(caplog: pytest.LogCaptureFixture) -> None:
    policy = made(lambda: Odd(result=(np.zeros(2, np.float32), 1.0, False, False, {})))
    ((episode,),) = policy.generate_actions([EpisodeStart(seed=1)], 1)
    assert (len(episode), episode.truncated, episode.terminated) == (10_000, True, False)
    (said,) = caplog.messages
    assert said.startswith(
        "EpisodePolicy: 1 of 1 episodes were truncated after 10,000 steps, because the environment has no"
    )
    assert said.endswith("Pass EpisodeOptions(max_episode_steps=...).")


class Swallows(gymnasium.Env):
    """Takes any keyword."""

    observation_space, action_space = BOX, gymnasium.spaces.Discrete(2)

    def __init__(self, *, size: int = 3, **kwargs: Any) -> None:
        self.kwargs = kwargs

    reset, step = Odd.reset, Odd.step


def test_keywords_that_an_environment_would_swallow_are_refused_with_the_nearest_name(
    subtests: pytest.Subtests,
) -> None:
    gymnasium.register("Swallows-v0", entry_point=Swallows)
    try:
        for name, words in (
            ("normalise_observations", "Did you mean 'normalize_observations'"),
            ("n_envs", "SB3's n_envs is num_members here"),
            ("num_member", "Did you mean 'num_members'"),
            ("hiden", "Did you mean 'hidden'"),
        ):
            with subtests.test(name), pytest.raises(ArgumentError, match=words):
                made("Swallows-v0", **{name: 3})
        policy = made("Swallows-v0", size=4, difficulty="hard")
        assert [env.unwrapped.kwargs for env in policy.pool._envs] == [{"difficulty": "hard"}] * 2
        with pytest.raises(ArgumentError, match="have no argument 'gravty'"):
            made("Pendulum-v1", gravty=9.0)
        assert made("Pendulum-v1", g=9.0).pool.max_episode_steps == 200
    finally:
        del gymnasium.registry["Swallows-v0"]


def test_masks_are_found_wherever_the_ecosystem_writes_them(subtests: pytest.Subtests) -> None:
    for name, (environment, expected) in MASKS.items():
        with subtests.test(name):
            policy = made(environment, action_mask="info")
            (episodes,) = policy.generate_actions([EpisodeStart(seed=1)], 2)
            for episode in episodes:
                assert episode.allowed.tolist() == [expected] * 3  # type: ignore[union-attr]
            report = check_environment(environment)
            assert f"Masks of {len(expected)} categories in" in report["masks"].message
    assert policy.pool.observation_space == BOX
    in_workers = made(MaskedPart, action_mask="info", vectorization="async")
    (episodes,) = in_workers.generate_actions([EpisodeStart(seed=1)], 2)
    assert episodes[0].allowed.tolist() == [[False, True, False]] * 3  # type: ignore[union-attr]
    in_workers.pool.close()


def test_masks_that_cannot_be_read_are_refused_in_words(subtests: pytest.Subtests) -> None:
    for name, (environment, words) in WRONG_MASKS.items():
        with subtests.test(name), pytest.raises((ContractError, ConfigError), match=words):
            made(environment, action_mask="info").generate_actions([EpisodeStart(seed=1)], 2)


def test_masks_that_are_not_used_are_said_once(subtests: pytest.Subtests, caplog: pytest.LogCaptureFixture) -> None:
    class Tells(Odd):
        def action_masks(self) -> Any:
            return np.ones(3, bool)

    part = gymnasium.spaces.Dict(observation=BOX, action_mask=gymnasium.spaces.MultiBinary(3))
    for environment, where in (
        (Tells, r"in action_masks()"),
        (lambda: Odd(part), "which is taken as input"),
        (lambda: Odd(info=lambda env: {"action_mask": np.ones(3, np.int8)}), "in info['action_mask']"),
    ):
        with subtests.test(where):
            caplog.clear()
            policy = made(environment)
            for _ in range(2):
                policy.generate_actions([EpisodeStart(seed=1)], 2)
            assert len(caplog.messages) == 1
            assert where in caplog.messages[0]
            assert "EpisodePolicy(action_mask='info') uses them" in caplog.messages[0]


def test_predict_takes_masks_as_sb3_contrib_passes_them(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    policy = made(MaskedPart, action_mask="info")
    observation = BOX.sample()
    mask = np.array([False, False, True])
    assert policy.predict(observation, action_masks=mask)[0] == 2
    assert policy.predict(np.stack([observation] * 2), action_masks=[mask, mask])[0].tolist() == [2, 2]
    assert policy.predict({"observation": observation, "action_mask": mask})[0] == 2
    with pytest.raises(ConfigError, match=r"Pass action_masks=info\['action_mask'\]"):
        policy.predict(observation)
    with pytest.raises(ContractError, match="K = 3"):
        policy.predict(observation, action_masks=[1, 1])
    assert made(Odd).predict(observation, action_masks=mask)[0] == 2


@pytest.mark.parametrize(
    ("space", "observation", "words"),
    [
        (BOX, [np.nan, 0.0], "must be finite"),
        (gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float64), [1e300, 0.0], "must be finite, also as float32"),
        (BOX, np.zeros(3, np.float32), r"needs an observation of Box.* got a numpy array"),
        (BOX, np.zeros((2, 3), np.float32), "or a batch of them"),
        (BOX, "ab", "needs an observation of Box"),
        (BOX, None, "needs an observation of Box"),
        (gymnasium.spaces.Discrete(3), 7, r"observations must lie in Discrete\(3\)"),
        (gymnasium.spaces.Discrete(3), -1, r"observations must lie in Discrete\(3\)"),
        (gymnasium.spaces.Discrete(3), 0.5, r"needs an observation of Discrete"),
        (gymnasium.spaces.Dict(a=BOX, b=BOX), {"a": BOX.sample()}, "needs an observation of Dict"),
        (gymnasium.spaces.Dict(a=BOX), 3, "needs an observation of Dict"),
        (gymnasium.spaces.Dict(a=BOX, b=BOX), {"a": BOX.sample(), "b": [BOX.sample()]}, "some parts .* are batches"),
        (gymnasium.spaces.Tuple((BOX, BOX)), (BOX.sample(),), "needs an observation of Tuple"),
    ],
)
def test_predict_refuses_what_is_no_observation(space: Any, observation: Any, words: str) -> None:
    with pytest.raises(ContractError, match=words):
        made(lambda: Odd(space)).predict(observation)


def test_predict_refuses_weights_that_are_not_finite() -> None:
    policy = made(Odd)
    with torch.no_grad():
        next(policy.parameters()).fill_(torch.nan)
    with pytest.raises(ContractError, match="the network's outputs must be finite"):
        policy.predict(BOX.sample())


# --- wrong arguments of every public class and function


WRONG: tuple[Any, ...] = (
    -1, 2.5, float("nan"), "abc", b"x", ["a"], {"a": 1}, np.zeros(3), torch.zeros(3), object(), int, (1, 2),
)  # fmt: skip


def cases() -> Iterator[tuple[Callable[..., Any], dict[str, Any]]]:
    """Functions with good arguments, which are replaced one at a time."""
    policy = EpisodePolicy("CartPole-v1", num_members=1, options=EpisodeOptions(hidden=(4,)))
    (episodes,) = policy.generate_actions([EpisodeStart(seed=1)], 1)
    env = gymnasium.make("CartPole-v1")
    observation, _ = env.reset(seed=0)
    snapshot = take_snapshot(env, observation)
    build = torch.distributions.Categorical
    evaluation = Evaluation(returns=np.ones(2), lengths=np.ones(2, int))
    for good in (EpisodeStart(seed=1), episodes[0], snapshot, evaluation, PRESETS["CartPole-v1"], EpisodeOptions()):
        yield type(good), {field.name: getattr(good, field.name) for field in fields(good)}
    yield EpisodePolicy, {
        "environment": "CartPole-v1", "num_members": 1, "torso": None, "distribution": "auto", "critic": False,
        "action_mask": None, "options": None, "vectorization": "auto",
    }  # fmt: skip
    yield policy.sample_actions, {"states": [EpisodeStart(seed=1)], "num_actions_per_state": 1}
    yield policy.score_actions, {"states": None, "actions": episodes}
    yield EnvironmentReward, {"per": "step", "discount": 1.0}
    yield StepReward, {"term": len}
    yield CNNTorso, {"shape": (40, 40, 3), "num_features": 4}
    yield mlp_torso, {"num_inputs": 3, "hidden": (4,), "activation": "tanh"}
    yield episode_starts, {"num_groups": 2, "seed": 0}
    yield make_pool, {"env": "CartPole-v1", "num_members": 1, "vectorization": "auto"}
    yield distribution_for, {"space": spaces.Discrete(2), "kind": "auto"}
    for distribution in (Categorical, MultiCategorical, Bernoulli, Gaussian):
        yield distribution, {"space": 3}
    yield FromTorch, {"space": spaces.Discrete(2), "num_parameters": 2, "build": build}
    yield evaluate_policy, {"policy": policy, "num_episodes": 1, "seed": 0, "max_steps": 3}
    yield preset_for, {"environment": "CartPole-v1", "credit": None, "total_steps": 9_000, "max_episode_steps": 5}
    yield take_snapshot, {"env": env, "observation": observation}
    yield restore_snapshot, {"env": env, "snapshot": snapshot}
    yield check_environment, {"environment": "CartPole-v1", "num_steps": 3, "seed": 0}


def test_wrong_arguments_get_typed_errors() -> None:
    """Some values are good for some arguments. Those that are not raise an error of this package."""
    count, untyped = 0, []
    for call, good in cases():
        for name in good:
            for value in WRONG:
                count += 1
                try:
                    call(**{**good, name: value})
                except GRPOError:
                    continue
                except Exception as error:
                    untyped.append(f"{call.__name__}({name}={value!r}): {type(error).__name__}: {error}"[:160])
    assert count > 700
    assert not untyped, "\n".join(untyped)
