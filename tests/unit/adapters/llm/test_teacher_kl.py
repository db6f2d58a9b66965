"""The exact KL of a language model to a teacher: against both models' whole distributions, one row at a time."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adapters.llm import HFPolicy
from adapters.llm.model.teacher_kl import kl_to_teacher
from grpo import ObjectiveConfig
from grpo.distillation import exact_kl, no_reward
from grpo.errors import ConfigError
from tests.support.llm_models import (
    FLOAT32_GRADIENT,
    FLOAT32_LOG_PROB,
    ROWS,
    STATES,
    VOCABULARY_SIZE,
    completion,
    encoded,
    gradients,
    policy_of,
    relative_difference,
    row_logits,
    tiny_model,
    trainer_of,
)


def kl_of_rows(model: Any, teacher: Any, top: int | None, temperature: float = 1.0) -> list[Tensor]:
    """The KL at each token of `ROWS`, from whole distributions, without cache, padding or blocks."""
    rows = [(encoded(state), row.token_ids) for state, row in zip(STATES, ROWS, strict=True)]
    return [
        exact_kl(*((row_logits(each, *row) / temperature).log_softmax(1) for each in (model, teacher)), top=top)
        for row in rows
    ]


@pytest.mark.parametrize("top", [1, 5, VOCABULARY_SIZE])
@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_values_and_gradients_are_those_of_whole_distributions(family: str, top: int) -> None:
    """The teacher is of another family. With k = V, the KL is exact."""
    model, teacher = tiny_model(family), tiny_model("gpt2")
    policy = policy_of(model, reference_model=teacher, exact_kl_top=top)
    scores = policy.score_actions(STATES, ROWS)
    expected = kl_of_rows(model, teacher, None if top == VOCABULARY_SIZE else top)
    for found, mask, row in zip(scores.kl, scores.mask, expected, strict=True):
        torch.testing.assert_close(found[mask], row, atol=4 * FLOAT32_LOG_PROB, rtol=0)
        assert not found[~mask].any()
    weights = [torch.arange(1.0, len(row) + 1).sin() for row in expected]
    total = sum((row * weight).sum() for row, weight in zip(expected, weights, strict=True))
    found_total = sum(
        (row[mask] * weight).sum() for row, mask, weight in zip(scores.kl, scores.mask, weights, strict=True)
    )
    difference = relative_difference(gradients(model, found_total), gradients(model, total))
    assert difference < 10 * FLOAT32_GRADIENT
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_a_fork_is_computed_once_and_has_the_same_kl() -> None:
    """Two rows that are equal up to their second token, scored as rows that fork and as whole rows."""
    model, teacher = tiny_model(), tiny_model("gpt2")
    policy = policy_of(model, reference_model=teacher, exact_kl_top=5)
    whole = [completion(4, 5, 6), completion(4, 5, 7, 8)]
    found = policy.score_actions(["abc"] * 2, [replace(row, forks=(2,)) for row in whole])
    expected = policy.score_actions(["abc"] * 2, whole)
    torch.testing.assert_close(found.kl, expected.kl, atol=4 * FLOAT32_LOG_PROB, rtol=0)


def test_blocks_and_padded_vocabularies_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of 7 and 9 logits: the last two of the teacher are padding, and count to the rest."""
    torch.manual_seed(0)
    head, wider = nn.Linear(4, 7).double(), nn.Linear(3, 9).double()
    hidden, its = torch.randn(10, 4, dtype=torch.float64, requires_grad=True), torch.randn(10, 3, dtype=torch.float64)
    with torch.no_grad():
        wider.bias[7:] = 1.0  # likelier than most tokens
    pi, teacher = head(hidden).log_softmax(1), wider(its).log_softmax(1)
    joined = [
        torch.stack([row[:, :7].gather(1, teacher[:, :7].topk(2).indices)[:, place] for place in range(2)], 1)
        for row in (pi, teacher)
    ]
    rests = [torch.log1p(-row.exp().sum(1, keepdim=True)) for row in joined]
    expected = exact_kl(*(torch.cat([row, rest], 1) for row, rest in zip(joined, rests, strict=True)))
    (slope,) = torch.autograd.grad(expected.sum(), hidden)
    for num_bytes in (2**20, 4 * 9 * 3):  # all positions at once, and three
        monkeypatch.setattr("adapters.llm.model.token_log_probs.BLOCK_BYTES", num_bytes)
        found = kl_to_teacher(hidden, head, its, wider, top=2)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(found.sum(), hidden)[0], slope)
    assert kl_to_teacher(hidden[:0], head, its[:0], wider, top=2).shape == (0,)
    swapped = kl_to_teacher(its.requires_grad_(), wider, hidden.detach(), head, top=100)
    assert bool(swapped.isfinite().all())


def test_only_scores_with_a_gradient_have_the_kl() -> None:
    policy = policy_of(reference_model=tiny_model("gpt2"), exact_kl_top=5)
    assert policy.score_actions(STATES, ROWS).kl is not None
    with torch.no_grad():
        assert policy.score_actions(STATES, ROWS).kl is None
    assert policy_of(reference_model=tiny_model("gpt2")).score_actions(STATES, ROWS).kl is None


def test_a_student_comes_closer_to_its_teacher_by_the_exact_kl() -> None:
    student, teacher = tiny_model(), tiny_model("gpt2")
    policy = policy_of(student, reference_model=teacher, exact_kl_top=20, max_new_tokens=4)
    objective = ObjectiveConfig(kl_coef=1.0, kl_estimator="exact", aggregation="step_mean")
    trainer = trainer_of(policy, no_reward, learning_rate=0.01, objective=objective)
    history = [trainer.step(STATES)["train/kl_mean"] for _ in range(15)]
    assert history[-1] < 0.5 * history[0]


def test_the_option_needs_a_second_model() -> None:
    message = r"options.exact_kl_top is for the KL to a second model. Pass reference_model"
    with pytest.raises(ConfigError, match=message):
        policy_of(exact_kl_top=5)
    assert isinstance(policy_of(reference_model=tiny_model("gpt2"), exact_kl_top=5), HFPolicy)
