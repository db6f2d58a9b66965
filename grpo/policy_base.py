"""The policy: a protocol of six methods, and optional capabilities with one method each.

There is no base class: a class with the six methods is a policy. The trainer looks for capabilities in its constructor, once.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from .types import ActionScores, SampledActions

StateT = TypeVar("StateT", contravariant=True)
ActionT = TypeVar("ActionT")


@runtime_checkable
class PolicyModel(Protocol[StateT, ActionT]):
    """Samples several actions for one state, and gives their log-probabilities.

    A `torch.nn.Module` already has `train`, `eval` and `to`; its `get_parameters` is `return dict(self.named_parameters())`.
    """

    def generate_actions(
        self, states: Sequence[StateT], num_actions_per_state: int, **kwargs: Any
    ) -> list[list[ActionT]]:
        """Sample `num_actions_per_state` actions for each state: B lists of G, or a tensor or array [B, G, ...]."""

    def get_log_probabilities(self, states: Sequence[StateT], actions: Sequence[ActionT]) -> Tensor:
        """Return log pi(actions[n] | states[n]) with gradient: [N], or [N, T] when all T steps of every row count."""

    def get_parameters(self) -> dict[str, Tensor]:
        """Return the parameters by name: the tensors themselves, not copies. Tensors with `requires_grad` are trained."""

    def train(self) -> Any:
        """Switch to training mode (dropout on)."""

    def eval(self) -> Any:
        """Switch to evaluation mode (dropout off)."""

    def to(self, device: torch.device | str) -> Any:
        """Move to a device, in place."""


@runtime_checkable
class ScoresActions(Protocol):
    """Scores rows with different numbers of steps. One forward pass gives log-probs, mask, exact entropy and values."""

    def score_actions(self, states: Any, actions: Any) -> ActionScores:
        """Return the scores of N rows: `actions[n]` was taken in `states[n]`."""


@runtime_checkable
class ScoresGroups(Protocol):
    """Computes a state's own part of the forward pass (an encoder, a prompt) once per group, not once per row."""

    def score_groups(self, states: Any, actions: Any) -> ActionScores:
        """Return the scores of all rows, group by group.

        Args:
            states: B states, each once.
            actions: One sequence of actions per state (lengths may differ), or a tensor or array [B, G, ...].
        """


@runtime_checkable
class SamplesWithScores(Protocol):
    """Samples actions together with their log-probs, which saves a second forward pass for the old policy."""

    def sample_actions(self, states: Any, num_actions_per_state: int) -> SampledActions:
        """Sample G actions per state, with their behaviour log-probs, and with their scores if the policy itself samples."""


@runtime_checkable
class ScoresReference(Protocol):
    """Scores rows under the reference without a second model. `reference_is_start = False`: its first KL may differ from 0."""

    def reference_log_probabilities(self, states: Any, actions: Any) -> Tensor:
        """Return log pi_ref(actions[n] | states[n]): [N], or [N, T] with one log-prob per step."""


@runtime_checkable
class SyncsSampler(Protocol):
    """Samples with a separate engine (such as vLLM), which needs a copy of the current weights."""

    def sync_sampler(self) -> None:
        """Copy the weights to the engine: before the first collection, after iterations that changed them, and after a load."""


@runtime_checkable
class BeginsSampling(Protocol):
    """Samples with a separate engine that can work while the policy is updated, for `GRPOConfig.iterations_ahead`."""

    def begin_sampling(self, states: Any, num_actions_per_state: int) -> Callable[[], SampledActions] | None:
        """Draw every random number now, and return a function that samples G actions per state.

        The trainer calls the function in a second thread, beside an update. So the function must not read the parameters, the
        mode or the global random generators, and must change nothing of the policy. It returns the same samples whenever it is
        called, with their `behaviour_log_probs`. The trainer calls `sync_sampler` only when the function has returned.

        None: the engine that is in use cannot sample beside an update. The trainer samples with `sample_actions`.
        """


@runtime_checkable
class PlansMicroBatches(Protocol):
    """Chooses the rows of each forward pass by token budget, shared prompts or length."""

    def plan_micro_batches(self, states: Any, actions: Any) -> list[Sequence[int]]:
        """Return the rows of each forward pass, such as [[0, 2], [1]]. Every row of range(N) must occur exactly once."""


@runtime_checkable
class SplitsSteps(Protocol):
    """Scores each step on its own, so that an update can be a shuffled minibatch of steps."""

    def split_steps(self, states: Any, actions: Any) -> tuple[Any, Any]:
        """Return one (state, action) row per valid step: first the steps of row 0, then the steps of row 1, and so on."""


@runtime_checkable
class KeysStates(Protocol):
    """Recognises states that recur within a group, for `advantage.credit="gigpo"`."""

    def state_keys(self, states: Any, actions: Any) -> Tensor:
        """Return [N, T] integers that identify the state in which each step was taken. In a group, equal numbers mean equal
        states. `grpo.types.CONTINUES`: the step continues the decision of the step before it, and is not compared itself."""


@runtime_checkable
class HasState(Protocol):
    """Has a state beyond its parameters that an exact resume needs, such as environments, generators or counters."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors, arrays, numbers, strings, None, and lists, tuples and dicts of these."""

    def load_state_dict(self, state: Any) -> Any:
        """Restore what `state_dict` returned."""


@runtime_checkable
class HasShardUnits(Protocol):
    """Names the modules whose weights `grpo.distributed.Sharded` gathers and drops one after another, such as layers."""

    def shard_units(self) -> list[nn.Module]:
        """Return modules with trained or frozen weights. A module may contain others; its remaining weights are gathered for
        the whole pass. Each forward pass calls each inner module equally often, whatever its rows are. Weights in none of the
        modules stay whole on every rank. A policy that is a module itself counts as the last of them."""


@runtime_checkable
class HasPenalty(Protocol):
    """Penalises its weights, such as their distance from a start, so that few states do not train them at will."""

    def penalty(self) -> Tensor:
        """Return a scalar with gradient. The loss of each update gets it once, however many passes and ranks there are."""


POLICY_METHODS = ("generate_actions", "get_log_probabilities", "get_parameters", "train", "eval", "to")
CAPABILITIES: tuple[type, ...] = (
    *(ScoresActions, ScoresGroups, SamplesWithScores, ScoresReference, SyncsSampler, BeginsSampling),
    *(PlansMicroBatches, SplitsSteps, KeysStates, HasState, HasShardUnits, HasPenalty),
)
