"""Where to start: settings that a person would choose for a first run on one GPU."""

from grpo import AdvantageConfig, GRPOConfig, ObjectiveConfig
from grpo.surrogates import Clip


def lora_start() -> GRPOConfig:
    """Settings for a first run: a LoRA adapter on a language model, and a reward from a verifier, between 0 and 1.

    `GRPOTrainer(config=lora_start(), policy=HFPolicy.from_pretrained(..., lora=True), reward_model=...)`. Change a setting with
    `dataclasses.replace(lora_start(), group_size=16)`. `grpo.presets` has the recipes of papers. Each setting, and its reason:

    - `group_size=8`: at a success rate of 20 %, a group of 8 teaches nothing in 17 % of cases (0.8^8), a group of 4 in 41 %.
      Raise it if `group_stats/zero_variance_fraction` stays above 0.5.
    - `num_states_per_iteration=16`: 128 completions per iteration. Halve it if an iteration takes too long.
    - `batch_size=None`: one update per iteration. All samples come from the current policy, so ratios are 1 and the clip bounds
      need no tuning. Sampling takes most of the time; two updates (`batch_size=64`) use each sample more.
    - `learning_rate=1e-5`: ten times the rate of recipes for whole models, 1e-6 (DAPO). LoRA's best rate is about ten times
      that of full training (Schulman et al. 2025, LoRA Without Regret). Lower it first if the reward falls.
    - `warmup_ratio=0.03`: Adam's first steps have full length whatever the gradient, and its averages are still poor.
    - `max_grad_norm=1.0`: one unusual batch does not undo many others.
    - `advantage.scale="none"`: dividing by the group's standard deviation would favour questions that are nearly always, or
      nearly never, answered right (Dr. GRPO, arXiv:2503.20783).
    - `Clip(low=0.2, high=0.28)`: unlikely tokens may become likely (DAPO, arXiv:2503.14476). It acts with several updates only.
    - `objective.aggregation="step_mean"`: each token counts the same. A mean per row would give the tokens of long wrong
      answers less weight, and answers would grow (DAPO).
    - `objective.kl_coef=0.0`: a verifier cannot be flattered as a learned reward can, LoRA stays near the model, and there is
      no forward pass for a reference. With a learned reward, start with 0.04.
    - `seed=0`: the run can be repeated.

    The sampling goes with it: `SamplingConfig(max_new_tokens=512, temperature=1.0)`, without truncation, so that the sampled
    distribution is the policy's own.
    """
    return GRPOConfig(
        group_size=8,
        num_states_per_iteration=16,
        batch_size=None,
        learning_rate=1e-5,
        warmup_ratio=0.03,
        max_grad_norm=1.0,
        advantage=AdvantageConfig(scale="none"),
        objective=ObjectiveConfig(surrogate=Clip(low=0.2, high=0.28), aggregation="step_mean", kl_coef=0.0),
        seed=0,
    )
