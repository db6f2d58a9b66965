"""Train a tiny model to serve customers, with GRPO over whole conversations.

    python -m examples.customer_service             # three seeds; nothing is downloaded
    python -m examples.customer_service --seeds 0 --profile aggressive

A supervised warm-up shows the model how to talk and how to call the tools, with conversations of a careless and curt colleague.
GRPO then teaches it from rewards to follow the shop's policy. All printed shares are measured on held-out scenarios (see
`make_scenarios`), with sampled conversations. For each seed, the script writes metrics.jsonl, and the transcripts of the
evaluation as transcripts.jsonl and transcripts.html.
"""

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from adapters.agents import AgentPolicy, Conversation, save_transcripts, transcript_page
from adapters.llm import HFPolicy
from grpo import GRPOConfig, GRPOTrainer, JSONLSink, ObjectiveConfig, presets

from .model import careless_script, make_model, with_reference
from .service import PARTS, CustomerService, Scenario, create_customer_service_reward, grade, make_scenarios

PROFILES = {"conservative": presets.conservative, "balanced": presets.balanced, "aggressive": presets.aggressive}


def settings(profile: str, learning_rate: float, kl_coef: float, seed: int) -> GRPOConfig:
    """A profile's groups, batches, gradient norm and schedule, with the learning rate of a tiny model.

    The profiles' learning rates and KL coefficients are for large pretrained models. This model has to move far, so it has
    coefficients of its own. Each iteration has 128 conversations: the profiles make 1, 2 or 8 updates with them.
    """
    config = PROFILES[profile]()
    return replace(
        config,
        learning_rate=learning_rate * config.learning_rate / presets.balanced().learning_rate,
        num_states_per_iteration=max(1, 128 // config.group_size),
        seed=seed,
        objective=replace(config.objective, kl_coef=kl_coef, entropy_coef=0.0),
    )


def make_agent(model: HFPolicy) -> AgentPolicy:
    """The agent that a model is in this shop."""
    return AgentPolicy(model, CustomerService, max_turns=6, concurrency=128)


def warm_up(policy: AgentPolicy, scenarios: list[Scenario], steps: int, seed: int) -> None:
    """Supervised learning on one scripted conversation for each scenario."""
    rng = random.Random(seed)
    given = policy.demonstrations(scenarios, [careless_script(scenario, rng) for scenario in scenarios])
    optimizer = torch.optim.AdamW(policy.get_parameters().values(), lr=5e-3, weight_decay=0.3)
    config = GRPOConfig(
        num_demonstrations_per_iteration=24,
        max_grad_norm=None,
        seed=seed,
        objective=ObjectiveConfig(aggregation="step_mean"),  # each token counts the same
    )
    trainer = GRPOTrainer(
        config=config,
        policy=policy,
        reward_model=create_customer_service_reward(),
        optimizer=optimizer,
        lr_scheduler=torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=steps),
    )
    trainer.train(None, demonstrations=given, num_iterations=steps)


def evaluate(policy: AgentPolicy, scenarios: list[Scenario]) -> tuple[dict[str, float], list[Conversation]]:
    """The mean of each part of the reward over one sampled conversation per scenario, and the conversations.

    `likeliest` is the share of scenarios that are solved if the model says what it finds most likely.
    """
    policy.eval()

    def graded(conversations: list[Conversation]) -> dict[str, float]:
        rows = [grade(scenario, row) for scenario, row in zip(scenarios, conversations, strict=True)]
        parts = torch.tensor([[row[part] for part in PARTS] for row in rows], dtype=torch.float64)
        return dict(zip(PARTS, parts.nanmean(0).tolist(), strict=True))

    with torch.random.fork_rng():
        torch.manual_seed(0)
        conversations = [row for [row] in policy.generate_actions(scenarios, 1)]
        likeliest = graded([row for [row] in policy.generate_actions(scenarios, 1, temperature=0)])
    return graded(conversations) | {"likeliest": likeliest["solved"]}, conversations


def run(seed: int, args: argparse.Namespace) -> list[dict[str, float]]:
    """Train with one seed. Returns the evaluation of the untrained model, after the warm-up, and after GRPO."""
    torch.manual_seed(seed)
    folder = args.out / f"seed-{seed}"
    train = make_scenarios(args.scripts, seed=seed)
    held_out = make_scenarios(args.held_out, seed=1, held_out=True)
    policy = make_agent(make_model())
    reports = [evaluate(policy, held_out)[0]]
    warm_up(policy, train, args.warmup_steps, seed)
    reports.append(evaluate(policy, held_out)[0])

    if args.kl_coef > 0:
        policy = make_agent(with_reference(policy.policy))
    config = settings(args.profile, args.learning_rate, args.kl_coef, seed)
    trainer = GRPOTrainer(config=config, policy=policy, reward_model=create_customer_service_reward())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").unlink(missing_ok=True)  # left by an earlier run
    with JSONLSink(folder / "metrics.jsonl") as sink:
        trainer.train(
            make_scenarios(4_000, seed=100 + seed),
            num_iterations=args.iterations,
            eval_states=held_out[:8],
            eval_every=max(1, args.iterations // 5),
            sinks=[sink],
        )
    report, conversations = evaluate(policy, held_out)
    titles = [f"{scenario['topic']} {scenario['context']}" for scenario in held_out]
    save_transcripts(folder / "transcripts.jsonl", conversations, titles=titles)
    (folder / "transcripts.html").write_text(transcript_page(conversations, titles=titles), encoding="utf-8")
    return [*reports, report]


def arguments(typed: Sequence[str] | None = None) -> argparse.Namespace:
    """The settings of a run, from what was typed behind the script's name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--profile", choices=PROFILES, default="balanced")
    parser.add_argument("--out", type=Path, default=Path("runs/customer_service"))
    parser.add_argument("--iterations", type=int, default=120, help="iterations of GRPO (default: %(default)s)")
    parser.add_argument(
        "--learning-rate", type=float, default=7e-4, help="of the balanced profile (default: %(default)s)"
    )
    parser.add_argument(
        "--kl-coef",
        type=float,
        default=0.0,
        help="weight of the KL to the model after the warm-up (default: %(default)s)",
    )
    parser.add_argument("--scripts", type=int, default=2400, help="scripted conversations (default: %(default)s)")
    parser.add_argument("--warmup-steps", type=int, default=900, help="default: %(default)s")
    parser.add_argument("--held-out", type=int, default=100, help="held-out scenarios (default: %(default)s)")
    return parser.parse_args(typed)


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)  # more threads do not help a model this small
    lines = []
    for seed in args.seeds:
        began, began_cpu = time.perf_counter(), time.process_time()
        reports = run(seed, args)
        for name, report in zip(("before", "warm-up alone", "after GRPO"), reports, strict=True):
            shares = " | ".join(f"{report[part]:.1%}" for part in (*PARTS, "likeliest"))
            lines.append(f"| {seed} | {name} | {shares} |")
        print(
            f"seed {seed}: {time.perf_counter() - began:.0f} s, processor time {time.process_time() - began_cpu:.0f} s"
        )
        print(f"| seed | held-out scenarios | {' | '.join(PARTS)} | likeliest |\n|{'---|' * (len(PARTS) + 3)}")
        print("\n".join(lines), flush=True)
    print(f"written: {args.out}/seed-*/")


if __name__ == "__main__":
    main()
