"""Snapshots of an environment's complete state during an episode, to restore in the same or another instance.

Gymnasium's classic control, toy text and MuJoCo environments, and Gymnasium-Robotics' mazes, are supported. Other environments
implement `Snapshotable`.

A layer is a wrapper or the environment itself. A snapshot contains, for each layer:
- all attributes that are plain data. Settings are among them, because some tasks draw new settings in every episode;
- random generators (`np_random`), so that random events continue as in the original environment;
- MuJoCo's integration state, and the quantities that MuJoCo derives from it;
- environments inside the environment (a maze contains a robot), and the running statistics of normalising wrappers.

A snapshot does not contain spaces (so `action_space.sample()` is not restored), rendering objects, the MuJoCo model, or global
random generators.
"""

import pickle
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Protocol, TypeVar, runtime_checkable

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.wrappers import HumanRendering, PassiveEnvChecker, RecordVideo, RenderCollection
from gymnasium.wrappers.utils import RunningMeanStd

from grpo.arguments import require_instances
from grpo.errors import ConfigError, ContractError

from .plain_data import pack, unpack

Copied = TypeVar("Copied")

COVERED_MODULES = (
    "gymnasium.envs.classic_control.",
    "gymnasium.envs.toy_text.",
    "gymnasium.envs.mujoco.",
    "gymnasium_robotics.envs.maze.",
)

# Wrappers that only observe: the checker remembers its own calls, and a recorder its own video.
ONLOOKERS = (PassiveEnvChecker, RecordVideo, RenderCollection, HumanRendering)

# Each instance keeps its own `render_mode`, so that a worker opens no window. The others repeat constructor arguments.
NOT_STATE = ("render_mode", "metadata", "_cached_spec", "_saved_kwargs", "_ezpickle_args", "_ezpickle_kwargs")

SCALARS = (int, float, complex, str, bytes, np.generic)
COLLECTIONS = (list, tuple, set, frozenset, deque)
SETTING_TYPES = (gymnasium.Space, EnvSpec, FunctionType, BuiltinFunctionType, MethodType, ModuleType, partial, type)
# Names instead of types, because these packages may not be installed.
SETTING_NAMES = (
    "pygame.",
    "gymnasium.envs.mujoco.mujoco_rendering.",
    "gymnasium_robotics.envs.maze.maze.Maze.",
    "gymnasium_robotics.envs.maze.maze_v4.Maze.",
    "gymnasium_robotics.utils.mujoco_utils.MujocoModelNames.",
    "mujoco._structs.MjModel.",
)

# `mj_step` leaves these fields one substep older than positions and velocities. Some rewards are differences of such fields
# before and after a step (Ant: xpos, Humanoid: xipos). `mj_forward` would make the fields current, and the first reward after a
# restore would differ from the original's. Therefore, a snapshot stores them.
DERIVED_FIELDS = (
    *("xpos", "xquat", "xmat", "xipos", "ximat", "geom_xpos", "geom_xmat", "site_xpos", "site_xmat", "subtree_com"),
    *("cinert", "cvel", "cacc", "cfrc_int", "cfrc_ext", "qacc", "qfrc_actuator", "qfrc_constraint", "actuator_force"),
    *("ten_length", "ten_velocity", "sensordata"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state of an environment at one moment, as plain data. It can be pickled, and restored any number of times."""

    environment: str
    """Registered id of the environment, or the name of its class if it has no id."""

    observation: Any
    """Observation at the moment of the snapshot, after all wrappers."""

    layers: tuple[tuple[str, dict[str, Any]], ...]
    """Class name and state of each layer: the wrappers from the outermost to the innermost, then the environment."""

    def __post_init__(self) -> None:
        require_instances("Snapshot", str, "the name of an environment", environment=self.environment)
        require_instances("Snapshot", tuple, "a tuple of pairs (class name, state)", layers=self.layers)

    def to_state(self) -> dict[str, Any]:
        """The snapshot as values that a checkpoint can hold.

        Raises:
            ContractError: The snapshot contains objects that are not plain data.
        """
        return {"environment": self.environment, "content": pack((self.observation, self.layers))}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Snapshot":
        """The inverse of `to_state`."""
        observation, layers = unpack(state["content"])
        return cls(environment=state["environment"], observation=observation, layers=layers)


@runtime_checkable
class Snapshotable(Protocol):
    """Two methods that a custom environment or wrapper implements to support snapshots.

    An environment implements them for its own state, and a wrapper for its own layer. The environment's `np_random` is always
    saved. If every other part of the state is an attribute that is plain data, a numpy generator or MuJoCo data, the two
    methods are `return environment_state(self)` and `restore_environment_state(self, state)`.
    """

    def snapshot(self) -> Any:
        """Return everything on which later steps depend, as data that can be pickled. The caller copies what is returned."""
        ...

    def restore(self, state: Any) -> None:
        """Continue from `state`. Before, this instance may have run other episodes, or may never have been reset."""
        ...


def take_snapshot(env: gymnasium.Env, observation: Any) -> Snapshot:
    """Copy the state of `env` between two steps. `env` is not changed.

    Args:
        env: The environment with all its wrappers.
        observation: Observation from the environment's last `reset` or `step`.

    Raises:
        ConfigError: The environment is neither supported nor `Snapshotable`, or an attribute has an unknown type.
        ContractError: The state of a `Snapshotable` cannot be pickled.
    """
    require_instances("take_snapshot", gymnasium.Env, "a gymnasium.Env", env=env)
    name = _name(env)
    inner = env.unwrapped
    if not is_supported(env):
        raise ConfigError(
            f"take_snapshot: {name} must be one of Gymnasium's classic control, toy text and MuJoCo environments, a maze of "
            f"Gymnasium-Robotics, or implement Snapshotable; got {_qualified_name(inner)} Give the class snapshot(self), "
            "which returns everything that determines its future as plain data, and restore(self, state). If all of that is in "
            "attributes, use environment_state(self) and restore_environment_state(self, state)."
        )
    layers = tuple((type(layer).__name__, _layer_state(layer)) for layer in _stateful(layers_of(env)))
    try:
        return _copy(Snapshot(environment=name, observation=observation, layers=layers))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ContractError(
            f"take_snapshot: the state and the observation of {name} must be picklable; got {error}. Return numbers, "
            "strings, numpy arrays, and dicts, lists and tuples of these from snapshot()."
        ) from error


def is_supported(env: gymnasium.Env) -> bool:
    """Whether the environment is `Snapshotable`, or one that this module covers."""
    inner = env.unwrapped
    return isinstance(inner, Snapshotable) or _qualified_name(inner).startswith(COVERED_MODULES)


def restore_snapshot(env: gymnasium.Env, snapshot: Snapshot) -> Any:
    """Restore a snapshot in `env`. Equal actions then lead to equal results.

    Args:
        env: The snapshot's environment, or an identically built one, even if it was never reset.
        snapshot: The snapshot.

    Returns:
        A copy of the snapshot's observation.

    Raises:
        ContractError: The snapshot is from another environment, or from other wrappers.
    """
    require_instances("restore_snapshot", gymnasium.Env, "a gymnasium.Env", env=env)
    require_instances("restore_snapshot", Snapshot, "a Snapshot of take_snapshot", snapshot=snapshot)
    layers = layers_of(env)
    stateful = _stateful(layers)
    theirs, ours = [name for name, _ in snapshot.layers], [type(layer).__name__ for layer in stateful]
    if (snapshot.environment, theirs) != (_name(env), ours):
        raise ContractError(
            f"restore_snapshot: {_name(env)} with the layers {ours} needs a snapshot of the same environment and layers; got "
            f"one of {snapshot.environment} with the layers {theirs}. Create and wrap both environments in the same way."
        )
    if any(isinstance(layer, PassiveEnvChecker) and not layer.checked_reset for layer in layers):
        env.reset(seed=0)  # the checker fails at the first step of an environment that was never reset
    snapshot = _copy(snapshot)  # steps may modify the restored objects, and the snapshot may be restored again
    for layer, (_, state) in zip(stateful, snapshot.layers, strict=True):
        _restore_layer(layer, state)
    return snapshot.observation


def environment_state(owner: Any) -> dict[str, Any]:
    """Return the attributes of an object on which its later steps depend. The values are not copied.

    Two limits:
    - Two attributes that are views of one array are restored as two arrays. Keep one array, and make the views when needed.
    - The MuJoCo model is not stored. A task that changes its model (masses, goals that are bodies) must add the changes to
      the returned state.

    Raises:
        ConfigError: An attribute has a type that cannot be classified as state or setting.
    """
    state: dict[str, dict[str, Any]] = {"values": {}, "generators": {}, "simulations": {}, "nested": {}}
    for name, value in vars(owner).items():
        is_next_layer = isinstance(owner, gymnasium.Wrapper) and name == "env"
        if is_next_layer or name in NOT_STATE:
            continue
        if _is_plain(value):
            state["values"][name] = value
        elif isinstance(value, np.random.Generator):
            state["generators"][name] = value.bit_generator.state
        elif _qualified_name(value) == "mujoco._structs.MjData.":
            state["simulations"][name] = _simulation_state(value)
        elif isinstance(value, gymnasium.Env | RunningMeanStd):
            state["nested"][name] = environment_state(value)
        elif not _is_setting(value):
            raise ConfigError(
                f"{type(owner).__name__}.{name} must be plain data, a numpy generator or MuJoCo data for its state to be "
                f"copied; got {type(value).__name__}. Implement Snapshotable: snapshot() and restore(state) on "
                f"{type(owner).__name__}."
            )
    return state


def restore_environment_state(owner: Any, state: Mapping[str, Any]) -> None:
    """Restore the result of `environment_state` in place. The instance keeps its own windows and rendered images."""
    attributes = vars(owner)
    for name, value in state["values"].items():
        if not _is_setting(attributes.get(name)):  # for example, None in the snapshot and an open window here
            attributes[name] = value
    for name, generator_state in state["generators"].items():
        _restore_generator(owner, name, generator_state)
    for name, simulation in state["simulations"].items():
        _restore_simulation(attributes[name], simulation)
    for name, nested in state["nested"].items():
        restore_environment_state(attributes[name], nested)


def _layer_state(layer: gymnasium.Env) -> dict[str, Any]:
    if not isinstance(layer, Snapshotable):
        return environment_state(layer)
    state = {"own": layer.snapshot()}
    if layer is layer.unwrapped:
        state["generator"] = layer.np_random.bit_generator.state
    return state


def _restore_layer(layer: gymnasium.Env, state: Mapping[str, Any]) -> None:
    if not isinstance(layer, Snapshotable):
        restore_environment_state(layer, state)
        return
    layer.restore(state["own"])
    if "generator" in state:
        _restore_generator(layer, "_np_random", state["generator"])


def _restore_generator(owner: Any, name: str, state: Mapping[str, Any]) -> None:
    """Restore in place, because other parts of the instance may hold the same generator."""
    if not isinstance(vars(owner).get(name), np.random.Generator):
        vars(owner)[name] = np.random.Generator(getattr(np.random, state["bit_generator"])())
    vars(owner)[name].bit_generator.state = state


def _simulation_state(data: Any) -> dict[str, Any]:
    mujoco = import_module("mujoco")  # optional; installed if the environment holds MuJoCo data
    signature = mujoco.mjtState.mjSTATE_INTEGRATION
    integration = np.empty(mujoco.mj_stateSize(data.model, signature))
    mujoco.mj_getState(data.model, data, integration, signature)
    return {"integration": integration, "derived": {name: getattr(data, name).copy() for name in DERIVED_FIELDS}}


def _restore_simulation(data: Any, state: Mapping[str, Any]) -> None:
    mujoco = import_module("mujoco")
    signature = mujoco.mjtState.mjSTATE_INTEGRATION
    required, integration = mujoco.mj_stateSize(data.model, signature), state["integration"]
    if len(integration) != required:
        raise ContractError(
            f"restore_snapshot: the MuJoCo model needs a state of {required} numbers; got {len(integration)}. Make both "
            "environments from the same model file."
        )
    mujoco.mj_setState(data.model, data, integration, signature)
    mujoco.mj_forward(data.model, data)  # recomputes contacts and constraints, which vary in number
    for name, value in state["derived"].items():
        getattr(data, name)[:] = value


def layers_of(env: gymnasium.Env) -> list[gymnasium.Env]:
    """The wrappers from the outermost to the innermost, then the environment itself."""
    layers = [env]
    while isinstance(layers[-1], gymnasium.Wrapper):
        layers.append(layers[-1].env)
    return layers


def _stateful(layers: Iterable[gymnasium.Env]) -> list[gymnasium.Env]:
    return [layer for layer in layers if not isinstance(layer, ONLOOKERS)]


def _name(env: gymnasium.Env) -> str:
    inner = env.unwrapped
    return inner.spec.id if inner.spec else type(inner).__qualname__


def _qualified_name(value: Any) -> str:
    """Module and class. The dot at the end lets a prefix match whole names only."""
    return f"{type(value).__module__}.{type(value).__qualname__}."


def _is_plain(value: Any) -> bool:
    """Whether the value is data that can be replaced by a copy."""
    if value is None or isinstance(value, SCALARS):
        return True
    if isinstance(value, dict):
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    if isinstance(value, COLLECTIONS):
        return all(map(_is_plain, value))
    return isinstance(value, np.ndarray) and not value.dtype.hasobject


def _is_setting(value: Any) -> bool:
    """Whether the value is constant for an instance or only used for rendering, or a list of such values (Taxi's images)."""
    if isinstance(value, list | tuple):
        return len(value) > 0 and all(map(_is_setting, value))
    return isinstance(value, SETTING_TYPES) or _qualified_name(value).startswith(SETTING_NAMES)


def _copy(value: Copied) -> Copied:
    """Deep copy through pickle. It is several times faster than `copy.deepcopy` for tables. Shared parts stay shared."""
    copied: Copied = pickle.loads(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))
    return copied
