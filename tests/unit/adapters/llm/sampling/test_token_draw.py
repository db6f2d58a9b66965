"""One token from given logits, settings that change the distribution, and random numbers of rows; and the settings."""

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from adapters.llm import SamplingConfig
from adapters.llm.sampling.token_draw import BLOCK, TokenDraw, draw, exclude_top_choices
from grpo.errors import ConfigError
from tests.support.llm_models import sampling_distribution

UNDER_ONE = math.nextafter(1.0, 0.0)
CPU = torch.device("cpu")


def logits_of(*probs: float) -> Tensor:
    return torch.tensor([probs]).log()


def drawing(config: SamplingConfig, prompts: list[list[int]], **options: Any) -> TokenDraw:
    defaults = {"end_token_ids": [1], "seeds": list(range(len(prompts))), "device": CPU, "with_entropy": False}
    return TokenDraw(config, prompts, **defaults | options)


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 0), (0.499, 0), (0.5, 2), (0.749, 2), (0.75, 3), (UNDER_ONE, 3)])
def test_the_token_is_where_the_running_sum_passes_the_random_number(uniform: Any, token: Any) -> None:
    tokens, log_probs, entropy = draw(logits_of(0.5, 0.0, 0.25, 0.25), torch.tensor([uniform]).double(), True)
    assert tokens.tolist() == [token]
    torch.testing.assert_close(log_probs, torch.tensor([math.log((0.5, 0, 0.25, 0.25)[token])]))
    torch.testing.assert_close(entropy, torch.tensor([1.5 * math.log(2)]))  # .5 ln 2 + 2 (.25 ln 4)


@pytest.mark.parametrize("size", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 1000])
def test_log_probs_and_entropy_are_those_of_the_softmax_for_any_size(size: Any) -> None:
    logits = 3 * torch.randn(64, size)
    uniforms = torch.rand(64, dtype=torch.float64)
    tokens, log_probs, entropy = draw(logits.clone(), uniforms, True)
    exact = logits.double().log_softmax(1)
    torch.testing.assert_close(log_probs.double(), exact.gather(1, tokens[:, None]).squeeze(1), atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy.double(), -(exact.exp() * exact).sum(1), atol=1e-5, rtol=1e-5)
    running = exact.exp().cumsum(1)  # inversion of the distribution function, in float64
    expected = (running <= uniforms[:, None]).sum(1).clamp(max=size - 1)
    is_clear = (running - uniforms[:, None]).abs().amin(1) > 1e-6  # closer than this, both neighbours are right
    assert is_clear.sum() > 50
    assert torch.equal(tokens[is_clear], expected[is_clear])


@pytest.mark.parametrize(
    ("size", "uniform"), [(3, 0.0), (BLOCK, 0.5), (BLOCK, UNDER_ONE), (3 * BLOCK - 7, 0.0), (3 * BLOCK - 7, UNDER_ONE)]
)
def test_a_token_of_probability_zero_is_never_drawn(size: Any, uniform: Any) -> None:
    """All tokens but one are impossible, and with them whole blocks."""
    logits = torch.full((size, size), -math.inf)
    logits.fill_diagonal_(2.5)  # row n allows token n alone
    tokens, log_probs, _ = draw(logits, torch.full((size,), uniform, dtype=torch.float64), False)
    assert torch.equal(tokens, torch.arange(size))
    assert torch.equal(log_probs, torch.zeros(size))


@pytest.mark.parametrize("uniform", [0.0, UNDER_ONE])
def test_extreme_logits_stay_finite(uniform: Any) -> None:
    peaked = torch.zeros(1, 700)
    peaked[0, 600] = 1e4  # exp(-1e4) is 0: nothing else has any weight
    tokens, log_probs, entropy = draw(peaked, torch.tensor([uniform]).double(), True)
    assert (tokens.item(), log_probs.item()) == (600, 0.0)
    assert entropy.item() == 0.0
    flat = torch.full((1, 700), -1e4)
    tokens, log_probs, entropy = draw(flat, torch.tensor([uniform]).double(), True)
    assert tokens.item() == (0 if uniform == 0 else 699)
    assert log_probs.item() == pytest.approx(-math.log(700), abs=2e-3)  # float32 has 1/1024 at 1e4
    assert entropy.item() == pytest.approx(math.log(700), abs=2e-3)


TOP_CHOICES = [
    (0.2, [0, 0.3, 0.15, 0.15]),  # .4 and .3 reach it: the less likely of them stays
    (0.35, [0.4, 0.3, 0.15, 0.15]),  # .4 alone reaches it, and stays
    (0.5, [0.4, 0.3, 0.15, 0.15]),
]


@pytest.mark.parametrize(("threshold", "left"), TOP_CHOICES)
def test_xtc_excludes_all_top_choices_but_the_least_likely(threshold: Any, left: Any) -> None:
    probs = exclude_top_choices(logits_of(0.4, 0.3, 0.15, 0.15), threshold).softmax(1).squeeze(0)
    torch.testing.assert_close(probs, torch.tensor(left) / sum(left))


def test_xtc_keeps_one_of_equally_likely_top_choices() -> None:
    probs = exclude_top_choices(logits_of(0.4, 0.3, 0.15, 0.15), 0.14).softmax(1).squeeze(0)
    assert sorted(probs.tolist()) == [0, 0, 0, 1]
    assert probs[:2].tolist() == [0, 0]


# Settings that change the distribution


SHAPES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7}, "top-k": {"top_k": 5}, "top-k above the vocabulary": {"top_k": 1000},
    "top-p": {"top_p": 0.6}, "top-p of next to nothing": {"top_p": 1e-6}, "min-p": {"min_p": 0.2},
    "XTC": {"xtc_probability": 1.0, "xtc_threshold": 0.05}, "penalty": {"repetition_penalty": 1.5},
    "reward for repetition": {"repetition_penalty": 0.8}, "minimum": {"min_new_tokens": 2},
    "all": {"temperature": 1.4, "top_k": 12, "top_p": 0.9, "min_p": 0.05, "xtc_probability": 1.0, "xtc_threshold": 0.1,
        "repetition_penalty": 1.2, "min_new_tokens": 1},
    "all but XTC": {"temperature": 0.8, "top_k": 8, "top_p": 0.7, "min_p": 0.1, "repetition_penalty": 1.3},
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_each_setting_draws_from_its_distribution_and_reports_it(shape: Any) -> None:
    """Three steps of 50 rows, with two end tokens and the largest seeds. Each token is the one that the row's own random number
    selects from the distribution."""
    config = SamplingConfig(max_new_tokens=3, **SHAPES[shape])
    prompts = [[2 + row % 5] * (1 + row % 4) for row in range(50)]
    given = torch.randn(3, 50, 20) * 2
    ends, seeds = [1, 3], [2**63 - 1 - row for row in range(50)]
    drawn = drawing(config, prompts, end_token_ids=ends, seeds=seeds, with_entropy=True)
    tokens = torch.stack([drawn(given[step].clone(), torch.arange(50), step) for step in range(3)], 1)
    assert torch.equal(drawn.tokens, tokens)
    numbers = [np.random.Generator(np.random.Philox(key=seed)).random((3, 2))[:, 0] for seed in seeds]
    for row, prompt in enumerate(prompts):
        for step in range(3):
            written = [*prompt, *tokens[row, :step].tolist()]
            probs = sampling_distribution(
                given[step, row].numpy(), config, written=written, step=step, end_token_ids=ends,
                excludes=config.xtc_probability == 1,
            )  # fmt: skip
            token = int(tokens[row, step])
            assert token == int((np.cumsum(probs) <= numbers[row][step]).sum())
            assert float(drawn.behaviour_log_probs[row, step]) == pytest.approx(math.log(probs[token]), abs=1e-5)
            policy = (given[step, row] / config.scoring_temperature).double().log_softmax(0)
            assert float(drawn.policy_log_probs[row, step]) == pytest.approx(policy[token].item(), abs=1e-5)
            entropy = -(policy.exp() * policy).sum().item()
            assert float(drawn.entropies[row, step]) == pytest.approx(entropy, abs=1e-5)


def test_a_repetition_penalty_by_hand() -> None:
    # logits (2, -1, 1, 0); tokens 0 and 1 have been written: 2 / 2 = 1 and -1 * 2 = -2
    logits, penalised = torch.tensor([[2.0, -1.0, 1.0, 0.0]]), torch.tensor([1.0, -2.0, 1.0, 0.0]).log_softmax(0)
    drawn = drawing(SamplingConfig(max_new_tokens=1, repetition_penalty=2.0), [[0, 1]])
    token = drawn(logits.clone(), torch.tensor([0]), 0).item()
    assert drawn.behaviour_log_probs.item() == pytest.approx(penalised[token].item(), abs=1e-6)
    # also at temperature 0: token 0, at 2 / 3, is no longer the most likely
    greedy = drawing(SamplingConfig(max_new_tokens=1, temperature=0, repetition_penalty=3.0), [[0, 1]])
    assert greedy(logits.clone(), torch.tensor([0]), 0).item() == 2
    assert greedy.behaviour_log_probs.item() == 0
    assert greedy.policy_log_probs.item() == pytest.approx(logits.log_softmax(1)[0, 2].item(), abs=1e-6)


def test_xtc_excludes_top_choices_with_its_probability() -> None:
    # the .4 alone is left out, once in 4 draws: .75 (.4, .3, .15, .15) + .25 (0, .5, .25, .25) = (.3, .35, .175, .175)
    config = SamplingConfig(max_new_tokens=1, xtc_probability=0.25, xtc_threshold=0.2)
    drawn = drawing(config, [[0]] * 4000)
    drawn(logits_of(0.4, 0.3, 0.15, 0.15).repeat(4000, 1), torch.arange(4000), 0)
    expected = torch.tensor([0.3, 0.35, 0.175, 0.175])
    counts = drawn.tokens.flatten().bincount(minlength=4)
    assert bool(((counts - 4000 * expected).abs() < 4 * (4000 * expected * (1 - expected)).sqrt()).all())
    # the log-prob of the mixture, whether or not XTC acted
    torch.testing.assert_close(drawn.behaviour_log_probs, expected.log()[drawn.tokens])


@pytest.mark.parametrize("changes", [{}, {"top_p": 0.9, "xtc_probability": 0.5}])
def test_a_row_draws_the_same_tokens_up_to_any_length(changes: Any) -> None:
    logits = torch.randn(4, 1, 40)
    short, long = (drawing(SamplingConfig(max_new_tokens=most, **changes), [[0]], seeds=[107]) for most in (4, 11))
    for step in range(4):
        for drawn in (short, long):
            drawn(logits[step].clone(), torch.arange(1), step)
    assert torch.equal(short.tokens[0], long.tokens[0, :4])


@pytest.mark.parametrize(
    ("dtype", "changes"), [(torch.bfloat16, {}), (torch.float16, {"temperature": 0.5}), (torch.float64, {"top_k": 3})]
)
def test_logits_of_any_precision_are_drawn_from_in_float32(dtype: Any, changes: Any) -> None:
    logits = torch.randn(5, 40).to(dtype)
    config = SamplingConfig(max_new_tokens=1, **changes)
    drawn = drawing(config, [[0]] * 5)
    tokens = drawn(logits.clone(), torch.arange(5), 0)
    expected = (logits.double() / config.temperature).log_softmax(1).gather(1, tokens[:, None])
    torch.testing.assert_close(drawn.policy_log_probs.double(), expected, atol=1e-5, rtol=1e-5)


# --- settings of sampling


NO_STRINGS = "have texts that are not empty and have no half characters; got '"
WRONG = [
    ("max_new_tokens", 0, "be .*>= 1"), ("min_new_tokens", -1, "be .*>= 0"), ("temperature", -0.1, "be .*>= 0"),
    ("top_k", 0, "be .*>= 1"), ("top_p", 0.0, "be .*> 0"), ("top_p", 1.1, "be .*<= 1"), ("min_p", -0.1, "be .*>= 0"),
    ("min_p", 1.5, "be .*<= 1"), ("xtc_probability", 1.5, "be .*<= 1"), ("xtc_threshold", 0.0, "be .*> 0"),
    ("xtc_threshold", 0.6, "be .*<= 0.5"), ("repetition_penalty", 0.0, "be .*> 0"), ("stop", ["a"], "be .*tuple"),
    ("stop", "a", "be .*tuple"), ("stop", ("###", ""), NO_STRINGS), ("stop", ("###", "end\ud83d"), NO_STRINGS),
    ("temperature", float("nan"), "be .*finite"), ("min_new_tokens", 257, "be at most max_new_tokens=256; got 257"),
]  # fmt: skip


def test_a_wrong_setting_is_named(subtests: pytest.Subtests) -> None:
    for setting, value, rule in WRONG:
        message = rf"SamplingConfig\.{setting} must {rule}"
        with subtests.test(setting=setting, value=value), pytest.raises(ConfigError, match=message):
            SamplingConfig(**{setting: value})
    assert SamplingConfig(min_new_tokens=4, max_new_tokens=4).min_new_tokens == 4


EXACT = [
    ({}, True), ({"temperature": 0.7}, True),
    ({"stop": ("a",)}, True),  # it ends completions, and changes no distribution
    ({"xtc_threshold": 0.3}, True),  # XTC is off
    ({"temperature": 0.0}, False), ({"min_new_tokens": 1}, False), ({"top_k": 10**6}, False), ({"top_p": 0.99}, False),
    ({"min_p": 0.01}, False), ({"xtc_probability": 0.1}, False), ({"repetition_penalty": 1.1}, False),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "is_exact"), EXACT)
def test_tokens_are_drawn_from_the_policy_if_only_a_positive_temperature_is_set(changes: Any, is_exact: Any) -> None:
    assert SamplingConfig(**changes).is_exact is is_exact


def test_settings_survive_json_and_temperature_0_scores_as_1() -> None:
    config = SamplingConfig(stop=("\n", "###"), top_k=5, temperature=0.5)
    assert SamplingConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert (config.scoring_temperature, SamplingConfig(temperature=0).scoring_temperature) == (0.5, 1.0)
