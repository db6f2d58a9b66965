"""What a policy can do wrong: one mutant per rule, and the error that names it. Nothing is changed by it."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from grpo import ActionScores, ContractError, GRPOConfig, GRPOTrainer, ProtocolError, SampledActions
from tests.support.policies import ExactSampling, GroupScoring, RowScoring, TablePolicy, digest
from tests.support.trainers import state_of, trainer_of


def refuses(policy: Any, pattern: str, states: Any = ("a", "b"), **settings: Any) -> None:
    """The first step raises a `ContractError` with this text, and changes nothing."""
    trainer = trainer_of(policy, **settings)
    before = state_of(trainer)
    with pytest.raises(ContractError, match=pattern):
        trainer.step(list(states))
    assert state_of(trainer) == before


class Mutant(TablePolicy):
    """A table policy whose log-probs or actions pass through a function."""

    def __init__(
        self, log_probs: Callable[[Tensor], Any] = lambda x: x, actions: Callable[[Any], Any] = lambda x: x
    ) -> None:
        super().__init__()
        self.change_log_probs, self.change_actions = log_probs, actions

    def get_log_probabilities(self, states: Any, actions: Any) -> Any:
        return self.change_log_probs(super().get_log_probabilities(states, actions))

    def generate_actions(self, states: Any, num_actions_per_state: int, **kwargs: Any) -> Any:
        return self.change_actions(super().generate_actions(states, num_actions_per_state))


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


def test_a_reference_and_a_reward_model_are_looked_at_alike() -> None:
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


@pytest.mark.parametrize("states", [[], (), torch.zeros(0, 3), np.zeros((0, 2))])
def test_no_states_are_refused(states: Any) -> None:
    trainer = trainer_of(TablePolicy())
    for ask in (trainer.step, trainer.collect, trainer.evaluate):
        with pytest.raises(ContractError, match="No states to act in: pass at least one"):
            ask(states)
    with pytest.raises(ContractError, match="No states"):
        trainer.train(states, num_iterations=1, progress=False)


@pytest.mark.parametrize(
    ("change", "got"),
    [
        (lambda groups: groups[:1], r"got 1 groups"),
        (lambda groups: [*groups, groups[0]], r"got 3 groups"),
        (lambda groups: [group[:3] for group in groups], r"\[3\] actions"),
        (lambda groups: [groups[0], groups[1] + [0]], r"\[4, 5\] actions"),
        (lambda groups: [groups[0], []], r"\[0, 4\] actions"),
        (lambda groups: [], r"got 0 groups"),
        (lambda groups: [0, 1], r"got a list of 2"),
        (lambda groups: None, r"got NoneType"),
        (lambda groups: torch.tensor(groups).reshape(-1), r"\[B, G, \.\.\.\]; got \[8\] int64"),
        (lambda groups: torch.tensor(groups).T, r"got \[4, 2\] int64"),
        (lambda groups: np.zeros((2, 5, 3)), r"got \[2, 5, 3\] float64"),
    ],
)
def test_a_wrong_number_of_actions(change: Any, got: str) -> None:
    refuses(Mutant(actions=change), rf"Mutant\.generate_actions must return 4 actions for each of 2 states.*{got}")


@pytest.mark.parametrize(
    ("change", "got"),
    [
        (lambda x: x.reshape(8, 1, 1), r"got \[8, 1, 1\] float64"),
        (lambda x: x.reshape(8, 1, 1).expand(8, 1, 3), r"got \[8, 1, 3\] float64"),
        (lambda x: x[:7], r"got \[7\] float64"),
        (lambda x: x.repeat(2), r"got \[16\] float64"),
        (lambda x: x.reshape(2, 4), r"got \[2, 4\] float64"),
        (lambda x: x.sum(), r"got \[\] float64"),
        (lambda x: x.tolist(), r"got a list of 8"),
        (lambda x: x.detach().numpy(), r"got \[8\] float64"),
        (lambda x: None, r"got NoneType"),
    ],
)
def test_log_probs_of_a_wrong_shape(change: Any, got: str) -> None:
    refuses(
        Mutant(log_probs=change),
        rf"Mutant\.get_log_probabilities must return \[N\] = \[8\] or \[N, T\]; {got}.*"
        r"Return one log-probability per \(state, action\) pair",
    )


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_log_probs_of_a_wrong_dtype(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    refuses(Mutant(log_probs=lambda x: x.to(dtype)), rf"Mutant\.get_log_probabilities must.*floating; got \[8\] {name}")


def test_a_wrong_shape_is_found_whenever_it_happens() -> None:
    policy = Mutant()
    trainer = trainer_of(policy)
    trainer.step(["a", "b"])
    before = state_of(trainer)
    policy.change_log_probs = lambda x: x[:5]
    with pytest.raises(ContractError, match=r"Mutant\.get_log_probabilities must return \[N\]"):
        trainer.step(["a", "b"])
    assert state_of(trainer) == before


@pytest.mark.parametrize(
    "cut", [lambda x: x.detach(), lambda x: x.detach().clone(), lambda x: torch.tensor(x.tolist())]
)
def test_log_probs_without_a_gradient(cut: Any) -> None:
    refuses(
        Mutant(log_probs=cut),
        r"Mutant: log-probabilities do not carry a gradient, but get_parameters\(\) holds tensors that require one",
    )


@pytest.mark.parametrize(
    "copies",
    [
        lambda policy: {"logits": policy.logits.detach().clone().requires_grad_()},
        lambda policy: {"logits": policy.logits.detach()},
        lambda policy: policy.state_dict(),
        lambda policy: {},
    ],
    ids=["leaf copies", "detached", "state_dict", "nothing"],
)
def test_parameters_that_are_not_the_parameters_themselves(copies: Any) -> None:
    class Copies(TablePolicy):
        def get_parameters(self) -> dict[str, Tensor]:
            return copies(self)

    policy = Copies()
    before = digest(policy.logits)
    with pytest.raises(ContractError, match=r"Copies: .*get_parameters\(\).*dict\(self\.named_parameters\(\)\)"):
        trainer_of(policy).step(["a", "b"])
    assert digest(policy.logits) == before


@pytest.mark.parametrize("bad", [-math.inf, math.nan, math.inf])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("row", [0, 5, 7])
def test_a_log_prob_of_a_sampled_action_that_is_no_number(bad: float, row: int, first: bool) -> None:
    """Found while collecting; and, once a plain policy needs no scoring pass any more, before the update is applied."""
    policy = Mutant()
    trainer = trainer_of(policy)
    if not first:
        trainer.step(["a", "b"])
    before = state_of(trainer)

    def poison(log_probs: Tensor) -> Tensor:
        return torch.where(torch.arange(len(log_probs)) == min(row, len(log_probs) - 1), bad, log_probs)

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
    """Its scores pass through a function when a gradient is wanted (`train`), when not (`old`), or always."""

    def __init__(self, change: Callable[[ActionScores], Any], when: str = "always") -> None:
        super().__init__()
        self.change, self.when = change, when

    def score_actions(self, states: Any, actions: Any) -> Any:
        scores = super().score_actions(states, actions)
        now = "train" if torch.is_grad_enabled() else "old"
        return self.change(scores) if self.when in ("always", now) else scores


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        (lambda s: s.log_probs, r"must return ActionScores; got \[8, \d\] float64"),
        (lambda s: replace(s, mask=s.mask.double()), r"mask must be bool; got \[8, \d\] float64.*mask\.bool\(\)"),
        (lambda s: replace(s, mask=s.mask.long()), r"mask must be bool; got \[8, \d\] int64"),
        (lambda s: replace(s, mask=s.mask[:, :1]), r"mask must be \[8, \d\] .* got \[8, 1\] bool"),
        (lambda s: replace(s, mask=s.mask[:5]), r"mask must be \[8, \d\] .* got \[5, \d\] bool"),
        (lambda s: replace(s, entropy=s.entropy[:, :1]), r"entropy must be \[8, \d\] .* got \[8, 1\] float64"),
        (lambda s: replace(s, entropy=s.entropy.isnan()), r"entropy must be floating; got \[8, \d\] bool"),
        (lambda s: replace(s, log_probs=s.log_probs[:5]), r"log_probs must be \[N, T\] with N = 8; got \[5, \d\] float64"),
        (lambda s: replace(s, log_probs=s.mask.long()), r"log_probs must be.*floating; got \[8, \d\] int64"),
    ],
)  # fmt: skip
def test_scores_that_break_their_contract(change: Any, pattern: str) -> None:
    """The data class is checked by beartype in these tests; users have no such help, so neither has this one."""
    from jaxtyping import config

    config.update("jaxtyping_disable", True)
    try:
        refuses(Masks(change), rf"Masks\.score_actions:? .*(?:{pattern})", states=(0, 1))
    finally:
        config.update("jaxtyping_disable", False)


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


@pytest.mark.parametrize(
    "change",
    [lambda s: widened(s, counts=True), lambda s: widened(s, counts=False), narrowed, flipped],
    ids=["wider", "wider, unmasked", "narrower", "another step"],
)
@pytest.mark.parametrize("epochs", [1, 2])
def test_other_steps_in_an_update_than_at_collection(change: Any, epochs: int) -> None:
    refuses(
        Masks(change, "train"),
        r"Masks (scored|masks).*Score the same steps every time",
        (0, 1),
        num_epochs_per_update=epochs,
    )


class Samples(ExactSampling):
    """What it says of its samples passes through a function."""

    def __init__(self, change: Callable[[SampledActions], Any]) -> None:
        super().__init__()
        self.change = change

    def sample_actions(self, states: Any, num_actions_per_state: int) -> Any:
        return self.change(super().sample_actions(states, num_actions_per_state))


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        (lambda s: s.actions, r"must return SampledActions; got a list of 2"),
        (lambda s: replace(s, mask=s.mask[:7]), r"mask must be bool \[N, T\] with N = 8; got \[7, 4\] bool"),
        (
            lambda s: replace(s, behaviour_log_probs=s.behaviour_log_probs[:, :2], scores=None),
            r"behaviour_log_probs must be \[8, 4\].*got \[8, 2\] float64",
        ),
        (lambda s: replace(s, mask=torch.ones_like(s.mask)), r"scores\.mask must equal mask"),
        (lambda s: replace(s, actions=s.actions[:1]), r"must return 4 actions for each of 2 states; got 1 groups"),
    ],
)
def test_samples_that_break_their_contract(change: Any, pattern: str) -> None:
    from jaxtyping import config

    config.update("jaxtyping_disable", True)
    try:
        refuses(Samples(change), rf"Samples\.sample_actions:? .*{pattern}|Samples\.sample_actions {pattern}", (0, 1))
    finally:
        config.update("jaxtyping_disable", False)


def test_behaviour_log_probs_may_be_unknown_but_not_infinite() -> None:
    def with_first(value: float) -> Callable[[SampledActions], SampledActions]:
        def change(sampled: SampledActions) -> SampledActions:
            assert sampled.behaviour_log_probs is not None
            behaviour = sampled.behaviour_log_probs.clone()
            behaviour[0, 0] = value
            return replace(sampled, behaviour_log_probs=behaviour)

        return change

    trainer_of(Samples(with_first(math.nan))).step([0, 1])
    refuses(
        Samples(with_first(-math.inf)),
        r"Samples: behaviour_log_probs of sampled steps must be finite; rows \[0\]",
        (0, 1),
    )


def test_groups_scored_with_too_few_rows() -> None:
    class Few(GroupScoring):
        def score_groups(self, states: Any, actions: Any) -> ActionScores:
            return super().score_groups(states, [group[:-1] for group in actions])

    refuses(Few(), r"Few\.score_groups: log_probs must be \[N, T\] with N = 8; got \[6, \d\]", (0, 1))
