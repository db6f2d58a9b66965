"""What scores have beside log-probs: values of a value head, the KL to a teacher, and the auxiliary loss of experts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from adapters.llm import Completion, HFPolicy, SamplingConfig, ValueHead, merged_weights
from adapters.llm.model.causal_lm import CausalLM
from adapters.llm.model.teacher_kl import kl_to_teacher
from grpo import AdvantageConfig, GRPOTrainer, ObjectiveConfig, ObjectiveInputs, grpo_objective
from grpo.checks import check_policy
from grpo.distillation import exact_kl, no_reward
from grpo.errors import ConfigError, GRPOWarning
from tests.support.llm_models import (
    FAMILIES,
    FLOAT32_GRADIENT,
    FLOAT32_LOG_PROB,
    ROWS,
    STATES,
    VOCABULARY_SIZE,
    adapted_model,
    character_tokenizer,
    completion,
    encoded,
    forward_shapes,
    gradients,
    hf_policy,
    policy_of,
    relative_difference,
    row_logits,
    saved_model,
    tiny_model,
    trainer_of,
)
from tests.support.tiny_architectures import tiny_of

CUT_ROWS = [completion(5, 6, 7, finish_reason="length"), completion(9), completion(4, 12, 30, 2)]


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
    grouped = policy.score_groups(STATES, [[row] for row in CUT_ROWS])
    for scores in (policy.score_actions(STATES, CUT_ROWS), grouped):
        for state, row, values, final in zip(STATES, CUT_ROWS, scores.values, scores.final_values, strict=True):
            expected = values_of(policy.value_head, hidden_of(policy.model, state, row))
            torch.testing.assert_close(values[: len(row)], expected[:-1], atol=1e-5, rtol=0)
            assert not values[len(row) :].any()
            after = expected[-1] if row.is_truncated else torch.tensor(0.0)
            torch.testing.assert_close(final, after, atol=1e-5, rtol=0)
        without = policy_of(policy.model).score_actions(STATES, CUT_ROWS)
        torch.testing.assert_close(scores.log_probs, without.log_probs, atol=1e-5, rtol=0)


def test_the_state_after_the_last_token_is_computed_only_for_truncated_rows() -> None:
    policy = policy_with_values()
    shapes = forward_shapes(policy.model)
    policy.score_actions(STATES, CUT_ROWS[1:2] * 3)
    policy.score_actions(STATES, CUT_ROWS)
    assert [width for _, width in shapes[1:]] == [len(STATES[1]), 4]  # one token each needs no second pass
    policy = policy_with_values(mask_truncated=True)
    scores = policy.score_actions(STATES, CUT_ROWS)
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
    scores = policy.score_actions(STATES, CUT_ROWS)
    with torch.no_grad():
        hidden = torch.cat([hidden_of(policy.model, s, row)[:-1] for s, row in zip(STATES, CUT_ROWS, strict=True)])
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


def test_the_head_may_say_that_nothing_follows_a_truncated_row() -> None:
    policy = policy_with_values()
    assert policy.score_actions(STATES, CUT_ROWS).final_values[0] != 0
    policy.value_head.bootstrap_truncated = False
    assert policy.score_actions(STATES, CUT_ROWS).final_values.tolist() == [0, 0, 0]


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
        scores = policy.score_actions(STATES, CUT_ROWS)
    assert scores.values.dtype == next(iter(heads.values())).dtype
    assert scores.values.any()


def test_a_frozen_model_is_refused_although_its_head_is_not_frozen() -> None:
    policy = policy_of(tiny_model().requires_grad_(False), value_head=True)
    with pytest.raises(ConfigError, match="are frozen, so training would change nothing"):
        with_gae(policy)


def test_dropout_is_on_in_training_only_and_does_not_disturb_the_first_ratio() -> None:
    policy = policy_with_values(dropout=0.5)
    plain = policy_with_values()
    expected = plain.score_actions(STATES, CUT_ROWS)
    assert torch.equal(policy.eval().score_actions(STATES, CUT_ROWS).values, expected.values)
    noisy = policy.train().score_actions(STATES, CUT_ROWS)
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
    policy.get_log_probabilities(STATES, CUT_ROWS)
    policy.reference_log_probabilities(STATES, CUT_ROWS)


def test_modes_and_devices_apply_to_the_model_its_head_and_in_part_to_the_reference() -> None:
    policy = policy_with_values(reference_model=tiny_model())
    parts = policy.model, policy.value_head, policy.reference_model
    assert policy.train() is policy
    assert [part.training for part in parts] == [True, True, False]
    assert policy.eval() is policy
    assert [part.training for part in parts] == [False] * 3
    assert policy_of(tiny_model().train(), value_head=True).value_head.training
    assert policy.to("meta") is policy
    assert {value.device.type for part in parts for value in part.parameters()} == {"meta"}
    assert policy_of().to("cpu").reference_model is None


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
            scores, others = (each.score_actions(STATES, CUT_ROWS) for each in (again, policy))
            torch.testing.assert_close(scores.values, others.values, atol=1e-5, rtol=0)
            assert HFPolicy.from_pretrained(folder, device="cpu").value_head is None
    fresh = HFPolicy.from_pretrained(tmp_path / "base", value_head=True, device="cpu")
    assert not fresh.score_actions(STATES, CUT_ROWS).values.any()


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


# --- the exact KL to a teacher: against both models' whole distributions, one row at a time


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


# --- the auxiliary loss of a mixture of experts: that of transformers for each row alone, whatever shares or pads the rows


TOKENIZER = character_tokenizer()
COEF = 0.5
PAIR = ["1+1=", "12+30=?"]
GROUPS = [[completion(5, 6, 7, 9), completion(9, 5)], [completion(4, 12, 30), completion(6, finish_reason="length")]]
WEIGHTS = torch.tensor([1.0, 2.0, 3.0, 4.0])


def balanced(model_type: str = "mixtral", **options: Any) -> HFPolicy:
    sampling = SamplingConfig(max_new_tokens=4)
    return hf_policy(tiny_of(model_type), TOKENIZER, sampling=sampling, router_aux_loss_coef=COEF, **options)


def row_losses(policy: HFPolicy, groups: list[list[Completion]]) -> torch.Tensor:
    """[N]: transformers' loss of each row alone, over the positions that predict tokens of the completion."""
    model, losses = policy.model, []
    for state, group in zip(PAIR, groups, strict=True):
        prompt = TOKENIZER(state)["input_ids"]
        for action in group:
            row = torch.tensor([[*prompt, *action.token_ids]])
            counted = torch.zeros_like(row)
            counted[0, len(prompt) - 1 : -1] = 1
            routers = model(input_ids=row, use_cache=False, output_router_logits=True).router_logits
            losses.append(load_balancing_loss_func(routers, model.num_experts, model.num_experts_per_tok, counted))
    return torch.stack(losses)


def assert_as_rows_alone(policy: HFPolicy, groups: list[list[Completion]] = GROUPS) -> None:
    policy.train()
    scores = policy.score_groups(PAIR, groups)
    counts = scores.mask.sum(1)
    means = (scores.auxiliary_loss * scores.mask).sum(1) / counts
    expected = COEF * row_losses(policy, groups)
    torch.testing.assert_close(means, expected, rtol=1e-5, atol=1e-5)
    found = gradients(policy.model, (means * WEIGHTS).sum())
    slopes = gradients(policy.model, (expected * WEIGHTS).sum())
    assert any(bool(slope.any()) for name, slope in slopes.items() if name.endswith(("gate.weight", "router.weight")))
    assert relative_difference(found, slopes) < 1e-4


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_values_and_gradients_are_those_of_transformers_for_each_row_alone(model_type: Any) -> None:
    policy = balanced(model_type)
    assert policy._lm.shares_prompts
    assert_as_rows_alone(policy)


def test_rows_in_packs_whole_rows_and_rows_that_fork_give_the_same(subtests: pytest.Subtests) -> None:
    with subtests.test("gradient checkpointing"):
        policy = balanced("mixtral")
        policy.model.gradient_checkpointing_enable()
        assert policy.train()._scorer._shares_prompts
        assert_as_rows_alone(policy)
    with subtests.test("whole rows"):
        policy = balanced("mixtral")
        policy._lm.shares_prompts = False
        assert_as_rows_alone(policy)
    with subtests.test("forks"):
        forked = [Completion(token_ids=(5, 6, end), text="", finish_reason="end", forks=(2,)) for end in (7, 9)]
        assert_as_rows_alone(balanced("mixtral"), [forked, GROUPS[1]])


def test_tokens_that_do_not_count_have_no_loss() -> None:
    policy = balanced("mixtral", mask_truncated=True)
    loss = policy.train().score_groups(PAIR, GROUPS).auxiliary_loss
    assert loss[3].abs().sum() == 0
    expected = COEF * row_losses(policy, GROUPS)
    torch.testing.assert_close(loss[:3].sum(1) / torch.tensor([4, 2, 3]), expected[:3], rtol=1e-5, atol=1e-5)


def test_hidden_states_keep_their_precision_and_log_probs_do_not_change() -> None:
    with_loss = balanced("mixtral")
    without = hf_policy(tiny_of("mixtral"), TOKENIZER)
    for dtype in [torch.float32, torch.bfloat16]:
        found, expected = (
            policy.model.to(dtype) and policy.score_groups(PAIR, GROUPS) for policy in (with_loss, without)
        )
        assert torch.equal(found.log_probs, expected.log_probs)
        assert expected.auxiliary_loss is None


def test_an_update_has_the_same_loss_and_gradient_in_any_micro_batches() -> None:
    found = []
    for limit in [16_384, 12]:
        policy = balanced("mixtral", max_tokens_per_forward=limit)
        found.append(trainer_of(policy, learning_rate=1e-3, max_grad_norm=None).step(PAIR))
    assert found[0]["train/auxiliary_loss"] == pytest.approx(found[1]["train/auxiliary_loss"], rel=1e-5)
    assert found[0]["train/grad_norm"] == pytest.approx(found[1]["train/grad_norm"], rel=1e-4)
    total = found[0]["train/policy_loss"] + found[0]["train/auxiliary_loss"]
    assert found[0]["train/total_loss"] == pytest.approx(total, rel=1e-5)


def test_a_model_without_routers_is_refused() -> None:
    for model_type in ["llama", "deepseek_v3"]:
        message = r"router_aux_loss_coef=0\.5 needs a mixture of experts whose router logits"
        with pytest.raises(ConfigError, match=message):
            balanced(model_type)
