"""A policy is one file that knows how it was built, and is read in another process."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from adapters.control import Categorical, EpisodePolicy, EpisodeStart, episode_starts
from grpo import load_weights
from grpo.errors import CheckpointError, ConfigError
from tests.support.control_policies import made, policy_of, trainer_of
from tests.support.odd_environments import ACTED, Odd

ROOT = Path(__file__).parents[5]

pytestmark = pytest.mark.usefixtures("without_type_checks")


def assert_same(one: EpisodePolicy, other: EpisodePolicy) -> None:
    for name, value in one.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], value, rtol=0, atol=0, equal_nan=True, msg=name)
    starts = [EpisodeStart(seed=3)]
    records = [policy.roll_out(starts, seed=1, max_steps=5) for policy in (one, other)]
    torch.testing.assert_close(records[0].actions, records[1].actions, rtol=0, atol=0)


def test_a_trained_policy_is_loaded_with_its_statistics_and_its_settings(tmp_path: Path) -> None:
    for kind in ("normalized", "critic", "squashed", "by observation"):
        policy = made(kind)
        trainer_of(policy).step(episode_starts(1)(0))
        path = policy.save(tmp_path / "deep" / f"{kind}.safetensors")
        assert path.read_bytes()[8:9] == b"{"  # the header of safetensors, no pickle
        loaded = EpisodePolicy.load(path)
        assert loaded.settings() == policy.settings()
        assert_same(policy, loaded)


def test_an_unfinished_file_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "policy.new").symlink_to(tmp_path / "victim")
    EpisodePolicy.load(made("categorical").save(tmp_path / "policy"))
    assert (tmp_path / "victim").read_bytes() == b"mine"
    assert {entry.name for entry in tmp_path.iterdir()} == {"victim", "policy"}


def answer(name: str, policy: EpisodePolicy) -> str:
    """What a policy does."""
    observation = np.array([0.1, 0.5], dtype=np.float32)
    parameters = policy.decide(policy.encoder(observation[None])).tolist()
    return f"{name}: {policy.predict(observation, deterministic=True)[0]!r}, {parameters}"


def answers(folder: str) -> list[str]:
    """What the policies in a folder do, one of each action space."""
    return [
        answer(name, EpisodePolicy.load(Path(folder) / name, environment=lambda space=space: Odd(act=space)))
        for name, space in ACTED.items()
    ]


def test_another_process_acts_as_this_one_in_every_action_space(tmp_path: Path) -> None:
    expected = []
    for name, space in ACTED.items():
        policy = EpisodePolicy(lambda space=space: Odd(act=space), num_members=1)
        policy.save(tmp_path / name)
        expected.append(answer(name, policy))
    script = f"import sys; from {__name__} import answers; print(answers(sys.argv[1]))"
    command = [sys.executable, "-c", script, str(tmp_path)]
    said = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert said.strip() == str(expected)


class Own(nn.Linear):
    """A torso."""


def test_what_is_no_data_is_asked_for_and_must_fit(tmp_path: Path, subtests: pytest.Subtests) -> None:
    def environment() -> gymnasium.Env:
        return gymnasium.make("CartPole-v1")

    space = gymnasium.spaces.Discrete(2)
    given: dict[str, Any] = {"environment": environment, "torso": Own(4, 3), "critic": nn.Linear(4, 1)}
    given |= {"distribution": Categorical(space), "action_mask": lambda observations: observations[:, :2] > -99}
    policy = EpisodePolicy(**given, num_members=1)
    path = policy.save(tmp_path / "policy")
    for name in given:
        with (
            subtests.test(name),
            pytest.raises(ConfigError, match=rf"built with {name}=\w+, .* Pass {name}=\.\.\. to Ep"),
        ):
            EpisodePolicy.load(path, **{**given, name: None})
    assert_same(policy, EpisodePolicy.load(path, **{**given, "torso": Own(4, 3), "critic": nn.Linear(4, 1)}))
    for changed, words in (
        ({"torso": nn.Linear(4, 3)}, "torso was 'Own' and is 'Linear'"),
        (
            {"environment": "Acrobot-v1", "torso": Own(6, 3), "critic": nn.Linear(6, 1)},
            r"observations was \[4\] and is \[6\]",
        ),
        ({"torso": Own(4, 5)}, "size mismatch for actor.0.weight"),
    ):
        with subtests.test(words), pytest.raises(CheckpointError, match=words):
            EpisodePolicy.load(path, **{**given, **changed})


def test_keywords_of_the_environment_are_kept_and_can_be_replaced(tmp_path: Path) -> None:
    policy = EpisodePolicy("Pendulum-v1", num_members=1, g=4.0, vectorization="sync")
    path = policy.save(tmp_path / "policy")
    assert [EpisodePolicy.load(path, **make).pool._envs[0].unwrapped.g for make in ({}, {"g": 5.0})] == [4.0, 5.0]
    assert EpisodePolicy.load(path, environment="Pendulum-v1").pool._envs[0].unwrapped.g == 10.0
    assert EpisodePolicy.load(path, num_members=3).pool.num_members == 3
    rows = ["SF", "FG"]
    path = EpisodePolicy("FrozenLake-v1", num_members=1, desc=rows).save(tmp_path / "map")
    rows[1] = "HG"
    assert EpisodePolicy.load(path).pool._envs[0].unwrapped.desc.tolist() == [[b"S", b"F"], [b"F", b"G"]]
    path = EpisodePolicy("FrozenLake-v1", num_members=1, desc=("SF", "FG")).save(tmp_path / "map")
    with pytest.raises(ConfigError, match=r"built with desc=tuple, which a file cannot hold\. Pass desc"):
        EpisodePolicy.load(path)


def test_files_that_hold_no_policy_are_refused(tmp_path: Path, subtests: pytest.Subtests) -> None:
    (tmp_path / "text").write_text("no policy")
    save_file({"weight": torch.zeros(2)}, tmp_path / "other")
    save_file({"weight": torch.zeros(2)}, tmp_path / "wrong", {"adapters.control.EpisodePolicy": "[]"})
    whole = made("categorical").save(tmp_path / "whole").read_bytes()
    (tmp_path / "cut").write_bytes(whole[:-10])
    for name in ("text", "other", "wrong", "cut", "missing", "."):
        with subtests.test(name), pytest.raises(CheckpointError, match=r"must be a file of EpisodePolicy\.save"):
            EpisodePolicy.load(tmp_path / name)


def test_an_id_that_would_import_a_module_is_not_taken_from_a_file(tmp_path: Path) -> None:
    path = made("categorical").save(tmp_path / "policy")
    with safe_open(str(path), framework="pt") as file:
        ((key, content),) = file.metadata().items()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(tensors, path, {key: content.replace("CartPole-v1", "antigravity:CartPole-v1")})
    with pytest.raises(ConfigError, match=r"built with environment=antigravity:CartPole-v1, which .* Pass environment"):
        EpisodePolicy.load(path)
    assert "antigravity" not in sys.modules
    EpisodePolicy.load(path, environment="CartPole-v1")


def test_weights_of_another_activation_or_distribution_are_refused(tmp_path: Path, subtests: pytest.Subtests) -> None:
    def policy(**options: Any) -> EpisodePolicy:
        distribution = options.pop("distribution", "squashed")
        return policy_of("Pendulum-v1", num_members=1, distribution=distribution, hidden=(4,), **options)

    trainer_of(policy()).save_checkpoint(tmp_path)
    load_weights(tmp_path, policy(initial_log_std=-1.0, max_episode_steps=9))  # these do not matter to weights
    for changed, words in (
        ({"activation": "relu"}, r"torso was \[\[4\], 'tanh'\] and is \[\[4\], 'relu'\]"),
        ({"distribution": "gaussian"}, "distribution was 'SquashedGaussian' and is 'Gaussian'"),
    ):
        with subtests.test(words):
            other = policy(**changed)
            before = {name: value.clone() for name, value in other.named_parameters()}
            with pytest.raises(CheckpointError, match=words):
                load_weights(tmp_path, other)
            with pytest.raises(CheckpointError, match=words):
                trainer_of(other).load_checkpoint(tmp_path)
            assert all(torch.equal(before[name], value) for name, value in other.named_parameters())
