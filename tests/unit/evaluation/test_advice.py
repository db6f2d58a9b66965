"""The advisor reports a problem that the metrics show in words, once, and reports nothing else."""

import copy
import logging
import math
import re
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
)
from grpo.evaluation.advice import RULES, Advisor, advice_on
from tests.support.policies import TablePolicy
from tests.support.trainers import SCRIPT, by_hand

pytestmark = pytest.mark.usefixtures("without_type_checks")


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The signs that were named, in order."""
    return [record.message.split(":")[0] for record in caplog.records if record.name == "grpo"]


def trained_by(
    policy: Any, *, lr: float, rewards: Any = (1.0, 0.0, 0.0, 1.0), parts: Any = None, **config: Any
) -> GRPOTrainer:
    """A trainer of a policy that takes the actions 0, 1 in state a and 1, 0 in state b."""
    optimizer = torch.optim.SGD(policy.parameters(), lr=lr)
    return by_hand(policy=policy, rewards=rewards, optimizer=optimizer, config=config, **(parts or {}))[0]


def run(num_steps: int, *, lr: float = 1.0, reference: bool = False, objective: Any = None, **settings: Any) -> None:
    policy = TablePolicy(script=SCRIPT)
    parts = {"reference_policy": copy.deepcopy(policy) if reference else None, "objective": objective}
    trainer = trained_by(policy, lr=lr, parts=parts, max_grad_norm=1.0, **settings)
    for _ in range(num_steps):
        trainer.step(["a", "b"])


def test_a_loss_of_zero_is_normal_and_explained_once_to_those_who_ask(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="grpo"):
        run(3)
    assert (said(caplog), caplog.records[0].levelno) == (["the loss is 0"], logging.INFO)
    assert "rewards/mean" in caplog.text


@pytest.mark.parametrize(
    ("num_steps", "expected", "settings"),
    [
        (9, [], {"num_epochs_per_update": 2, "lr": 1e-3}),
        (11, ["nothing is ever clipped"], {"num_epochs_per_update": 2, "lr": 1e-3}),
        (11, ["much of the gradient is clipped"], {"num_epochs_per_update": 4, "lr": 3.0}),
        (11, ["the KL is 0"], {"reference": True, "reference_sync_every": 1}),
        (11, [], {"reference": True}),
        (11, ["nearly all groups are dead"], {"rewards": (1.0, 1.0, 0.3, 0.3)}),
        (2, ["all advantages are 0"], {"rewards": (-1.0, 0.0, -2.0, -3.0), "advantage": AdvantageConfig(scale="mean")}),
        (2, ["batch_size is larger than an iteration"], {"batch_size": 5}),
    ],
)
def test_the_metrics_of_real_runs_show_the_signs(num_steps, expected, settings, caplog) -> None:
    run(num_steps, **settings)
    assert said(caplog) == expected
    assert all(record.levelno == logging.WARNING for record in caplog.records)


class KnowsItsEntropy(TablePolicy):
    """`ScoresActions`, so that the entropy is exact."""

    def score_actions(self, states: Any, actions: Any) -> ActionScores:
        log_softmax = self._logits_of(states).log_softmax(1)
        entropy = -(log_softmax.exp() * log_softmax).sum(1, keepdim=True)
        log_probs = log_softmax.gather(1, torch.tensor(actions).unsqueeze(1))
        return ActionScores(log_probs=log_probs, mask=torch.ones_like(log_probs, dtype=torch.bool), entropy=entropy)


def test_a_collapsed_entropy_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """Training pushes the policy towards one action until the entropy, averaged over ten iterations, is a twentieth of ln 2."""
    trainer = trained_by(KnowsItsEntropy(script=SCRIPT), lr=1.0, objective=ObjectiveConfig(entropy_coef=1e-9))
    entropies = []
    while "the entropy has collapsed" not in said(caplog):
        entropies.append(trainer.step(["a", "b"])["train/entropy"])
        assert len(entropies) < 100
    assert sum(entropies[-10:]) / 10 < 0.1 * entropies[0]
    assert entropies[-1] < 0.05 * entropies[0] < entropies[4]


class Drawn(KnowsItsEntropy):
    """Says that its actions were drawn with log-probs that are `off` more than the policy's: one number, or one per row."""

    def __init__(self, off: Any, *, tells_scores: bool) -> None:
        super().__init__(script=SCRIPT)
        self.off = torch.as_tensor(off, dtype=torch.float64).expand(4).unsqueeze(1)
        self.tells_scores = tells_scores

    def sample_actions(self, states: Any, num_actions_per_state: int) -> SampledActions:
        actions = self.generate_actions(states, num_actions_per_state)
        scores = self.score_actions([state for state in states for _ in range(2)], [*actions[0], *actions[1]])
        told = {"behaviour_log_probs": scores.log_probs + self.off, "scores": scores if self.tells_scores else None}
        return SampledActions(actions=actions, mask=scores.mask, **told)


def train_on(policy: Drawn, num_steps: int, own_loss: Any = None, **settings: Any) -> dict[str, float]:
    trainer = trained_by(policy, lr=1e-3, parts={"objective": own_loss}, objective=ObjectiveConfig(**settings))
    return [trainer.step(["a", "b"]) for _ in range(num_steps)][-1]


SIGN = "the sampler is not the policy"


@pytest.mark.parametrize(
    ("tells_scores", "surrogate"), [(False, "clip"), (True, "clip"), (False, "reinforce"), (True, "vespo")]
)
def test_a_truncated_sampler_without_a_correction_is_reported_once(caplog, tells_scores, surrogate):
    """Nine tenths of the policy are kept: -ln .9 in every step. Once, after ten iterations; with old log-probs and without."""
    policy = Drawn(-math.log(0.9), tells_scores=tells_scores)
    assert train_on(policy, 9, surrogate=surrogate)["train/sampler_divergence"] == pytest.approx(0.10536, abs=1e-5)
    assert SIGN not in said(caplog)
    train_on(policy, 12, surrogate=surrogate)
    assert said(caplog).count(SIGN) == 1
    assert "objective.sampler_correction='truncate'" in caplog.text


def loss_without_metrics(inputs: Any) -> ObjectiveOutput:
    return ObjectiveOutput(loss=(inputs.log_probs.squeeze(1) * inputs.advantages).sum(), metrics={})


@pytest.mark.parametrize(
    ("off", "tells_scores", "divergence", "settings"),
    [
        (0.005, False, 0.005, {}),
        (0.005, True, 0.005, {}),
        ([0.05, -0.05, 0.04, -0.04], False, 0.0, {}),  # rounding: as often up as down
        ([math.nan, 0.1, math.nan, -0.1], True, 0.0, {}),  # unscored steps count nowhere
        (0.1, True, 0.1, {"sampler_correction": "truncate"}),
        (0.1, True, 0.1, {"sampler_correction": "mask"}),
        (0.1, True, None, {"own_loss": loss_without_metrics}),
    ],
)
def test_a_sampler_that_rounds_is_corrected_or_has_a_loss_of_the_users_own_is_not_reported(
    off, tells_scores, divergence, settings, caplog
) -> None:
    metrics = train_on(Drawn(off, tells_scores=tells_scores), 12, **settings)
    if divergence is not None:
        assert metrics["train/sampler_divergence"] == pytest.approx(divergence, abs=1e-9)
    assert SIGN not in said(caplog)


def test_a_user_loss_that_reports_nothing_is_not_reported_as_0(caplog: pytest.LogCaptureFixture) -> None:
    """Neither its loss nor its KL is known to be 0."""
    with pytest.warns(GRPOWarning, match=r"kl_coef=0\.04"):
        run(11, reference=True, objective=loss_without_metrics)
    assert said(caplog) == []


SEVERAL_UPDATES = GRPOConfig(num_epochs_per_update=2).to_dict()
WITHOUT_BOUNDS = GRPOConfig(objective=ObjectiveConfig(surrogate="reinforce")).to_dict()
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
UNSKIPPED = {"rows/skipped_zero_advantage": 0.0, "train/num_updates": 2.0, "train/skipped_updates": 0.0}
BY_KL = {**DEAD, **UNSKIPPED, "train/kl_coef": 0.04}
"""Equal rewards with a KL coefficient: rows without an advantage are not skipped."""
UNCLIPPED = {**LIVE, "train/clip_fraction": 0.0}


def course(length: int, first: dict[str, float], **changed: Any) -> list[dict[str, float]]:
    """`length` iterations. A changed metric is one number, or goes along a line from its first to its last number."""
    lines = {
        name.replace("__", "/"): ends if isinstance(ends, tuple) else (ends, ends) for name, ends in changed.items()
    }
    shares = [place / max(length - 1, 1) for place in range(length)]
    return [{**first, **{name: a + (b - a) * share for name, (a, b) in lines.items()}} for share in shares]


def signs(history: list[dict[str, float]], settings: Any = SEVERAL_UPDATES) -> list[str]:
    return [advice.sign for advice in advice_on(history, settings)]


COLLAPSE = [{**LIVE, "train/entropy": max(0.8**place, 0.01)} for place in range(60)]
RISE = {"rewards__mean": (0.1, 0.7)}


def risen(first: float, last: float) -> list[dict[str, float]]:
    """A collapse whose reward rises in 20 iterations and stays for 60. The highest reward of a row is 1."""
    means = [first + (last - first) * min(place / 20, 1.0) for place in range(80)]
    return [{**COLLAPSE[min(place, 59)], "rewards/mean": mean} for place, mean in enumerate(means)]


DEAD_GROUPS, NEVER_CLIPPED = "nearly all groups are dead", "nothing is ever clipped"
COLLAPSED, TEACHER = "the entropy has collapsed", "the teacher is the policy"
HIGHEST, BATCH_SIZE = "every reward is the highest one", "batch_size is larger than an iteration"
ONE_LIVE_ROW = {"group_stats__zero_variance_fraction": 0.95, "rows__skipped_zero_advantage": 15.0}  # of 16
ALL_1 = {"rewards__min": 1.0, "rewards__max": 1.0}
TAUGHT = {"train__kl_mean": 0.2, "train__grad_norm": 0.5}

FIRES: list[tuple[str, list[dict[str, float]], dict[str, Any]]] = [
    ("a part of the reward is missing", [{**LIVE, "rewards/a/applies": 0.5}], {}),
    (HIGHEST, [LIVE, *course(10, DEAD, **ALL_1)], {}),
    ("every group has one row", course(1, DEAD, group_stats__avg_group_size=1.0, rewards__max=1.0), {}),
    (DEAD_GROUPS, course(10, DEAD), {}),
    (DEAD_GROUPS, course(10, LIVE, **ONE_LIVE_ROW), {}),
    (TEACHER, course(10, BY_KL), {}),
    # rewards differ between groups, so they are to teach it
    (DEAD_GROUPS, course(10, BY_KL, rewards__max=1.0), {}),
    # rewards taught it before, so an equal reference is no teacher that it has become
    (DEAD_GROUPS, [*course(3, LIVE, train__kl_coef=0.04, train__kl_mean=0.2), *course(10, BY_KL)], {}),
    ("all advantages are 0", course(1, DEAD, group_stats__zero_variance_fraction=0.5), {}),
    (BATCH_SIZE, course(1, LIVE, train__num_updates=1.0), {"batch_size": 17}),
    ("the loss is 0", course(1, LIVE, train__num_updates=1.0, train__total_loss=0.0), {}),
    ("the gradient is exactly 0", [{**UNCLIPPED, "train/zero_gradients": 1.0}], {}),
    (NEVER_CLIPPED, course(10, UNCLIPPED), SEVERAL_UPDATES),
    (NEVER_CLIPPED, course(60, UNCLIPPED, rewards__mean=(0.6, 0.4)), SEVERAL_UPDATES),
    ("much of the gradient is clipped", course(10, LIVE, train__clip_fraction=0.31), {}),
    ("ratios are extreme", [LIVE, {**LIVE, "train/ratio_clamped_fraction": 0.01}, LIVE], {}),
    ("the KL is 0", course(10, LIVE, train__kl_coef=0.04), {}),
    (SIGN, course(10, LIVE, train__sampler_divergence=0.011), {}),
    (COLLAPSED, COLLAPSE, {}),
    (COLLAPSED, risen(0.1, 0.5), {}),  # less than half of the way from 0.1 to 1
    (COLLAPSED, [*risen(0.1, 0.8), *course(60, COLLAPSE[-1], rewards__mean=(0.8, 0.6))], {}),
]

FALSE_ALARMS: list[tuple[str, str, list[dict[str, float]], dict[str, Any]]] = [
    ("a part of the reward is missing", "it applies to all rows", [{**LIVE, "rewards/a/applies": 1.0}], {}),
    (HIGHEST, "they always were", course(20, DEAD, **ALL_1), {}),
    (HIGHEST, "a KL to a reference teaches", [LIVE, *course(20, BY_KL, **ALL_1, train__kl_mean=0.2)], {}),
    ("every group has one row", "the baseline needs no group", course(1, LIVE, group_stats__avg_group_size=1.0), {}),
    ("every group has one row", "all rewards are equal", course(1, DEAD, group_stats__avg_group_size=1.0), {}),
    (DEAD_GROUPS, "only for nine iterations", course(9, DEAD), {}),
    (DEAD_GROUPS, "a KL to a reference teaches: distillation", course(20, BY_KL, **TAUGHT), {}),
    (DEAD_GROUPS, "the policy has become its teacher", [*course(3, BY_KL, **TAUGHT), *course(20, BY_KL)], {}),
    (DEAD_GROUPS, "a loss of the user's own", course(20, BY_KL, train__kl_coef=0.0, train__grad_norm=0.5), {}),
    (DEAD_GROUPS, "a global baseline", course(20, LIVE, group_stats__zero_variance_fraction=1.0), {}),
    (DEAD_GROUPS, "the few live groups make the reward rise", course(40, LIVE, **ONE_LIVE_ROW, **RISE), {}),
    (TEACHER, "it has no reference", course(20, DEAD), {}),
    (TEACHER, "rewards taught it", [LIVE, *course(20, BY_KL)], {}),
    (TEACHER, "it has become its teacher", [*course(3, BY_KL, train__kl_mean=0.2), *course(20, BY_KL)], {}),
    ("all advantages are 0", "every group is dead", course(1, DEAD), {}),
    (BATCH_SIZE, "it is as large", course(1, LIVE, train__num_updates=1.0), {"batch_size": 16}),
    ("the loss is 0", "there are several updates", course(1, LIVE, train__total_loss=0.0), {}),
    ("the loss is 0", "the gradient is, too", course(1, DEAD, train__total_loss=0.0), {}),
    ("the gradient is exactly 0", "some updates had one", [{**UNCLIPPED, "train/zero_gradients": 0.5}], {}),
    ("the gradient is exactly 0", "it is clipped", [{**LIVE, "train/zero_gradients": 1.0}], {}),
    (NEVER_CLIPPED, "one update per iteration", course(20, UNCLIPPED, train__num_updates=1.0), SEVERAL_UPDATES),
    (NEVER_CLIPPED, "the reward rises", course(40, UNCLIPPED, **RISE), SEVERAL_UPDATES),
    (NEVER_CLIPPED, "the reward is near its best", course(40, UNCLIPPED, rewards__mean=0.95), SEVERAL_UPDATES),
    (NEVER_CLIPPED, "once it was", [*course(5, UNCLIPPED), LIVE, *course(40, UNCLIPPED)], SEVERAL_UPDATES),
    (
        NEVER_CLIPPED,
        "after supervised updates",
        [*course(5, UNCLIPPED, train__advantages_std=0.0, train__advantages_mean=1.0), *course(40, UNCLIPPED)],
        SEVERAL_UPDATES,
    ),
    (NEVER_CLIPPED, "the surrogate has no bounds", course(40, UNCLIPPED), WITHOUT_BOUNDS),
    ("much of the gradient is clipped", "less than a third is", course(20, LIVE, train__clip_fraction=0.3), {}),
    ("ratios are extreme", "none was bounded", course(20, LIVE, train__ratio_clamped_fraction=0.0), {}),
    ("the KL is 0", "it has no coefficient", course(20, LIVE, train__kl_coef=0.0), {}),
    ("the KL is 0", "nothing was updated", course(20, DEAD, train__kl_coef=0.04), {}),
    ("the KL is 0", "only at first", [*course(9, LIVE, train__kl_coef=0.04), *course(9, LIVE, train__kl_mean=0.1)], {}),
    (SIGN, "by rounding", course(20, LIVE, train__sampler_divergence=0.01), {}),
    (SIGN, "corrected", course(20, LIVE, train__sampler_divergence=0.1, train__sampler_ratio_mean=0.9), {}),
    (COLLAPSED, "it was low from the start", course(60, LIVE, train__entropy=0.01), {}),
    (COLLAPSED, "a density's is negative", course(60, LIVE, train__entropy=(1.4, -2.0)), {}),
    (COLLAPSED, "a density's was negative from the start", course(60, LIVE, train__entropy=(-1.0, -0.9)), {}),
    (COLLAPSED, "the reward rises", [{**low, "rewards/mean": 0.1 + 0.01 * n} for n, low in enumerate(COLLAPSE)], {}),
    (COLLAPSED, "the reward has come more than half of the way", risen(0.1, 0.6), {}),
    (COLLAPSED, "the reward is near its best", [{**low, "rewards/mean": 0.95} for low in COLLAPSE], {}),
    (
        COLLAPSED,
        "after supervised updates on rows that nobody sampled",
        [{**low, "time/sample": 0.0 if place < 30 else 0.1} for place, low in enumerate(COLLAPSE)],
        {},
    ),
]


@pytest.mark.parametrize(("sign", "history", "settings"), FIRES, ids=[case[0] for case in FIRES])
def test_a_rule_sees_its_sign_and_no_other_rule_does(sign, history, settings) -> None:
    assert signs(history, settings) == [sign]
    assert sign not in signs(history[: next(rule for rule in RULES if rule.sign == sign).patience - 1], settings)


@pytest.mark.parametrize(
    ("sign", "why", "history", "settings"), FALSE_ALARMS, ids=[f"{a[0]}: {a[1]}" for a in FALSE_ALARMS]
)
def test_a_rule_gives_no_false_alarm(sign, why, history, settings) -> None:
    assert sign not in signs(history, settings), why


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
    assert (signs([{}] * 20), signs(course(20, dict.fromkeys(LIVE, math.nan)))) == ([], [])


def test_imitating_rows_that_were_given_is_no_collapse_and_no_lack_of_clipping(caplog) -> None:
    """Demonstrations: rewards of 1, and no baseline. Their updates lower the entropy on purpose, and none is clipped."""
    policy = KnowsItsEntropy(script=SCRIPT)
    shown = ExperienceBatch.from_rows(["a", "b"] * 2, [0, 1] * 2, [1.0] * 4, [0, 1] * 2)
    objective, advantage = ObjectiveConfig(entropy_coef=1e-9, surrogate="clip"), AdvantageConfig(baseline="none")
    trainer = trained_by(policy, lr=0.4, num_epochs_per_update=2, advantage=advantage, objective=objective)
    entropies = [trainer.update(shown)["train/entropy"] for _ in range(300)]
    assert entropies[-1] < 0.05 * entropies[0]
    for _ in range(15):
        trainer.step(["a", "b"])
    assert said(caplog) == []


def test_the_settings_that_an_advice_names_exist() -> None:
    names = re.findall(r"\b(?:group_size|dynamic_sampling_rounds|reference_sync_every|reference_mix)\b", str(RULES))
    assert all(hasattr(GRPOConfig(), name) for name in names)
    assert hasattr(ObjectiveConfig(), "entropy_coef")
