"""Teachers: a function that scores, a policy that reads hints, and several teachers for different states."""

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from grpo._collecting.scoring import Scorer, join_scores
from grpo._common.calls import takes
from grpo._common.conversion import describe, require_lengths
from grpo._common.protocols import parameters_of, require_methods
from grpo.errors import ConfigError, ContractError
from grpo.policy_base import POLICY_METHODS
from grpo.reward_model_base import is_function
from grpo.types import ActionScores, Rows, select_rows, zero_outside


def no_reward(states: Rows, actions: Rows) -> Float[Tensor, " N"]:  # noqa: ARG001
    """The reward 0 for every action, for a policy that learns from a teacher or demonstrations alone.

    Example:
        >>> no_reward(["a", "a"], [0, 1])
        tensor([0., 0.])
    """
    return torch.zeros(len(actions))


class _Teacher:
    """What teachers have in common: they only score, and the methods of a policy follow from `score_actions`."""

    score_actions: Callable[[Rows, Rows], ActionScores]

    def get_log_probabilities(self, states: Rows, actions: Rows) -> Float[Tensor, " N"]:
        """log pi(actions[n] | states[n]): the log-probs of a row's steps are added up."""
        scores = self.score_actions(states, actions)
        return zero_outside(scores.log_probs, scores.mask).sum(1)

    def train(self) -> "_Teacher":
        """Do nothing, because a teacher is not trained."""
        return self


class Teacher(_Teacher):
    """A teacher that is a function: a table, a service, or a policy of another library.

    It has no weights that are saved, and is not moved: the function decides where it computes.

    Args:
        log_probs: `log_probs(states, actions)` returns one entry per row: the log-prob of its action or, if actions have
            several steps, the log-probs [T] of the student's steps. As a tensor [N] or [N, T], or as a list of N entries.

    Raises:
        ConfigError: `log_probs` is no function of states and actions.

    Example:
        >>> table = torch.tensor([[0.9, 0.1], [0.2, 0.8]]).log()  # two actions in two states
        >>> teacher = Teacher(lambda states, actions: table[states, actions])
        >>> teacher.get_log_probabilities([0, 1], [0, 0]).exp()
        tensor([0.9000, 0.2000])
    """

    def __init__(self, log_probs: Callable[[Any, Any], Any]) -> None:
        if not is_function(log_probs) or not takes(log_probs, 2):
            raise ConfigError(f"Teacher: log_probs must be a function of (states, actions); got {describe(log_probs)}.")
        self.log_probs = log_probs

    @torch.no_grad()
    def score_actions(self, states: Rows, actions: Rows) -> ActionScores:
        """The function's log-probs, padded to the longest row.

        Raises:
            ContractError: The function did not return one entry per row, each a float or floats [T].
        """
        found = self.log_probs(states, actions)
        require_lengths("Teacher: log_probs(states, actions)", len(states), log_probs=found)
        rows = [_steps(row) for row in found]
        mask = pad_sequence([torch.ones_like(row, dtype=torch.bool) for row in rows], batch_first=True)
        return ActionScores(log_probs=pad_sequence(rows, batch_first=True), mask=mask)

    def generate_actions(self, states: Rows, num_actions_per_state: int, **kwargs: Any) -> Any:
        """Raise an error: the function only says how likely an action is."""
        raise ContractError("Teacher only scores actions. Sample from the policy that learns.")

    def get_parameters(self) -> dict[str, Tensor]:
        """Empty: nothing of it is trained or saved."""
        return {}

    def eval(self) -> "Teacher":
        """Do nothing."""
        return self

    def to(self, device: torch.device | str) -> "Teacher":
        """Do nothing."""
        return self


def _steps(row: Any) -> Float[Tensor, " T"]:
    """The log-probs of a row's steps."""
    try:
        steps = torch.as_tensor(row)
    except (TypeError, ValueError, RuntimeError):  # what torch raises for texts, None and ragged lists
        steps = torch.zeros(0, 0)
    if steps.dim() > 1 or not steps.is_floating_point():
        raise ContractError(
            f"Teacher: log_probs(states, actions) must return a float or floats [T] per row; got {describe(row)}."
        )
    return steps.reshape(-1)


class Hinted(_Teacher):
    """A policy that reads more than the student: its states have a hint, such as a right answer or an error text.

    Self-distillation: with the hint, a policy knows what to do, and it teaches itself to do the same without the hint. Pass it
    as the reference of the policy: `reference_policy=Hinted(policy, hint)`. It scores the student's actions in the hinted
    states, with the weights that the policy has when an iteration is collected.

    The policy must read the states when it scores. A policy whose actions hold all that it reads cannot be given a hint.

    Args:
        policy: The policy that is trained. Or a copy of it, with `is_copy=True`.
        hint: `hint(states, actions)` returns N other states, in each of which the policy scores the action of the same row. It
            sees the actions because a hint may be a comment on them, such as the error that an action raised.
        is_copy: Whether `policy` is a copy, whose weights do not change with the updates. A checkpoint keeps them, and
            `config.reference_sync_every` moves them towards the policy.

    Raises:
        ProtocolError: The policy lacks methods.
        ConfigError: `hint` is no function of states and actions.

    Example:
        A language model that learns from the answers in its data set, whose rows have the columns `prompt` and `answer`::

            def hint(states, actions):
                return [f"{row['prompt']}\n(The answer is {row['answer']}.)" for row in states]

            trainer = GRPOTrainer(policy=policy, reference_policy=Hinted(policy, hint), reward_model=no_reward, config=...)

    Source:
        Hübotter et al. 2026 (SDPO), arXiv:2601.20802; Shenfeld et al. 2026 (SDFT), arXiv:2601.19897.
    """

    def __init__(self, policy: Any, hint: Callable[[Any, Any], Any], *, is_copy: bool = False) -> None:
        require_methods(policy, POLICY_METHODS, "Hinted: policy", "PolicyModel")
        if not is_function(hint) or not takes(hint, 2):
            raise ConfigError(
                f"Hinted: hint must be a function of (states, actions); got {describe(hint)}. It returns one state per row."
            )
        self.policy, self.hint, self.is_copy = policy, hint, is_copy
        self._score = Scorer(policy)

    def score_actions(self, states: Rows, actions: Rows) -> ActionScores:
        """The policy's scores of the actions in the hinted states.

        Raises:
            ContractError: `hint` did not return one state per row.
        """
        hinted = self.hint(states, actions)
        require_lengths("Hinted: hint(states, actions)", len(states), states=hinted)
        return self._score(hinted, actions, torch.arange(len(states)))  # each row has its own state

    def generate_actions(self, states: Rows, num_actions_per_state: int, **kwargs: Any) -> Any:
        """Raise an error: a hint is made for an action, and there is none yet."""
        raise ContractError("Hinted only scores actions. Sample from the policy itself, in states that have the hint.")

    def get_parameters(self) -> dict[str, Tensor]:
        """The weights of a copy. Empty for the trained policy itself, whose weights the trainer has already."""
        return dict(parameters_of(self.policy)) if self.is_copy else {}

    def eval(self) -> "Hinted":
        """Switch the policy to evaluation mode. The trainer switches it back before an update."""
        self.policy.eval()
        return self

    def to(self, device: torch.device | str) -> "Hinted":
        """Move the policy to a device."""
        self.policy.to(device)
        return self


class Teachers(_Teacher):
    """Several teachers, each for its own states.

    Args:
        choose: Maps a state to the name of its teacher.
        teachers: The teachers by name: policies, which have the same actions and steps as the student.

    Raises:
        ProtocolError: A teacher lacks methods.
        ConfigError: There is no teacher, or `choose` is no function of a state.

    Example:
        Two models, for questions in two languages::

            Teachers(lambda state: state["language"], {"fr": french_policy, "de": german_policy})
    """

    def __init__(self, choose: Callable[[Any], Hashable], teachers: Mapping[Hashable, Any]) -> None:
        given: Any = teachers
        if not isinstance(given, Mapping) or not given:
            raise ConfigError(f"Teachers: teachers must be a dict of policies by name; got {describe(teachers)}.")
        if not is_function(choose) or not takes(choose, 1):
            raise ConfigError(f"Teachers: choose must be a function of a state; got {describe(choose)}.")
        for name, teacher in teachers.items():
            require_methods(teacher, POLICY_METHODS, f"Teachers: the teacher {name!r}", "PolicyModel")
        self.choose, self.teachers = choose, dict(teachers)
        self._scores = {name: Scorer(teacher) for name, teacher in self.teachers.items()}

    def score_actions(self, states: Rows, actions: Rows) -> ActionScores:
        """The scores of each row by the teacher of its state. Each teacher makes one forward pass.

        Raises:
            ContractError: `choose` returned a name that no teacher has.
        """
        rows = self._rows_by_teacher(states)
        parts = [
            self._scores[name](select_rows(states, index), select_rows(actions, index), index)
            for name, index in rows.items()
        ]
        same = [ActionScores(log_probs=part.log_probs, mask=part.mask) for part in parts]  # not all may give an entropy
        return join_scores(same, torch.cat([*rows.values()]).argsort())

    def generate_actions(self, states: Rows, num_actions_per_state: int, **kwargs: Any) -> list[Any]:
        """Actions of each state by its teacher, a sequence of G per state."""
        groups: dict[int, Any] = {}
        for name, index in self._rows_by_teacher(states).items():
            found = self.teachers[name].generate_actions(select_rows(states, index), num_actions_per_state, **kwargs)
            groups |= dict(zip(index.tolist(), found, strict=True))
        return [groups[place] for place in range(len(states))]

    def _rows_by_teacher(self, states: Rows) -> dict[Hashable, Tensor]:
        rows: dict[Hashable, list[int]] = {}
        for place in range(len(states)):
            name: Any = self.choose(states[place])
            if not isinstance(name, Hashable) or name not in self.teachers:
                raise ContractError(
                    f"Teachers: choose must return one of {sorted(map(repr, self.teachers))}; got {name!r} for state {place}. "
                    "Add this teacher, or choose another."
                )
            rows.setdefault(name, []).append(place)
        return {name: torch.tensor(places) for name, places in rows.items()}

    def get_parameters(self) -> dict[str, Tensor]:
        """The weights of all teachers, as `teacher.name`."""
        found = {name: parameters_of(teacher) for name, teacher in self.teachers.items()}
        return {f"{name}.{key}": value for name, values in found.items() for key, value in values.items()}

    def eval(self) -> "Teachers":
        """Switch every teacher to evaluation mode."""
        for teacher in self.teachers.values():
            teacher.eval()
        return self

    def to(self, device: torch.device | str) -> "Teachers":
        """Move every teacher to a device."""
        for teacher in self.teachers.values():
            teacher.to(device)
        return self
