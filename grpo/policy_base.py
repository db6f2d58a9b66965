"""What a policy is: six methods, and optional capabilities of one method each.

Nothing here is inherited from. A class that has the methods is a policy; a class that also has `score_actions`
scores ragged steps, and so on. The trainer looks once, when it is built.
"""

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from .errors import ProtocolError
from .types import ActionScores, SampledActions

StateT = TypeVar("StateT", contravariant=True)
ActionT = TypeVar("ActionT")


@runtime_checkable
class PolicyModel(Protocol[StateT, ActionT]):
    """Proposes several actions for one state, and says how likely each was.

    A `torch.nn.Module` already has `train`, `eval` and `to`; `get_parameters` is then
    `return dict(self.named_parameters())`.
    """

    def generate_actions(
        self, states: Sequence[StateT], num_actions_per_state: int, **kwargs: Any
    ) -> list[list[ActionT]]:
        """Sample `num_actions_per_state` actions for each state: B lists of G, or a tensor or array [B, G, ...]."""
        ...

    def get_log_probabilities(self, states: Sequence[StateT], actions: Sequence[ActionT]) -> Tensor:
        """log pi(actions[n] | states[n]) with gradient: [N], or [N, T] when all T steps of every row count."""
        ...

    def get_parameters(self) -> dict[str, Tensor]:
        """The parameters themselves, not copies, by name; those that require a gradient are trained."""
        ...

    def train(self) -> Any:
        """Switch to training mode (dropout on)."""
        ...

    def eval(self) -> Any:
        """Switch to evaluation mode (dropout off)."""
        ...

    def to(self, device: torch.device | str) -> Any:
        """Move to a device, in place."""
        ...


@runtime_checkable
class ScoresActions(Protocol):
    """Ragged steps and exact entropy, from one forward pass."""

    def score_actions(self, states: Any, actions: Any) -> ActionScores:
        """Scores of N (state, action) rows."""
        ...


@runtime_checkable
class ScoresGroups(Protocol):
    """The state's own work (an encoder, a prompt) once per group instead of once per row."""

    def score_groups(self, states: Any, actions: Any) -> ActionScores:
        """Scores of all rows, group by group.

        Args:
            states: B states, each once.
            actions: one sequence of actions per state (lengths may differ), or a tensor or array [B, G, ...].
        """
        ...


@runtime_checkable
class SamplesWithScores(Protocol):
    """Sampling that already knows its log-probabilities: no second pass for the old policy."""

    def sample_actions(self, states: Any, num_actions_per_state: int) -> SampledActions:
        """G actions per state, with the behaviour log-probs, and the scores where the sampler is exact."""
        ...


@runtime_checkable
class ScoresReference(Protocol):
    """A reference without a second model (LoRA with the adapter off, a stored table)."""

    def reference_log_probabilities(self, states: Any, actions: Any) -> Tensor:
        """log pi_ref of N rows: [N] or [N, T]."""
        ...


@runtime_checkable
class SyncsSampler(Protocol):
    """A separate sampler (an inference engine) that has to be given the weights."""

    def sync_sampler(self) -> None:
        """Called before the first collection, after every iteration that changed weights, and after loading."""
        ...


@runtime_checkable
class PlansMicroBatches(Protocol):
    """Rows per forward chosen by what only the domain knows: token budgets, shared prompts, lengths."""

    def plan_micro_batches(self, states: Any, actions: Any) -> list[Sequence[int]]:
        """A partition of range(N) into the rows of each forward."""
        ...


@runtime_checkable
class SplitsSteps(Protocol):
    """Domains whose steps can be scored one by one: updates become shuffled minibatches of steps."""

    def split_steps(self, states: Any, actions: Any) -> tuple[Any, Any]:
        """One (state, action) row per valid step, row by row, each row's steps in order."""
        ...


@runtime_checkable
class KeysStates(Protocol):
    """Domains whose states recur within a group, for `advantage.credit="gigpo"`."""

    def state_keys(self, states: Any, actions: Any) -> Tensor:
        """[N, T] integers: the state each step was taken in; equal numbers mark equal states within a group."""
        ...


@runtime_checkable
class HasState(Protocol):
    """Anything else that an exact resume needs: environments, generators, counters."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors, arrays, numbers, strings, None, and lists, tuples and dicts of these."""
        ...

    def load_state_dict(self, state: Any) -> Any:
        """Restore what `state_dict` returned."""
        ...


POLICY_METHODS = ("generate_actions", "get_log_probabilities", "get_parameters", "train", "eval", "to")


def require_methods(value: Any, methods: Sequence[str], role: str, protocol: str) -> None:
    """All of `methods` are callable on `value`.

    Raises:
        ProtocolError: (a TypeError) naming every method that is missing.
    """
    if isinstance(value, type):
        raise ProtocolError(f"{role} must be an instance; got the class {value.__name__}. Call it first.")
    missing = [name for name in methods if not callable(getattr(value, name, None))]
    if missing:
        listed = ", ".join(f"{name}()" for name in missing)
        raise ProtocolError(
            f"{role} must implement {protocol}; {type(value).__name__} lacks {listed}. "
            f"Add the missing methods: nothing has to be inherited."
        )
