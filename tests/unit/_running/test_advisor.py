"""The advisor reports a problem that the metrics show in words, once, and reports nothing else."""

import copy
import logging
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo import (
    ActionScores,
    AdvantageConfig,
    GRPOConfig,
    GRPOTrainer,
    GRPOWarning,
    ObjectiveConfig,
    ObjectiveOutput,
    SampledActions,
    WeightedRewards,
)
from grpo._running.advisor import ADVICE
from tests.support.objective_inputs import as_users_run_it
from tests.support.policies import TablePolicy

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def without_type_checks() -> Iterator[None]:
    """They take half of the time of these runs of many iterations."""
    with as_users_run_it():
        yield


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
    assert said(caplog) == ["all groups are dead"]
    assert caplog.records[0].levelno == logging.WARNING


def test_a_policy_that_earns_the_highest_reward_everywhere_is_no_problem(
    caplog: pytest.LogCaptureFixture, subtests: pytest.Subtests
) -> None:
    """Rewards differ in the first iteration, and are equal afterwards."""
    caplog.set_level(logging.INFO, logger="grpo")
    for later, expected in [
        (1.0, "every reward is the highest one"),
        (0.5, "all groups are dead"),
        (0.0, "all groups are dead"),
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
    assert "all groups are dead" not in said(caplog)


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


def test_the_debugging_page_contains_every_advice() -> None:
    page = " ".join((ROOT / "docs" / "debugging.md").read_text().split())  # wherever its lines are broken
    assert [sign for sign in ADVICE if sign not in page] == []
    settings = set(
        re.findall(r"\b(?:group_size|dynamic_sampling_rounds|reference_sync_every|reference_mix)\b", str(ADVICE))
    )
    assert all(hasattr(GRPOConfig(), name) for name in settings)
    assert hasattr(ObjectiveConfig(), "entropy_coef")
