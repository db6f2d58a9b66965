"""The same given samples, trained on by our trainer and by TRL's."""

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from adapters.agents import AgentPolicy, train_with_trl
from adapters.llm import HFPolicy, SampledTokens, SamplingConfig
from grpo import GRPOConfig, GRPOTrainer
from tests.support.llm_models import END, PAD, character_tokenizer, hf_policy, row_log_probs, tiny_model

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
