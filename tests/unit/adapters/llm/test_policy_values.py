"""`HFPolicy` with a value head: values, their gradients, and what becomes of the head."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from adapters.llm import HFPolicy, ValueHead, merged_weights
from adapters.llm.model.causal_lm import CausalLM
from grpo import AdvantageConfig, GRPOTrainer, ObjectiveConfig, ObjectiveInputs, grpo_objective
from grpo.checks import check_policy
from grpo.errors import ConfigError, GRPOWarning
from tests.support.llm_models import (
    FAMILIES,
    STATES,
    adapted_model,
    completion,
    encoded,
    forward_shapes,
    policy_of,
    relative_difference,
    saved_model,
    tiny_model,
    trainer_of,
)

ROWS = [completion(5, 6, 7, finish_reason="length"), completion(9), completion(4, 12, 30, 2)]


def random_head(model: Any, dropout: float = 0.0) -> ValueHead:
    """A head of 8 hidden units with random weights, the same in every call."""
    head = ValueHead(CausalLM(model).hidden_size, width=8, dropout=dropout)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(std=0.3, generator=generator)
    return head


def policy_with_values(model: Any = None, dropout: float = 0.0, **options: Any) -> HFPolicy:
    model = model or tiny_model()
    return policy_of(model, value_head=random_head(model, dropout), **options)


def hidden_of(model: Any, state: str, action: Any) -> Tensor:
    """[L + 1, H]: hidden states before each token of a completion and after the last, from this row alone."""
    row = torch.tensor([[*encoded(state), *action.token_ids]])
    output = model(input_ids=row, use_cache=False, output_hidden_states=True)
    return output.hidden_states[-1][0, len(encoded(state)) - 1 :]


def values_of(head: ValueHead, hidden: Tensor) -> Tensor:
    """w · relu(U h + a) + b, written out."""
    u, a, w, b = head.parameters()
    return (hidden @ u.T + a).clamp_min(0) @ w[0] + b


@pytest.mark.parametrize("family", FAMILIES)
def test_values_are_those_of_each_row_alone(family: str) -> None:
    """The value of a token belongs to the state before it. Only a truncated row has a value after its last token."""
    policy = policy_with_values(tiny_model(family))
    grouped = policy.score_groups(STATES, [[row] for row in ROWS])
    for scores in (policy.score_actions(STATES, ROWS), grouped):
        for state, row, values, final in zip(STATES, ROWS, scores.values, scores.final_values, strict=True):
            expected = values_of(policy.value_head, hidden_of(policy.model, state, row))
            torch.testing.assert_close(values[: len(row)], expected[:-1], atol=1e-5, rtol=0)
            assert not values[len(row) :].any()
            after = expected[-1] if row.is_truncated else torch.tensor(0.0)
            torch.testing.assert_close(final, after, atol=1e-5, rtol=0)
        without = policy_of(policy.model).score_actions(STATES, ROWS)
        torch.testing.assert_close(scores.log_probs, without.log_probs, atol=1e-5, rtol=0)


def test_the_state_after_the_last_token_is_computed_only_for_truncated_rows() -> None:
    policy = policy_with_values()
    shapes = forward_shapes(policy.model)
    policy.score_actions(STATES, ROWS[1:2] * 3)
    policy.score_actions(STATES, ROWS)
    assert [width for _, width in shapes[1:]] == [len(STATES[1]), 4]  # one token each needs no second pass
    policy = policy_with_values(mask_truncated=True)
    scores = policy.score_actions(STATES, ROWS)
    assert scores.final_values.tolist() == [0, 0, 0]  # the truncated row has no step
    assert not scores.values[0].any()


def test_tokens_that_were_not_sampled_have_no_value() -> None:
    policy = policy_with_values()
    row = completion(5, 6, 7, 8, finish_reason="length")
    context = type(row)(**row.to_state() | {"sampled": (True, False, True, False)})
    expected = values_of(policy.value_head, hidden_of(policy.model, "abc", row))
    scores = policy.score_actions(["abc"], [context])
    torch.testing.assert_close(scores.values[0, :4], expected[:4] * torch.tensor([1, 0, 1, 0]), atol=1e-5, rtol=0)
    torch.testing.assert_close(scores.final_values[0], expected[3], atol=1e-5, rtol=0)


@pytest.mark.parametrize("clip", [None, 0.25])
def test_the_gradient_of_the_value_loss_by_hand(clip: float | None) -> None:
    """e = (v - R)^2 has the slope 2 (v - R). With a clip, a step has no slope where the clipped error is the larger one."""
    policy = policy_with_values()
    scores = policy.score_actions(STATES, ROWS)
    with torch.no_grad():
        hidden = torch.cat([hidden_of(policy.model, s, row)[:-1] for s, row in zip(STATES, ROWS, strict=True)])
        v = values_of(policy.value_head, hidden)
        u, a, w, _ = policy.value_head.parameters()
        # relative to v: the returns, and the values at collection
        returns = v + torch.tensor([1.0, -1.0, 1.0, -1.0, 0.5, 0.2, 2.0, -0.1])
        old = v + torch.tensor([-0.5, 0.1, 0.5, 0.6, -0.3, 0.0, -0.26, 0.4])
        # old + clip(v - old): -0.25, 0, 0.25, 0.35, -0.05, 0, -0.01, 0.15; no slope where this is further from R than v = 0 is
        is_free = torch.tensor([clip is None or near for near in (False, True, True, False, False, True, False, False)])
        slopes = 0.5 * 2 * (v - returns) * is_free / 8
        active = (hidden @ u.T + a).clamp_min(0)
        of_units = slopes[:, None] * w * (active > 0)
    mask = scores.mask

    def on_steps(values: Tensor) -> Tensor:
        return torch.zeros(mask.shape).masked_scatter(mask, values)

    inputs = ObjectiveInputs(
        log_probs=scores.log_probs, old_log_probs=None, advantages=torch.zeros(3), mask=mask, weights=mask / 8,
        values=scores.values, old_values=on_steps(old), returns=on_steps(returns),
    )  # fmt: skip
    grpo_objective(inputs, ObjectiveConfig(value_coef=0.5, value_clip=clip)).loss.backward()
    found = {name: parameter.grad for name, parameter in policy.value_head.named_parameters()}
    expected = {
        "layers.0.weight": of_units.T @ hidden, "layers.0.bias": of_units.sum(0),
        "layers.3.weight": slopes[None] @ active, "layers.3.bias": slopes.sum()[None],
    }  # fmt: skip
    assert relative_difference(found, expected) < 1e-5
    assert any(bool(parameter.grad.any()) for parameter in policy.model.parameters())  # the values train the model too


# Training


def ones(states: Any, actions: Any) -> list[float]:
    return [1.0] * len(actions)


def with_gae(policy: HFPolicy, **settings: Any) -> GRPOTrainer:
    return trainer_of(policy, ones, **{"learning_rate": 1e-2, "advantage": AdvantageConfig(credit="gae")} | settings)


def test_values_start_at_0_and_become_the_returns() -> None:
    """Every completion is truncated with the reward 1. Nothing follows, so each return is 1."""
    head = ValueHead(32, bootstrap_truncated=False)
    policy = policy_of(value_head=head, max_new_tokens=2, end_token_ids=[])
    assert not policy.score_actions(STATES, ROWS).values.any()
    trainer = with_gae(policy, advantage=AdvantageConfig(credit="gae", gamma=1.0), num_epochs_per_update=8)
    trainer.step(STATES)
    trainer.step(STATES)
    scores = policy.eval().score_actions(STATES, [completion(5, 6, finish_reason="length")] * 3)
    assert scores.final_values.tolist() == [0, 0, 0]
    torch.testing.assert_close(scores.values, torch.ones(3, 2), atol=0.3, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "make", "autocast"), [
    ("adapter", adapted_model, None), ("bfloat16", lambda: adapted_model(tiny_model(dtype=torch.bfloat16)), None),
    ("autocast", tiny_model, "bfloat16"), ("float64", lambda: tiny_model(dtype=torch.float64), None),
])  # fmt: skip
def test_the_head_is_trained_beside_an_adapter_and_in_float32(name: Any, make: Any, autocast: Any) -> None:
    policy = policy_of(make(), value_head=True)
    heads = {key: value for key, value in policy.get_parameters().items() if key.startswith("value_head.")}
    assert [tuple(value.shape) for value in heads.values()] == [(32, 32), (32,), (1, 32), (1,)]
    assert {v.dtype for v in heads.values()} == {torch.float64 if name == "float64" else torch.float32}
    assert all("lora_" in key for key in policy.get_parameters().keys() - heads) or "adapt" not in name
    before = {key: value.detach().clone() for key, value in policy.get_parameters().items()}
    with_gae(policy, autocast_dtype=autocast, num_epochs_per_update=3).step(STATES)
    assert all(not torch.equal(value, before[key]) for key, value in heads.items())
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast is not None):
        scores = policy.score_actions(STATES, ROWS)
    assert scores.values.dtype == next(iter(heads.values())).dtype
    assert scores.values.any()


def test_a_frozen_model_is_refused_although_its_head_is_not_frozen() -> None:
    policy = policy_of(tiny_model().requires_grad_(False), value_head=True)
    with pytest.raises(ConfigError, match="are frozen, so training would change nothing"):
        with_gae(policy)


def test_dropout_is_on_in_training_only_and_does_not_disturb_the_first_ratio() -> None:
    policy = policy_with_values(dropout=0.5)
    plain = policy_with_values()
    expected = plain.score_actions(STATES, ROWS)
    assert torch.equal(policy.eval().score_actions(STATES, ROWS).values, expected.values)
    noisy = policy.train().score_actions(STATES, ROWS)
    assert not torch.equal(noisy.values, expected.values)
    assert torch.equal(noisy.log_probs, expected.log_probs)
    with_gae(policy, num_epochs_per_update=2).step(STATES)  # a warning would be an error
    model = tiny_model("gpt2", resid_pdrop=0.5)
    with pytest.warns(GRPOWarning, match=r"differ by .*resid_dropout") as said:
        with_gae(policy_with_values(model, dropout=0.5), num_epochs_per_update=2).step(STATES)
    assert "value_head" not in str(said[0].message)  # only what changes log-probs is named


@pytest.mark.slow
def test_the_conformance_kit_accepts_values() -> None:
    report = check_policy(policy_with_values(max_new_tokens=3), STATES, num_samples=20)
    report.raise_for_failures()
    assert report["values"].status == "passed"


# The head and the model


def test_the_head_is_no_part_of_the_model() -> None:
    """A sampler with weights of its own gets the model only, and log-probs are computed without the head."""
    policy = policy_with_values(adapted_model())
    policy.value_head.forward = None  # a call would fail
    assert [name for name, _ in merged_weights(policy.model)] == [name for name, _ in merged_weights(tiny_model())]
    policy.get_log_probabilities(STATES, ROWS)
    policy.reference_log_probabilities(STATES, ROWS)


def test_the_head_follows_the_model() -> None:
    policy = policy_with_values()
    assert policy.train().value_head.training
    assert not policy.eval().value_head.training
    assert policy_of(tiny_model().train(), value_head=True).value_head.training
    assert {value.device.type for value in policy.to("meta").get_parameters().values()} == {"meta"}


def test_the_head_is_saved_with_the_model(tmp_path: Path, subtests: pytest.Subtests) -> None:
    base = tiny_model()
    saved_model(tmp_path / "base", base)
    for lora, merge in ((None, False), (True, False), (True, True)):
        with subtests.test(lora=lora, merge=merge):
            head = random_head(base, dropout=0.25)
            head.bootstrap_truncated = False
            policy = HFPolicy.from_pretrained(tmp_path / "base", lora=lora, value_head=head, device="cpu")
            folder = tmp_path / f"{lora}{merge}"
            policy.save_pretrained(folder, merge=merge)
            again = HFPolicy.from_pretrained(folder, value_head=True, device="cpu")
            found, expected = again.value_head.state_dict(), head.state_dict()
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in expected)
            assert (again.value_head.layers[2].p, again.value_head.bootstrap_truncated) == (0.25, False)
            scores, others = (each.score_actions(STATES, ROWS) for each in (again, policy))
            torch.testing.assert_close(scores.values, others.values, atol=1e-5, rtol=0)
            assert HFPolicy.from_pretrained(folder, device="cpu").value_head is None
    fresh = HFPolicy.from_pretrained(tmp_path / "base", value_head=True, device="cpu")
    assert not fresh.score_actions(STATES, ROWS).values.any()


@pytest.mark.parametrize(("make", "message"), [
    (lambda: policy_of(value_head="yes"), "value_head must be True, False or a ValueHead; got str 'yes'"),
    (lambda: policy_of(value_head=ValueHead(31)), r"hidden states of 32 numbers; got hidden_size=31. Pass ValueHead\(32\)"),
    (lambda: ValueHead(0), "at least 1, .* got 0, 0 and 0.1"),
    (lambda: ValueHead(8, width=0), "at least 1, .* got 8, 0 and 0.1"),
    (lambda: ValueHead(8, dropout=1.0), r"below 1; got 8, 8 and 1\.0"),
    (lambda: ValueHead(8, dropout=-0.1), r"below 1; got 8, 8 and -0\.1"),
])  # fmt: skip
def test_wrong_heads_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_the_smallest_head_is_accepted() -> None:
    assert ValueHead(1, width=1, dropout=0.0)(torch.ones(2, 1)).tolist() == [0, 0]
