"""Masks of allowed actions, in the forms in which environments give them."""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces
from jaxtyping import Bool

from grpo.arguments import describe
from grpo.errors import ContractError

from .pool_base import checked_reset, five_values
from .snapshots import layers_of

MaskForm = Literal["method", "observation"]

KEY = "action_mask"
"""The name of the mask in `info`, and in observations."""


def mask_form(env: gymnasium.Env) -> MaskForm | None:
    """Where an environment keeps its masks: `action_masks()`, as in sb3-contrib, or a part of the observation, as in PettingZoo
    and RLlib. None: neither; `info["action_mask"]` is known only after a reset."""
    if isinstance(env.observation_space, spaces.Dict) and KEY in env.observation_space.spaces:
        return "observation"
    return "method" if any(callable(getattr(layer, "action_masks", None)) for layer in layers_of(env)) else None


def without_mask(space: spaces.Space) -> spaces.Space:
    """The space of observations without their mask. A single other part takes the place of the dict."""
    if not isinstance(space, spaces.Dict) or KEY not in space.spaces:
        return space
    others = {name: part for name, part in space.spaces.items() if name != KEY}
    return next(iter(others.values())) if len(others) == 1 else spaces.Dict(others)


def take_mask(observation: Any) -> tuple[Any, Any]:
    """Divide an observation that is a dict into the rest, as `without_mask` does, and its mask."""
    others = {name: part for name, part in observation.items() if name != KEY}
    return (next(iter(others.values())) if len(others) == 1 else others), observation[KEY]


def mask_of(env: gymnasium.Env, observation: Any, info: Mapping[str, Any]) -> Any:
    """The present mask of an environment, in its own form. None: it gives none."""
    match mask_form(env):
        case "observation":
            return take_mask(observation)[1]
        case "method":
            return env.get_wrapper_attr("action_masks")()
        case None:
            return info.get(KEY)


class MasksInInfo(gymnasium.Wrapper):
    """An environment whose masks are in `info["action_mask"]`, wherever it keeps them itself."""

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        self._form = mask_form(env)
        self.observation_space = without_mask(env.observation_space)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the environment."""
        return self._shown(*checked_reset(self.env.reset(seed=seed, options=options)))

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the environment."""
        observation, reward, terminated, truncated, info = five_values(self.env.step(action))
        observation, info = self._shown(observation, info)
        return observation, reward, terminated, truncated, info

    def _shown(self, observation: Any, info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        mask = mask_of(self.env, observation, info)
        observation = take_mask(observation)[0] if self._form == "observation" else observation
        return observation, info if mask is None else {**info, KEY: mask}


def flat_mask(space: spaces.Space, mask: Any) -> Bool[np.ndarray, " K"]:
    """A mask as one row: the categories of all parts of the space, in order.

    Args:
        space: The space of actions.
        mask: One row already, as in sb3-contrib, or nested as in `space.sample(mask)`: a tuple for `MultiDiscrete`, a tuple or
            a dict for `Tuple` and `Dict`. None stands for a part without a mask.

    Raises:
        ContractError: The mask is nested in another way, or holds other numbers than 0 and 1.
    """
    try:
        row = np.concatenate(_rows(space, mask)) if isinstance(mask, tuple | Mapping) else np.asarray(mask).ravel()
    except (ValueError, TypeError, KeyError) as error:
        raise _wrong(space, mask) from error
    if row.dtype.kind not in "biuf" or not ((row == 0) | (row == 1)).all():
        raise _wrong(space, mask)
    return row.astype(bool)


def sample_mask(space: spaces.Space, mask: Any) -> Any:
    """A mask in any form as `space.sample` takes it. None: there is none."""
    return None if mask is None else _nested(space, iter(flat_mask(space, mask).astype(np.int8).tolist()))


def _nested(space: spaces.Space, row: Iterator[int]) -> Any:
    match space:
        case spaces.Dict():
            return {name: _nested(part, row) for name, part in space.spaces.items()}
        case spaces.Tuple():
            return tuple(_nested(part, row) for part in space.spaces)
        case spaces.MultiDiscrete():
            return _nested_sizes(space.nvec.tolist(), row)
        case spaces.Discrete():
            return np.array([*islice(row, int(space.n))], dtype=np.int8)
        case _:
            return None  # a part without categories


def _nested_sizes(sizes: Any, row: Iterator[int]) -> Any:
    if isinstance(sizes, list):
        return tuple(_nested_sizes(size, row) for size in sizes)
    return np.array([*islice(row, sizes)], dtype=np.int8)


def _rows(space: spaces.Space, mask: Any) -> list[np.ndarray]:
    """The masks of the parts of a space, each as one row."""
    match space:
        case spaces.Dict():
            pairs = [(part, None if mask is None else mask[name]) for name, part in space.spaces.items()]
        case spaces.Tuple():
            pairs = list(zip(space.spaces, [None] * len(space.spaces) if mask is None else mask, strict=True))
        case spaces.MultiDiscrete():
            sizes = np.ravel(space.nvec).tolist()
            masks = [None] * len(sizes) if mask is None else _leaves(mask)
            return [np.ones(n) if one is None else np.asarray(one) for n, one in zip(sizes, masks, strict=True)]
        case spaces.Discrete():
            return [np.ones(int(space.n)) if mask is None else np.asarray(mask).ravel()]
        case _ if mask is not None:  # Gymnasium's masks of bits are none of categories
            raise ValueError(f"{space} has no categories")
        case _:
            return []  # a part without categories
    return [row for part, one in pairs for row in _rows(part, one)]


def _leaves(mask: Any) -> list[Any]:
    """The masks in nested tuples, in order."""
    return [leaf for part in mask for leaf in _leaves(part)] if isinstance(mask, tuple) else [mask]


def _wrong(space: spaces.Space, mask: Any) -> ContractError:
    return ContractError(
        f"An action mask of {space} must be one row of 0 and 1, or nested as in action_space.sample(mask); got "
        f"{describe(mask)}. Correct what the environment returns."
    )
