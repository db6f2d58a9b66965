"""What a policy can do wrong in an iteration: the error that names it, and nothing is changed by it.

The shapes that a policy may return are tested in `_collecting/test_contract.py` and `test_experience_collector.py`.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from grpo import ActionScores, ConfigError, ContractError, GRPOConfig, GRPOTrainer, ProtocolError
from tests.support.policies import RowScoring, TablePolicy, digest
from tests.support.trainers import state_of, trainer_of


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


# What a policy is


def test_every_missing_method_is_named_at_once() -> None:
    class Half:
        def generate_actions(self, states: Any, num_actions_per_state: int) -> Any: ...

        def eval(self) -> None: ...

        to = "cpu"

    with pytest.raises(TypeError) as caught:
        trainer_of(Half())
    assert isinstance(caught.value, ProtocolError)
    for part in (
        "policy must implement PolicyModel",
        "Half",
        "get_log_probabilities()",
        "get_parameters()",
        "train()",
        "to()",
    ):
        assert part in str(caught.value)
    assert "generate_actions" not in str(caught.value)
    assert "eval()" not in str(caught.value)


def test_missing_methods_of_a_reference_and_a_reward_model_are_named_too() -> None:
    class Wrong:
        def compute_rewards(self, states: Any, actions: Any) -> Any: ...

    with pytest.raises(
        ProtocolError, match=r"reference_policy must implement PolicyModel; Wrong lacks generate_actions"
    ):
        GRPOTrainer(config=GRPOConfig(), policy=TablePolicy(), reward_model=lambda s, a: [], reference_policy=Wrong())
    with pytest.raises(
        ProtocolError, match=r"reward_model must implement RewardModel; Wrong lacks train\(\), eval\(\), to\(\)"
    ):
        trainer_of(TablePolicy(), Wrong())
    with pytest.raises(ProtocolError, match=r"reward_model must implement RewardModel; int lacks compute_rewards\(\)"):
        trainer_of(TablePolicy(), 3)


def test_a_class_in_place_of_an_instance_is_refused() -> None:
    class Reward:
        def compute_rewards(self, states: Any, actions: Any) -> Any: ...

        def train(self) -> None: ...

        def eval(self) -> None: ...

        def to(self, device: Any) -> None: ...

    with pytest.raises(ProtocolError, match=r"reward_model must be an instance; got the class Reward"):
        trainer_of(TablePolicy(), Reward)
    with pytest.raises(ProtocolError, match=r"policy must be an instance; got the class TablePolicy"):
        trainer_of(TablePolicy)


# What a policy returns


def test_empty_states_are_refused(subtests: pytest.Subtests) -> None:
    trainer = trainer_of(TablePolicy())
    for states in [[], (), torch.zeros(0, 3), np.zeros((0, 2))]:
        with subtests.test(states=type(states).__name__):
            for ask in (trainer.step, trainer.collect, trainer.evaluate):
                with pytest.raises(ContractError, match="No states to act in: pass at least one"):
                    ask(states)
            with pytest.raises(ContractError, match="No states"):
                trainer.train(states, num_iterations=1, progress=False)


def test_log_probs_of_a_wrong_shape_or_dtype_are_refused(subtests: pytest.Subtests) -> None:
    cases: list[tuple[Any, str]] = [
        (
            lambda x: x.reshape(8, 1, 1),
            r"; got \[8, 1, 1\] float64.*Return one log-probability per \(state, action\) pair",
        ),
        (lambda x: x.tolist(), r"; got a list of 8.*Return one log-probability per \(state, action\) pair"),
        (lambda x: x.long(), r", floating-point; got \[8\] int64"),
    ]
    for change, got in cases:
        with subtests.test(got=got):
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


def test_get_parameters_that_returns_copies_is_refused(subtests: pytest.Subtests) -> None:
    class Copies(TablePolicy):
        copies: Any

        def get_parameters(self) -> dict[str, Tensor]:
            return self.copies(self)

    cases: dict[str, Any] = {
        "leaf copies": lambda policy: {"logits": policy.logits.detach().clone().requires_grad_()},
        "computed": lambda policy: {"logits": policy.logits * 1.0},
        "detached": lambda policy: {"logits": policy.logits.detach()},
        "state_dict": lambda policy: policy.state_dict(),
        "nothing": lambda policy: {},
    }
    for case, copies in cases.items():
        with subtests.test(case=case):
            policy = Copies()
            Copies.copies = staticmethod(copies)
            before = digest(policy.logits)
            with pytest.raises(
                (ConfigError, ContractError), match=r"Copies.*get_parameters\(\).*dict\(self\.named_parameters\(\)\)"
            ):
                trainer_of(policy).step(["a", "b"])
            assert digest(policy.logits) == before


def test_a_non_finite_log_prob_of_a_sampled_action_is_refused(subtests: pytest.Subtests) -> None:
    """The error is raised while collecting, or before the update once a plain policy needs no scoring pass."""
    for bad, first, row in [(-math.inf, True, 0), (math.nan, True, 7), (-math.inf, False, 7), (math.inf, False, 0)]:
        with subtests.test(bad=bad, first=first, row=row):
            policy = Mutant()
            trainer = trainer_of(policy)
            if not first:
                trainer.step(["a", "b"])
            before = state_of(trainer)

            def poison(log_probs: Tensor, row: int = row, bad: float = bad) -> Tensor:
                return torch.where(torch.arange(len(log_probs)) == row, bad, log_probs)

            policy.change_log_probs = poison
            with pytest.raises(
                ContractError, match=r"Mutant: .*of sampled steps must be finite.*finfo\(dtype\)\.min, not -inf"
            ):
                trainer.step(["a", "b"])
            assert state_of(trainer) == before
            policy.change_log_probs = lambda x: x
            trainer.step(["a", "b"])  # and the policy is as good as before
            assert torch.isfinite(policy.logits).all()


class Masks(RowScoring):
    """Its scores pass through a function when a gradient is wanted."""

    def __init__(self, change: Callable[[ActionScores], Any]) -> None:
        super().__init__()
        self.change = change

    def score_actions(self, states: Any, actions: Any) -> Any:
        scores = super().score_actions(states, actions)
        return self.change(scores) if torch.is_grad_enabled() else scores


def widened(scores: ActionScores, *, counts: bool) -> ActionScores:
    """One more column, which counts or does not."""
    more = torch.full((len(scores.mask), 1), counts)
    return ActionScores(
        log_probs=torch.cat([scores.log_probs, torch.zeros(len(more), 1).double()], 1),
        mask=torch.cat([scores.mask, more], 1),
    )


def narrowed(scores: ActionScores) -> ActionScores:
    return ActionScores(log_probs=scores.log_probs[:, :-1], mask=scores.mask[:, :-1])


def flipped(scores: ActionScores) -> ActionScores:
    mask = scores.mask.clone()
    mask[1, 0] = False
    return ActionScores(log_probs=scores.log_probs, mask=mask)


def test_scoring_other_steps_in_an_update_than_at_collection_is_refused(subtests: pytest.Subtests) -> None:
    cases: dict[str, Any] = {
        "wider": lambda scores: widened(scores, counts=True),
        "wider, unmasked": lambda scores: widened(scores, counts=False),
        "narrower": narrowed,
        "another step": flipped,
    }
    for (case, change), epochs in itertools.product(cases.items(), [1, 2]):
        with subtests.test(case=case, epochs=epochs):
            refuses(
                Masks(change),
                r"Masks (scored|must return).*Score the same steps every time",
                (0, 1),
                num_epochs_per_update=epochs,
            )
