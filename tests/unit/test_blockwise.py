"""Large inputs, evaluated block of rows by block of rows: the same loss, gradients and metrics as in one piece."""

import importlib
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from grpo import ObjectiveConfig, ObjectiveInputs, blockwise, grpo_objective
from grpo.ratios import RatioLevel
from grpo.surrogates import Surrogate
from tests.support import objective_inputs

LEAVES = ("log_probs", "entropy", "kl", "values")
NUM_ROWS, WIDTH = 7, 3


@pytest.fixture
def in_blocks_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven rows of three steps come in blocks of two, two, two and one."""
    monkeypatch.setitem(blockwise.STEPS_PER_BLOCK, "cpu", 2 * WIDTH)


def tensors(dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Everything that inputs can hold: padded rows, a hole, a row without steps, an unscored step, ratios on both sides."""
    random = torch.Generator().manual_seed(11)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(NUM_ROWS, WIDTH, generator=random, dtype=torch.float64).to(dtype)

    mask = torch.tensor([[1, 1, 1], [1, 0, 1], [1, 1, 0], [0, 0, 0], [1, 0, 0], [1, 1, 1], [0, 1, 1]], dtype=torch.bool)
    log_probs = uniform(-2.0, -0.6)
    behaviour = log_probs + uniform(-0.4, 0.4)
    behaviour[0, 1] = torch.nan
    return {
        "log_probs": log_probs.masked_fill(~mask, torch.nan),
        "old_log_probs": (log_probs + uniform(-0.5, 0.5)).masked_fill(~mask, torch.nan),
        "behaviour_log_probs": behaviour,
        "ref_log_probs": log_probs + uniform(-0.5, 0.5),
        "advantages": uniform(-2.0, 2.0)[:, 0].contiguous(),
        "mask": mask,
        "weights": torch.where(mask, uniform(0.1, 1.0).double(), 0.0),
        "entropy": uniform(0.1, 1.0),
        "entropy_weights": torch.where(mask, uniform(0.1, 1.0).double(), 0.0),
        "kl": uniform(0.0, 0.5),
        "values": uniform(-1.0, 1.0),
        "old_values": uniform(-1.0, 1.0),
        "returns": uniform(-1.0, 1.0),
        "keep": uniform(0.0, 1.0) < 0.8,
        "penalised": uniform(0.0, 1.0) < 0.5,
        "kl_coef": 0.3,
        "entropy_coef": 0.2,
    }


def leaves_of(given: dict[str, Any], names: tuple[str, ...] = LEAVES) -> ObjectiveInputs:
    leaves = {name: given[name].clone().requires_grad_() for name in names if given[name] is not None}
    return objective_inputs(**{**given, **leaves})


def evaluated(inputs: ObjectiveInputs, config: ObjectiveConfig, upstream: float = 1.0) -> dict[str, Tensor]:
    """Loss, metrics and gradients by name."""
    output = grpo_objective(inputs, config)
    (output.loss * upstream).backward()
    gradients = {f"d {name}": getattr(inputs, name).grad for name in LEAVES}
    return {"loss": output.loss.detach(), **output.metrics, **gradients}


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each block had that was evaluated."""
    sizes: list[int] = []
    module = importlib.import_module("grpo.grpo_objective")  # the package's attribute of that name is the function
    evaluate = module._evaluate

    def watched(config: Any, coefs: Any, inputs: ObjectiveInputs, *others: Any) -> Any:
        sizes.append(len(inputs.mask))
        return evaluate(config, coefs, inputs, *others)

    monkeypatch.setattr(module, "_evaluate", watched)
    return sizes


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 1e-12) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        if value is None:
            assert found[name] is None, name
        else:
            torch.testing.assert_close(
                found[name], value, rtol=rtol, atol=rtol / 100, msg=lambda m, n=name: f"{n}: {m}"
            )


EVERYTHING = {
    "kl_estimator": "exact",
    "value_clip": 0.2,
    "sampler_correction": "truncate",
    "off_policy_threshold": 0.1,
    "tv_limit": 0.05,
}


@pytest.mark.parametrize("level", get_args(RatioLevel))
@pytest.mark.parametrize("surrogate", get_args(Surrogate))
def test_blocks_equal_the_whole(surrogate, level, blocks, monkeypatch):
    config = ObjectiveConfig(surrogate=surrogate, ratio_level=level, **EVERYTHING)
    whole = evaluated(leaves_of(tensors()), config)
    monkeypatch.setitem(blockwise.STEPS_PER_BLOCK, "cpu", 2 * WIDTH)
    inputs = leaves_of(tensors())
    assert_same(evaluated(inputs, config), whole)
    assert blocks == [7, 2, 2, 2, 1]
    for name in LEAVES:
        assert (whole[f"d {name}"] != 0).any()
        assert (whole[f"d {name}"][~inputs.mask] == 0).all()


@pytest.mark.parametrize(
    ("settings", "changes"),
    [
        ({"kl_estimator": "k3"}, {}),
        ({"kl_estimator": "k3_weighted", "entropy_estimator": "score_function"}, {}),
        (
            {"sampler_correction": "mask", "sampler_ratio_level": "row", "sampler_ratio_low": 0.8},
            {"ref_log_probs": None},
        ),
        ({"surrogate": "kl_cov", "cov_fraction": 0.3}, {"keep": None, "penalised": None}),
        ({"top_entropy_fraction": 0.4}, {"keep": None, "penalised": None}),
        ({}, {"old_log_probs": None}),
        ({"ratio_level": "row"}, {"old_log_probs": None, "entropy_weights": None}),
        ({"value_coef": 2.0}, {"old_values": None}),
    ],
    ids=str,
)
def test_blocks_equal_the_whole_under_other_settings(settings, changes, monkeypatch):
    given = {**tensors(), **changes}
    if settings.get("kl_estimator") is None and given["ref_log_probs"] is None:
        given["kl_coef"] = 0.0
    config = ObjectiveConfig(**settings)
    whole = evaluated(leaves_of(given), config)
    monkeypatch.setitem(blockwise.STEPS_PER_BLOCK, "cpu", 2 * WIDTH)
    assert_same(evaluated(leaves_of(given), config), whole)


def test_advantages_per_step_in_blocks(monkeypatch):
    given = {**tensors(), "advantages": torch.randn(NUM_ROWS, WIDTH, dtype=torch.float64)}
    config = ObjectiveConfig(**EVERYTHING)
    whole = evaluated(leaves_of(given), config)
    monkeypatch.setitem(blockwise.STEPS_PER_BLOCK, "cpu", 2 * WIDTH)
    assert_same(evaluated(leaves_of(given), config), whole)


@pytest.mark.parametrize(
    ("limit", "sizes"), [(1, [1] * 7), (WIDTH, [1] * 7), (3 * WIDTH, [3, 3, 1]), (3 * WIDTH + 2, [3, 3, 1])]
)
def test_any_size_of_block(limit, sizes, blocks, monkeypatch):
    """Less than a row makes blocks of one row; 3 and 3 2/3 rows make blocks of three, the last of one."""
    config = ObjectiveConfig(**EVERYTHING)
    whole = evaluated(leaves_of(tensors()), config)
    monkeypatch.setitem(blockwise.STEPS_PER_BLOCK, "cpu", limit)
    assert_same(evaluated(leaves_of(tensors()), config), whole)
    assert blocks == [7, *sizes]


def test_less_than_two_blocks_are_one_piece(blocks, monkeypatch):
    monkeypatch.setitem(blockwise.STEPS_PER_BLOCK, "cpu", 4 * WIDTH)
    grpo_objective(leaves_of(tensors()), ObjectiveConfig(**EVERYTHING))
    assert blocks == [7]


def test_the_gradient_is_scaled_by_what_comes_from_above(in_blocks_of_two):
    config = ObjectiveConfig(**EVERYTHING)
    plain, scaled = (evaluated(leaves_of(tensors()), config, upstream) for upstream in (1.0, -2.5))
    for name in LEAVES:
        torch.testing.assert_close(scaled[f"d {name}"], -2.5 * plain[f"d {name}"], rtol=1e-14, atol=0)


def test_a_second_backward_gives_the_same_again(in_blocks_of_two):
    inputs = leaves_of(tensors())
    leaves = [getattr(inputs, name) for name in LEAVES]
    loss = grpo_objective(inputs, ObjectiveConfig(**EVERYTHING)).loss
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    second = torch.autograd.grad(loss, leaves, retain_graph=True)
    third = torch.autograd.grad(2.0 * loss, leaves)
    for once, twice, doubled in zip(first, second, third, strict=True):
        assert torch.equal(once, twice)
        torch.testing.assert_close(doubled, 2.0 * once, rtol=1e-15, atol=0)


def test_two_backwards_add_up_in_the_leaves(in_blocks_of_two):
    inputs = leaves_of(tensors())
    loss = grpo_objective(inputs, ObjectiveConfig(**EVERYTHING)).loss
    loss.backward(retain_graph=True)
    once = [getattr(inputs, name).grad.clone() for name in LEAVES]
    loss.backward()
    for name, gradient in zip(LEAVES, once, strict=True):
        torch.testing.assert_close(getattr(inputs, name).grad, 2 * gradient, rtol=1e-15, atol=0)


def test_gradients_reach_parameters_that_several_inputs_share(blocks, monkeypatch):
    """log-probs and entropy of one softmax, whose logits they meet in."""
    logits = torch.randn(NUM_ROWS, WIDTH, 4, dtype=torch.float64)
    chosen = torch.randint(4, (NUM_ROWS, WIDTH, 1))

    def gradient() -> Tensor:
        leaf = logits.clone().requires_grad_()
        log_probs = leaf.log_softmax(-1)
        given = tensors() | {"old_log_probs": None, "behaviour_log_probs": None, "keep": None}
        given["log_probs"] = log_probs.gather(-1, chosen).squeeze(-1)
        given["entropy"] = -(log_probs.exp() * log_probs).sum(-1)
        loss = grpo_objective(objective_inputs(**given), ObjectiveConfig(value_coef=0.0)).loss
        return torch.autograd.grad(loss, leaf)[0]

    whole = gradient()
    monkeypatch.setitem(blockwise.STEPS_PER_BLOCK, "cpu", 2 * WIDTH)
    torch.testing.assert_close(gradient(), whole, rtol=1e-12, atol=1e-15)
    assert blocks == [7, 2, 2, 2, 1]


def test_only_what_asks_for_a_gradient_gets_one(in_blocks_of_two):
    inputs = leaves_of(tensors(), ("log_probs", "values"))
    found = evaluated(inputs, ObjectiveConfig(**EVERYTHING))
    assert found["d entropy"] is None
    assert found["d kl"] is None
    everything = evaluated(leaves_of(tensors()), ObjectiveConfig(**EVERYTHING))
    assert torch.equal(found["d log_probs"], everything["d log_probs"])
    assert torch.equal(found["d values"], everything["d values"])


def test_under_no_grad_the_numbers_are_the_same_and_nothing_is_differentiated(monkeypatch):
    config = ObjectiveConfig(**EVERYTHING)
    inputs = leaves_of(tensors())
    with torch.no_grad():
        whole = grpo_objective(inputs, config)
        monkeypatch.setitem(blockwise.STEPS_PER_BLOCK, "cpu", 2 * WIDTH)
        parts = grpo_objective(inputs, config)
    assert not parts.loss.requires_grad
    assert_same({"loss": parts.loss, **parts.metrics}, {"loss": whole.loss, **whole.metrics})


def test_under_no_grad_no_gradient_is_put_together(in_blocks_of_two, monkeypatch):
    """An evaluation must not pay for a backward pass that nobody can ask for."""
    module = importlib.import_module("grpo.log_prob_gradient")
    asked = []
    monkeypatch.setattr(module, "times", lambda *values: asked.append(1) or torch.mul(*values))
    inputs = leaves_of(tensors())
    with torch.no_grad():
        grpo_objective(inputs, ObjectiveConfig(**EVERYTHING))
    assert not asked
    grpo_objective(inputs, ObjectiveConfig(**EVERYTHING))
    assert asked, "nothing goes through what is watched here"


def test_there_is_no_second_derivative(in_blocks_of_two):
    """Slopes are constants to autograd: what they depend on would be forgotten, so it is refused."""
    inputs = leaves_of(tensors())
    loss = grpo_objective(inputs, ObjectiveConfig(**EVERYTHING)).loss
    (gradient,) = torch.autograd.grad(loss, inputs.log_probs, create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        gradient.sum().backward()


def test_inputs_without_any_gradient(in_blocks_of_two, monkeypatch):
    config = ObjectiveConfig(**EVERYTHING)
    blocks = grpo_objective(objective_inputs(**tensors()), config)
    assert not blocks.loss.requires_grad
    monkeypatch.undo()
    whole = grpo_objective(objective_inputs(**tensors()), config)
    assert_same({"loss": blocks.loss, **blocks.metrics}, {"loss": whole.loss, **whole.metrics})


@pytest.mark.parametrize("only", ["values", "entropy", "kl"])
def test_an_input_that_no_term_reads_may_be_the_only_one_with_a_gradient(only, in_blocks_of_two):
    """As in one piece, where the loss then has no gradient (or one of 0)."""
    given = tensors() | {"returns": None, "kl_coef": 0.0, "entropy_coef": 0.0}
    inputs = leaves_of(given, (only,))
    assert grpo_objective(inputs, ObjectiveConfig()).loss.isfinite()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_come_in_the_precision_of_their_inputs(dtype, monkeypatch):
    config = ObjectiveConfig(value_clip=0.2, kl_estimator="exact")
    given = tensors(dtype)
    whole = evaluated(leaves_of(given), config)
    monkeypatch.setitem(blockwise.STEPS_PER_BLOCK, "cpu", 2 * WIDTH)
    inputs = leaves_of(given)
    found = evaluated(inputs, config)
    assert found["loss"].dtype == torch.float32
    assert all(found[f"d {name}"].dtype == dtype for name in LEAVES)
    assert_same(found, whole, rtol=1e-5)


def test_the_inputs_are_left_as_they_were(in_blocks_of_two):
    inputs = leaves_of(tensors())
    before = replace(inputs)
    evaluated(inputs, ObjectiveConfig(**EVERYTHING))
    for name, value in tensors().items():
        assert getattr(inputs, name) is getattr(before, name)
        if isinstance(value, Tensor):
            torch.testing.assert_close(getattr(inputs, name).detach(), value, rtol=0, atol=0, equal_nan=True)


def test_a_large_batch_comes_in_blocks_by_itself(blocks):
    """At the real size: two blocks, half a second."""
    rows = 2 * blockwise.STEPS_PER_BLOCK["cpu"] // 64
    log_probs = -torch.rand(rows, 64)
    advantages = torch.randn(rows)
    leaf = log_probs.clone().requires_grad_()
    output = grpo_objective(
        objective_inputs(leaf, advantages, old_log_probs=log_probs, weights=torch.full((rows, 64), 1e-3).double()),
        ObjectiveConfig(),
    )
    assert blocks == [rows // 2, rows // 2]
    output.loss.backward()
    # ratio 1: -w A
    torch.testing.assert_close(leaf.grad, (-1e-3 * advantages.unsqueeze(1)).expand_as(leaf), rtol=1e-6, atol=0)
    assert output.metrics["ratio"][0].item() == rows * 64
