"""Image-text models of several families: what is sampled and scored is what a plain forward pass of each row gives."""

from typing import Any

import pytest
import torch
from torch import Tensor

from adapters.llm import HFPolicy, SamplingConfig
from tests.support.llm_models import gradients, relative_difference
from tests.support.vision_models import FAMILIES, chat, picture, plain_log_probs, tiny_vision

STATES = [
    chat("how many?", picture(32, 48)),
    chat("a?", picture(56, 24, 1), picture(20, 36, 2)),
    chat("what is 12+34=?"),
]
"""One picture, two pictures of other sizes, and none. The prompts have different lengths."""
DAILY = ("qwen2_5_vl", "qwen3_vl", "gemma3", "llava_next", "idefics3")
"""Families with positions of their own, with features in several layers, with attention in both directions, with several parts
of a picture, and with padded pictures."""


def tiny_policy(family: str, **options: Any) -> HFPolicy:
    model, processor = tiny_vision(family)
    return HFPolicy(model, processor, sampling=SamplingConfig(max_new_tokens=7), **options)


def assert_as_alone(policy: HFPolicy, states: Any = STATES) -> None:
    """Sampled and scored log-probs and the gradients of all parameters are those of plain forward passes, row by row."""
    torch.manual_seed(0)
    groups = policy.generate_actions(states, 2)
    rows = [(state, action) for state, group in zip(states, groups, strict=True) for action in group]
    alone = [plain_log_probs(policy, state, action.token_ids) for state, action in rows]
    assert torch.cat(alone).std() > 0.5  # the distributions are not flat
    policy.train()
    scores = policy.score_groups(states, groups).log_probs
    policy.eval()
    for scored, (_, action), expected in zip(scores, rows, alone, strict=True):
        torch.testing.assert_close(scored[: len(action)], expected, atol=2e-5, rtol=0)
        torch.testing.assert_close(torch.tensor(action.behaviour_log_probs), expected.detach(), atol=2e-5, rtol=0)
    weights = torch.arange(scores.numel()).sin().view(scores.shape)
    found = gradients(policy.model, (scores * weights).sum())
    plain = sum((row * weight[: len(row)]).sum() for row, weight in zip(alone, weights, strict=True))
    expected_slopes = gradients(policy.model, plain)  # type: ignore[arg-type]
    for of_vision in (True, False):  # apart, because the gradients of a vision tower are small
        some = [name for name in expected_slopes if ("vis" in name) is of_vision]
        assert relative_difference(_of(found, some), _of(expected_slopes, some)) < 1e-5
    unused = {name for name, slope in expected_slopes.items() if not slope.any()}
    assert {name for name, slope in found.items() if not slope.any()} == unused


def _of(slopes: dict[str, Tensor], names: list[str]) -> dict[str, Tensor]:
    return {name: slopes[name] for name in names}


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # of the processor of GLM-4V
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in DAILY else pytest.mark.slow) for name in FAMILIES]
)
def test_a_family_is_sampled_and_scored_as_in_plain_forward_passes(family: str) -> None:
    assert_as_alone(tiny_policy(family))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_rows_are_computed_as_wholes_with_gradient_checkpointing(family: str) -> None:
    policy = tiny_policy(family)
    policy.model.activation_checkpointing_enable()
    assert_as_alone(policy)
