"""What a policy or a reward can do wrong: one mutant per rule, and the error that says whose it is, or the counted recovery."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from grpo import (
    ActionScores,
    ContractError,
    ExperienceBatch,
    GRPOConfig,
    GRPOTrainer,
    NonFiniteGradientError,
    ObjectiveConfig,
    ProtocolError,
    RewardConfig,
    RewardError,
    SampledActions,
    WeightedRewards,
)
from grpo.checks import check_reward_model
from tests.policies import (
    DuckPolicy,
    ExactSampling,
    GroupScoring,
    RowScoring,
    SequencePolicy,
    TablePolicy,
    digest,
    weights_of,
)
from tests.support import as_users_run_it


def trainer_of(
    policy: Any, judge: Any = lambda states, actions: torch.arange(float(len(actions))), **settings: Any
) -> GRPOTrainer:
    return GRPOTrainer(config=GRPOConfig(**{"group_size": 4, **settings}), policy=policy, reward_model=judge)


def state_of(trainer: GRPOTrainer) -> str:
    """SHA-256 over weights and the optimizer's state."""
    optimizer = trainer.gradient.optimizer
    return digest(weights_of(trainer.policy), None if optimizer is None else optimizer.state_dict())


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


def test_a_forward_that_is_narrower_by_masked_columns_alone_is_fine() -> None:
    """Rows of one forward are padded to their own longest."""
    policy = RowScoring()
    actions = [(1, 2, 2, 0), (0,), (0,), (1, 0)]
    mask = torch.tensor([[place < len(action) for place in range(4)] for action in actions])
    trainer = trainer_of(policy, micro_batch_size=2)
    trainer.update(ExperienceBatch.from_rows([0, 0, 1, 1], actions, [0.0, 1.0, 0.0, 1.0], [0, 0, 1, 1], mask=mask))


def test_rollouts_with_another_mask_than_the_policys_are_refused() -> None:
    trainer = trainer_of(RowScoring(), num_epochs_per_update=2)
    batch = ExperienceBatch.from_rows([0, 0], [(1, 0), (0,)], [0.0, 1.0], [0, 0])  # one step per row: not so
    with pytest.raises(ContractError, match=r"masks differ.*ExperienceBatch\.from_rows the mask"):
        trainer.update(batch)


ROLLOUTS: dict[str, Any] = {
    "states": [0, 0, 1, 1],
    "actions": [(1, 2, 0), (0,), (2, 0), (1,)],
    "rewards": [0.0, 1.0, 0.0, 1.0],
    "group_ids": [0, 0, 1, 1],
    "mask": torch.tensor([[True, True, True], [True, False, False], [True, True, False], [True, False, False]]),
}
"""Rows of 3, 1, 2 and 1 steps, for a `RowScoring`."""


class OwnReference(RowScoring):
    """`ScoresReference`, with so many steps per row."""

    def __init__(self, num_steps: int) -> None:
        super().__init__()
        self.num_steps = num_steps

    def reference_log_probabilities(self, states: Any, actions: Any) -> Tensor:
        return torch.full((len(actions), self.num_steps), -1.0, dtype=torch.float64)


def trainer_with_reference(reference: Any, **settings: Any) -> GRPOTrainer:
    own = isinstance(reference, OwnReference)
    return GRPOTrainer(
        config=GRPOConfig(objective=ObjectiveConfig(kl_coef=0.1), **settings),
        policy=reference if own else RowScoring(),
        reward_model=lambda states, actions: [],
        reference_policy=None if own else reference,
    )


@pytest.mark.parametrize("micro_batch_size", [None, 2])
@pytest.mark.parametrize(
    ("reference", "name"),
    [
        (lambda: OwnReference(1), r"OwnReference\.reference_log_probabilities"),
        (lambda: OwnReference(2), r"OwnReference\.reference_log_probabilities"),
        (lambda: SequencePolicy(), "reference SequencePolicy"),
        (lambda: Masks(flipped), "reference Masks"),
    ],
    ids=["the policy's own, sums", "the policy's own, two of three steps", "a policy, sums", "a policy, another step"],
)
def test_a_reference_that_leaves_out_steps_is_refused(reference: Any, name: str, micro_batch_size: int | None) -> None:
    """A step it says nothing of must not count as one it is sure of."""
    trainer = trainer_with_reference(reference(), micro_batch_size=micro_batch_size)
    before = state_of(trainer)
    with pytest.raises(ContractError, match=rf"{name} must score every step"):
        trainer.update(ExperienceBatch.from_rows(**ROLLOUTS))
    assert state_of(trainer) == before


def test_a_reference_need_not_score_what_is_masked_for_all() -> None:
    """A fourth step that no row has: three are enough."""
    mask = torch.nn.functional.pad(ROLLOUTS["mask"], (0, 1), value=False)
    trainer = trainer_with_reference(OwnReference(3))
    metrics = trainer.update(ExperienceBatch.from_rows(**{**ROLLOUTS, "mask": mask}))
    assert metrics["train/kl_mean"] > 0


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


def test_rows_without_a_step_are_legal_and_carry_no_loss() -> None:
    """Two rows, the second empty: the mean over rows counts both, so the gradient is that of the first, halved."""
    policy = RowScoring()
    trainer = trainer_of(policy)
    mask = torch.tensor([[True, True], [False, False]])
    metrics = trainer.update(ExperienceBatch.from_rows([0, 0], [(1, 0), ()], [1.0, 0.0], [0, 0], mask=mask))
    assert metrics["steps/mean"] == 1.0
    assert metrics["train/policy_loss"] == pytest.approx(-0.5 * 0.5)  # advantage 1/2, ratio 1, weight 1/2


# Advantages of the caller's own


@pytest.mark.parametrize(
    ("make", "got"),
    [
        (lambda n: torch.ones(n - 1), r"got \[7\] float32"),
        (lambda n: torch.ones(n, 2), r"got \[8, 2\] float32"),
        (lambda n: torch.ones(1, n), r"got \[1, 8\] float32"),
        (lambda n: torch.ones(n, 1, 1), r"got \[8, 1, 1\] float32"),
        (lambda n: torch.tensor(1.0), r"got \[\] float32"),
        (lambda n: [1.0] * n, r"got a list of 8"),
        (lambda n: np.ones(n), r"got \[8\] float64"),
        (lambda n: None, r"got NoneType"),
        (lambda n: torch.tensor([1.0] * (n - 1) + [math.nan]), r"got NaN or infinity"),
        (lambda n: torch.full((n, 1), math.inf), r"got NaN or infinity"),
    ],
)
def test_advantages_that_are_not_one_number_per_row_or_step(make: Any, got: str) -> None:
    policy = TablePolicy()
    trainer = GRPOTrainer(
        config=GRPOConfig(group_size=4, batch_size=2),
        policy=policy,
        reward_model=lambda states, actions: torch.arange(8.0),
        advantages=lambda batch: make(batch.num_rows),
    )
    before = state_of(trainer)
    with as_users_run_it(), pytest.raises(ContractError, match=rf"advantages must be a tensor \[N\] = \[8\].*{got}"):
        trainer.step(["a", "b"])
    assert state_of(trainer) == before


def with_advantages(values: list[list[float]], filler: float) -> tuple[str, dict[str, float]]:
    """Three updates on `ROLLOUTS` with these advantages on its mask, and `filler` off it: the state after, the metrics."""
    torch.manual_seed(1)
    trainer = GRPOTrainer(
        config=GRPOConfig(),
        policy=RowScoring(),
        reward_model=lambda states, actions: [],
        advantages=lambda batch: torch.tensor(values).where(batch.mask, filler),
    )
    for _ in range(3):
        metrics = trainer.update(ExperienceBatch.from_rows(**ROLLOUTS))
    return state_of(trainer), {name: value for name, value in metrics.items() if not name.startswith("time/")}


def test_what_advantages_hold_off_the_mask_is_never_looked_at() -> None:
    """NaN there gives the very updates that 0 there gives."""
    values = [[1.0, -2.0, 0.5], [-1.0, 0.0, 0.0], [2.0, 0.0, 0.0], [3.0, 0.0, 0.0]]
    state, metrics = with_advantages(values, math.nan)
    assert (state, metrics) == with_advantages(values, 0.0)
    assert math.isfinite(metrics["train/grad_norm"])


def test_a_row_without_an_advantage_is_one_whatever_stands_off_its_mask() -> None:
    _, metrics = with_advantages([[1.0, -2.0, 0.5], [0.0] * 3, [0.0] * 3, [3.0, 0.0, 0.0]], math.nan)
    assert metrics["rows/skipped_zero_advantage"] == 2.0


# Rollouts made elsewhere


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"mask": ROLLOUTS["mask"].double()}, r"mask must be bool \[N, T\] with N = 4; got \[4, 3\] float64"),
        ({"mask": ROLLOUTS["mask"].long()}, r"mask must be bool \[N, T\] with N = 4; got \[4, 3\] int64"),
        ({"mask": ROLLOUTS["mask"][:3]}, r"mask must be bool \[N, T\] with N = 4; got \[3, 3\] bool"),
        ({"mask": ROLLOUTS["mask"][:, 0]}, r"mask must be bool \[N, T\] with N = 4; got \[4\] bool"),
        ({"behaviour_log_probs": torch.zeros(4, 2)}, r"behaviour_log_probs must be like mask, \[4, 3\]; got \[4, 2\]"),
        ({"behaviour_log_probs": torch.zeros(4)}, r"behaviour_log_probs must be like mask, \[4, 3\]; got \[4, 1\]"),
        ({"behaviour_log_probs": torch.zeros(3, 3)}, r"behaviour_log_probs must .*\[4\] or \[N, T\]; got \[3, 3\]"),
        ({"rewards": torch.zeros(4, 2)}, r"rewards per step must be like mask, \[4, 3\]; got \[4, 2\]"),
        ({"group_ids": [[0], [0], [1], [1]]}, r"group_ids must be \[N\].*got \[4, 1\] int64"),
        ({"group_ids": torch.tensor(0)}, r"group_ids must be \[N\].*got \[\] int64"),
    ],
)
def test_rollouts_of_another_shape_are_refused(changes: dict[str, Any], pattern: str) -> None:
    with pytest.raises(ContractError, match=rf"ExperienceBatch\.from_rows: {pattern}"):
        ExperienceBatch.from_rows(**{**ROLLOUTS, **changes})


# Rewards


def good(count: int) -> list[float]:
    return [float(n % 3) for n in range(count)]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", ["list", "tensor", "array"])
def test_a_reward_that_is_not_finite_is_an_error_at_every_position(bad: float, kind: str) -> None:
    make: Any = {"list": list, "tensor": torch.tensor, "array": np.array}[kind]
    for row in range(8):

        def broken(states: Any, actions: Any, row: int = row) -> Any:
            return make([bad if n == row else value for n, value in enumerate(good(8))])

        trainer = trainer_of(TablePolicy(), broken)
        before = state_of(trainer)
        with pytest.raises(
            RewardError, match=rf"broken must return finite numbers; got .* at rows \[{row}\] of 8"
        ) as caught:
            trainer.step(["a", "b"])
        assert str(bad) in str(caught.value)
        assert "'drop' or 'zero'" in str(caught.value)
        assert state_of(trainer) == before


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_zeroed_rewards_count_as_zero(bad: float) -> None:
    for row in range(4):
        values = [3.0, 5.0, 7.0, 9.0]
        trainer = trainer_of(
            TablePolicy(),
            lambda s, a, row=row, values=values: [bad if n == row else v for n, v in enumerate(values)],
            reward=RewardConfig(non_finite="zero"),
        )
        batch = trainer.collect(["a"])
        expected = [0.0 if n == row else v for n, v in enumerate(values)]
        assert batch.rewards.tolist() == expected
        assert trainer.advantages(batch).tolist() == pytest.approx([v - sum(expected) / 4 for v in expected])
        metrics = trainer.update(batch)
        assert (metrics["rewards/zeroed"], metrics["rows/dropped"]) == (1.0, 0.0)


@pytest.mark.parametrize("kind", [TablePolicy, RowScoring, GroupScoring, ExactSampling])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_dropped_row_leaves_the_batch_and_its_groups_statistics(kind: Any, bad: float) -> None:
    """Rewards 1, 2, 4, 8 in both groups: without one, the mean is that of the other three."""
    policy = TablePolicy(states=(0, 1)) if kind is TablePolicy else kind()
    values = [1.0, 2.0, 4.0, 8.0] * 2
    for row in range(8):
        kept = [n for n in range(8) if n != row]
        trainer = trainer_of(
            policy,
            lambda s, a, row=row: torch.tensor([bad if n == row else v for n, v in enumerate(values)]),
            reward=RewardConfig(non_finite="drop"),
        )
        batch = trainer.collect([0, 1])
        assert batch.num_rows == 7
        assert batch.rewards.tolist() == [values[n] for n in kept]
        assert batch.group_ids.tolist() == [n // 4 for n in kept]
        assert batch.states == [n // 4 for n in kept]
        assert len(batch.actions) == len(batch.mask) == 7
        means = {g: sum(values[n] for n in kept if n // 4 == g) / sum(n // 4 == g for n in kept) for g in (0, 1)}
        assert trainer.advantages(batch).tolist() == pytest.approx([values[n] - means[n // 4] for n in kept], rel=1e-6)
        metrics = trainer.update(batch)
        assert metrics["rows/dropped"] == 1.0
        assert metrics["group_stats/avg_group_size"] == 3.5
        assert metrics["rewards/max"] == 8.0


def test_when_every_reward_is_dropped_there_is_nothing_to_learn_from() -> None:
    trainer = trainer_of(TablePolicy(), lambda s, a: [math.nan] * len(a), reward=RewardConfig(non_finite="drop"))
    before = state_of(trainer)
    with pytest.raises(RewardError, match=r"<lambda>: no row of 8 has a reward"):
        trainer.step(["a", "b"])
    assert state_of(trainer) == before


WRONG_REWARDS = [
    (lambda n: torch.zeros(n - 1), r"got \[7\] float32"),
    (lambda n: [0.0] * (n + 1), r"got a list of 9"),
    (lambda n: [], r"got a list of 0"),
    (lambda n: torch.zeros(n, 1), r"got \[8, 1\] float32\. Squeeze the last axis"),
    (lambda n: np.zeros((n, 1)), r"got \[8, 1\] float64\. Squeeze the last axis"),
    (lambda n: [[0.0]] * n, r"got a list of 8"),
    (lambda n: torch.zeros(n, 2, 2), r"got \[8, 2, 2\] float32"),
    (lambda n: torch.zeros(1, n), r"got \[1, 8\] float32"),
    (lambda n: torch.tensor(0.0), r"got \[\] float32"),
    (lambda n: 1.0, r"got float 1\.0"),
    (lambda n: None, r"got NoneType None"),
    (lambda n: [None] * n, r"got a list of 8"),
    (lambda n: [1.0, None] * (n // 2), r"got a list of 8"),
    (lambda n: ["1.0"] * n, r"got a list of 8"),
    (lambda n: "12345678", r"got str"),
    (lambda n: [1j] * n, r"got a list of 8.*real numbers"),
    (lambda n: torch.zeros(n, dtype=torch.complex64), r"got \[8\] complex64.*real numbers"),
    (lambda n: [object()] * n, r"got a list of 8"),
    (lambda n: dict.fromkeys(range(n), 1.0), r"got dict"),
    (lambda n: [[1.0], [1.0, 2.0]] * (n // 2), r"got a list of 8"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "got"), WRONG_REWARDS)
def test_rewards_of_a_wrong_kind(make: Any, got: str) -> None:
    def reward(states: Any, actions: Any) -> Any:
        return make(len(actions))

    trainer = trainer_of(TablePolicy(), reward)
    before = state_of(trainer)
    with pytest.raises(RewardError, match=rf"reward must return one number per row, \[N\] = \[8\].*{got}"):
        trainer.step(["a", "b"])
    assert state_of(trainer) == before


@pytest.mark.parametrize(
    "make",
    [
        lambda values: values,
        tuple,
        lambda values: [int(v) for v in values],
        lambda values: torch.tensor(values),
        lambda values: torch.tensor(values).half(),
        lambda values: torch.tensor(values).bfloat16(),
        lambda values: torch.tensor(values).int(),
        lambda values: torch.tensor(values, requires_grad=True),
        lambda values: np.array(values, dtype=np.float32),
        lambda values: np.array(values, dtype=np.uint8),
        lambda values: np.array(values)[::-1][::-1],
        lambda values: [np.float32(v) for v in values],
        lambda values: [torch.tensor(v) for v in values],
        lambda values: [v > 0 for v in values],
    ],
)  # fmt: skip
def test_rewards_of_every_right_kind(make: Any) -> None:
    values = [1.0, 0.0, 0.0, 1.0]
    batch = trainer_of(TablePolicy(), lambda s, a: make(values)).collect(["a"])
    assert batch.rewards.tolist() == values
    assert not batch.rewards.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("make", [lambda x: x, lambda x: x.numpy(), lambda x: WeightedRewards({"x": lambda s, a: x})])
def test_rewards_that_are_the_rewards_models_own_memory_are_copied(make: Any, dtype: torch.dtype) -> None:
    memory = torch.tensor([1, 0, 2, 3], dtype=dtype)
    made = make(memory)
    batch = trainer_of(TablePolicy(), made if isinstance(made, WeightedRewards) else lambda s, a: made).collect(["a"])
    memory.zero_()
    assert batch.rewards.tolist() == [1.0, 0.0, 2.0, 3.0]
    assert all(part.tolist() == [1.0, 0.0, 2.0, 3.0] for part in batch.reward_components.values())


def test_parts_of_a_zeroed_reward_are_zeroed_too() -> None:
    """x = (NaN, 1, 2, 3) counts as (0, 1, 2, 3): mean 3/2; its row's reward, NaN + 1, as 0."""
    parts = {"x": lambda s, a: [math.nan, 1.0, 2.0, 3.0], "y": lambda s, a: [1.0] * 4}
    trainer = trainer_of(TablePolicy(), WeightedRewards(parts), reward=RewardConfig(non_finite="zero"))
    metrics = trainer.step(["a"])
    assert metrics["rewards/x/mean"] == 1.5
    assert metrics["rewards/x/std"] == pytest.approx(math.sqrt(5 / 3))
    assert metrics["rewards/y/mean"] == 1.0
    assert metrics["rewards/mean"] == pytest.approx((0 + 2 + 3 + 4) / 4)


class OfWhatApplies(WeightedRewards):
    """The sum of the parts that are no NaN, which marks a part that does not apply to the row."""

    def combine(self, components: Any) -> torch.Tensor:
        parts = torch.stack(list(components.values()))
        return parts.nansum(0).where(~parts.isnan().all(0), math.nan)


def test_a_part_that_does_not_apply_to_a_row_is_left_out_of_its_statistics() -> None:
    """x = (-, 1, 2, 3): mean 2, std 1; rewards (1, 2, 3, 4). A part that applies to no row has no mean."""
    parts = {"x": lambda s, a: [math.nan, 1.0, 2.0, 3.0], "y": lambda s, a: [1.0] * 4, "z": lambda s, a: [math.nan] * 4}
    metrics = trainer_of(TablePolicy(), OfWhatApplies(parts)).step(["a"])
    assert (metrics["rewards/x/mean"], metrics["rewards/x/std"]) == (2.0, 1.0)
    assert math.isnan(metrics["rewards/z/mean"])
    assert metrics["rewards/mean"] == 2.5
    report = check_reward_model(OfWhatApplies(parts), ["a"] * 4, [0, 1, 2, 3])
    assert report["components"].status == "passed", str(report)


def test_a_row_to_which_no_part_applies_names_the_parts_and_zeroes_its_own_only() -> None:
    """Row 0 has no reward and counts as 0; x does not apply to row 1, which does not count as 0: mean of x (0 + 2 + 3)/3."""
    parts = {"x": lambda s, a: [math.nan, math.nan, 2.0, 3.0], "y": lambda s, a: [math.nan, 1.0, 1.0, 1.0]}
    with pytest.raises(RewardError, match=r"rows \[0\] of 4, from x, y"):
        trainer_of(TablePolicy(), OfWhatApplies(parts)).step(["a"])
    trainer = trainer_of(TablePolicy(), OfWhatApplies(parts), reward=RewardConfig(non_finite="zero"))
    metrics = trainer.step(["a"])
    assert metrics["rewards/x/mean"] == pytest.approx(5 / 3)
    assert metrics["rewards/mean"] == pytest.approx((0 + 1 + 3 + 4) / 4)


def test_one_part_of_a_weighted_reward_is_named_when_it_is_wrong() -> None:
    def right(states: Any, actions: Any) -> Any:
        return [0.0] * len(actions)

    def wrong(states: Any, actions: Any) -> Any:
        return torch.zeros(len(actions), 1)

    with pytest.raises(RewardError, match=r"wrong must return one number per row"):
        trainer_of(TablePolicy(), WeightedRewards({"one": right, "two": wrong})).step(["a", "b"])


def test_a_reward_model_is_named_by_its_class() -> None:
    class Judge:
        def compute_rewards(self, states: Any, actions: Any) -> Any:
            raise KeyError("lost")

        def train(self) -> None: ...

        def eval(self) -> None: ...

        def to(self, device: Any) -> None: ...

    with pytest.raises(
        RewardError, match=r"Judge\.compute_rewards raised KeyError: 'lost' for rows 0 to 7, in 1 call"
    ) as caught:
        trainer_of(TablePolicy(), Judge()).step(["a", "b"])
    assert isinstance(caught.value.__cause__, KeyError)


class Flaky:
    """Raises on the given calls (from 0), and whenever one of the given actions is among those to be judged."""

    def __init__(self, calls: set[int] = frozenset(), actions: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        self.bad_calls, self.bad_actions, self.calls = calls, actions, 0

    def __call__(self, states: Any, actions: Any) -> list[float]:
        self.calls += 1
        if self.calls - 1 in self.bad_calls or self.bad_actions & set(actions):
            raise TimeoutError("the judge is away")
        return [float(action) for action in actions]


@pytest.mark.parametrize("retries", [0, 1, 3])
@pytest.mark.parametrize("failing", range(4))
def test_a_reward_that_raises_on_call_k_is_asked_again(failing: int, retries: int) -> None:
    """Three iterations; the call `failing` raises once. Without retries that is the end of its iteration."""
    flaky = Flaky({failing})
    trainer = trainer_of(TablePolicy(num_actions=9), flaky, reward=RewardConfig(num_retries=retries, retry_delay=0.0))
    for iteration in range(3):
        fails_now = failing == iteration
        if fails_now and retries == 0:
            before = state_of(trainer)
            with pytest.raises(
                RewardError, match=r"Flaky raised TimeoutError: the judge is away for rows 0 to 7, in 1 call"
            ):
                trainer.step(["a", "b"])
            assert state_of(trainer) == before
        else:
            metrics = trainer.step(["a", "b"])
            assert metrics["rewards/retries"] == float(fails_now)
    assert flaky.calls == 3 + (failing < 3 and retries > 0)


@pytest.mark.parametrize("retries", [0, 1, 2, 3])
@pytest.mark.parametrize("failures", [1, 2, 3, 4])
def test_retries_outlast_as_many_failures_and_no_more(failures: int, retries: int) -> None:
    flaky = Flaky(set(range(failures)))
    trainer = trainer_of(TablePolicy(num_actions=9), flaky, reward=RewardConfig(num_retries=retries, retry_delay=0.0))
    if failures <= retries:
        assert trainer.step(["a", "b"])["rewards/retries"] == failures
        assert flaky.calls == failures + 1
    else:
        with pytest.raises(RewardError, match=rf"in {retries + 1} call"):
            trainer.step(["a", "b"])
        assert flaky.calls == retries + 1


def test_rows_whose_reward_raises_are_dropped_one_by_one() -> None:
    """Actions 0..3 of state a, 0, 4, 5, 6 of state b; whatever holds a 0 raises. One call for all, then eight."""
    script = [[0, 1, 2, 3], [0, 4, 5, 6]]
    flaky = Flaky(actions={0})
    policy = TablePolicy(num_actions=7, script=script)
    trainer = trainer_of(policy, flaky, reward=RewardConfig(on_failure="drop"))
    batch = trainer.collect(["a", "b"])
    assert flaky.calls == 9
    assert batch.actions == [1, 2, 3, 4, 5, 6]
    assert batch.states == ["a"] * 3 + ["b"] * 3
    assert batch.group_ids.tolist() == [0, 0, 0, 1, 1, 1]
    assert trainer.advantages(batch).tolist() == [-1.0, 0.0, 1.0] * 2
    assert trainer.update(batch)["rows/dropped"] == 2.0


def test_retries_come_before_rows_are_dropped() -> None:
    flaky = Flaky({0})
    trainer = trainer_of(TablePolicy(), flaky, reward=RewardConfig(on_failure="drop", num_retries=1, retry_delay=0.0))
    assert trainer.step(["a", "b"])["rows/dropped"] == 0.0
    assert flaky.calls == 2


def test_when_every_row_raises_that_is_an_error() -> None:
    trainer = trainer_of(TablePolicy(), Flaky(actions={0, 1}), reward=RewardConfig(on_failure="drop"))
    with pytest.raises(RewardError, match=r"Flaky raised for every one of 8 rows") as caught:
        trainer.step(["a", "b"])
    assert isinstance(caught.value.__cause__, TimeoutError)


def test_a_row_asked_for_alone_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four calls for all rows, with pauses of 1, 2 and 4 seconds; then one for each of eight rows, at once."""
    pauses: list[float] = []
    monkeypatch.setattr("time.sleep", pauses.append)
    flaky = Flaky(actions={0})
    policy = TablePolicy(num_actions=7, script=[[0, 1, 2, 3], [0, 4, 5, 6]])
    batch = trainer_of(policy, flaky, reward=RewardConfig(on_failure="drop", num_retries=3)).collect(["a", "b"])
    assert pauses == [1.0, 2.0, 4.0]
    assert flaky.calls == 4 + 8
    assert batch.metrics["rewards/retries"] == 3.0
    assert batch.actions == [1, 2, 3, 4, 5, 6]


class RaggedScript(RowScoring):
    """Always acts as `ROLLOUTS`: rows of 3, 1, 2 and 1 steps."""

    def generate_actions(self, states: Any, num_actions_per_state: int, **kwargs: Any) -> Any:
        actions = ROLLOUTS["actions"]
        return [actions[:2], actions[2:]]


RAGGED_REWARDS = [[2.0, 3.0, 1.0], [1.0, 0.0, 0.0], [3.0, 1.0, 0.0], [2.0, 0.0, 0.0]]
"""1 + token, of every step of `ROLLOUTS`."""


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("failing", [None, 0, 1, 2, 3])
def test_ragged_rewards_per_step_survive_being_asked_for_row_by_row(failing: int | None, weighted: bool) -> None:
    """The call for all raises, and that for one row, or none; row 0 is the longest, rows 1 and 3 have one step."""

    def reward(states: Any, actions: Any) -> Any:
        (action,) = actions  # raises for more than one
        if failing is not None and action == ROLLOUTS["actions"][failing]:
            raise TimeoutError("the judge is away")
        return [[1.0 + token for token in action]]

    judge = WeightedRewards({"x": reward}) if weighted else reward
    trainer = trainer_of(RaggedScript(), judge, group_size=2, reward=RewardConfig(on_failure="drop"))
    batch = trainer.collect([0, 1])
    kept = [row for row in range(4) if row != failing]
    assert batch.actions == [ROLLOUTS["actions"][row] for row in kept]
    assert batch.mask.tolist() == ROLLOUTS["mask"][kept].tolist()
    assert batch.rewards.tolist() == [RAGGED_REWARDS[row] for row in kept]
    assert trainer.update(batch)["rows/dropped"] == 4 - len(kept)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda action: torch.ones(2),
        lambda action: torch.ones(1, 2, 2),
        lambda action: torch.ones(1, 9),
        lambda action: torch.ones(1, 2) if len(action) == 3 else torch.ones(1, len(action)),
        lambda action: torch.ones(1) if len(action) == 2 else torch.ones(1, len(action)),
        lambda action: torch.ones(1, len(action)) if len(action) == 2 else torch.ones(1),
        lambda action: ["one"],
    ],
    ids=[
        "two rows",
        "three axes",
        "too many steps",
        "one step too few",
        "one row per row",
        "one row per step",
        "words",
    ],
)
def test_a_wrong_shape_is_an_error_also_row_by_row(wrong: Any) -> None:
    def reward(states: Any, actions: Any) -> Any:
        (action,) = actions
        return wrong(action)

    trainer = trainer_of(RaggedScript(), reward, group_size=2, reward=RewardConfig(on_failure="drop"))
    before = state_of(trainer)
    with pytest.raises(RewardError, match="reward"):
        trainer.step([0, 1])
    assert state_of(trainer) == before


def test_rows_that_raise_and_rows_that_are_not_finite_are_both_dropped() -> None:
    def reward(states: Any, actions: Any) -> Any:
        if 0 in actions:
            raise ValueError("no zero")
        return [math.nan if action == 1 else float(action) for action in actions]

    policy = TablePolicy(num_actions=5, script=[[0, 1, 2, 3], [1, 4, 2, 0]])
    trainer = trainer_of(policy, reward, reward=RewardConfig(on_failure="drop", non_finite="drop"))
    batch = trainer.collect(["a", "b"])
    assert batch.actions == [2, 3, 4, 2]
    assert batch.rewards.tolist() == [2.0, 3.0, 4.0, 2.0]
    assert batch.metrics["rows/dropped"] == 4.0


def test_parts_of_a_weighted_reward_leave_with_their_rows() -> None:
    parts = WeightedRewards(
        {"x": Flaky(actions={0}), "y": lambda s, a: [10.0 * action for action in a]}, {"x": 1, "y": 0.1}
    )
    policy = TablePolicy(num_actions=4, script=[[0, 1, 2, 3]])
    batch = trainer_of(policy, parts, reward=RewardConfig(on_failure="drop")).collect(["a"])
    assert batch.rewards.tolist() == pytest.approx([2.0, 4.0, 6.0])
    assert batch.reward_components["x"].tolist() == [1.0, 2.0, 3.0]
    assert batch.reward_components["y"].tolist() == [10.0, 20.0, 30.0]


def test_rewards_per_step_must_fit_the_policys_steps() -> None:
    with pytest.raises(RewardError, match=r"Rewards per step must be \[8, 4\].*got \[8, 9\]"):
        trainer_of(ExactSampling(), lambda s, a: torch.zeros(len(a), 9)).step([0, 1])


@pytest.mark.parametrize("elsewhere", [False, True])
def test_rewards_of_steps_that_are_not_the_policys_are_never_looked_at(elsewhere: bool) -> None:
    """NaN off the mask, as an environment that pads its rewards may give it."""

    def padded(mask: Tensor) -> Tensor:
        return torch.where(mask, torch.arange(float(mask.numel())).view(mask.shape), math.nan)

    policy = ExactSampling()
    masks: list[Tensor] = []
    sample = policy.sample_actions

    def remembered(*arguments: Any) -> SampledActions:
        masks.append((sampled := sample(*arguments)).mask)
        return sampled

    policy.sample_actions = remembered  # type: ignore[method-assign]
    trainer = trainer_of(policy, lambda s, a: padded(masks[-1]))
    if elsewhere:
        mask = torch.tensor([[True, True, False], [True, False, False]])
        batch = ExperienceBatch.from_rows([0, 0], [(1, 0), (0,)], padded(mask), [0, 0], mask=mask)
    else:
        batch = trainer.collect([0, 1])
    metrics = trainer.update(batch)
    assert all(math.isfinite(value) for value in metrics.values())
    assert torch.isfinite(weights_of(policy)).all()


# Groups


def test_groups_of_one_learn_nothing_and_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    trainer = trainer_of(TablePolicy(), group_size=1)
    before = state_of(trainer)
    metrics = trainer.step(["a", "b"])
    assert "nothing to learn from: in every group all rewards are equal, or there is one row" in caplog.text
    assert state_of(trainer) == before
    assert metrics["train/skipped_updates"] == 1.0
    assert metrics["group_stats/avg_group_size"] == 1.0
    assert metrics["group_stats/zero_variance_fraction"] == 1.0


# Gradients that are not finite


class Poisoned(TablePolicy):
    """Puts a value into its gradient at the given backward passes, counted from 0."""

    def __init__(self, when: set[int], value: float) -> None:
        super().__init__()
        self.num_backwards = 0

        def hook(gradient: Tensor) -> Tensor:
            self.num_backwards += 1
            if self.num_backwards - 1 not in when:
                return gradient
            poisoned = gradient.clone()
            poisoned[1, 0] = value
            return poisoned

        self.logits.register_hook(hook)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", range(6))
@pytest.mark.parametrize("duck", [False, True])
def test_an_update_with_a_gradient_that_is_not_finite_changes_nothing(at: int, bad: float, duck: bool) -> None:
    """Six updates in two iterations; the poisoned one leaves weights and Adam's moments bitwise as they were."""
    policy: Any = Poisoned({at}, bad)
    if duck:
        inner, policy = policy, DuckPolicy(num_actions=2)
        policy.tensors = {"logits": inner.logits}
    seen: list[str] = []
    trainer = trainer_of(policy, batch_size=3, seed=0)
    apply, skip = trainer.gradient.apply, trainer.gradient.skip

    def after(method: Any) -> Any:
        def call(*arguments: Any) -> None:
            method(*arguments)
            seen.append(state_of(trainer))

        return call

    trainer.gradient.apply, trainer.gradient.skip = after(apply), after(skip)  # type: ignore[method-assign]
    states = [0, 1] if duck else ["a", "b"]
    start = state_of(trainer)
    skipped = [trainer.step(states)["train/skipped_updates"] for _ in range(2)]
    assert skipped == ([1.0, 0.0] if at < 3 else [0.0, 1.0])
    history = [start, *seen]
    changed = [before != after for before, after in pairwise(history)]
    assert changed == [n != at for n in range(6)]
    assert torch.isfinite(weights_of(policy)).all()


def test_a_poisoned_micro_batch_skips_its_whole_update() -> None:
    """8 rows in forwards of 3: three backward passes per update; the second of the first update is poisoned."""
    policy = Poisoned({1}, math.nan)
    trainer = trainer_of(policy, micro_batch_size=3)
    before = state_of(trainer)
    metrics = trainer.step(["a", "b"])
    assert metrics["train/skipped_updates"] == 1.0
    assert state_of(trainer) == before
    assert policy.logits.grad is None
    trainer.step(["a", "b"])
    assert state_of(trainer) != before


@pytest.mark.parametrize("limit", [1, 3])
def test_too_many_skipped_updates_in_a_row_end_the_run_with_a_checkpoint(limit: int, tmp_path: Path) -> None:
    """Iterations 0 and 1 are sound, then nothing is."""
    trainer = trainer_of(Poisoned(set(range(2, 100)), math.nan), max_skipped_updates=limit, seed=0)
    states: list[str] = []

    class Sink:
        def log(self, metrics: Any, iteration: int) -> None:
            states.append(state_of(trainer))

        def close(self) -> None: ...

    with pytest.raises(
        NonFiniteGradientError, match=rf"{limit} updates in a row had a gradient of norm nan.*no weight"
    ):
        trainer.train(
            ["a", "b"], num_iterations=20, sinks=[Sink()], checkpoint_dir=tmp_path, checkpoint_every=100, progress=False
        )
    assert len(states) == 2 + limit - 1
    assert set(states[1:]) == {state_of(trainer)}
    fresh = trainer_of(Poisoned(set(), math.nan), max_skipped_updates=limit, seed=9)
    fresh.load_checkpoint(tmp_path)
    assert state_of(fresh) == state_of(trainer)
    assert fresh.iteration == len(states)


def test_a_run_ended_by_skipped_updates_is_given_all_of_them_again_when_it_is_loaded(tmp_path: Path) -> None:
    """Three in a row end it. Loaded, one more bad update is skipped, and a second; the third ends it."""
    trainer = trainer_of(Poisoned(set(range(1, 100)), math.nan), max_skipped_updates=3)
    with pytest.raises(NonFiniteGradientError):
        trainer.train(["a", "b"], num_iterations=9, checkpoint_dir=tmp_path, checkpoint_every=9, progress=False)
    resumed = trainer_of(Poisoned(set(range(100)), math.nan), max_skipped_updates=3)
    resumed.load_checkpoint(tmp_path)
    assert [resumed.step(["a", "b"])["train/skipped_updates"] for _ in range(2)] == [1.0, 1.0]
    with pytest.raises(NonFiniteGradientError, match="3 updates in a row"):
        resumed.step(["a", "b"])


def test_one_sound_update_begins_the_count_again() -> None:
    trainer = trainer_of(Poisoned({0, 1, 3, 4, 6, 7}, math.inf), max_skipped_updates=3)
    skipped = [trainer.step(["a", "b"])["train/skipped_updates"] for _ in range(9)]
    assert skipped == [1.0, 1.0, 0.0] * 3
    trainer = trainer_of(Poisoned({0, 1, 2}, math.inf), max_skipped_updates=3)
    trainer.step(["a", "b"])
    trainer.step(["a", "b"])
    with pytest.raises(NonFiniteGradientError, match=re.escape("3 updates in a row")):
        trainer.step(["a", "b"])
