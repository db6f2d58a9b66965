"""Learning from a teacher: samples and steps that a student needs, and what self-distillation keeps.

    python -m benchmarks.distillation                          # all three parts; about ten minutes on one free core
    python -m benchmarks.distillation --parts control --seeds 3

language  A Qwen3 of 2 layers learns from one of 4 layers, which supervised learning has taught to add, as in
          `examples.arithmetic_llm`. The same student, from the same weights, learns from the reward alone: 1 for a right
          answer. How many samples does each need for 97 % of the teacher's accuracy on sums that nobody has trained on?
control   CartPole, from a PPO teacher of Stable-Baselines3, in 3,000 steps of the environment.
self      A model that can add, and can copy an answer that it is shown, learns to subtract from itself with the answer shown
          (`Hinted`). Half of its states are sums, without answers, on which its first weights are the teacher. Supervised
          fine-tuning on the answers of the subtractions is beside it. What is left of addition?
"""

import argparse
import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from adapters.control import Episode, EpisodeOptions, EpisodePolicy, episode_starts, evaluate_policy
from adapters.llm import CompletionRewards, HFOptions, HFPolicy, SamplingConfig
from examples.arithmetic_llm import MAX_NEW_TOKENS, accuracy, make_sums, make_tokenizer, right
from grpo import AdvantageConfig, GRPOConfig, GRPOTrainer, presets
from grpo.distillation import Hinted, Teacher, no_reward

Rows = list[dict[str, str]]
SHARE = 0.97
"""Share of the teacher's accuracy that a student has to reach."""
CONTROL_STEPS = 3_000
"""Steps of the environment that a student of control may take."""


def make_policy(num_layers: int, tokenizer: Any, **arguments: Any) -> HFPolicy:
    """A policy of a new Qwen3 with 64 hidden numbers."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=32,
        tie_word_embeddings=True,
        initializer_range=0.12,  # about 1 / sqrt(hidden_size)
        bos_token_id=None,
        eos_token_id=0,
    )
    sampling = SamplingConfig(max_new_tokens=MAX_NEW_TOKENS)
    return HFPolicy(Qwen3ForCausalLM(config), tokenizer, sampling=sampling, **arguments)


def imitate(
    policy: HFPolicy, rows: Rows, is_done: Callable[[], bool], max_steps: int, learning_rate: float = 2e-3
) -> int:
    """Supervised learning on prompts with answers, in batches of 128, until it is done. Return the number of rows seen."""
    encode = policy.tokenizer
    prompts = [encode(row["prompt"])["input_ids"] for row in rows]
    answers = [[*encode(row["answer"])["input_ids"], 0] for row in rows]
    pairs = list(zip(prompts, answers, strict=True))
    tokens = pad_sequence([torch.tensor([*prompt, *answer]) for prompt, answer in pairs], batch_first=True)
    labels = [torch.tensor([*[-100] * len(prompt), *answer]) for prompt, answer in pairs]
    targets = pad_sequence(labels, batch_first=True, padding_value=-100)
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=learning_rate, weight_decay=0.0)
    for step in range(1, max_steps + 1):
        policy.train()
        batch = torch.randint(len(tokens), (128,))
        policy.model(input_ids=tokens[batch], labels=targets[batch]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 25 == 0 and is_done():
            return 128 * step
    return 128 * max_steps


def samples_until(trainer: GRPOTrainer, states: Rows, target: float, held_out: Rows, limit: int) -> tuple[int, float]:
    """Train until the accuracy on held-out rows is reached, or for `limit` samples. Return the samples, and the accuracy."""
    config, reached = trainer.config, 0.0
    per_iteration = config.group_size * (config.num_states_per_iteration or len(states))
    order = random.Random(0)
    for iteration in range(1, limit // per_iteration + 1):
        trainer.step(order.sample(states, config.num_states_per_iteration or len(states)))
        if iteration % 5 == 0 and (reached := accuracy(trainer.policy, held_out)) >= target:
            return iteration * per_iteration, reached
    return limit, reached


def language(seed: int, limit: int, teacher_steps: int) -> str:
    torch.manual_seed(seed)
    train, others, held_out = make_sums(seed)
    teacher = make_policy(4, make_tokenizer())
    imitate(teacher, train, lambda: accuracy(teacher, others) >= 0.98, teacher_steps)
    first = make_policy(2, make_tokenizer())
    imitate(first, train, lambda: accuracy(first, others) >= 0.1, 1_000)  # the reward of a new model is always 0
    its, start = accuracy(teacher, held_out), accuracy(first, held_out)
    recipe = presets.on_policy_distillation()
    distilled = replace(
        recipe,
        group_size=1,  # nothing is compared within a group, so other sums teach more than other answers to the same sum
        num_states_per_iteration=128,
        learning_rate=2e-3,
        seed=seed,
        objective=replace(recipe.objective, kl_estimator="exact"),
    )
    by_reward = GRPOConfig(
        group_size=16,
        num_states_per_iteration=32,
        batch_size=128,
        learning_rate=4e-4,
        seed=seed,
        advantage=AdvantageConfig(scale="group"),
    )
    student = HFPolicy(
        copy.deepcopy(first.model),
        make_tokenizer(),
        sampling=first.sampling,
        reference_model=teacher.model,
        options=HFOptions(exact_kl_top=12),  # all of 13 tokens
    )
    trainer = GRPOTrainer(config=distilled, policy=student, reward_model=no_reward)
    samples, reached = samples_until(trainer, train, SHARE * its, held_out, limit // 10)
    alone = GRPOTrainer(config=by_reward, policy=first, reward_model=CompletionRewards(right))
    needed, reached_alone = samples_until(alone, train, SHARE * its, held_out, max(10 * samples, 5_120))
    is_reached = reached_alone >= SHARE * its
    return (
        f"language, seed {seed}: teacher {its:.1%}, student at the start {start:.1%}; distilled {reached:.1%} after "
        f"{samples:,} samples, by reward {reached_alone:.1%} after {needed:,}{'' if is_reached else ' and not there yet'}; "
        f"ratio {needed / samples:.1f}"
    )


def from_sb3(model: Any) -> Teacher:
    """A policy of Stable-Baselines3 as a teacher of episodes, as on docs/distillation.md."""

    def log_probs(states: Any, episodes: Sequence[Episode]) -> Sequence[Tensor]:  # noqa: ARG001
        observations = torch.cat([episode.observations for episode in episodes])
        actions = torch.cat([episode.actions for episode in episodes])
        _, found, _ = model.policy.evaluate_actions(observations, actions)
        return found.split([len(episode) for episode in episodes])

    return Teacher(log_probs)


def ppo_teacher(seed: int, num_steps: int) -> tuple[Any, float]:
    """A policy of Stable-Baselines3 that PPO has trained with the settings of rl-zoo, and its mean return."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy as evaluate_theirs

    envs = make_vec_env("CartPole-v1", n_envs=8, seed=seed)
    settings = {
        "n_steps": 32,
        "batch_size": 256,
        "gae_lambda": 0.8,
        "gamma": 0.98,
        "n_epochs": 20,
        "learning_rate": 1e-3,
    }
    model = PPO("MlpPolicy", envs, seed=seed, device="cpu", **settings).learn(num_steps)
    mean_return, _ = evaluate_theirs(model, make_vec_env("CartPole-v1", seed=1_000), n_eval_episodes=20)
    return model, float(mean_return)


def control(seed: int, teacher_steps: int, student_steps: int = CONTROL_STEPS) -> str:
    model, theirs = ppo_teacher(seed, teacher_steps)
    torch.manual_seed(seed)
    student = EpisodePolicy("CartPole-v1", num_members=8, options=EpisodeOptions(num_steps=32))
    recipe = presets.on_policy_distillation()
    config = replace(
        recipe,
        group_size=1,
        batch_size=64,
        num_epochs_per_update=10,
        learning_rate=3e-3,
        seed=seed,
        objective=replace(recipe.objective, kl_estimator="k3_weighted"),  # the student moves within an iteration
    )
    trainer = GRPOTrainer(config=config, policy=student, reference_policy=from_sb3(model), reward_model=no_reward)
    before = evaluate_policy(student).mean_return
    trainer.train(episode_starts(8, seed=seed), num_iterations=student_steps // (8 * 32), progress=False)
    after = evaluate_policy(student).mean_return
    steps = student_steps // (8 * 32) * 8 * 32
    return f"control, seed {seed}: teacher {theirs:.0f}, student {before:.0f} -> {after:.0f} in {steps:,} steps"


def make_problems(seed: int) -> tuple[Rows, Rows, Rows, Rows]:
    """Sums and differences with answers, the last digit first: to train on, and held out."""
    from examples.arithmetic_llm import CHARACTERS

    assert "-" not in CHARACTERS
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(seed).shuffle(pairs)
    sums = [{"prompt": f"{a}+{b}=", "answer": str(a + b)[::-1]} for a, b in pairs]
    # without a sign of its own in the tokenizer, "a=b+" stands for the larger number minus the smaller one
    differences = [{"prompt": f"{max(a, b)}={min(a, b)}+", "answer": str(abs(a - b))[::-1]} for a, b in pairs]
    return sums[400:], sums[:400], differences[400:], differences[:400]


def shown(row: dict[str, str]) -> dict[str, str]:
    """The row with its answer in front of it."""
    return {**row, "prompt": f"{row['answer']}={row['prompt']}"}


def self_distillation(seed: int, base_steps: int, iterations: int) -> str:
    torch.manual_seed(seed)
    sums, held_sums, differences, held_differences = make_problems(seed)
    base = make_policy(4, make_tokenizer())
    copied = [shown(row) for row in [*sums[::2], *differences[::2]]]
    imitate(base, [*sums, *copied], lambda: accuracy(base, held_sums) >= 0.98, base_steps)

    def hint(states: Any, actions: Any) -> Rows:  # noqa: ARG001
        # on sums, the policy's first weights teach what they did, and no answer is shown
        return [shown(state) if state["prompt"].endswith("+") else state for state in states]

    def measured(policy: HFPolicy) -> str:
        return f"sums {accuracy(policy, held_sums):.1%}, differences {accuracy(policy, held_differences):.1%}"

    lines = [
        f"self, seed {seed}: before {measured(base)}; with a hint {accuracy(base, list(map(shown, held_differences))):.1%}"
    ]
    policies = [HFPolicy(copy.deepcopy(base.model), make_tokenizer(), sampling=base.sampling) for _ in range(2)]
    recipe = presets.on_policy_distillation()
    config = replace(
        recipe,
        num_states_per_iteration=128,
        group_size=2,
        learning_rate=5e-4,
        lr_schedule="cosine",
        seed=seed,
        # an action that the teacher would never take has a log-ratio of 10 and more, which is the weight of its gradient in k2
        objective=replace(recipe.objective, kl_estimator="k3"),
    )
    teacher = Hinted(copy.deepcopy(policies[0]), hint, is_copy=True)
    trainer = GRPOTrainer(config=config, policy=policies[0], reference_policy=teacher, reward_model=no_reward)

    def mixed(iteration: int) -> Rows:
        order = random.Random(f"{seed} {iteration}")
        return [*order.sample(differences, 64), *order.sample(sums, 64)]

    trainer.train(mixed, num_iterations=iterations, progress=False)
    lines.append(f"  self-distillation, {256 * iterations:,} samples: {measured(policies[0])}")
    imitate(policies[1], differences, lambda: False, iterations, learning_rate=5e-4)
    lines.append(f"  supervised, {128 * iterations:,} rows: {measured(policies[1])}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--parts", nargs="+", choices=["language", "control", "self"], default=["language", "control", "self"]
    )
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--limit", type=int, default=600_000, help="samples by reward (default: %(default)s)")
    parser.add_argument(
        "--teacher-steps", type=int, default=3_000, help="supervised, of language (default: %(default)s)"
    )
    parser.add_argument(
        "--ppo-steps", type=int, default=50_000, help="of the teacher of control (default: %(default)s)"
    )
    parser.add_argument("--student-steps", type=int, default=CONTROL_STEPS, help="of control (default: %(default)s)")
    parser.add_argument("--iterations", type=int, default=800, help="of self-distillation (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for seed in range(args.seeds):
        if "control" in args.parts:
            print(control(seed, args.ppo_steps, args.student_steps), flush=True)
        if "language" in args.parts:
            print(language(seed, args.limit, args.teacher_steps), flush=True)
        if "self" in args.parts:
            print(self_distillation(seed, args.teacher_steps, args.iterations), flush=True)


if __name__ == "__main__":
    main()
