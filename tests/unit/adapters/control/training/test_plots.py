"""Frames and videos of episodes, and plots of learning curves."""

import copy
import os
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.envs.registration import register

from adapters.control import (
    EpisodeOptions,
    EpisodePolicy,
    LearningCurve,
    plot_learning_curves,
    record_frames,
    record_video,
)
from grpo.errors import ConfigError
from tests.support.control_policies import policy_of
from tests.support.odd_environments import ACTED, Odd


@pytest.fixture(autouse=True)
def screenless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    if not os.environ.get("DISPLAY"):
        monkeypatch.setenv("MUJOCO_GL", os.environ.get("MUJOCO_GL", "egl"))


def frames_or_skip(*args: Any, **options: Any) -> list[Any]:
    try:
        return record_frames(*args, **options)
    except ConfigError as error:
        pytest.skip(f"no renderer: {error}")


def test_frames_show_the_most_likely_actions_of_consecutive_episodes() -> None:
    policy = EpisodePolicy("CartPole-v1", num_members=1, options=EpisodeOptions(hidden=(4,)))
    with torch.no_grad():
        policy.actor[1].weight.zero_()
        policy.actor[1].bias.copy_(torch.tensor([0.0, 0.1]))  # always to the right, so the pole falls at once
    frames = frames_or_skip(policy, "CartPole-v1", seed=5, num_frames=7, every=3)
    assert {frame.shape for frame in frames} == {(400, 600, 3)}
    env = gymnasium.make("CartPole-v1", render_mode="rgb_array")
    expected: list[Any] = []
    for seed in (5, 6, 7):
        env.reset(seed=seed)
        terminated, number = False, 0
        while not terminated:
            if number % 3 == 0:
                expected.append(env.render())
            _, _, terminated, _, _ = env.step(1)
            number += 1
    np.testing.assert_array_equal(np.stack(frames), np.stack(expected[:7]))


def test_films_of_an_environment_without_a_limit_have_that_of_the_policy() -> None:
    policy = EpisodePolicy("CliffWalking-v1", num_members=1, options=EpisodeOptions(hidden=(4,), max_episode_steps=5))
    with torch.no_grad():
        policy.actor[1].weight.zero_()
        policy.actor[1].bias.copy_(torch.tensor([1.0, 0.0, 0.0, 0.0]))  # always up, which never arrives
    frames = frames_or_skip(policy, "CliffWalking-v1", num_frames=4, every=3)  # of steps 0 and 3 of two episodes
    np.testing.assert_array_equal(frames[0], frames[2])
    np.testing.assert_array_equal(frames[1], frames[3])
    assert not np.array_equal(frames[0], frames[1])


class Filmed(Odd):
    """Shows how many actions it has taken, which the class notes."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 9}  # noqa: RUF012  # as Gymnasium declares it
    noted: ClassVar[list[Any]] = []

    def __init__(self, render_mode: str | None = None, **options: Any) -> None:
        super().__init__(look=lambda env: np.zeros(2, np.float32), **options)
        self.render_mode = render_mode

    def step(self, action: Any) -> Any:
        Filmed.noted.append(copy.deepcopy(action))
        result = super().step(action)
        if isinstance(action, np.ndarray):
            action.fill(0)  # the next step must not get this
        return result

    def render(self) -> Any:
        return np.full((2, 2, 3), len(Filmed.noted), np.uint8)


@pytest.mark.parametrize("repeat", [1, 2])
def test_a_film_of_every_action_space_takes_each_action_as_often_as_training(
    repeat: int, subtests: pytest.Subtests
) -> None:
    """An episode has three steps."""
    for name, space in ACTED.items():
        register(id="Filmed-v0", entry_point=Filmed, kwargs={"act": space}, max_episode_steps=9)
        with subtests.test(name):
            torch.manual_seed(0)
            policy = policy_of(lambda space=space: Odd(act=space), num_members=1, repeat=repeat)
            decided: list[Any] = []
            policy.predict = lambda *args, to=decided, by=policy, **named: (  # type: ignore[method-assign]
                to.append(args) or EpisodePolicy.predict(by, *args, **named)
            )
            for environment in ("Filmed-v0", lambda space=space: Filmed("rgb_array", act=space)):
                decided.clear()
                Filmed.noted.clear()
                frames = record_frames(policy, environment, num_frames=3)
                assert [int(frame[0, 0, 0]) for frame in frames] == [0, 1, 2]
                first, second = Filmed.noted
                assert space.contains(first)
                np.testing.assert_equal(first, second)
                assert len(decided) == 2 // repeat
        gymnasium.registry.pop("Filmed-v0")


def test_what_cannot_be_rendered_and_numbers_below_1_are_refused(subtests: pytest.Subtests) -> None:
    policy = EpisodePolicy(Odd, num_members=1, options=EpisodeOptions(hidden=(4,)))
    for environment, options, words in (
        (Filmed, {}, r'render_mode="rgb_array"; Filmed created one with None. Let it pass this'),
        (lambda: 3, {}, r"must be a gymnasium\.Env; got a int"),
        ("CartPole-v1", {"no_such_keyword": 1}, "cannot be rendered here"),
        ("CartPole-v1", {"every": 0}, "every must be an integer >= 1; got int 0"),
    ):
        with subtests.test(words), pytest.raises(ConfigError, match=words):
            record_frames(policy, environment, **{"num_frames": 1} | options)


def test_a_video_is_written_as_mp4(tmp_path: Path) -> None:
    pytest.importorskip("moviepy", reason="moviepy is not installed")
    policy = EpisodePolicy("CartPole-v1", num_members=1, options=EpisodeOptions(hidden=(4,)))
    frames_or_skip(policy, "CartPole-v1", num_frames=1)
    path = record_video(policy, "CartPole-v1", tmp_path / "video", max_episode_steps=8)
    assert path.stat().st_size > 1000
    assert path.read_bytes()[4:8] == b"ftyp"  # the signature of an MP4 file


# --- plots of learning curves


def test_plotted_curves_are_medians_and_quartiles_and_a_written_plot_leaves_no_figure_open(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from matplotlib import pyplot

    pyplot.close("all")  # figures that another test has left open
    matplotlib.use("svg")
    runs = [
        LearningCurve(iterations=[0, 1], steps=[0, 100], returns=[low, low + 10.0], seconds=[1.0, 2.0])
        for low in (0.0, 2.0, 8.0)
    ]
    path = tmp_path / "new" / "curves.png"
    figure = plot_learning_curves({"GRPO": runs, "one": runs[:1]}, path, title="CartPole", threshold=9.0)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert (matplotlib.get_backend(), pyplot.get_fignums()) == ("svg", [])
    median, single, threshold = figure.axes[0].get_lines()
    assert median.get_ydata().tolist() == [2.0, 12.0]
    assert single.get_ydata().tolist() == [0.0, 10.0]
    assert list(threshold.get_ydata()) == [9.0, 9.0]
    # only for the name with several runs: from 1 to 5 at first, and from 11 to 15 at the end
    (quartiles,) = figure.axes[0].collections
    assert sorted(set(quartiles.get_paths()[0].vertices[:, 1])) == [1.0, 5.0, 11.0, 15.0]
    shown = plot_learning_curves({"GRPO": runs[:1]}, None, title="CartPole")
    assert [pyplot.figure(number) for number in pyplot.get_fignums()] == [shown]
    pyplot.close(shown)
