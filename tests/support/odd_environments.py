"""Environments that are odd, or wrong, in one thing each, and what a policy must do with each of them."""

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

BOX = spaces.Box(-1.0, 1.0, (2,), np.float32)
PAIR = spaces.MultiDiscrete([2, 3])
PARTS = spaces.Tuple((spaces.Discrete(3), spaces.Box(-1.0, 1.0, (2,), np.float32), spaces.MultiDiscrete([2, 2])))


class Odd(gymnasium.Env):
    """Three steps of reward 1. What `step` and `reset` return can be replaced, part by part.

    Args:
        see: The space of observations.
        act: The space of actions.
        look: Returns an observation. None: samples of the space.
        reward: Returned as the reward.
        ended: Returned as `terminated` at the third step.
        info: Returns the info.
        result: Replaces the whole tuple of a step.
        begins: Replaces the whole tuple of a reset.
    """

    def __init__(
        self,
        see: spaces.Space = BOX,
        act: spaces.Space | None = None,
        *,
        look: Callable[["Odd"], Any] | None = None,
        reward: Any = 1.0,
        ended: Any = True,
        info: Callable[["Odd"], Mapping[str, Any]] = lambda env: {},
        result: Any = None,
        begins: Any = None,
    ) -> None:
        self.observation_space, self.action_space = see, spaces.Discrete(3) if act is None else act
        self._look, self._reward, self._ended, self._info = look, reward, ended, info
        self._result, self._begins = result, begins
        self.time = 0
        self.taken: list[Any] = []

    def look(self) -> Any:
        return self.observation_space.sample() if self._look is None else self._look(self)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.time = 0
        return (self.look(), self._info(self)) if self._begins is None else self._begins

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        self.taken.append(action)
        self.time += 1
        if self._result is not None:
            return self._result
        return self.look(), self._reward, self._ended if self.time >= 3 else False, False, self._info(self)


class Masked(Odd):
    """Gives a mask in `action_masks()`, and refuses masked actions."""

    def action_masks(self) -> Any:
        return np.array([False, True, False])

    def step(self, action: Any) -> Any:
        assert action == 1, f"{action} is masked"
        return Odd.step(self, action)


class MaskedPart(Odd):
    """Gives a mask as a part of its observations, and refuses masked actions."""

    def __init__(self) -> None:
        mask = spaces.Box(0, 1, (3,), np.int8)
        super().__init__(
            spaces.Dict(observation=BOX, action_mask=mask),
            look=lambda env: {"observation": BOX.sample(), "action_mask": np.array([0, 1, 0], np.int8)},
        )

    step = Masked.step


class Writes(Odd):
    """Scales the action that it gets in place. `taken` has copies of what it got."""

    def __init__(self) -> None:
        super().__init__(act=BOX)

    def step(self, action: Any) -> Any:
        taken = Odd.step(self, action.copy())
        action *= 0.5
        return taken


class Unreadable:
    """Numpy cannot make an array of it."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("It is on a GPU.")


class Spaceless(Odd):
    """Has no spaces."""

    def __init__(self) -> None: ...


class Specified(Odd):
    """Uses the name of Gymnasium's `spec`."""

    spec = "the small one"  # type: ignore[assignment]


class Duck:
    """Not a `gymnasium.Env`, although it has everything of one."""

    observation_space, action_space = BOX, spaces.Discrete(2)

    def reset(self, **_: Any) -> Any:
        return BOX.sample(), {}

    def step(self, action: Any) -> Any:
        return BOX.sample(), 0.0, True, False, {}


class TheirVector(Duck):
    """Has what Stable-Baselines3's vector environments have."""

    num_envs = 2

    def step_async(self, actions: Any) -> None: ...

    def step_wait(self) -> None: ...


class Agents(Duck):
    """Has what PettingZoo's environments have."""

    possible_agents = ("one", "two")


def masked(mask: Any, act: spaces.Space | None = None) -> Callable[[], Odd]:
    return lambda: Odd(act=act, info=lambda env: {"action_mask": mask})


IMAGES = {
    "pixels, channels last": spaces.Box(0, 255, (40, 44, 3), np.uint8),
    "pixels, channels first": spaces.Box(0, 255, (3, 40, 44), np.uint8),
    "pixels, four frames first": spaces.Box(0, 255, (4, 36, 36), np.uint8),
    "floats, channels last": spaces.Box(0.0, 1.0, (36, 36, 1), np.float32),
    "MiniGrid": spaces.Box(0, 255, (7, 7, 3), np.uint8),
    "MinAtar": spaces.Box(0, 1, (10, 10, 4), np.bool_),
    "small floats": spaces.Box(0.0, 1.0, (3, 9, 9), np.float32),
    "a matrix": spaces.Box(0.0, 1.0, (5, 6), np.float32),
    "a dict with pixels": spaces.Dict(picture=spaces.Box(0, 255, (36, 36, 3), np.uint8), speed=BOX),
    "a tuple with pixels first": spaces.Tuple((spaces.Box(0, 255, (1, 36, 36), np.uint8), spaces.Discrete(3))),
    "a dict with MiniGrid": spaces.Dict(image=spaces.Box(0, 255, (7, 7, 3), np.uint8), direction=spaces.Discrete(4)),
}

OBSERVED: dict[str, spaces.Space] = {
    **IMAGES,
    "a number": spaces.Box(-1.0, 1.0, (), np.float32),
    "doubles": spaces.Box(-1.0, 1.0, (3,), np.float64),
    "halves": spaces.Box(-1.0, 1.0, (3,), np.float16),
    "integers": spaces.Box(-5, 5, (3,), np.int64),
    "unbounded": spaces.Box(-np.inf, np.inf, (3,), np.float32),
    "one category": spaces.Discrete(1),
    "from 7": spaces.Discrete(3, start=7),
    "from -2": spaces.Discrete(3, start=-2),
    "a table": spaces.MultiDiscrete([[2, 3], [4, 2]]),
    "bits": spaces.MultiBinary([2, 2]),
    "nested": spaces.Dict(a=PARTS, b=spaces.MultiBinary(2)),
}

ACTED: dict[str, spaces.Space] = {
    "one": spaces.Discrete(1),
    "from 5": spaces.Discrete(3, start=5),
    "a pair": PAIR,
    "a table": spaces.MultiDiscrete([[2, 3], [4, 2]]),
    "bits": spaces.MultiBinary(3),
    "a box": spaces.Box(-2.0, 3.0, (2, 2), np.float32),
    "doubles": spaces.Box(-2.0, 3.0, (2,), np.float64),
    "a number": spaces.Box(-1.0, 1.0, (1,), np.float32),
    "half bounded": spaces.Box(np.array([0.0, -np.inf], np.float32), np.array([np.inf, 1.0], np.float32)),
    "unbounded": spaces.Box(-np.inf, np.inf, (2,), np.float32),
    "parts": PARTS,
    "named parts": spaces.Dict(arm=spaces.Box(-1.0, 1.0, (2,), np.float32), grip=spaces.Discrete(2)),
}

WORK: dict[str, Callable[[], Any]] = {
    **{f"observes {name}": lambda space=space: Odd(space) for name, space in OBSERVED.items()},
    **{f"acts in {name}": lambda space=space: Odd(act=space) for name, space in ACTED.items()},
    "no limit, and ends": Odd,
    "an array as reward": lambda: Odd(reward=np.array([1.0])),
    "a number of numpy as reward": lambda: Odd(reward=np.float32(1.0)),
    "an integer as reward": lambda: Odd(reward=1),
    "a bool as reward": lambda: Odd(reward=True),
    "a bool of numpy as end": lambda: Odd(ended=np.bool_(True)),
    "1 as end": lambda: Odd(ended=1),
    "1 of numpy as end": lambda: Odd(ended=np.int64(1)),
    "an array as end": lambda: Odd(ended=np.array([True])),
    "writes into its actions": Writes,
    "an observation as a list": lambda: Odd(look=lambda env: [0.5, -0.5]),
    "doubles for floats": lambda: Odd(look=lambda env: np.zeros(2)),
    "a shorter integer for a category": lambda: Odd(spaces.Discrete(3), look=lambda env: np.int32(1)),
    "beyond the bounds of its box": lambda: Odd(look=lambda env: np.full(2, 9.0, np.float32)),
    "wrapped by a frame stack": lambda: gymnasium.wrappers.FrameStackObservation(Odd(), 3),
    "wrapped by a rescaling": lambda: gymnasium.wrappers.RescaleAction(
        Odd(act=spaces.Box(0.0, 9.0, (2,), np.float32)), np.float32(-1.0), np.float32(1.0)
    ),
    "wrapped by a limit": lambda: gymnasium.wrappers.TimeLimit(Odd(), 2),
}
"""Environments that can be trained on as they are."""

LOOKS: dict[str, tuple[spaces.Space, Any, str]] = {
    "0 where numbers count from 3": (spaces.Discrete(4, start=3), 0, r"must lie in Discrete\(4, start=3\); got 0"),
    "-1 for nothing": (spaces.Discrete(3), -1, r"must lie in Discrete\(3\); got -1"),
    "a number beyond": (spaces.Discrete(3), 7, r"must lie in Discrete\(3\); got 7"),
    "-1 in a pair": (PAIR, np.array([0, -1]), r"must lie in MultiDiscrete"),
    "5 in a pair": (PAIR, np.array([5, 0]), r"must lie in MultiDiscrete"),
    "a pair of the right type beyond": (PAIR, np.array([1, 3], np.int64), r"must lie in MultiDiscrete"),
    "2 as a bit": (spaces.MultiBinary(2), np.array([0, 2], np.int8), r"must lie in MultiBinary"),
    "half a category": (spaces.Discrete(3), 0.5, r"must be int64 \[\]; got float64 \[\]\. Correct"),
    "a text": (spaces.Discrete(3), "1", "must be int64"),
    "nothing": (BOX, None, r"must be float32 \[2\]; got object \[\]\. Correct"),
    "a column": (BOX, np.zeros((2, 1), np.float32), r"must be float32 \[2\]; got float32 \[2, 1\]"),
    "too few": (BOX, np.zeros(1, np.float32), r"must be float32 \[2\]; got float32 \[1\]"),
    "uneven rows": (BOX, [[1.0], [1.0, 2.0]], r"must be float32 \[2\]; got list of uneven rows"),
    "texts": (BOX, np.array(["a", "b"]), "must be float32"),
    "NaN": (BOX, np.array([np.nan, 0.0], np.float32), "contains NaN or infinity"),
    "infinity": (BOX, np.array([0.0, np.inf], np.float32), "contains NaN or infinity"),
    "a missing key": (spaces.Dict(a=BOX, b=BOX), {"a": 0}, r"a dict with the keys \['a', 'b'\]; got the keys \['a'\]"),
    "a number for a dict": (spaces.Dict(a=BOX), 1, r"must be a dict with the keys \['a'\]; got int"),
    "a list for a tuple": (spaces.Tuple((BOX, BOX)), [BOX.sample()] * 2, "must be a tuple of 2; got list"),
    "a longer tuple": (spaces.Tuple((BOX,)), (BOX.sample(),) * 2, "must be a tuple of 1; got 2"),
    "half a category in a tuple": (
        spaces.Tuple((spaces.Discrete(2),)),
        (0.5,),
        r"\[0\] must be int64 \[\]; got float64",
    ),
    "a part beyond": (spaces.Dict(a=spaces.Discrete(2)), {"a": 2}, r"\['a'\] must lie in Discrete\(2\); got 2"),
}

FAULTS: dict[str, tuple[Callable[[], Any], str]] = {
    **{
        f"observes {name}": (lambda space=space, value=value: Odd(space, look=lambda env: value), words)
        for name, (space, value, words) in LOOKS.items()
    },
    "a text as reward": (lambda: Odd(reward="1.5"), "the reward must be a number; got '1.5'"),
    "bytes as reward": (lambda: Odd(reward=b"1"), "the reward must be a number"),
    "nothing as reward": (lambda: Odd(reward=None), "the reward must be a number; got None"),
    "two rewards": (lambda: Odd(reward=np.ones(2)), "the reward must be a number"),
    "a list as reward": (lambda: Odd(reward=[1.0]), "the reward must be a number"),
    "an integer beyond floats as reward": (lambda: Odd(reward=10**400), "the reward must be a number; got 10000"),
    "a complex reward": (lambda: Odd(reward=1j), "the reward must be a number"),
    "NaN as reward": (lambda: Odd(reward=np.nan), "the reward must be finite, also as float32; got nan"),
    "a reward beyond float32": (lambda: Odd(reward=-1e39), "must be finite, also as float32; got -1e\\+39"),
    "a text as end": (lambda: Odd(ended="False"), "terminated must be True or False; got 'False'"),
    "nothing as end": (lambda: Odd(ended=None), "terminated must be True or False; got None"),
    "2 as end": (lambda: Odd(ended=2), "terminated must be True or False; got 2"),
    "-1 as end": (lambda: Odd(ended=-1), "terminated must be True or False; got -1"),
    "1.0 as end": (lambda: Odd(ended=1.0), r"terminated must be True or False; got 1\.0"),
    "two ends": (lambda: Odd(ended=np.array([True, True])), "terminated must be True or False; got array"),
    "four values of a step": (lambda: Odd(result=(BOX.sample(), 0.0, True, {})), "step.. must return .*got 4 values"),
    "no values of a step": (lambda: Odd(result=3), r"step\(\) must return .*got a int"),
    "no info of a step": (
        lambda: Odd(result=(BOX.sample(), 0.0, True, False, None)),
        r"step\(\) must return a dict as info; got a NoneType. Return \{\}",
    ),
    "no info of a reset": (lambda: Odd(begins=BOX.sample()), r"reset\(\) must return .*got a ndarray"),
    "no dict of a reset": (lambda: Odd(begins=(BOX.sample(), None)), r"reset\(\) must return \(observation, info\)"),
    "numbers beyond float32": (
        lambda: Odd(spaces.Box(-np.inf, np.inf, (2,), np.float64), look=lambda env: np.array([0.0, 1e300])),
        "or a number beyond float32",
    ),
    "what numpy cannot read": (
        lambda: Odd(look=lambda env: Unreadable()),
        "got Unreadable, which numpy cannot read: It is on a GPU. Correct",
    ),
    "a step that raises": (
        lambda: Odd(look=lambda env: BOX.sample() * (1 // (env.time - 1))),
        "raised ZeroDivisionError",
    ),
    "a function that raises": (
        lambda: Odd(act=1 // 0),
        r"<lambda> cannot be created: it raised ZeroDivisionError: .*The cause is chained",
    ),
    "a spec of its own": (Specified, "Specified.spec must be what gymnasium.make sets.* got str.*another name"),
    "no spaces": (Spaceless, "Spaceless.observation_space must be a space of gymnasium.spaces; got NoneType None"),
    "a dict of spaces": (
        lambda: Odd({"a": BOX}),  # type: ignore[arg-type]
        "Odd.observation_space must be a space of gymnasium.spaces; got dict",
    ),
    "nothing to observe": (
        lambda: Odd(spaces.Box(0.0, 1.0, (0,), np.float32)),
        r"at least one number in each part; got Box.*return a constant",
    ),
    "a part without numbers": (
        lambda: Odd(spaces.Dict(a=BOX, b=spaces.Tuple(()))),
        r"at least one number in each part; got Tuple\(\)",
    ),
    "nothing to do": (
        lambda: Odd(act=spaces.Box(0.0, 1.0, (0,), np.float32)),
        "Gaussian needs a box with at least one number",
    ),
    "no Env": (Duck, "inherit from gymnasium.Env.*shimmy"),
    "vectors of SB3": (TheirVector, "make_vec_env got, and num_members"),
    "several agents": (Agents, "takes the action of one agent"),
    "a vector environment": (lambda: gymnasium.make_vec("CartPole-v1", 2), "A member is a single environment"),
    "nothing": (lambda: None, "Every member of a pool must be a gymnasium.Env; got a NoneType"),
    "a text observation": (lambda: Odd(spaces.Text(4)), "fixed shape"),
    "a sequence observation": (lambda: Odd(spaces.Sequence(BOX)), "fixed shape"),
    "a graph observation": (lambda: Odd(spaces.Graph(BOX, None)), "fixed shape"),
    "a text action": (lambda: Odd(act=spaces.Text(4)), "actions must be Discrete"),
    "a box of integers as action": (lambda: Odd(act=spaces.Box(0, 5, (2,), np.int64)), "is for boxes of floats"),
    "running statistics": (
        lambda: gymnasium.wrappers.NormalizeObservation(Odd()),
        r"NormalizeObservation keeps a running mean.*normalize_observations=True",
    ),
    "a grey image": (lambda: Odd(spaces.Box(0, 255, (64, 64), np.uint8)), "three axes.*add one to images without"),
    "a stack of images": (
        lambda: Odd(spaces.Box(0, 255, (4, 40, 40, 3), np.uint8)),
        "images with three axes.* in Box observations, .* to 19,200 numbers. Stack frames along the last axis",
    ),
    "a stack of images in a part of a part": (
        lambda: Odd(spaces.Tuple((BOX, spaces.Dict(camera=spaces.Box(0, 255, (4, 40, 40, 3), np.uint8))))),
        "images with three axes.* in Tuple observations, .* to 19,202 numbers. Stack frames along the last axis",
    ),
    "a stack of floats": (lambda: Odd(spaces.Box(0.0, 1.0, (4, 96, 96, 3))), "at most 10,000 numbers .* got 110,592"),
    "too many categories": (lambda: Odd(spaces.Discrete(10_001)), "at most 10,000 numbers .* got 10,001 from Discrete"),
}
"""Environments that cannot be trained on, and words of the error."""

MASKS: dict[str, tuple[Callable[[], Any], list[bool]]] = {
    "in info": (masked(np.array([0, 1, 0], np.int8)), [False, True, False]),
    "in info, bools": (masked([False, True, False]), [False, True, False]),
    "in a method": (Masked, [False, True, False]),
    "in a method, behind a wrapper": (lambda: gymnasium.wrappers.TimeLimit(Masked(), 9), [False, True, False]),
    "in the observation": (MaskedPart, [False, True, False]),
    "of a pair, nested": (masked((np.array([0, 1]), np.array([1, 0, 1])), PAIR), [False, True, True, False, True]),
    "of a pair, in a row": (masked(np.array([0, 1, 1, 0, 1]), PAIR), [False, True, True, False, True]),
    "of a pair, with a part that is free": (
        masked((None, np.array([1, 0, 1], np.int8)), PAIR),
        [True, True, True, False, True],
    ),
    "of parts, nested": (
        masked((np.array([1, 0, 1], np.int8), None, (np.array([1, 0], np.int8), np.array([0, 1], np.int8))), PARTS),
        [True, False, True, True, False, False, True],
    ),
}
"""Environments with masks, and the row of allowed categories."""

WRONG_MASKS: dict[str, tuple[Callable[[], Any], str]] = {
    "too few": (masked(np.ones(2, np.int8)), r"one entry per category, K = 3 for Discrete\(3\); got 2"),
    "a 2": (masked(np.array([0, 2, 1])), "must be one row of 0 and 1"),
    "a text": (masked("all"), "must be one row of 0 and 1"),
    "texts": (masked(["a", "b", "c"]), "must be one row of 0 and 1"),
    "one part of a pair": (masked((np.ones(2, np.int8),), PAIR), "nested as in action_space.sample"),
    "no info of a step": (lambda: Masked(result=(BOX.sample(), 0.0, True, False, [])), "a dict as info; got a list"),
    "none allowed": (masked(np.zeros(3, np.int8)), "must allow an action; row 0 allows none"),
    "no mask": (Odd, "needs info.'action_mask'. after every reset"),
    "of a box": (masked(np.ones(2), BOX), "action_mask needs actions with categories"),
    "of bits": (masked(np.ones(2), spaces.MultiBinary(2)), r"Declare bits as MultiDiscrete\(\[2, 2, \.\.\.\]\)"),
    "of a part without categories": (
        masked((np.ones(3), np.ones(2)), spaces.Tuple((spaces.Discrete(3), spaces.MultiBinary(2)))),
        "nested as in action_space.sample",
    ),
}
"""Environments whose masks cannot be used, and words of the error."""
