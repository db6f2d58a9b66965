"""One function per published recipe, with its settings: `GRPOTrainer(config=presets.dapo(), ...)`.

Batches are counted in rows: a paper's 512 prompts with 16 answers each are `num_states_per_iteration=512` and `group_size=16`,
and its mini-batch of 512 answers is `batch_size=512`. Learning rates fit language models with billions of parameters; small
networks need about a thousand times as much. To change a setting:

    recipe = presets.dapo()  # with dataclasses.replace:
    config = replace(recipe, learning_rate=1e-3, objective=replace(recipe.objective, surrogate=Clip(high=0.3)))

For a small problem, change `num_states_per_iteration` and `batch_size` together: rows / batch_size is the number of updates per
iteration. (`train` repeats a list of states that is too short.) With one update, every ratio is 1 and most recipes have the
same gradient. Clip bounds have to fit the learning rate, too.

If a paper does not state a setting, the setting has its default or is from the authors' code. The docstring then says so.
"""

import math
from typing import Any

from .config import AdvantageConfig, GRPOConfig, KLControl, ObjectiveConfig
from .surrogates import Cispo, Clip, Gmpo, Reinforce, Sapo

# Language models with verifiable rewards


def deepseek_math() -> GRPOConfig:
    """GRPO as first published: advantages divided by the group's std, a mean loss per row, and the k3 KL to a reference.

    The paper gives no clip range; 0.2 is the common choice.

    Source:
        Shao et al. 2024 (DeepSeekMath), arXiv:2402.03300, sec. 4.1 and 4.2.
    """
    objective = ObjectiveConfig(kl_coef=0.04, kl_estimator="k3", aggregation="row_mean")
    return _language_model(objective, group_size=64, num_states_per_iteration=16)


def dapo() -> GRPOConfig:
    """Decoupled clip, dynamic sampling, a mean over steps, no KL.

    The paper's warm-up is 20 iterations (`warmup_ratio = 20 / num_iterations`). Its overlong punishment belongs to the reward.

    Source:
        Yu et al. 2025 (DAPO), arXiv:2503.14476, sec. 3 and 4.1; the bound on draws and the gradient norm: its code.
    """
    objective = ObjectiveConfig(surrogate=Clip(low=0.2, high=0.28), kl_coef=0.0, aggregation="step_mean")
    return _language_model(
        objective,
        group_size=16,
        num_states_per_iteration=512,
        batch_size=512,
        max_grad_norm=1.0,
        dynamic_sampling_rounds=9,
    )


def dr_grpo(max_length: int = 3000) -> GRPOConfig:
    """GRPO done right: no division by the std or by the row's own length.

    Args:
        max_length: The divisor of every row, usually the largest length that a row can have.

    Source:
        Liu et al. 2025 (Dr. GRPO), arXiv:2503.20783, sec. 3; batches and learning rate: the authors' code.
    """
    objective = ObjectiveConfig(
        surrogate=Clip(low=0.2, high=0.2), kl_coef=0.0, aggregation="fixed_length", fixed_length=max_length
    )
    return _language_model(
        objective, group_size=8, num_states_per_iteration=128, batch_size=128, advantage=AdvantageConfig(scale="none")
    )


def gspo() -> GRPOConfig:
    """One ratio per row, the geometric mean over its steps, with a very narrow clip.

    The bounds fit rows of hundreds of steps and small learning rates. Widen them for shorter rows or larger learning rates, and
    watch `train/clip_fraction`. The paper splits each iteration's rows into 4 updates; group, batch and learning rate are from
    verl's recipe.

    Source:
        Zheng et al. 2025 (GSPO), arXiv:2507.18071, eq. 5 to 7, sec. 5.1.
    """
    surrogate = Clip(low=3e-4, high=4e-4, level="row")
    objective = ObjectiveConfig(surrogate=surrogate, kl_coef=0.0, aggregation="row_mean")
    return _language_model(objective, group_size=16, num_states_per_iteration=512, batch_size=2048)


def cispo() -> GRPOConfig:
    """The importance weight is bounded instead of the objective, so that every step keeps a gradient.

    The paper does not state the upper bound. ScaleRL uses 5 (`high=4`), and found that 4 to 8 work equally well. The paper
    does not state group size, batch sizes and learning rate either. This preset uses DAPO's, because both papers use dynamic
    sampling.

    Source:
        MiniMax 2025 (MiniMax-M1), arXiv:2506.13585, eq. 4 and 5; Khatri et al. 2025 (ScaleRL), arXiv:2510.13786, A.17.2.
    """
    objective = ObjectiveConfig(surrogate=Cispo(low=1.0, high=4.0), kl_coef=0.0, aggregation="step_mean")
    return _language_model(
        objective, group_size=16, num_states_per_iteration=512, batch_size=512, dynamic_sampling_rounds=9
    )


def sapo() -> GRPOConfig:
    """A smooth gate instead of a clip, a little steeper for bad actions.

    The paper splits each iteration's rows into 4 updates. It does not state group size, batch sizes and learning rate;
    this preset uses the values of `gspo`.

    Source:
        Gao et al. 2025 (SAPO), arXiv:2511.20347.
    """
    surrogate = Sapo(temperature_pos=1.0, temperature_neg=1.05)
    objective = ObjectiveConfig(surrogate=surrogate, kl_coef=0.0, aggregation="row_mean")
    return _language_model(objective, group_size=16, num_states_per_iteration=512, batch_size=2048)


def gmpo() -> GRPOConfig:
    """The geometric mean of a row's ratios, each clipped to exp(-0.4) .. exp(0.4).

    Source:
        Zhao et al. 2025 (GMPO), arXiv:2507.20673; group, batches, learning rate and the std: the authors' code.
    """
    surrogate = Gmpo(low=1.0 - math.exp(-0.4), high=math.exp(0.4) - 1.0)
    objective = ObjectiveConfig(surrogate=surrogate, kl_coef=0.0, aggregation="row_mean")
    return _language_model(objective, group_size=8, num_states_per_iteration=128, batch_size=128)


def rloo() -> GRPOConfig:
    """REINFORCE on whole rows, with the mean reward of the group's other rows as the baseline.

    The paper subtracts the KL from the reward. Here the KL is a loss term per step (`k2`, with the same sign and scale).

    Source:
        Ahmadian et al. 2024 (RLOO), arXiv:2402.14740, sec. 4 and app. C.
    """
    objective = ObjectiveConfig(surrogate=Reinforce(), kl_coef=0.03, kl_estimator="k2", aggregation="row_sum")
    return _language_model(objective, group_size=4, advantage=AdvantageConfig(baseline="leave_one_out", scale="none"))


def reinforce_plus_plus_baseline() -> GRPOConfig:
    """Advantages are rewards minus the group's mean, whitened over the whole batch. The loss has the k2 KL to a reference.

    The paper states no KL coefficient and no batch sizes. This preset uses OpenRLHF's.

    Source:
        Hu et al. 2025 (REINFORCE++), arXiv:2501.03262, eq. 6 to 8.
    """
    objective = ObjectiveConfig(
        surrogate=Clip(low=0.2, high=0.2), kl_coef=1e-5, kl_estimator="k2", aggregation="row_mean"
    )
    advantage = AdvantageConfig(baseline="group_mean", scale="whiten")
    return _language_model(
        objective, group_size=8, num_states_per_iteration=128, learning_rate=5e-7, advantage=advantage
    )


def gpg() -> GRPOConfig:
    """The plain policy gradient: no ratio, no clip, no reference. Groups with equal rewards do not weaken the gradient.

    If fewer than 60 % of the rows have an advantage, the paper draws further rows, as `dynamic_sampling_rounds` does.

    Source:
        Chu et al. 2025 (GPG), arXiv:2504.02546, eq. 5 to 7.
    """
    objective = ObjectiveConfig(surrogate=Reinforce(), kl_coef=0.0, aggregation="step_mean")
    return _language_model(objective, group_size=8, advantage=AdvantageConfig(scale="none", upweight_live_groups=True))


def maxrl() -> GRPOConfig:
    """Divide advantages by the group's mean reward, which maximises the log-likelihood of success. For rewards 0 and 1.

    Source:
        Tajwar et al. 2026 (MaxRL), arXiv:2602.02710; batches, eps and the gradient norm: the authors' code.
    """
    objective = ObjectiveConfig(surrogate=Clip(low=0.2, high=0.2), kl_coef=0.0, aggregation="step_mean")
    advantage = AdvantageConfig(scale="mean", std_eps=1e-6)
    return _language_model(
        objective, group_size=16, num_states_per_iteration=256, max_grad_norm=0.3, advantage=advantage
    )


def bnpo() -> GRPOConfig:
    """Divide advantages by a Beta density fitted to the groups' mean rewards. For rewards in [0, 1].

    The warm-up is 10 updates (`warmup_ratio = 10 / num_iterations`).

    Source:
        Xiao et al. 2025 (BNPO), arXiv:2506.02864; all numbers: the authors' code.
    """
    objective = ObjectiveConfig(surrogate=Clip(low=0.2, high=0.28, dual=10.0), kl_coef=0.0, aggregation="row_sum")
    advantage = AdvantageConfig(scale="beta")
    return _language_model(
        objective, group_size=16, num_states_per_iteration=32, max_grad_norm=1.0, advantage=advantage
    )


def _language_model(objective: ObjectiveConfig, **settings: Any) -> GRPOConfig:
    """Make a recipe for language models. Defaults: a learning rate of 1e-6, and advantages divided by the group's std."""
    common = {"learning_rate": 1e-6, "advantage": AdvantageConfig(scale="group")}
    return GRPOConfig(objective=objective, **{**common, **settings})


# Distillation


def on_policy_distillation() -> GRPOConfig:
    """The policy acts, and the KL to its teacher is the loss. Pass the teacher as `reference_policy`; it needs no reward.

    Each step is pulled towards the teacher with the gradient of KL(policy || teacher) (`k2`). Give it a reward beside the
    teacher, and both count. Without a reward, nothing is compared within a group: `group_size` is the number of actions per
    state.

    The learning rate is that of language models, and the papers' batches depend on the task.

    Source:
        Agarwal et al. 2024 (GKD), arXiv:2306.13649, algorithm 1 with lambda = 1 and the reverse KL; Gu et al. 2024 (MiniLLM),
        arXiv:2306.08543.
    """
    objective = ObjectiveConfig(kl_coef=1.0, kl_estimator="k2", aggregation="step_mean")
    return GRPOConfig(group_size=4, learning_rate=1e-6, objective=objective)


# Choosing tools


def tool_default() -> GRPOConfig:
    """For policies that choose tools: an adaptive KL coefficient, and four passes over small batches."""
    return _tools()


def tool_use() -> GRPOConfig:
    """More careful than `tool_default`: a smaller learning rate, a larger KL coefficient, and half the passes."""
    return _tools(
        group_size=4,
        learning_rate=5e-6,
        kl_coef=0.05,
        kl_target=0.02,
        entropy_coef=0.005,
        num_epochs=2,
        batch_size=16,
        clip=0.15,
    )


def tool_exploration() -> GRPOConfig:
    """`tool_default` with a larger entropy bonus, a smaller KL coefficient and a wider clip."""
    return _tools(entropy_coef=0.05, kl_coef=0.01, clip=0.3)


def tool_stable() -> GRPOConfig:
    """`tool_default` with a tenth of the learning rate, a larger KL coefficient and a narrower clip."""
    return _tools(learning_rate=1e-6, kl_coef=0.1, clip=0.1, num_epochs=2)


def _tools(
    *,
    group_size: int = 8,
    learning_rate: float = 1e-5,
    kl_coef: float = 0.02,
    kl_target: float = 0.01,
    entropy_coef: float = 0.01,
    num_epochs: int = 4,
    batch_size: int = 32,
    clip: float = 0.2,
) -> GRPOConfig:
    return GRPOConfig(
        group_size=group_size,
        batch_size=batch_size,
        num_epochs_per_update=num_epochs,
        learning_rate=learning_rate,
        max_grad_norm=1.0,
        kl_control=KLControl(rule="threshold", target=kl_target, coef_min=0.001, coef_max=0.1),
        advantage=AdvantageConfig(scale="group", std_ddof=0, gamma=0.99, gae_lambda=0.95),
        objective=ObjectiveConfig(surrogate=Clip(low=clip, high=clip), kl_coef=kl_coef, entropy_coef=entropy_coef),
    )


# Conversations


def conservative() -> GRPOConfig:
    """For conversations: a small learning rate and large groups.

    The KL coefficient of 0.1 is strong if rewards are at most 1 and advantages are not scaled. Lower it, or set
    `advantage.scale="group"`.
    """
    return _conversation(learning_rate=1e-6, group_size=32, num_groups=8, max_grad_norm=0.5, warmup_ratio=0.2)


def balanced() -> GRPOConfig:
    """For conversations: a medium learning rate and medium groups. `conservative` says when to lower the KL coefficient."""
    return _conversation(learning_rate=5e-6, group_size=16, num_groups=4, max_grad_norm=1.0, warmup_ratio=0.1)


def aggressive() -> GRPOConfig:
    """For conversations: a large learning rate and small groups. `conservative` says when to lower the KL coefficient."""
    return _conversation(learning_rate=1e-5, group_size=8, num_groups=2, max_grad_norm=2.0, warmup_ratio=0.05)


def _conversation(
    *, learning_rate: float, group_size: int, num_groups: int, max_grad_norm: float, warmup_ratio: float
) -> GRPOConfig:
    """Make a recipe for conversations with `num_groups` groups per update and one group per forward pass."""
    return GRPOConfig(
        group_size=group_size,
        batch_size=num_groups * group_size,
        micro_batch_size=group_size,
        learning_rate=learning_rate,
        lr_schedule="cosine",
        warmup_ratio=warmup_ratio,
        max_grad_norm=max_grad_norm,
        advantage=AdvantageConfig(reward_clip=10.0),
        objective=ObjectiveConfig(surrogate=Clip(low=0.2, high=0.2), kl_coef=0.1, entropy_coef=0.01),
    )
