"""Videos of a policy. Requires a renderer: `pip install ".[robots]"`; without a screen also MUJOCO_GL=egl."""

import copy
import os
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from adapters.control.environments.masks import KEY, MasksInInfo
from adapters.control.environments.pool_base import require_environment, time_limit
from adapters.control.environments.pools import describe_factory
from adapters.control.policy.episode_policy import EpisodePolicy
from grpo.arguments import require_integers
from grpo.errors import ConfigError, GRPOError

Frame = NDArray[np.uint8]
"""An RGB image, [height, width, 3]."""


def record_video(policy: EpisodePolicy, environment: Any, folder: str | Path, *, seed: int = 0, **make: Any) -> Path:
    """Record one episode of the most likely actions as an MP4, with Gymnasium's `RecordVideo`.

    Args:
        policy: The policy. It acts through `predict`.
        environment: Id or spec from which a new environment is created, or a function that creates one with
            `render_mode="rgb_array"`.
        folder: Folder of the video. It is created.
        seed: Seed of the reset.
        make: Keywords of `gymnasium.make`.

    Returns:
        The MP4 file.

    Raises:
        ConfigError: The environment cannot be rendered on this machine.
    """
    env = gym.wrappers.RecordVideo(
        _renderable(environment, make), str(folder), name_prefix="episode", disable_logger=True
    )
    with closing(env):
        for _ in _frames(policy, env, seed, None):
            pass
    return Path(folder) / "episode-episode-0.mp4"


def record_frames(
    policy: EpisodePolicy, environment: Any, *, seed: int = 0, every: int = 1, num_frames: int = 100, **make: Any
) -> list[Frame]:
    """Record frames of consecutive episodes with the most likely actions, up to a number of frames.

    Args:
        policy: The policy. It acts through `predict`.
        environment: Id or spec from which a new environment is created, or a function that creates one with
            `render_mode="rgb_array"`.
        seed: Seed of the first reset. Each further episode adds 1.
        every: Steps between frames.
        num_frames: Number of frames.
        make: Keywords of `gymnasium.make`.

    Raises:
        ConfigError: The environment cannot be rendered on this machine, or `every` or `num_frames` is below 1.
    """
    require_integers("record_frames", 1, every=every, num_frames=num_frames)
    require_integers("record_frames", 0, seed=seed)
    frames: list[Frame] = []
    with closing(_renderable(environment, make)) as env:
        while len(frames) < num_frames:
            frames += islice(_frames(policy, env, seed, every), num_frames - len(frames))
            seed += 1
    return frames


def _frames(policy: EpisodePolicy, env: gym.Env, seed: int, every: int | None) -> Iterator[Any]:
    """Run one episode, up to the time limit of the environment or the policy.

    Yields a frame before every `every`-th step, or no frames if `every` is None.
    """
    env = MasksInInfo(env) if policy.action_mask == "info" else env
    observation, info = env.reset(seed=seed)
    action: Any = None
    for step in range(time_limit(env) or policy.time_limit):
        if every is not None and step % every == 0:
            yield env.render()
        if step % policy.repeat == 0:
            masks = info[KEY] if policy.action_mask == "info" else None
            action, _ = policy.predict(observation, deterministic=True, action_masks=masks)
        # a copy, because an environment may write into the action that it gets
        observation, _, terminated, truncated, info = env.step(copy.deepcopy(action))
        if terminated or truncated:
            return


def _renderable(environment: Any, make: dict[str, Any]) -> gym.Env:
    """Create an environment, and render it once to see whether it can be rendered."""
    if not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")  # read when mujoco is first imported; renders without a window
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    try:
        env = environment(**make) if callable(environment) else gym.make(environment, render_mode="rgb_array", **make)
        require_environment(env)
        if callable(environment) and env.render_mode != "rgb_array":
            raise ConfigError(
                f'A film needs an environment with render_mode="rgb_array"; {describe_factory(environment)} created one with '
                f"{env.render_mode!r}. Let it pass this keyword to gymnasium.make."
            )
        env.reset(seed=0)
        env.render()
    except GRPOError:
        raise
    except Exception as error:  # exceptions differ between drivers; the cause is chained
        raise ConfigError(
            f"{environment} cannot be rendered here: {error}. Without a screen, MuJoCo needs EGL: install the system's Mesa "
            "packages, and set MUJOCO_GL=egl before mujoco is first imported. Other environments need pygame."
        ) from error
    return env
