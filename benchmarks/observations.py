"""Foreseeing what the environment answers (ECHO): how soon a text game is won with it, and without it.

    python -m benchmarks.observations               # five seeds of both sides
    python -m benchmarks.observations --seeds 0 --coef 0.2

The game is that of `examples.text_game`: the opponent plays rock, paper, scissors in this order, and one move in five is
random. What the policy reads is the opponent's last move. Whoever foresees the next one knows what wins, so the answers of lost
games are informative, too. Both sides have the same model, warm-up, games and settings but `observation_coef`. A side is
measured on games that are not trained on, with sampled moves.
"""

import argparse
import statistics

import torch

from adapters.agents import AgentPolicy
from examples.text_game import HELD_OUT, TRAINING, make_game, make_policy, warm_up, won
from grpo import AdvantageConfig, GRPOConfig, GRPOTrainer, ObjectiveConfig


def course(seed: int, coef: float, args: argparse.Namespace) -> dict[int, float]:
    """The share of held-out games that are won, by the number of iterations. It ends where the target is reached."""
    torch.manual_seed(seed)
    agent = AgentPolicy(make_policy(), make_game, max_turns=10, concurrency=64, observations=coef > 0)
    warm_up(agent, TRAINING[:400], args.warmup_steps, seed)
    config = GRPOConfig(
        group_size=16,
        num_states_per_iteration=8,
        batch_size=64,
        learning_rate=1e-3,
        seed=seed,
        advantage=AdvantageConfig(scale="none", credit="gigpo"),
        objective=ObjectiveConfig(observation_coef=coef),
    )
    found: dict[int, float] = {}

    def evaluation() -> dict[str, float]:
        agent.eval()
        games = HELD_OUT[: args.games]
        conversations = [conversation for [conversation] in agent.generate_actions(games, 1)]
        found[trainer.iteration] = sum(won(games, conversations)) / len(games)
        return {"eval/won": found[trainer.iteration]}

    class Reached:
        def on_evaluation(self, trainer: object, metrics: dict[str, float]) -> str | None:
            return "stop" if metrics["eval/won"] >= args.target else None

    trainer = GRPOTrainer(config=config, policy=agent, reward_model=won)
    trainer.train(
        TRAINING,
        num_iterations=args.iterations,
        evaluation=evaluation,
        eval_every=args.every,
        callbacks=[Reached()],
        progress=False,
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--coef", type=float, default=0.05, help="of the observations (default: %(default)s)")
    parser.add_argument("--target", type=float, default=0.8, help="share of games won (default: %(default)s)")
    parser.add_argument("--iterations", type=int, default=60, help="at most (default: %(default)s)")
    parser.add_argument("--every", type=int, default=2, help="iterations between evaluations (default: %(default)s)")
    parser.add_argument("--games", type=int, default=len(HELD_OUT), help="held-out games (default: %(default)s)")
    parser.add_argument("--warmup-steps", type=int, default=150, help="supervised steps (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    needed: dict[str, list[float]] = {"GRPO": [], "with observations": []}
    for seed in args.seeds:
        for side, coef in zip(needed, (0.0, args.coef), strict=True):
            rates = course(seed, coef, args)
            reached = [iteration for iteration, rate in rates.items() if rate >= args.target]
            needed[side].append(reached[0] if reached else float("inf"))
            print(
                f"seed {seed}, {side}:", *(f"{iteration}: {rate:.1%}" for iteration, rate in rates.items()), flush=True
            )
    print(f"iterations until {args.target:.0%} of the games are won (inf: not within {args.iterations})")
    for side, numbers in needed.items():
        print(f"  {side:18}", *(f"{number:.0f}" for number in numbers), f"  median {statistics.median(numbers):.0f}")


if __name__ == "__main__":
    main()
