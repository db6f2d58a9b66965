"""`train_with_trl` and our trainer reach the same weights from the same samples, for each setting that has a counterpart."""

import os
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from adapters.agents import AgentPolicy, EnvironmentReward, train_with_trl
from adapters.agents.bridges.trl import trl_environments
from adapters.llm import HFPolicy, SampledTokens, SamplingConfig
from grpo import AdvantageConfig, GRPOConfig, GRPOTrainer, ObjectiveConfig, RewardConfig, WeightedRewards
from grpo.surrogates import Cispo, Clip, Sapo, Vespo
from tests.integration.test_readme import python_blocks
from tests.support.agents import Scripted, Tools, chat_tokenizer, original_template, says_call
from tests.support.llm_models import END, PAD, character_tokenizer, hf_policy, row_log_probs, tiny_model
from tests.support.trl_environments import Counter, price

pytestmark = pytest.mark.slow
os.environ["HF_HUB_OFFLINE"] = "1"
TOLERANCE = 1e-5
"""Largest difference of a weight. Each update moves a weight by about 1e-3."""
TIGHT = Clip(low=0.001, high=0.002)
STATES = ["1 + 1 = ", "2 + 2 = ? "]
LENGTH = 6


def given_samples(num_rows: int) -> Iterator[list[list[int]]]:
    """Token ids of the rows of one iteration after another. Short rows end with the end token."""
    choose = random.Random(0)
    while True:
        lengths = [choose.randint(1, LENGTH) for _ in range(num_rows)]
        yield [[*(choose.randint(2, 40) for _ in range(n - 1)), END if n < LENGTH else 7] for n in lengths]


class Says:
    """A sampler that returns given samples, with their log-probs under the model."""

    def __init__(self, model: Any, samples: Iterator[list[list[int]]]) -> None:
        self.model, self.samples = model, samples

    def sync(self, model: Any) -> None:
        """Do nothing."""

    def sample(self, prompts: Any, count: int, config: Any, *, end_token_ids: Any, seeds: Any) -> SampledTokens:
        rows, each = next(self.samples), [prompt for prompt in prompts for _ in range(count)]
        with torch.no_grad():
            log_probs = [row_log_probs(self.model, *pair).tolist() for pair in zip(each, rows, strict=True)]
        reasons: list[Any] = ["end" if row[-1] in end_token_ids else "length" for row in rows]
        return SampledTokens(token_ids=rows, finish_reasons=reasons, behaviour_log_probs=log_probs)


def generates(model: Any, turns: Callable[[Tensor], Sequence[Sequence[int]]], pad: int = PAD) -> None:
    """Make `model.generate` return given turns, which may depend on the prompts."""

    def generate(input_ids: Tensor, **_: Any) -> Tensor:
        rows = turns(input_ids)
        width = max(map(len, rows))
        return torch.cat([input_ids, torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows])], 1)

    model.generate = generate


def both_ways(
    config: GRPOConfig,
    reward: Any,
    *,
    num_iterations: int = 1,
    reference_model: Callable[[], Any] | None = None,
    reference_policy: Callable[[], HFPolicy] | None = None,
    **options: Any,
) -> list[tuple[list[dict[str, float]], dict[str, Tensor]]]:
    """The metrics and the weights of our trainer and of TRL's, after the same samples."""
    results = []
    for is_ours in (True, False):
        model = tiny_model()
        options["reference_model"] = None if reference_model is None else reference_model()
        policy = hf_policy(model, character_tokenizer(), sampling=SamplingConfig(max_new_tokens=LENGTH), **options)
        samples = given_samples(len(STATES) * config.group_size)
        reference = None if reference_policy is None else reference_policy()
        if is_ours:
            policy._sampler = Says(model, samples)
            trainer = GRPOTrainer(config=config, policy=policy, reward_model=reward, reference_policy=reference)
            history = trainer.train(STATES, num_iterations=num_iterations, progress=False)
        else:
            generates(model, lambda _, samples=samples: next(samples))  # type: ignore[misc]
            history = with_trl(policy, reward, config, STATES, num_iterations, reference_policy=reference)
        results.append((history, {name: value.detach() for name, value in model.named_parameters()}))
    return results


def with_trl(
    policy: HFPolicy | AgentPolicy, reward: Any, config: GRPOConfig, states: Any, num_iterations: int, **options: Any
) -> list[dict[str, float]]:
    """`train_with_trl` without the warnings of TRL's dependencies, which are not ours to fix."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return train_with_trl(policy, reward, config, states=states, num_iterations=num_iterations, **options)


def share(states: Any, actions: Any) -> list[float]:
    """Numbers that float32 holds: TRL divides what rounding leaves of 0 by 1e-4."""
    return [sum(c in "0123456789abc" for c in action.text) / 8 for action in actions]


def length(states: Any, actions: Any) -> list[float]:
    """NaN, which means that the reward does not apply, for some rows."""
    return [
        float("nan") if len(action) == 3 else len(action) + len(state)
        for state, action in zip(states, actions, strict=True)
    ]


def nearby() -> Any:
    """A reference model."""
    model = tiny_model()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(5)
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model


def nearby_policy() -> HFPolicy:
    return HFPolicy(nearby(), character_tokenizer())


def objective(**settings: Any) -> dict[str, Any]:
    return {"objective": ObjectiveConfig(**settings)}


EPOCHS: dict[str, Any] = {"num_epochs_per_update": 3}
BY_STEP: dict[str, Any] = {"aggregation": "step_mean"}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": (objective(), {"num_iterations": 3}),
    "no bound on the gradient": ({"max_grad_norm": None}, {}),
    "a small bound on the gradient": ({"max_grad_norm": 0.01}, {}),
    "scaled by the group": ({"advantage": AdvantageConfig(scale="group", std_eps=1e-4)}, {}),
    "scaled by the batch": ({"advantage": AdvantageConfig(scale="batch", std_eps=1e-4)}, {}),
    "epochs": (EPOCHS | objective(surrogate=TIGHT), {}),
    "ratios of rows": (EPOCHS | objective(surrogate=Clip(low=0.001, high=0.002, level="row")), {}),
    "delta": (EPOCHS | objective(surrogate=Clip(low=0.001, high=0.002, delta=1.003)), {}),
    "step_mean": (objective(**BY_STEP), {}),
    "step_mean over several passes": ({"micro_batch_size": 2} | objective(**BY_STEP), {}),
    "fixed_length": ({"micro_batch_size": 4} | objective(aggregation="fixed_length", fixed_length=6), {}),
    "row_sum": (objective(aggregation="row_sum"), {}),
    "cispo": (EPOCHS | objective(surrogate=Cispo(low=1.0, high=0.01), **BY_STEP), {}),
    "sapo": (EPOCHS | objective(surrogate=Sapo(temperature_pos=0.5, temperature_neg=2.0)), {}),
    "vespo": (
        EPOCHS | objective(surrogate=Vespo(k_pos=1.0, lambda_pos=2.0, k_neg=2.0, lambda_neg=1.0), **BY_STEP),
        {},
    ),
    "kl": (objective(kl_coef=0.5), {"reference_model": nearby}),
    "k3_weighted": (objective(kl_coef=0.5, kl_estimator="k3_weighted"), {"reference_model": nearby}),
    "kl to a policy that moves": (
        {"reference_sync_every": 2, "reference_mix": 0.3} | EPOCHS | objective(kl_coef=0.5),
        {"reference_policy": nearby_policy, "num_iterations": 3},
    ),
    "entropy": (objective(entropy_coef=0.1, entropy_aggregation="step_mean"), {"exact_entropy": True}),
    "top entropy": (objective(top_entropy_fraction=0.4), {"exact_entropy": True}),
    "off-policy rows": (EPOCHS | objective(off_policy_threshold=0.005), {}),
    "truncated rows": (objective(), {"mask_truncated": True}),
    "cosine": ({"lr_schedule": "cosine", "warmup_ratio": 0.3, "num_epochs_per_update": 2}, {"num_iterations": 4}),
    "linear": ({"lr_schedule": "linear"}, {"num_iterations": 3}),
    "several rewards": (
        {},
        {"reward": WeightedRewards({"share": share, "length": length}, {"share": 2, "length": 0.5})},
    ),
    "GDPO": (
        {"advantage": AdvantageConfig(several_rewards="normalize_each", std_eps=1e-4)},
        {
            "reward": WeightedRewards(
                {"share": share, "short": lambda s, a: [-len(x) for x in a]}, {"share": 2, "short": 1}
            )
        },
    ),
    "lost rewards count as 0": ({"reward": RewardConfig(non_finite="zero")}, {"reward": length}),
}
SAME_METRICS = ("rewards/", "train/grad_norm", "train/learning_rate", "train/kl_mean", "train/num_updates")


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((one[name].detach() - other[name].detach()).abs().max()) for name in one)


@pytest.mark.parametrize("name", CASES)
def test_both_trainers_reach_the_same_weights_and_report_the_same(name: str) -> None:
    settings, options = CASES[name]
    config = GRPOConfig(group_size=4, learning_rate=1e-3, seed=0, **settings)
    (ours, our_weights), (theirs, their_weights) = both_ways(config, options.pop("reward", share), **options)
    assert largest_difference(our_weights, dict(tiny_model().named_parameters())) > 30 * TOLERANCE
    assert largest_difference(our_weights, their_weights) <= TOLERANCE
    assert len(theirs) == len(ours)
    for mine, yours in zip(ours, theirs, strict=True):
        for metric in yours:
            if metric.startswith(SAME_METRICS):
                assert yours[metric] == pytest.approx(mine[metric], rel=1e-3, abs=1e-5), metric


def test_an_agent_with_tools_reaches_the_same_weights() -> None:
    """Qwen2.5's template. Conversations of one, two and three turns; the last reaches `max_turns`."""
    config, weights = GRPOConfig(group_size=3, learning_rate=1e-3, seed=0), []
    said = [["fine"], [says_call(), "so so"], [says_call(), says_call(), says_call()]]

    def talk(states: Any, actions: Any) -> list[int]:  # TRL does not answer the calls of the last turn
        return [sum(message["role"] != "tool" for message in action.messages) for action in actions]

    reward = WeightedRewards({"environment": EnvironmentReward(), "talk": talk})
    for is_ours in (True, False):
        # our loop samples the first turns of all conversations, then the second turns, and so on
        scripted = Scripted(
            [turns[i] for i in range(3) for turns in said if i < len(turns)],
            tokenizer=chat_tokenizer(original_template("qwen2_5")),
            max_new_tokens=120,
            positions=4096,
        )
        policy, tokenizer = scripted.policy, scripted.policy.tokenizer
        agent = AgentPolicy(policy, Tools, max_turns=3)
        if is_ours:
            trainer = GRPOTrainer(config=config, policy=agent, reward_model=reward)
            history = trainer.train(["rain"], num_iterations=1, progress=False)
            assert history[0]["agents/turns"] == 6
        else:
            policy._sampler = HFPolicy(policy.model, tokenizer)._sampler
            generates(policy.model, _says(tokenizer, scripted.turns), tokenizer.pad_token_id)
            found = with_trl(agent, reward, config, ["rain"], 1)
            for name in ("mean", "std"):
                assert found[0][f"rewards/environment/{name}"] == history[0][f"rewards/environment/{name}"]
                assert found[0][f"rewards/{name}"] == pytest.approx(history[0][f"rewards/{name}"])
        weights.append({name: value.detach().clone() for name, value in policy.model.named_parameters()})
    assert largest_difference(*weights) <= TOLERANCE


def test_trls_own_trainer_and_ours_run_the_same_environment_class(tmp_path: Any) -> None:
    """`Counter`, unchanged, with TRL's reward function `price`: the same rewards in both."""
    row = {"prompt": [{"role": "user", "content": "Count. "}], "goal": 3}
    said = [[says_call("add", '{"number": 2}'), "two"], [says_call("add", '{"number": 3}'), "three"]]
    expected = [-1 - 0.5 * 3, 0 - 0.5 * 3]
    turns = [turns[i] for i in range(2) for turns in said]
    options: dict[str, Any] = {"max_new_tokens": 120, "positions": 4096}
    scripted = Scripted(turns, tokenizer=chat_tokenizer(original_template("qwen2_5")), **options)
    agent = AgentPolicy(scripted.policy, trl_environments(Counter, price))
    assert [conversation.reward for conversation in agent.generate_actions([row], 2)[0]] == expected

    policy = Scripted([], tokenizer=scripted.policy.tokenizer, **options).policy
    generates(policy.model, _says(policy.tokenizer, turns), policy.tokenizer.pad_token_id)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import trl
        from datasets import Dataset

        arguments = {
            "per_device_train_batch_size": 2,
            "num_generations": 2,
            "max_steps": 1,
            "max_completion_length": 999,
        }
        quiet: dict[str, Any] = {
            "use_cpu": True,
            "bf16": False,
            "report_to": [],
            "save_strategy": "no",
            "logging_steps": 1,
        }
        trainer = trl.GRPOTrainer(
            model=policy.model,
            args=trl.GRPOConfig(output_dir=str(tmp_path), disable_tqdm=True, **arguments, **quiet),
            reward_funcs=price,
            train_dataset=Dataset.from_list([row]),
            processing_class=policy.tokenizer,
            environment_factory=Counter,
        )
        trainer.train()
    logged = trainer.state.log_history[0]
    assert logged["reward"] == sum(expected) / 2
    assert logged["rewards/Counter/mean"] == -0.5
    assert logged["tools/call_frequency"] == 1.0


def test_the_code_of_the_guide_runs() -> None:
    """The block with `train_with_trl`, which the daily tests leave out, on the page's model."""
    page = Path(__file__).parents[2] / "docs" / "agents.md"
    blocks = [block.code for block in python_blocks(page.read_text(encoding="utf-8"))]
    names: dict[str, Any] = {"config": GRPOConfig(group_size=2)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for code in (blocks[0], *(block for block in blocks if "train_with_trl(" in block)):
            exec(compile(code, str(page), "exec"), names)
    assert len(names["history"]) == 2
    assert "forward" not in vars(names["network"])  # TRL's own is gone
    assert names["network"].config.bos_token_id is None
    assert names["model"].generate_actions(["a"], 1)[0][0].text is not None


def _says(tokenizer: Any, turns: list[str]) -> Callable[[Tensor], list[list[int]]]:
    """The next turns, one for each prompt."""
    left = iter(tokenizer(turns, add_special_tokens=False)["input_ids"])
    return lambda prompts: [[*next(left), tokenizer.eos_token_id] for _ in prompts]
