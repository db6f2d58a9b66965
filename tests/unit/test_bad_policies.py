"""What a policy can do wrong in an iteration: the error that names it, and nothing is changed by it.

The shapes that a policy may return are tested in `_collecting/test_contract.py` and `test_experience_collector.py`.
"""

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from grpo import ActionScores, ConfigError, ContractError, ProtocolError
from tests.support.policies import Changing, TablePolicy, digest
from tests.support.trainers import by_hand, state_of, trainer_of


def refuses(policy: Any, pattern: str, states: Any = ("a", "b"), **settings: Any) -> None:
    """The first step raises a `ContractError` with this text, and changes nothing."""
    trainer = trainer_of(policy, **settings)
    before = state_of(trainer)
    with pytest.raises(ContractError, match=pattern):
        trainer.step(list(states))
    assert state_of(trainer) == before


class Mutant(TablePolicy):
    """A table policy whose log-probs pass through a function."""

    def __init__(self, log_probs: Callable[[Tensor], Any] = lambda x: x) -> None:
        super().__init__()
        self.change_log_probs = log_probs

    def get_log_probabilities(self, states: Any, actions: Any) -> Any:
        return self.change_log_probs(super().get_log_probabilities(states, actions))


def test_every_missing_method_is_named_at_once() -> None:
    half = type("Half", (), {"generate_actions": print, "eval": print, "to": "cpu"})  # `to` is no method
    with pytest.raises(TypeError) as caught:
        trainer_of(half())
    assert isinstance(caught.value, ProtocolError)
    lacking = r"Half lacks get_log_probabilities\(\), get_parameters\(\), train\(\), to\(\)\."
    assert re.match(rf"policy must implement PolicyModel; {lacking}", str(caught.value))


def test_a_class_in_place_of_a_policy_and_a_reference_without_methods_are_refused() -> None:
    with pytest.raises(ProtocolError, match="policy must be an instance; got the class TablePolicy"):
        trainer_of(TablePolicy)
    message = r"reference_policy must implement PolicyModel; object lacks generate_actions"
    with pytest.raises(ProtocolError, match=message):
        by_hand(reference_policy=object())


@pytest.mark.parametrize("states", [[], (), torch.zeros(0, 3), np.zeros((0, 2))], ids=lambda x: type(x).__name__)
def test_empty_states_are_refused(states: Any) -> None:
    trainer = trainer_of(TablePolicy())
    for ask in (trainer.step, trainer.collect, trainer.evaluate):
        with pytest.raises(ContractError, match="No states to act in: pass at least one"):
            ask(states)
    with pytest.raises(ContractError, match="No states to train on"):
        trainer.train(states, num_iterations=1, progress=False)


@pytest.mark.parametrize(("change", "got"), [
    (lambda x: x.reshape(8, 1, 1), r"; got \[8, 1, 1\] float64.*Return one log-probability per \(state, action\) pair"),
    (lambda x: x.tolist(), r"; got a list of 8.*Return one log-probability per \(state, action\) pair"),
    (lambda x: x.long(), r", floating-point; got \[8\] int64"),
])  # fmt: skip
def test_log_probs_of_a_wrong_shape_or_dtype_are_refused(change: Any, got: str) -> None:
    refuses(Mutant(change), rf"Mutant\.get_log_probabilities must return \[N\] = \[8\] or \[N, T\]{got}")


def test_a_wrong_shape_is_also_refused_in_a_later_step() -> None:
    policy = Mutant()
    trainer = trainer_of(policy)
    trainer.step(["a", "b"])
    before = state_of(trainer)
    policy.change_log_probs = lambda x: x[:5]
    with pytest.raises(ContractError, match=r"Mutant\.get_log_probabilities must return \[N\]"):
        trainer.step(["a", "b"])
    assert state_of(trainer) == before


def test_log_probs_without_a_gradient_are_refused() -> None:
    refuses(
        Mutant(log_probs=lambda x: x.detach()),
        r"Mutant: log-probabilities do not carry a gradient, but get_parameters\(\) holds tensors that require one",
    )


COPIES: dict[str, Callable[[TablePolicy], Any]] = {
    "leaf copies": lambda policy: {"logits": policy.logits.detach().clone().requires_grad_()},
    "computed": lambda policy: {"logits": policy.logits * 1.0},
    "detached": lambda policy: {"logits": policy.logits.detach()},
    "state_dict": lambda policy: policy.state_dict(),
    "nothing": lambda policy: {},
}


@pytest.mark.parametrize("case", COPIES)
def test_get_parameters_that_returns_copies_is_refused(case: str) -> None:
    policy = type("Copies", (TablePolicy,), {"get_parameters": COPIES[case]})()
    before = digest(policy.logits)
    error: Any = ConfigError if case == "computed" else (ConfigError, ContractError)
    what = ".*logits is computed from other tensors" if case == "computed" else ""
    with pytest.raises(error, match=rf"Copies.*get_parameters\(\){what}.*dict\(self\.named_parameters\(\)\)"):
        trainer_of(policy).step(["a", "b"])
    assert digest(policy.logits) == before


@pytest.mark.parametrize(
    ("bad", "first", "row"), [(-math.inf, True, 0), (math.nan, True, 7), (-math.inf, False, 7), (math.inf, False, 0)]
)
def test_a_non_finite_log_prob_of_a_sampled_action_is_refused(bad: float, first: bool, row: int) -> None:
    """The error is raised while collecting, or before the update once a plain policy needs no scoring pass."""
    policy = Mutant()
    trainer = trainer_of(policy)
    if not first:
        trainer.step(["a", "b"])
    before = state_of(trainer)
    policy.change_log_probs = lambda log_probs: torch.where(torch.arange(len(log_probs)) == row, bad, log_probs)
    with pytest.raises(ContractError, match=r"Mutant: .*steps.* must be finite.*finfo\(dtype\)\.min, not -inf"):
        trainer.step(["a", "b"])
    assert state_of(trainer) == before
    policy.change_log_probs = lambda log_probs: log_probs
    trainer.step(["a", "b"])  # and the policy is as good as before
    assert torch.isfinite(policy.logits).all()


def widened(scores: ActionScores, *, counts: bool) -> ActionScores:
    """One more column, which counts or does not."""
    log_probs, mask = nn.functional.pad(scores.log_probs, (0, 1)), nn.functional.pad(scores.mask, (0, 1), value=counts)
    return ActionScores(log_probs=log_probs, mask=mask)


def flipped(scores: ActionScores) -> ActionScores:
    mask = scores.mask.clone()
    mask[1, 0] = False
    return ActionScores(log_probs=scores.log_probs, mask=mask)


OTHER_STEPS: dict[str, Callable[[ActionScores], ActionScores]] = {
    "wider": lambda scores: widened(scores, counts=True),
    "wider, unmasked": lambda scores: widened(scores, counts=False),
    "narrower": lambda scores: ActionScores(log_probs=scores.log_probs[:, :-1], mask=scores.mask[:, :-1]),
    "another step": flipped,
}


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("case", OTHER_STEPS)
def test_scoring_other_steps_in_an_update_than_at_collection_is_refused(case: str, epochs: int) -> None:
    message = r"Changing must score the batch's steps, but the masks differ: .*score the same steps every time"
    refuses(Changing(OTHER_STEPS[case]), message, (0, 1), num_epochs_per_update=epochs)
