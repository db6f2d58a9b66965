"""The advisor reports a problem that the metrics show in words, once, and reports nothing else."""

import copy
import logging
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo import (
    ActionScores,
    AdvantageConfig,
    ExperienceBatch,
    GRPOConfig,
    GRPOTrainer,
    GRPOWarning,
    ObjectiveConfig,
    ObjectiveOutput,
    SampledActions,
    WeightedRewards,
)
from grpo.evaluation.advice import RULES, Advisor, advice_on
from tests.support.policies import TablePolicy

pytestmark = pytest.mark.usefixtures("without_type_checks")

ROOT = Path(__file__).parents[3]


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The signs that were named, in order."""
    return [record.message.split(":")[0] for record in caplog.records if record.name == "grpo"]


def run(
    num_steps: int,
    *,
    lr: float = 1.0,
    rewards: Any = (1.0, 0.0, 0.0, 1.0),
    reference: bool = False,
    logits: Any = None,
    objective: Any = None,
    **settings: Any,
) -> None:
    policy = TablePolicy(script=[[0, 1], [1, 0]], logits=logits)
    trainer = GRPOTrainer(
        config=GRPOConfig(group_size=2, **settings),
        policy=policy,
        reward_model=lambda states, actions: list(rewards),
        reference_policy=copy.deepcopy(policy) if reference else None,
        optimizer=torch.optim.SGD(policy.parameters(), lr=lr),
        objective=objective,
    )
    for _ in range(num_steps):
        trainer.step(["a", "b"])


def test_a_loss_of_zero_is_normal_and_explained_once_to_those_who_ask(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="grpo"):
        run(3)
    assert said(caplog) == ["the loss is 0"]
    assert caplog.records[0].levelno == logging.INFO
    assert "rewards/mean" in caplog.text


def test_a_loss_of_0_is_not_explained_when_there_are_several_updates(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="grpo"):
        run(3, num_epochs_per_update=2)
    assert said(caplog) == []


def test_no_clipping_in_ten_iterations_of_several_updates_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    run(9, num_epochs_per_update=2, lr=1e-3)
    assert said(caplog) == []
    run(11, num_epochs_per_update=2, lr=1e-3)
    assert said(caplog) == ["nothing is ever clipped"]


def test_occasional_clipping_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    run(11, num_epochs_per_update=4, lr=3.0)
    assert "nothing is ever clipped" not in said(caplog)


def test_a_reference_copied_every_iteration_is_reported_as_kl_0(caplog: pytest.LogCaptureFixture) -> None:
    run(11, reference=True, reference_sync_every=1, objective=None)
    assert "the KL is 0" in said(caplog)
    caplog.clear()
    run(11, reference=True)
    assert "the KL is 0" not in said(caplog)


def test_ten_iterations_whose_groups_are_all_dead_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    run(9, rewards=(1.0, 1.0, 0.3, 0.3))
    assert said(caplog) == []
    run(11, rewards=(1.0, 1.0, 0.3, 0.3))
    assert said(caplog) == ["nearly all groups are dead"]
    assert caplog.records[0].levelno == logging.WARNING


def test_a_policy_that_earns_the_highest_reward_everywhere_is_no_problem(
    caplog: pytest.LogCaptureFixture, subtests: pytest.Subtests
) -> None:
    """Rewards differ in the first iteration, and are equal afterwards."""
    caplog.set_level(logging.INFO, logger="grpo")
    for later, expected in [
        (1.0, "every reward is the highest one"),
        (0.5, "nearly all groups are dead"),
        (0.0, "nearly all groups are dead"),
    ]:
        with subtests.test(later=later):
            caplog.clear()
            rewards = iter([[1.0, 0.0, 0.0, 1.0], *([[later] * 4] * 10)])
            trainer = GRPOTrainer(
                config=GRPOConfig(group_size=2),
                policy=TablePolicy(),
                reward_model=lambda states, actions, rewards=rewards: next(rewards),
            )
            for _ in range(11):
                trainer.step(["a", "b"])
            assert [sign for sign in said(caplog) if sign != "the loss is 0"] == [expected]
            level = logging.INFO if later == 1.0 else logging.WARNING
            assert caplog.records[-1].levelno == level


def test_advantages_scaled_to_0_are_reported_apart_from_dead_groups(caplog: pytest.LogCaptureFixture) -> None:
    run(2, rewards=(-1.0, 0.0, -2.0, -3.0), advantage=AdvantageConfig(scale="mean"))
    assert said(caplog) == ["all advantages are 0"]


def test_a_batch_size_larger_than_an_iteration_is_reported(
    caplog: pytest.LogCaptureFixture, subtests: pytest.Subtests
) -> None:
    for batch_size, is_said in [(5, True), (4, False), (2, False), (None, False)]:
        with subtests.test(batch_size=batch_size, is_said=is_said):
            caplog.clear()
            run(2, batch_size=batch_size)
            assert ("batch_size is larger than an iteration" in said(caplog)) == is_said


def test_dead_groups_are_not_reported_while_one_group_is_live(caplog: pytest.LogCaptureFixture) -> None:
    run(11, rewards=(1.0, 1.0, 0.3, 0.7))
    assert "nearly all groups are dead" not in said(caplog)


class KnowsItsEntropy(TablePolicy):
    """`ScoresActions`, so that the entropy is exact."""

    def score_actions(self, states: Any, actions: Any) -> ActionScores:
        log_softmax = self._logits_of(states).log_softmax(1)
        entropy = -(log_softmax.exp() * log_softmax).sum(1, keepdim=True)
        log_probs = log_softmax.gather(1, torch.tensor(actions).unsqueeze(1))
        return ActionScores(log_probs=log_probs, mask=torch.ones_like(log_probs, dtype=torch.bool), entropy=entropy)


def test_a_collapsed_entropy_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """Training pushes the policy towards one action until the entropy, averaged over ten iterations, is a twentieth of ln 2."""
    policy = KnowsItsEntropy(script=[[0, 1], [1, 0]])
    trainer = GRPOTrainer(
        config=GRPOConfig(group_size=2, objective=ObjectiveConfig(entropy_coef=1e-9), max_grad_norm=None),
        policy=policy,
        reward_model=lambda states, actions: [1.0, 0.0, 0.0, 1.0],
        optimizer=torch.optim.SGD(policy.parameters(), lr=1.0),
    )
    entropies = []
    while "the entropy has collapsed" not in said(caplog):
        entropies.append(trainer.step(["a", "b"])["train/entropy"])
        assert len(entropies) < 100
    assert sum(entropies[-10:]) / 10 < 0.1 * entropies[0]
    assert entropies[-1] < 0.05 * entropies[0] < entropies[4]


def test_an_entropy_that_is_low_from_the_start_is_not_reported_as_collapsed(caplog: pytest.LogCaptureFixture) -> None:
    run(15, lr=1e-3, logits=[[5.0, -5.0], [5.0, -5.0]])
    assert "the entropy has collapsed" not in said(caplog)


class Drawn(KnowsItsEntropy):
    """Says that its actions were drawn with log-probs that are `off` more than the policy's: one number, or one per row."""

    def __init__(self, off: Any, *, tells_scores: bool) -> None:
        super().__init__(script=[[0, 1], [1, 0]])
        self.off = torch.as_tensor(off, dtype=torch.float64).expand(4).unsqueeze(1)
        self.tells_scores = tells_scores

    def sample_actions(self, states: Any, num_actions_per_state: int) -> SampledActions:
        actions = self.generate_actions(states, num_actions_per_state)
        scores = self.score_actions([state for state in states for _ in range(2)], [*actions[0], *actions[1]])
        return SampledActions(
            actions=actions,
            mask=scores.mask,
            behaviour_log_probs=scores.log_probs + self.off,
            scores=scores if self.tells_scores else None,
        )


def train_on(policy: Drawn, num_steps: int, objective: Any = None, **settings: Any) -> dict[str, float]:
    trainer = GRPOTrainer(
        config=GRPOConfig(group_size=2, objective=ObjectiveConfig(**settings)),
        policy=policy,
        reward_model=lambda states, actions: [1.0, 0.0, 0.0, 1.0],
        optimizer=torch.optim.SGD(policy.parameters(), lr=1e-3),
        objective=objective,
    )
    return [trainer.step(["a", "b"]) for _ in range(num_steps)][-1]


SIGN = "the sampler is not the policy"


def test_a_truncated_sampler_without_a_correction_is_reported_once(
    caplog: pytest.LogCaptureFixture, subtests: pytest.Subtests
) -> None:
    """Nine tenths of the policy are kept: -ln .9 in every step. Once, after ten iterations; with old log-probs and without."""
    for tells_scores, surrogate in [(False, "clip"), (True, "clip"), (False, "reinforce"), (True, "vespo")]:
        with subtests.test(tells_scores=tells_scores, surrogate=surrogate):
            caplog.clear()
            policy = Drawn(-math.log(0.9), tells_scores=tells_scores)
            metrics = train_on(policy, 9, surrogate=surrogate)
            assert metrics["train/sampler_divergence"] == pytest.approx(0.10536, abs=1e-5)
            assert SIGN not in said(caplog)
            train_on(policy, 12, surrogate=surrogate)
            assert said(caplog).count(SIGN) == 1
            assert "objective.sampler_correction='truncate'" in caplog.text


def test_a_sampler_that_differs_by_rounding_is_not_reported(
    caplog: pytest.LogCaptureFixture, subtests: pytest.Subtests
) -> None:
    for off, tells_scores in [
        (0.005, False),
        (0.005, True),
        ([0.05, -0.05, 0.04, -0.04], False),  # rounding: as often up as down
        ([math.nan, 0.0, math.nan, 0.0], True),  # unscored steps count nowhere
        (math.nan, False),
    ]:
        with subtests.test(off=off, tells_scores=tells_scores):
            metrics = train_on(Drawn(off, tells_scores=tells_scores), 12)
            assert metrics["train/sampler_divergence"] == pytest.approx(0.005 if off == 0.005 else 0.0, abs=1e-9)
            assert SIGN not in said(caplog)


def test_the_sampler_divergence_averages_the_scored_steps_only() -> None:
    assert train_on(Drawn([math.nan, 0.1, math.nan, 0.3], tells_scores=True), 1)["train/sampler_divergence"] == (
        pytest.approx(0.2)
    )


def test_a_corrected_sampler_divergence_is_not_reported(
    caplog: pytest.LogCaptureFixture, subtests: pytest.Subtests
) -> None:
    for correction in ["truncate", "mask"]:
        with subtests.test(correction=correction):
            metrics = train_on(Drawn(0.1, tells_scores=True), 12, sampler_correction=correction)
            assert metrics["train/sampler_divergence"] == pytest.approx(0.1)
            assert SIGN not in said(caplog)


def test_a_sampler_divergence_is_not_reported_under_a_user_loss(caplog: pytest.LogCaptureFixture) -> None:
    policy = Drawn(0.1, tells_scores=True)
    train_on(
        policy,
        12,
        objective=lambda inputs: ObjectiveOutput(
            loss=(inputs.log_probs.squeeze(1) * inputs.advantages).sum(), metrics={}
        ),
    )
    assert SIGN not in said(caplog)


def test_a_user_loss_that_reports_nothing_is_not_reported_as_0(caplog: pytest.LogCaptureFixture) -> None:
    """The user loss reports nothing, so neither its loss nor its KL is known to be 0."""
    with pytest.warns(GRPOWarning, match=r"kl_coef=0\.04"):
        run(
            11,
            reference=True,
            objective=lambda inputs: ObjectiveOutput(
                loss=(inputs.log_probs.squeeze(1) * inputs.advantages).sum(), metrics={}
            ),
        )
    assert said(caplog) == []


def test_a_part_of_the_reward_that_does_not_apply_is_reported_once(
    caplog: pytest.LogCaptureFixture, subtests: pytest.Subtests
) -> None:
    for missing, expected in [(math.nan, 1), (0.5, 0)]:
        with subtests.test(missing=missing):
            caplog.clear()
            parts = {
                "x": lambda states, actions, m=missing: [m, *[1.0] * (len(actions) - 1)],
                "y": lambda s, a: [0.0] * len(a),
            }
            policy = TablePolicy()
            trainer = GRPOTrainer(config=GRPOConfig(group_size=4), policy=policy, reward_model=WeightedRewards(parts))
            for _ in range(3):
                trainer.step(["a", "b"])
            assert said(caplog).count("a part of the reward is missing") == expected


SEVERAL_UPDATES = GRPOConfig(num_epochs_per_update=2).to_dict()
LIVE = {
    "group_stats/num_groups": 4.0,
    "group_stats/avg_group_size": 4.0,
    "group_stats/zero_variance_fraction": 0.0,
    "rewards/min": 0.0,
    "rewards/mean": 0.5,
    "rewards/max": 1.0,
    "rows/skipped_zero_advantage": 0.0,
    "train/advantages_mean": 0.0,
    "train/advantages_std": 0.5,
    "train/clip_fraction": 0.1,
    "train/entropy": 1.0,
    "train/grad_norm": 0.3,
    "train/kl_coef": 0.0,
    "train/kl_mean": 0.0,
    "train/num_updates": 2.0,
    "train/policy_loss": -0.1,
    "train/skipped_updates": 0.0,
    "train/total_loss": -0.1,
    "time/sample": 0.1,
}
"""An iteration of 16 rows and two updates that gives no advice."""
DEAD = {
    **LIVE,
    "group_stats/zero_variance_fraction": 1.0,
    "rewards/min": 0.0,
    "rewards/mean": 0.0,
    "rewards/max": 0.0,
    "rows/skipped_zero_advantage": 16.0,
    "train/advantages_std": 0.0,
    "train/clip_fraction": 0.0,
    "train/grad_norm": 0.0,
    "train/num_updates": 0.0,
    "train/skipped_updates": 2.0,
}
"""An iteration whose rewards are all equal."""
BY_KL = {
    "rows/skipped_zero_advantage": 0.0,
    "train/num_updates": 2.0,
    "train/skipped_updates": 0.0,
    "train/kl_coef": 0.04,
}
"""With a KL coefficient, rows without an advantage are not skipped."""
UNCLIPPED = {**LIVE, "train/clip_fraction": 0.0}


def course(length: int, first: dict[str, float], **changed: Any) -> list[dict[str, float]]:
    """`length` iterations. A changed metric is one number, or goes along a line from its first to its last number."""
    history = []
    for place in range(length):
        along = {
            name.replace("__", "/"): ends[0] + (ends[1] - ends[0]) * place / (length - 1)
            if isinstance(ends, tuple)
            else ends
            for name, ends in changed.items()
        }
        history.append({**first, **along})
    return history


def signs(history: list[dict[str, float]], settings: Any = SEVERAL_UPDATES) -> list[str]:
    return [advice.sign for advice in advice_on(history, settings)]


COLLAPSE = [{**LIVE, "train/entropy": max(0.8**place, 0.01)} for place in range(60)]
RISE = {"rewards__mean": (0.1, 0.7)}


def risen(first: float, last: float) -> list[dict[str, float]]:
    """A collapse whose reward rises in 20 iterations and stays for 60. The highest reward of a row is 1."""
    means = [first + (last - first) * min(place / 20, 1.0) for place in range(80)]
    return [{**COLLAPSE[min(place, 59)], "rewards/mean": mean} for place, mean in enumerate(means)]


FIRES: list[tuple[str, list[dict[str, float]], dict[str, Any]]] = [
    ("a part of the reward is missing", [{**LIVE, "rewards/a/applies": 0.5}], {}),
    ("every reward is the highest one", [LIVE, *course(10, DEAD, rewards__min=1.0, rewards__max=1.0)], {}),
    ("every group has one row", course(1, DEAD, group_stats__avg_group_size=1.0, rewards__max=1.0), {}),
    ("nearly all groups are dead", course(10, DEAD), {}),
    (
        "nearly all groups are dead",  # one of 16 rows has an advantage
        course(10, LIVE, group_stats__zero_variance_fraction=0.95, rows__skipped_zero_advantage=15.0),
        {},
    ),
    # the policy is still its reference, so the KL teaches it nothing either
    ("nearly all groups are dead", course(10, {**DEAD, **BY_KL}), {}),
    # rewards taught it before, so an equal reference is no teacher that it has become
    (
        "nearly all groups are dead",
        [*course(3, LIVE, train__kl_coef=0.04, train__kl_mean=0.2), *course(10, {**DEAD, **BY_KL})],
        {},
    ),
    ("all advantages are 0", course(1, DEAD, group_stats__zero_variance_fraction=0.5), {}),
    ("batch_size is larger than an iteration", course(1, LIVE, train__num_updates=1.0), {"batch_size": 17}),
    ("the loss is 0", course(1, LIVE, train__num_updates=1.0, train__total_loss=0.0), {}),
    ("the gradient is exactly 0", [{**UNCLIPPED, "train/zero_gradients": 1.0}], {}),
    ("nothing is ever clipped", course(10, UNCLIPPED), SEVERAL_UPDATES),
    ("nothing is ever clipped", course(60, UNCLIPPED, rewards__mean=(0.6, 0.4)), SEVERAL_UPDATES),
    ("much of the gradient is clipped", course(10, LIVE, train__clip_fraction=0.31), {}),
    ("ratios are extreme", [LIVE, {**LIVE, "train/ratio_clamped_fraction": 0.01}, LIVE], {}),
    ("the KL is 0", course(10, LIVE, train__kl_coef=0.04), {}),
    ("the sampler is not the policy", course(10, LIVE, train__sampler_divergence=0.011), {}),
    ("the entropy has collapsed", COLLAPSE, {}),
    ("the entropy has collapsed", risen(0.1, 0.5), {}),  # less than half of the way from 0.1 to 1
    ("the entropy has collapsed", [*risen(0.1, 0.8), *course(60, COLLAPSE[-1], rewards__mean=(0.8, 0.6))], {}),
]

FALSE_ALARMS: list[tuple[str, str, list[dict[str, float]], dict[str, Any]]] = [
    ("a part of the reward is missing", "it applies to all rows", [{**LIVE, "rewards/a/applies": 1.0}], {}),
    ("every reward is the highest one", "they always were", course(20, DEAD, rewards__min=1.0, rewards__max=1.0), {}),
    (
        "every reward is the highest one",
        "a KL to a reference teaches: distillation",
        [LIVE, *course(20, {**DEAD, **BY_KL}, rewards__min=1.0, rewards__max=1.0, train__kl_mean=0.2)],
        {},
    ),
    ("every group has one row", "the baseline needs no group", course(1, LIVE, group_stats__avg_group_size=1.0), {}),
    ("every group has one row", "all rewards are equal", course(1, DEAD, group_stats__avg_group_size=1.0), {}),
    ("nearly all groups are dead", "only for nine iterations", course(9, DEAD), {}),
    (
        "nearly all groups are dead",
        "a KL to a reference teaches: distillation",
        course(20, {**DEAD, **BY_KL}, train__kl_mean=0.2, train__grad_norm=0.5),
        {},
    ),
    (
        "nearly all groups are dead",
        "a KL to a reference has taught, and the policy has become its teacher: distillation",
        [*course(3, {**DEAD, **BY_KL}, train__kl_mean=0.2, train__grad_norm=0.5), *course(20, {**DEAD, **BY_KL})],
        {},
    ),
    (
        "nearly all groups are dead",
        "a loss of the user's own teaches",
        course(20, {**DEAD, **BY_KL}, train__kl_coef=0.0, train__grad_norm=0.5),
        {},
    ),
    (
        "nearly all groups are dead",
        "a global baseline gives their rows advantages",
        course(20, LIVE, group_stats__zero_variance_fraction=1.0),
        {},
    ),
    (
        "nearly all groups are dead",
        "the few live groups make the reward rise",
        course(40, LIVE, group_stats__zero_variance_fraction=0.95, rows__skipped_zero_advantage=15.0, **RISE),
        {},
    ),
    ("all advantages are 0", "every group is dead", course(1, DEAD), {}),
    (
        "batch_size is larger than an iteration",
        "it is as large",
        course(1, LIVE, train__num_updates=1.0),
        {"batch_size": 16},
    ),
    ("the loss is 0", "there are several updates", course(1, LIVE, train__total_loss=0.0), {}),
    ("the loss is 0", "the gradient is, too", course(1, DEAD, train__total_loss=0.0), {}),
    ("the gradient is exactly 0", "some updates had one", [{**UNCLIPPED, "train/zero_gradients": 0.5}], {}),
    ("the gradient is exactly 0", "it is clipped", [{**LIVE, "train/zero_gradients": 1.0}], {}),
    (
        "nothing is ever clipped",
        "one update per iteration",
        course(20, UNCLIPPED, train__num_updates=1.0),
        SEVERAL_UPDATES,
    ),
    ("nothing is ever clipped", "the reward rises", course(40, UNCLIPPED, **RISE), SEVERAL_UPDATES),
    (
        "nothing is ever clipped",
        "the reward is near its best",
        course(40, UNCLIPPED, rewards__mean=0.95),
        SEVERAL_UPDATES,
    ),
    (
        "nothing is ever clipped",
        "it was clipped once",
        [*course(5, UNCLIPPED), LIVE, *course(40, UNCLIPPED)],
        SEVERAL_UPDATES,
    ),
    (
        "nothing is ever clipped",
        "after supervised updates",
        [*course(5, UNCLIPPED, train__advantages_std=0.0, train__advantages_mean=1.0), *course(40, UNCLIPPED)],
        SEVERAL_UPDATES,
    ),
    (
        "nothing is ever clipped",
        "the surrogate has no bounds",
        course(40, UNCLIPPED),
        GRPOConfig(objective=ObjectiveConfig(surrogate="reinforce")).to_dict(),
    ),
    ("much of the gradient is clipped", "less than a third is", course(20, LIVE, train__clip_fraction=0.3), {}),
    ("ratios are extreme", "none was bounded", course(20, LIVE, train__ratio_clamped_fraction=0.0), {}),
    ("the KL is 0", "it has no coefficient", course(20, LIVE, train__kl_coef=0.0), {}),
    ("the KL is 0", "nothing was updated", course(20, DEAD, train__kl_coef=0.04), {}),
    ("the KL is 0", "only at first", [*course(9, LIVE, train__kl_coef=0.04), *course(9, LIVE, train__kl_mean=0.1)], {}),
    ("the sampler is not the policy", "by rounding", course(20, LIVE, train__sampler_divergence=0.01), {}),
    (
        "the sampler is not the policy",
        "it is corrected",
        course(20, LIVE, train__sampler_divergence=0.1, train__sampler_ratio_mean=0.9),
        {},
    ),
    ("the entropy has collapsed", "it was low from the start", course(60, LIVE, train__entropy=0.01), {}),
    ("the entropy has collapsed", "a density's is negative", course(60, LIVE, train__entropy=(1.4, -2.0)), {}),
    (
        "the entropy has collapsed",
        "a density's was negative from the start",
        course(60, LIVE, train__entropy=(-1.0, -0.9)),
        {},
    ),
    (
        "the entropy has collapsed",
        "the reward rises",
        [{**low, "rewards/mean": 0.1 + 0.01 * place} for place, low in enumerate(COLLAPSE)],
        {},
    ),
    ("the entropy has collapsed", "the reward has come more than half of the way", risen(0.1, 0.6), {}),
    (
        "the entropy has collapsed",
        "the reward is near its best",
        [{**low, "rewards/mean": 0.95} for low in COLLAPSE],
        {},
    ),
    (
        "the entropy has collapsed",
        "after supervised updates on rows that nobody sampled",
        [{**low, "time/sample": 0.0 if place < 30 else 0.1} for place, low in enumerate(COLLAPSE)],
        {},
    ),
]


@pytest.mark.parametrize(("sign", "history", "settings"), FIRES, ids=[case[0] for case in FIRES])
def test_a_rule_sees_its_sign_and_no_other_rule_does(
    sign: str, history: list[dict[str, float]], settings: dict[str, Any]
) -> None:
    assert signs(history, settings) == [sign]
    needed = next(rule for rule in RULES if rule.sign == sign).patience
    assert sign not in signs(history[: needed - 1], settings)


@pytest.mark.parametrize(
    ("sign", "history", "settings"),
    [(sign, history, settings) for sign, _, history, settings in FALSE_ALARMS],
    ids=[f"{sign}: {why}" for sign, why, *_ in FALSE_ALARMS],
)
def test_a_rule_gives_no_false_alarm(sign: str, history: list[dict[str, float]], settings: dict[str, Any]) -> None:
    assert sign not in signs(history, settings)


def test_every_rule_has_a_run_that_shows_its_sign_and_a_false_alarm() -> None:
    names = {rule.sign for rule in RULES}
    assert {case[0] for case in FIRES} == {case[0] for case in FALSE_ALARMS} == names
    assert signs(course(60, LIVE)) == []


def test_an_advice_shows_the_metrics_it_rests_on(caplog: pytest.LogCaptureFixture) -> None:
    advisor = Advisor({})
    for _ in range(12):
        advisor.log({**LIVE, "train/sampler_divergence": 0.25})
    (record,) = caplog.records
    assert "Now train/sampler_divergence is 0.25. (Logged once. docs/debugging.md explains it.)" in record.message


def test_metrics_that_a_file_lacks_or_has_as_nan_give_no_advice() -> None:
    assert signs([{}] * 20) == []
    assert signs(course(20, dict.fromkeys(LIVE, math.nan))) == []


def test_distillation_with_equal_rewards_is_something_to_learn(caplog: pytest.LogCaptureFixture) -> None:
    """The policy moves towards a teacher by the KL alone. All rewards are equal, and first they are not."""
    caplog.set_level(logging.INFO, logger="grpo")
    teacher = TablePolicy(logits=[[2.0, -2.0], [-2.0, 2.0]])
    for first in ([1.0] * 4, [0.0, 1.0, 1.0, 1.0]):
        rewards = iter([first, *([[1.0] * 4] * 20)])
        trainer = GRPOTrainer(
            config=GRPOConfig(group_size=2, objective=ObjectiveConfig(kl_coef=1.0), seed=0),
            policy=TablePolicy(),
            reward_model=lambda states, actions, rewards=rewards: next(rewards),
            reference_policy=teacher,
        )
        history = [trainer.step(["a", "b"]) for _ in range(20)]
        assert history[-1]["train/kl_mean"] < history[0]["train/kl_mean"]
        assert said(caplog) == []


def test_imitating_rows_that_were_given_is_no_collapse_and_no_lack_of_clipping(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Demonstrations: rewards of 1, and no baseline. Their updates lower the entropy on purpose, and none is clipped."""
    policy = KnowsItsEntropy(script=[[0, 1], [1, 0]])
    shown = ExperienceBatch.from_rows(["a", "b"] * 2, [0, 1] * 2, [1.0] * 4, [0, 1] * 2)
    trainer = GRPOTrainer(
        config=GRPOConfig(
            group_size=2,
            num_epochs_per_update=2,
            advantage=AdvantageConfig(baseline="none"),
            objective=ObjectiveConfig(entropy_coef=1e-9, surrogate="clip"),
            max_grad_norm=None,
        ),
        policy=policy,
        reward_model=lambda states, actions: [1.0, 0.0, 0.0, 1.0],
        optimizer=torch.optim.SGD(policy.parameters(), lr=0.4),
    )
    entropies = [trainer.update(shown)["train/entropy"] for _ in range(300)]
    assert entropies[-1] < 0.05 * entropies[0]
    for _ in range(15):
        trainer.step(["a", "b"])
    assert said(caplog) == []


def test_the_debugging_page_contains_every_advice() -> None:
    page = " ".join((ROOT / "docs" / "debugging.md").read_text().split())  # wherever its lines are broken
    assert [rule.sign for rule in RULES if rule.sign not in page] == []
    settings = set(
        re.findall(r"\b(?:group_size|dynamic_sampling_rounds|reference_sync_every|reference_mix)\b", str(RULES))
    )
    assert all(hasattr(GRPOConfig(), name) for name in settings)
    assert hasattr(ObjectiveConfig(), "entropy_coef")
