"""Demonstrations and observations in updates: their cross-entropy by hand, and what does not see them."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grpo import (
    ActionScores,
    ConfigError,
    ContractError,
    ExperienceBatch,
    GRPOConfig,
    GRPOTrainer,
    Learner,
    ObjectiveConfig,
    ObjectiveOutput,
    SampledActions,
)
from grpo._collecting.update_plan import epoch_of_updates
from tests.support.configs import EVERY, Rows, make_policy, make_trainer
from tests.support.imitated_ranks import ImitatedRank, on_ranks
from tests.support.policies import (
    EpisodePolicy,
    GroupScoring,
    Planning,
    RowScoring,
    SequencePolicy,
    TablePolicy,
    weights_of,
)
from tests.support.stopped_runs import Unbroken, by_signal
from tests.support.trainers import ROLLOUTS, assert_same, by_hand, quarters, trainer_of, updated, without_time

GIVEN_STATES, GIVEN_ACTIONS = [2, 0, 3, 1], [(2, 1), (1,), (1, 2, 1, 1), (2, 2, 0)]
"""Demonstrations for a `SequencePolicy`, of 2, 1, 4 and 3 steps."""


def given(*rows: int) -> ExperienceBatch:
    """These demonstrations, or all."""
    chosen = rows or range(4)
    return ExperienceBatch.from_demonstrations([GIVEN_STATES[i] for i in chosen], [GIVEN_ACTIONS[i] for i in chosen])


def sampled() -> ExperienceBatch:
    return ExperienceBatch.from_rows(**ROLLOUTS)


def gradients_of(
    *batches: ExperienceBatch, kind: type[SequencePolicy] = RowScoring, **settings: Any
) -> tuple[list[Tensor], dict[str, float]]:
    """The gradient of each update of the same policy on these rows, and the metrics."""
    torch.manual_seed(0)
    return updated(kind(), *batches, **settings)


def test_demonstrations_alone_have_their_mean_cross_entropy_and_its_gradient() -> None:
    """p = (1/4, 3/4) in both states. Row (a, 0) has -log p = log 4 and the gradient p - onehot = (-3/4, 3/4); row (b, 1) has
    log 4/3 and (1/4, -1/4). Each row weighs 1/2, and the coefficient is 3."""
    policy = quarters()
    trainer, _ = by_hand(policy=policy, config={"objective": ObjectiveConfig(demonstration_coef=3.0)})
    before = policy.logits.detach().clone()
    metrics = trainer.update(ExperienceBatch.from_demonstrations(["a", "b"], [0, 1]))
    expected = 3.0 * (math.log(4) + math.log(4 / 3)) / 2
    assert metrics["train/demonstration_loss"] == pytest.approx(expected)
    assert metrics["train/total_loss"] == pytest.approx(expected)
    gradient = 3.0 / 2 * torch.tensor([[-3 / 4, 3 / 4], [1 / 4, -1 / 4]], dtype=torch.float64)
    torch.testing.assert_close(policy.logits.detach(), before - gradient)
    assert metrics["rows/demonstrations"] == 2.0


def test_beside_sampled_rows_they_have_a_denominator_of_their_own() -> None:
    """The policy's probabilities are 1/2. The four sampled rows have A = 1/2, -1/2, -1/2, 1/2 for actions 0, 1, 1, 0 of
    states a, a, b, b: each state's gradient is 1/4 (-1/2 (1/2, -1/2) + 1/2 (-1/2, 1/2)) = (-1/8, 1/8). A demonstration of
    action 1 in state a adds coefficient x (1/2, -1/2), whatever the number of sampled rows."""
    objective = ObjectiveConfig(demonstration_coef=0.5)
    trainer, policy = by_hand(rewards=[1.0, 0.0, 3.0, 4.0], config={"objective": objective})
    metrics = trainer.update(trainer.collect(["a", "b"]), ExperienceBatch.from_demonstrations(["a"], [1]))
    expected = torch.tensor([[-1 / 8 + 1 / 4, 1 / 8 - 1 / 4], [-1 / 8, 1 / 8]], dtype=torch.float64)
    torch.testing.assert_close(policy.logits.detach(), -expected)
    assert metrics["train/demonstration_loss"] == pytest.approx(0.5 * math.log(2))
    assert metrics["train/policy_loss"] == pytest.approx(0.0)
    assert metrics["train/total_loss"] == pytest.approx(0.5 * math.log(2))


LENGTHS = torch.tensor([2.0, 1.0, 4.0, 3.0])


@pytest.mark.parametrize(
    ("aggregation", "weights"),
    [
        ("row_mean", 1 / (4 * LENGTHS)),
        ("step_mean", torch.full((4,), 1 / 10)),
        ("row_sum", torch.full((4,), 1 / 4)),
        ("group_mean", 1 / (4 * LENGTHS)),  # each demonstration is a group
        ("fixed_length", torch.full((4,), 1 / (4 * 8))),
    ],
)
def test_several_steps_are_weighted_as_the_aggregation_says(aggregation, weights):
    torch.manual_seed(0)
    scores = RowScoring().score_actions(GIVEN_STATES, GIVEN_ACTIONS)
    log_probs = torch.where(scores.mask, scores.log_probs, 0.0).detach()
    fixed_length = 8 if aggregation == "fixed_length" else None
    _, metrics = gradients_of(given(), objective=ObjectiveConfig(aggregation=aggregation, fixed_length=fixed_length))
    assert metrics["train/demonstration_loss"] == pytest.approx(-float((weights.double() * log_probs.sum(1)).sum()))


@pytest.mark.filterwarnings("ignore:objective.kl_estimator='k1'")
@pytest.mark.parametrize(("name", "preset"), EVERY.items())
def test_the_gradient_is_the_sum_of_the_gradients_of_both_kinds(name, preset):
    """For every preset and further settings: no statistic, baseline, selection or metric of the sampled rows changes."""
    ours = ("train/total_loss", "train/grad_norm", "train/demonstration_loss", "rows/demonstrations")

    def learned(*, has_sampled: bool = True, has_given: bool = True) -> tuple[Tensor, dict[str, float]]:
        trainer, optimizer = make_trainer(config, make_policy(), reference=make_policy(RowScoring, seed=1))
        batches = [Rows.example().batch(config)] if has_sampled else []
        metrics = trainer.update(*batches, *([given()] if has_given else []))
        return optimizer.gradients[0], without_time(metrics)

    config = replace(preset, num_epochs_per_update=1)
    alone, metrics = learned(has_given=False)
    imitated, imitating = learned(has_sampled=False)
    both, mixed = learned()
    torch.testing.assert_close(both, alone + imitated, rtol=1e-9, atol=1e-11)
    assert mixed.keys() == {*metrics, *ours}
    for key in metrics.keys() - set(ours):
        assert mixed[key] == pytest.approx(metrics[key], nan_ok=True, abs=1e-12), key
    assert mixed["train/demonstration_loss"] == pytest.approx(imitating["train/demonstration_loss"])
    expected = metrics["train/total_loss"] + imitating["train/total_loss"]
    assert mixed["train/total_loss"] == pytest.approx(expected, abs=1e-12)


def test_an_iteration_of_demonstrations_reports_no_reward_and_no_ratio() -> None:
    _, metrics = gradients_of(given())
    measured = {name for name in metrics if name.startswith(("rewards/", "group_stats/", "train/", "steps/"))}
    assert not {name for name in measured if name.split("/")[1] in ("mean", "max", "ratio_mean", "entropy", "kl_mean")}
    assert "train/policy_loss" not in measured
    assert metrics["rows/demonstrations"] == 4.0


def test_the_rewards_and_scores_of_demonstrations_are_never_read() -> None:
    """Poison in the fields of a demonstration that only sampled rows have."""

    class Poisoned(RowScoring):
        def score_actions(self, states: Any, actions: Any) -> ActionScores:
            scores = super().score_actions(states, actions)
            is_given = torch.tensor([len(action) == 4 for action in actions]).unsqueeze(1)
            return replace(scores, entropy=scores.entropy.masked_fill(is_given, math.nan))

    objective = ObjectiveConfig(entropy_coef=0.1)
    found, metrics = gradients_of(sampled(), given(2), kind=Poisoned, objective=objective)
    assert_same(found, gradients_of(sampled(), given(2), objective=objective)[0])
    assert math.isfinite(metrics["train/entropy"])


def test_an_objective_of_the_users_own_is_asked_for_the_sampled_rows_alone() -> None:
    sizes = []

    def own(inputs: Any) -> ObjectiveOutput:
        sizes.append(len(inputs.mask))
        log_probs = torch.where(inputs.mask, inputs.log_probs, 0.0)
        return ObjectiveOutput(loss=-(inputs.weights * log_probs * inputs.advantages.unsqueeze(1)).sum(), metrics={})

    (both,), metrics = gradients_of(sampled(), given(), own_loss=own)
    (alone,), _ = gradients_of(sampled(), own_loss=own)
    (imitated,), _ = gradients_of(given(), own_loss=own)
    assert_same([both], [alone + imitated])
    assert sizes == [4, 4]
    assert metrics["train/demonstration_loss"] > 0


def test_the_policys_own_loss_counts_the_steps_of_demonstrations() -> None:
    """An auxiliary loss of 7 per step, averaged over the sampled rows and over the demonstrations."""

    class Regularised(RowScoring):
        def score_actions(self, states: Any, actions: Any) -> ActionScores:
            scores = super().score_actions(states, actions)
            return replace(scores, auxiliary_loss=torch.full_like(scores.log_probs, 7.0))

    assert gradients_of(given(), kind=Regularised)[1]["train/auxiliary_loss"] == pytest.approx(7.0)
    assert gradients_of(sampled(), given(), kind=Regularised)[1]["train/auxiliary_loss"] == pytest.approx(14.0)


class InAnyOrder(Planning):
    plan = staticmethod(lambda num_rows: [list(range(num_rows))[i::3] for i in range(3)])


@pytest.mark.parametrize(
    ("kind", "size"), [*((RowScoring, size) for size in (1, 2, 3, 5)), (GroupScoring, 3), (InAnyOrder, None)]
)
def test_no_split_into_forward_passes_changes_the_gradient(kind, size):
    expected, metrics = gradients_of(sampled(), given())
    found, same = gradients_of(sampled(), given(), kind=kind, micro_batch_size=size)
    assert_same(found, expected)
    assert same["train/demonstration_loss"] == pytest.approx(metrics["train/demonstration_loss"])


def test_each_update_of_an_iteration_has_its_share_of_the_demonstrations() -> None:
    """Batches of 2 of the 4 sampled rows: two updates, with 2 of the 4 demonstrations each. Demonstrations alone: two, too."""
    flags = torch.tensor([False] * 6 + [True] * 3)
    ids = torch.tensor([5, 5, 5, 4, 4, 4, 6, 7, 8])
    for _ in range(5):
        generator = torch.Generator().manual_seed(_)
        updates = [rows.tolist() for rows in epoch_of_updates(ids, 2, generator, flags)]  # type: ignore[union-attr]
        assert [[row < 6 for row in rows] for rows in updates] == [[True, True, False]] * 3
        assert sorted(row for rows in updates for row in rows) == list(range(9))
    (all_rows,) = epoch_of_updates(ids, 6, torch.Generator(), flags)
    assert all_rows == slice(0, 9)
    sizes = [len(rows) for rows in epoch_of_updates(ids[6:], 2, torch.Generator(), flags[6:])]  # type: ignore[arg-type]
    assert (sizes, gradients_of(sampled(), given(), batch_size=2)[1]["train/num_updates"]) == ([2, 1], 2.0)
    assert gradients_of(given(), batch_size=2, num_epochs_per_update=2)[1]["train/num_updates"] == 4.0


HALVES = [
    ExperienceBatch.from_rows(**{name: values[part] for name, values in ROLLOUTS.items()})
    for part in (slice(0, 2), slice(2, 4))
]


def on_two_ranks(*batches: list[ExperienceBatch]) -> list[Any]:
    """The gradient and the metrics of one update on each of two ranks, or an error."""
    torch.manual_seed(0)
    start = RowScoring()

    def on_rank(engine: ImitatedRank) -> tuple[Tensor, dict[str, float]]:
        own = batches[engine.rank]
        (gradient,), metrics = updated(copy.deepcopy(start), *own, engine=engine, micro_batch_size=2)
        return gradient, metrics

    return on_ranks(2, on_rank)


@pytest.mark.parametrize(
    ("whole", "of_ranks"),
    [
        ([sampled(), given()], ([HALVES[0], given(0, 1, 2)], [HALVES[1], given(3)])),
        ([given()], ([given(0, 1, 2)], [given(3)])),
        ([sampled(), given()], ([HALVES[0], given()], [HALVES[1]])),
    ],
    ids=["both", "demonstrations", "demonstrations on one rank only"],
)
def test_two_ranks_make_the_update_of_one_process(whole, of_ranks):
    expected, metrics = gradients_of(*whole)
    for gradient, found in on_two_ranks(*of_ranks):
        assert_same([gradient], expected)
        for name in ("train/demonstration_loss", "train/total_loss", "rows/demonstrations"):
            assert found[name] == pytest.approx(metrics[name])


def test_sampled_rows_on_one_rank_only_are_refused():
    errors = on_two_ranks([HALVES[0]], [given()])
    assert all(isinstance(error, ContractError) for error in errors)
    assert "either every rank has sampled rows, or no rank has; they have [2, 0]" in str(errors[0])


def test_rows_that_are_split_into_steps_have_the_mean_over_steps() -> None:
    """Episodes of 2 and 1 steps are three rows of one step."""
    torch.manual_seed(0)
    policy = EpisodePolicy()
    episodes = [(torch.rand(length, 2, dtype=torch.float64), torch.arange(length)) for length in (2, 1)]
    log_probs = policy.log_probs_of(*policy.split_steps([0.0, 1.0], episodes)).detach()
    config = GRPOConfig(group_size=2, seed=0)
    trainer = GRPOTrainer(config=config, policy=policy, reward_model=lambda s, a: [float(len(m)) for _, m in a])
    batch = ExperienceBatch.from_demonstrations([0.0, 1.0], episodes)
    sampled = trainer.collect([0.0, 1.0])
    assert trainer.update(sampled, batch)["train/demonstration_loss"] == pytest.approx(-float(log_probs.mean()))
    assert policy.rows_scored[-1] == int(sampled.mask.sum()) + 3


@pytest.mark.parametrize("is_known", [False, True])
def test_the_policy_is_asked_for_the_steps_unless_they_are_known(is_known):
    batch, policy = ExperienceBatch.from_demonstrations([2, 0], GIVEN_ACTIONS[:2]), RowScoring()
    assert batch.mask.shape == (2, 0)
    if is_known:
        batch = replace(batch, mask=torch.tensor([[True, True, False], [True, False, False]]))
    Learner(config=GRPOConfig(seed=0), policy=policy, reward_model=lambda s, a: [0.0]).update(batch)
    assert (policy.calls["score"], policy.calls["score with gradient"]) == (int(not is_known), 1)
    with pytest.raises(ContractError, match="the masks differ"):
        gradients_of(replace(batch, mask=torch.ones(2, 2, dtype=torch.bool)))


def test_a_policy_that_has_told_that_it_decides_once_per_row_is_not_asked_again():
    table = TablePolicy()
    learner = Learner(config=GRPOConfig(seed=0), policy=table, reward_model=lambda s, a: [0.0] * len(s))
    for _ in range(2):
        learner.update(ExperienceBatch.from_demonstrations(["a"], [1]))
    assert table.calls["score"] == 1


class Mute(RowScoring):
    def score_actions(self, states: Any, actions: Any) -> ActionScores:
        scores = super().score_actions(states, actions)
        return replace(scores, mask=torch.zeros_like(scores.mask))


MAKE = ExperienceBatch.from_demonstrations


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: MAKE(["a"], [1, 0]), ContractError, r"actions must have one entry per row = 1; got a list of 2 int"),
        (lambda: MAKE([], []), ContractError, "there must be a row to imitate; got none"),
        (lambda: MAKE("ab", [1, 0]), ContractError, "states must be a list"),
        (lambda: MAKE(["a"], [1], mask=[[1.0]]), ContractError, r"mask must be bool \[N, T\] with N = 1"),
        (lambda: gradients_of(), ContractError, "update needs at least one batch; got none"),
        (lambda: gradients_of(given(), kind=Mute), ContractError, "Mute: demonstrations must have a step to imitate"),
        (lambda: ObjectiveConfig(demonstration_coef=0.0), ConfigError, "demonstration_coef must be > 0"),
    ],
)
def test_wrong_demonstrations_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_replayed_rows_are_sampled_rows() -> None:
    """The second iteration trains on the rows of both, and on its own demonstrations alone."""
    trainer, _ = by_hand(config={"replay_iterations": 1})
    demonstrations = ExperienceBatch.from_demonstrations(["a"], [1])
    trainer.update(trainer.collect(["a", "b"]), demonstrations)
    metrics = trainer.update(trainer.collect(["a", "b"]), demonstrations)
    assert (metrics["rows/replayed"], metrics["rows/demonstrations"]) == (4.0, 1.0)
    metrics = trainer.update(demonstrations)
    assert (metrics["rows/replayed"], metrics["rows/demonstrations"]) == (0.0, 1.0)
    metrics = trainer.update(trainer.collect(["a", "b"]))
    assert metrics["rows/replayed"] == 4.0


def test_rows_without_an_advantage_are_skipped_and_demonstrations_are_not() -> None:
    trainer, policy = by_hand(rewards=[1.0, 1.0, 1.0, 1.0])
    metrics = trainer.update(trainer.collect(["a", "b"]), ExperienceBatch.from_demonstrations(["a", "b"], [1, 1]))
    assert (metrics["rows/skipped_zero_advantage"], metrics["train/num_updates"]) == (4.0, 1.0)
    torch.testing.assert_close(policy.logits.detach(), torch.tensor([[-1 / 4, 1 / 4]] * 2, dtype=torch.float64))


def test_several_batches_of_sampled_rows_are_one_batch() -> None:
    """`update` takes any number of batches. Groups of different batches are different groups."""
    one, other = by_hand(advantages=None)[0], by_hand()[0]
    first, second = (one.collect(["a", "b"]) for _ in range(2))
    assert one.update(first, second)["group_stats/num_groups"] == 4.0
    other.update(other.collect(["a", "b"]))
    # the same rows twice have the same mean
    torch.testing.assert_close(weights_of(one.policy), weights_of(other.policy))


SCRIPT = [[(0, 1), (1, 0, 1)], [(1,), (0, 1)]]
"""Two moves in each of two states, each with what the environment answered: 1, 2, 0 and 1 observations."""
ROWS: dict[str, Any] = {
    "states": ["a", "a", "b", "b"],
    "actions": [action for group in SCRIPT for action in group],
    "rewards": [1.0, 0.0, 3.0, 4.0],
    "group_ids": [0, 0, 1, 1],
}


class Foreseeing(TablePolicy):
    """A table policy that also foresees what the environment answers, from a table of its own. Padding is NaN.

    An action is a move and the answers to it.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.answers = nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))

    def score_actions(self, states: Any, actions: Any) -> ActionScores:
        log_probs = self.get_log_probabilities(states, [move for move, *_ in actions]).unsqueeze(1)
        width = max(len(answers) for _, *answers in actions)
        foreseen = self.answers[[self.places[state] for state in states]].log_softmax(1)
        rows = [[foreseen[row, answer] for answer in answers] for row, (_, *answers) in enumerate(actions)]
        nan = torch.tensor(math.nan, dtype=torch.float64)
        observed = torch.stack([torch.stack([*row, *[nan] * (width + 1 - len(row))])[:width] for row in rows])
        return ActionScores(
            log_probs=log_probs,
            mask=torch.ones_like(log_probs, dtype=torch.bool),
            observed_log_probs=observed,
            observed_mask=torch.arange(width) < torch.tensor([len(row) for row in rows]).unsqueeze(1),
        )

    def sample(self, states: Any, size: int) -> tuple[list[list[tuple[int, ...]]], Tensor]:
        """Moves, each answered by its own number, once or twice."""
        moves = super().generate_actions(states, size)
        rows = [[(move, *[move] * (1 + place % 2)) for place, move in enumerate(group)] for group in moves]
        return rows, torch.tensor([[True, place % 2 == 1] for group in moves for place, _ in enumerate(group)])

    def generate_actions(self, states: Any, num_actions_per_state: int, **kwargs: Any) -> Any:
        return SCRIPT if self.script is not None else self.sample(states, num_actions_per_state)[0]


def moves_and_answers(*rows: int) -> ExperienceBatch:
    chosen = rows or range(4)
    return ExperienceBatch.from_rows(**{name: [values[i] for i in chosen] for name, values in ROWS.items()})


def learned(*batches: ExperienceBatch, policy: Any = None, **settings: Any) -> tuple[Tensor, dict[str, float], Any]:
    """The gradient of one update, its metrics, and the policy."""
    policy = Foreseeing() if policy is None else policy
    settings = {"objective": ObjectiveConfig(observation_coef=0.5), **settings}
    (gradient,), metrics = updated(policy, *(batches or [moves_and_answers()]), **settings)
    return gradient, metrics, policy


def test_each_row_counts_the_same_and_its_observations_share_its_weight() -> None:
    """All answers have probability 1/2. The rows have 1, 2, 0 and 1 observations, which weigh 1/4, 1/8 each, and 1/4, so the
    loss is 0.5 log 2 (1/4 + 1/4 + 0 + 1/4). The gradient of an observation is its weight times p - onehot: in state a,
    1/4 (1/2, -1/2) + 1/8 (-1/2, 1/2) + 1/8 (1/2, -1/2), and in state b, 1/4 (1/2, -1/2). The moves' gradient is GRPO's: the
    advantages are 1/2, -1/2, -1/2, 1/2, for moves 0, 1, 1, 0."""
    gradient, metrics, _ = learned()
    moves = [-1 / 8, 1 / 8, -1 / 8, 1 / 8]
    assert_same(gradient, torch.tensor([*moves, *[0.5 / 8, -0.5 / 8, 0.5 / 8, -0.5 / 8]], dtype=torch.float64))
    assert metrics["train/observation_loss"] == pytest.approx(0.5 * math.log(2) * 3 / 4)
    parts = metrics["train/policy_loss"] + metrics["train/observation_loss"]
    assert metrics["train/total_loss"] == pytest.approx(parts)
    assert metrics["steps/max"] == 1.0, "observations are no steps"


def test_a_mean_over_observations_divides_by_their_number() -> None:
    """Four observations weigh 1/4 each, whatever the number of steps."""
    gradient, metrics, _ = learned(objective=ObjectiveConfig(observation_coef=2.0, aggregation="step_mean"))
    assert metrics["train/observation_loss"] == pytest.approx(2.0 * math.log(2))
    a, b = [(1 - 1 + 1) / 2, (-1 + 1 - 1) / 2], [1 / 2, -1 / 2]
    assert_same(gradient[4:], 2.0 / 4 * torch.tensor([*a, *b], dtype=torch.float64))


def test_a_policy_foresees_its_environment_also_where_no_row_has_an_advantage() -> None:
    """The rewards are all equal, so that without observations no row would be forwarded."""
    gradient, metrics, policy = learned(replace(moves_and_answers(), rewards=torch.zeros(4)))
    assert metrics["rows/skipped_zero_advantage"] == 0.0
    assert_same(gradient[:4], torch.zeros(4, dtype=torch.float64))
    assert float(gradient[4:].abs().sum()) > 0
    assert policy.calls["score with gradient"] == 1


def test_demonstrations_have_observations_too() -> None:
    """Beside the sampled rows, one demonstration with one observation: five rows share the weight, and the demonstration's
    answer adds 1/5 (1/2, -1/2) in state b. The cross-entropy of its move is separate."""
    given = ExperienceBatch.from_demonstrations(["b"], [(1, 1)])
    gradient, metrics, policy = learned(moves_and_answers(), given, micro_batch_size=2)
    assert metrics["train/observation_loss"] == pytest.approx(0.5 * math.log(2) * 4 / 5)
    assert metrics["train/demonstration_loss"] == pytest.approx(math.log(2))
    answers = torch.tensor([1 / 2, -1 / 2, 1.0, -1.0], dtype=torch.float64) * 0.5 / 5
    assert_same(gradient[4:], answers)
    assert_same(gradient[:4], torch.tensor([-1 / 8, 1 / 8, -1 / 8 + 1 / 2, 1 / 8 - 1 / 2], dtype=torch.float64))
    _, metrics, _ = learned(given)
    assert metrics["train/observation_loss"] == pytest.approx(0.5 * math.log(2))
    assert policy.calls["score"] == 3, "two passes of sampled rows, and one of the demonstration"


def test_without_the_coefficient_observations_are_never_read() -> None:
    class Poisoned(Foreseeing):
        def score_actions(self, states: Any, actions: Any) -> ActionScores:
            scores = super().score_actions(states, actions)
            return replace(scores, observed_log_probs=scores.observed_log_probs * math.nan)

    gradient, metrics, policy = learned(policy=Poisoned(), objective=ObjectiveConfig())
    assert_same(gradient[4:], torch.zeros(4, dtype=torch.float64))
    assert "train/observation_loss" not in metrics
    assert policy.calls["score"] == 0
    with pytest.raises(ContractError, match="log-probabilities of steps and observations must be finite"):
        learned(policy=Poisoned())


def test_an_objective_of_the_users_own_stands_beside_them() -> None:
    def own(inputs: Any) -> ObjectiveOutput:
        return ObjectiveOutput(loss=0.0 * inputs.log_probs.sum(), metrics={})

    gradient, metrics, _ = learned(own_loss=own)
    assert_same(gradient[4:], learned()[0][4:])
    assert_same(gradient[:4], torch.zeros(4, dtype=torch.float64))
    assert metrics["train/total_loss"] == metrics["train/observation_loss"]


class Telling(Foreseeing):
    """Samples with masks."""

    def sample_actions(self, states: Any, num_actions_per_state: int) -> SampledActions:
        actions, observed_mask = self.sample(states, num_actions_per_state)
        mask = torch.ones(len(observed_mask), 1, dtype=torch.bool)
        return SampledActions(actions=actions, mask=mask, observed_mask=observed_mask)


@pytest.mark.parametrize(
    ("kind", "coef", "num_passes"), [(Telling, 0.5, 0), (Telling, 0.0, 0), (Foreseeing, 0.5, 1), (Foreseeing, 0.0, 1)]
)
def test_a_sampler_that_tells_the_mask_saves_a_pass(kind, coef, num_passes):
    """`Foreseeing` is scored once to find its steps, with or without observations."""
    policy = kind()
    trainer_of(policy, objective=ObjectiveConfig(observation_coef=coef), seed=0).step(["a", "b"])
    assert (policy.calls["score"], policy.calls["score with gradient"]) == (num_passes, 1)


def test_the_policy_learns_the_answers_of_a_run_that_samples_ahead() -> None:
    """Each move is answered by its number, and the reward wants move 1 in both states: then the answer is 1."""
    objective = ObjectiveConfig(observation_coef=1.0, sampler_correction="none")
    settings = {"objective": objective, "iterations_ahead": 1, "seed": 0, "learning_rate": 0.1}
    policy = Telling()
    trainer = trainer_of(policy, lambda s, a: [float(x[0]) for x in a], **settings)
    trainer.train(["a", "b"], num_iterations=80, progress=False)
    assert policy.logits.softmax(1)[:, 1].min() > 0.9
    assert policy.answers.softmax(1)[:, 1].min() > 0.9


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize("at", [2, 3, 4])
def test_a_stopped_run_continues_to_the_bit(at: int, tmp_path: Path) -> None:
    """With replayed rows, stopped before or between updates."""

    def trainer() -> GRPOTrainer:
        torch.manual_seed(0)
        objective = ObjectiveConfig(observation_coef=0.5)
        return trainer_of(Foreseeing(), seed=0, batch_size=6, replay_iterations=1, objective=objective)

    given = ExperienceBatch.from_demonstrations(["b"], [(1, 1)])
    options = {"demonstrations": given, "progress": False}
    unbroken = Unbroken(lambda _: (trainer(), ["a", "b"], options), num_iterations=2)
    unbroken.assert_same_after_a_stop(tmp_path, "step", at, by_signal)


class Wrong(Foreseeing):
    """Its scores are changed by a function."""

    def __init__(self, change: Callable[[ActionScores], dict[str, Any]]) -> None:
        super().__init__()
        self.change = change

    def score_actions(self, states: Any, actions: Any) -> ActionScores:
        scores = super().score_actions(states, actions)
        return replace(scores, **self.change(scores))


NOTHING = {"observed_log_probs": None, "observed_mask": None}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda scores: {"observed_log_probs": scores.observed_log_probs.detach()},
            "Wrong: observed_log_probs must carry a gradient, as log_probs do, or it teaches",
        ),
        (lambda scores: {"observed_mask": None}, "observed_log_probs and observed_mask together; got one of them"),
        (
            lambda scores: NOTHING if torch.is_grad_enabled() else {},
            r"must score the batch's observations, .*: the policy scored none, .* has \[4, 2\]",
        ),
        (
            lambda scores: {"observed_mask": scores.observed_mask & (not torch.is_grad_enabled())},
            r"Wrong must score the batch's observations, .*score the same observations every time",
        ),
    ],
)
def test_wrong_observations_are_refused(change, message):
    with pytest.raises(ContractError, match=message):
        learned(policy=Wrong(change))


def test_a_coefficient_without_observations_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"observation_coef=0\.5 needs log-probs of observations, and TablePolicy gives"
    ):
        learned(replace(moves_and_answers(), actions=[0, 1, 1, 0]), policy=TablePolicy())
    with pytest.raises(ConfigError, match="EpisodePolicy has split_steps"):
        trainer_of(EpisodePolicy(), objective=ObjectiveConfig(observation_coef=0.1))
    with pytest.raises(ConfigError, match="observation_coef must be >= 0"):
        ObjectiveConfig(observation_coef=-0.1)
