"""GRPO for Hugging Face causal language models, with reward functions and samplers of any kind.

Requires transformers and PEFT (`pip install ".[llm]"`). 4-bit and 8-bit models also require `[llm-4bit]`, and pictures
`[vision]`.

Example:
    Train a model with a TRL-style reward function::

        from adapters.llm import CompletionRewards, HFPolicy, SamplingConfig
        from grpo import GRPOConfig, GRPOTrainer

        def right(completions, answer, **columns):
            return [float(completion.strip() == truth) for completion, truth in zip(completions, answer)]

        policy = HFPolicy.from_pretrained("Qwen/Qwen3-0.6B", lora=True, sampling=SamplingConfig(max_new_tokens=64))
        trainer = GRPOTrainer(
            config=GRPOConfig(group_size=8, learning_rate=1e-5), policy=policy, reward_model=CompletionRewards(right)
        )
        trainer.train([{"prompt": "1 + 1 = ", "answer": "2"}], num_iterations=100)
"""

import logging as _logging

try:
    import transformers as _transformers  # noqa: F401  # the one place that says what to install
except ImportError as error:
    from grpo.arguments import install_command

    raise ImportError(f"adapters.llm needs transformers: {install_command('llm')}") from error
else:
    # PEFT imports bitsandbytes, which warns on CPUs with AVX512-BF16 that a kernel for inference in 4 bits is not installed.
    _logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(lambda told: "kernels-community" not in str(told.msg))

from .completions import Completion, FinishReason
from .model.loading import add_lora, load_model
from .model.merged_weights import merged_weights
from .model.parts import train_parts
from .model.token_log_probs import token_log_probs
from .model.value_head import ValueHead
from .options import HFOptions
from .policy import HFPolicy
from .presets import lora_start
from .prompts.control_tokens import ControlTokens, special_tokens
from .prompts.pictures import Picture
from .rewards.completion_rewards import CompletionRewards
from .rewards.gsm8k import extract_answer, gsm8k_prompt, load_gsm8k
from .rewards.gsm8k_rewards import correctness_first, hybrid_reward
from .rewards.json_schema import JSONSchemaMatch
from .rewards.math_answers import MathMatch
from .rewards.verifiers import Between, ExactMatch, OverlongPunishment, PerToken, RegexMatch, tags_pattern
from .sampling.samplers import GivesRows, LimitsRows, RowLimit, SampledTokens, Sampler
from .sampling.sampling_config import SamplingConfig
from .sampling.vllm_engine import VLLMSampler
from .sampling.vllm_server import VLLMServerSampler
from .texts import CompletionTexts

__all__ = [
    "Between", "Completion", "CompletionRewards", "CompletionTexts", "ControlTokens", "ExactMatch", "FinishReason",
    "GivesRows", "HFOptions", "HFPolicy", "JSONSchemaMatch", "LimitsRows", "MathMatch", "OverlongPunishment", "PerToken",
    "Picture", "RegexMatch", "RowLimit", "SampledTokens", "Sampler", "SamplingConfig", "VLLMSampler", "VLLMServerSampler",
    "ValueHead", "add_lora", "correctness_first", "extract_answer", "gsm8k_prompt", "hybrid_reward", "load_gsm8k", "load_model",
    "lora_start", "merged_weights", "special_tokens", "tags_pattern", "token_log_probs", "train_parts",
]  # fmt: skip
