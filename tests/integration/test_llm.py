"""Tiny language models: the conformance kit, and training end to end."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import Tensor

from adapters.llm import CompletionRewards, HFPolicy, SamplingConfig
from adapters.llm.policy_scoring import CompletionScorer
from grpo import GRPOConfig, GRPOTrainer, compare_policies, measure_policy
from grpo.checks import check_policy
from tests.support.llm_models import (
    FLOAT32_GRADIENT,
    character_tokenizer,
    hf_policy,
    relative_difference,
    tiny_model,
)
from tests.support.objective_inputs import as_users_run_it

STATES = ["1+1=", "12+30=?", "abc"]


def count_of_ones(states: Any, actions: Any) -> list[float]:
    return [float(action.text.count("1")) for action in actions]


def policy_of(model: Any = None, **options: Any) -> HFPolicy:
    sampling = options.pop("sampling", SamplingConfig(max_new_tokens=8))
    return hf_policy(model or tiny_model(), character_tokenizer(), sampling=sampling, **options)


def with_lora(model: Any = None) -> Any:
    return get_peft_model(model or tiny_model(), LoraConfig(r=4, lora_alpha=16, target_modules="all-linear"))


def trainer_of(policy: HFPolicy, reward: Any = count_of_ones, **settings: Any) -> GRPOTrainer:
    config = GRPOConfig(**{"group_size": 8, "learning_rate": 3e-3, "seed": 0} | settings)
    return GRPOTrainer(config=config, policy=policy, reward_model=reward)


def weights_of(model: Any) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


POLICIES: dict[str, Callable[[], HFPolicy]] = {
    "plain": lambda: policy_of(),
    "LoRA": lambda: policy_of(with_lora()),
    "reference model": lambda: policy_of(reference_model=tiny_model()),
    "truncated sampling, exact entropy": lambda: policy_of(
        sampling=SamplingConfig(max_new_tokens=6, temperature=0.7, top_p=0.9, repetition_penalty=1.2),
        exact_entropy=True,
        max_tokens_per_forward=50,
    ),
    "generate": lambda: policy_of(sampler="generate", mask_truncated=True),
    **{family: lambda family=family: policy_of(tiny_model(family)) for family in ("gpt2", "mistral", "mamba")},
}


@pytest.mark.slow
def test_the_conformance_kit_passes(subtests: pytest.Subtests) -> None:
    for kind in POLICIES:
        with subtests.test(kind=kind):
            report = check_policy(POLICIES[kind](), STATES, num_samples=50)
            report.raise_for_failures()
            assert report.ok
            has_reference = kind in ("LoRA", "reference model")
            assert (report["reference"].status == "passed") == has_reference
            assert report["sample_actions"].status == "passed"


def test_short_completions_are_sampled_with_their_probability() -> None:
    """With one token per completion, few different completions exist, and the kit can count them."""
    policy = policy_of(sampling=SamplingConfig(max_new_tokens=1))
    report = check_policy(policy, STATES, num_samples=1000)
    assert report["generated samples"].status == report["sampled samples"].status == "passed"


# Learning


@pytest.mark.parametrize("kind", ["LoRA", "mistral"])
def test_a_trivial_reward_is_learned(kind: str) -> None:
    """The reward is the number of ones. At first about one character in 43 is a one; at last most of the 8 are."""
    trainer = trainer_of(POLICIES[kind](), learning_rate=1e-2)
    rewards = [trainer.step(STATES)["rewards/mean"] for _ in range(20)]
    assert sum(rewards[:3]) / 3 < 1.5
    assert sum(rewards[-3:]) / 3 > 5


@pytest.mark.parametrize(("dtype", "settings"), [
    (torch.bfloat16, {}), (torch.float32, {"autocast_dtype": "bfloat16", "learning_rate": 1e-4}),
], ids=["weights", "autocast"])  # fmt: skip
def test_in_bfloat16_a_model_trains_with_ratios_near_one_and_keeps_its_dtype(dtype: torch.dtype, settings: Any) -> None:
    policy = policy_of(tiny_model(dtype=dtype))
    before = weights_of(policy.model)
    metrics = trainer_of(policy, batch_size=12, **settings).step(STATES)  # of two updates: old log-probs are computed
    assert any(not torch.equal(value, before[name]) for name, value in weights_of(policy.model).items())
    assert {value.dtype for value in policy.get_parameters().values()} == {dtype}
    assert metrics["train/ratio_mean"] == pytest.approx(1, abs=0.1)


# Forward passes that are saved


def forwarded_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counts: list[int] = []
    inner = CompletionScorer.scores

    def counting(self: CompletionScorer, prompts: Any, actions: Any, **options: Any) -> Any:
        counts.append(len(actions))
        return inner(self, prompts, actions, **options)

    monkeypatch.setattr(CompletionScorer, "scores", counting)
    return counts


def test_old_log_probs_and_rows_with_advantage_0_need_no_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_group_differs(states: Any, actions: Any) -> list[float]:
        return [
            float(len(action.text)) if state == STATES[0] else 1.0
            for state, action in zip(states, actions, strict=True)
        ]

    counts = forwarded_rows(monkeypatch)
    metrics = trainer_of(policy_of(), first_group_differs, num_epochs_per_update=2).step(STATES)
    assert metrics["rows/skipped_zero_advantage"] >= 16  # all rows of two groups
    live = 24 - int(metrics["rows/skipped_zero_advantage"])
    assert counts == [live, live]  # one per epoch: the sampler's scores are the old log-probs


def test_the_positions_per_forward_pass_do_not_change_the_update(
    subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One update of the same rows in one forward pass, in several, and in one per row."""
    counts = forwarded_rows(monkeypatch)
    for kind in ("qwen3", "mistral"):
        with subtests.test(kind=kind):
            updates, num_forwards = [], []
            for budget in (10**6, 60, 1):
                policy = policy_of(tiny_model(kind), max_tokens_per_forward=budget)
                optimizer = torch.optim.SGD(
                    policy.get_parameters().values(), lr=64.0
                )  # Adam's first step keeps only signs
                before = weights_of(policy.model)
                counts.clear()
                GRPOTrainer(
                    config=GRPOConfig(group_size=8, seed=0),
                    policy=policy,
                    reward_model=count_of_ones,
                    optimizer=optimizer,
                ).step(STATES)
                num_forwards.append(len(counts))
                after = weights_of(policy.model)
                updates.append({name: after[name] - before[name] for name in after})
            assert num_forwards[0] == 1 < num_forwards[1] < num_forwards[2]
            for update in updates[1:]:
                assert relative_difference(update, updates[0]) < FLOAT32_GRADIENT


def test_training_measuring_and_comparing_work_on_a_dataset() -> None:
    """A dataset creates its rows on access, and the reward gets the column of the answers."""
    problems = Dataset.from_list([{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(4)])

    def right(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return [float(truth in completion) for completion, truth in zip(completions, answer, strict=True)]

    policy = HFPolicy(tiny_model(), character_tokenizer(), sampling=SamplingConfig(max_new_tokens=6))
    reward = CompletionRewards(right)
    config = GRPOConfig(group_size=8, num_states_per_iteration=4, learning_rate=1e-2, seed=0)
    with as_users_run_it():  # without the type checks: a Dataset is not a Sequence
        before = measure_policy(policy, problems, reward, progress=False)
        trainer = GRPOTrainer(config=config, policy=policy, reward_model=reward)
        trainer.train(problems, num_iterations=15, progress=False)
        report = compare_policies(before, policy, problems, reward, progress=False)
    assert report.improvement > 0.1
    assert report.components_after["right"] == report.mean_reward_after
