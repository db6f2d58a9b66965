"""`GRPOConfig.iterations_ahead`: the time it hides, and what it costs in quality.

Speed: a reward that waits 50 ms, as a server would, beside an update of about 50 ms. Quality: the catapult of
`examples/custom_domain.py`. Settings, states and seeds are the same in every column; only `iterations_ahead` and the sampler
correction differ.

    python -m benchmarks.iterations_ahead
"""

import argparse
import logging
import platform
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

from examples.custom_domain import Closeness, Gunner, make_targets
from grpo import GRPOConfig, GRPOTrainer, ObjectiveConfig

REWARD_SECONDS = 0.05
AHEAD = 16


class Slow(nn.Module):
    """A policy whose forward pass with gradient takes some matrix products."""

    def __init__(self, num_products: int = 1) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(8))
        self.num_products, self.matrix = num_products, torch.eye(192)

    def generate_actions(self, states: Any, num_actions_per_state: int) -> Tensor:
        """Sample arms [B, G]."""
        return torch.multinomial(
            self.logits.softmax(0).expand(len(states), -1), num_actions_per_state, replacement=True
        )

    def get_log_probabilities(self, states: Any, actions: Tensor) -> Tensor:
        """Return [N]. With gradient, spend time first."""
        if torch.is_grad_enabled():
            for _ in range(self.num_products):
                self.matrix = self.matrix @ self.matrix
        return self.logits.log_softmax(0)[actions]

    def get_parameters(self) -> dict[str, Tensor]:
        """Return the logits."""
        return {"logits": self.logits}


def waiting(states: Any, actions: Tensor) -> Tensor:
    """Reward the fourth arm, after a wait."""
    del states
    time.sleep(REWARD_SECONDS)
    return (actions == 3).float()


def seconds_of(ahead: int, num_products: int, num_iterations: int) -> dict[str, float]:
    """Median seconds of an iteration after the first, and of its parts."""
    torch.manual_seed(0)
    policy = Slow(num_products)
    trainer = GRPOTrainer(config=GRPOConfig(iterations_ahead=ahead, seed=0), policy=policy, reward_model=waiting)
    history = trainer.train(["a", "b"], num_iterations=num_iterations, progress=False)
    history = history[ahead + 1 : num_iterations - ahead]  # not the first iterations, nor those with an empty queue
    names = ("time/iteration", "time/update", "time/reward", "time/waited", "time/hidden")
    return {name: statistics.median(metrics.get(name, 0.0) for metrics in history) for name in names}


def products_of(seconds: float) -> int:
    """How many matrix products take so many seconds here."""
    policy, count = Slow(50), 0
    actions = torch.zeros(1, dtype=torch.int64)
    start = time.perf_counter()
    while time.perf_counter() - start < 10 * seconds:
        policy.get_log_probabilities(["a"], actions)
        count += policy.num_products
    return max(round(count * seconds / (time.perf_counter() - start)), 1)


def print_speed(num_iterations: int) -> None:
    """Compare an iteration with the longer one of its update and its reward."""
    num_products = products_of(REWARD_SECONDS)
    print("milliseconds, medians     iteration    update    reward    waited    hidden    iteration / longer part")
    for ahead in (0, 1, 4):
        found = {name: 1e3 * seconds for name, seconds in seconds_of(ahead, num_products, num_iterations).items()}
        longer = max(found["time/update"], found["time/reward"])
        shown = "".join(f"{value:10.1f}" for value in found.values())
        print(f"iterations_ahead={ahead:<2d}      {shown}    {found['time/iteration'] / longer:.2f}", flush=True)


def quality(seed: int, ahead: int, correction: str | None, num_iterations: int) -> float:
    """The mean closeness on new targets after training."""
    torch.manual_seed(seed)
    policy = Gunner()
    objective = ObjectiveConfig(entropy_coef=0.03, entropy_estimator="score_function", sampler_correction=correction)
    config = GRPOConfig(
        group_size=16,
        batch_size=256,
        learning_rate=0.01,
        lr_schedule="linear",
        iterations_ahead=ahead,
        seed=seed,
        objective=objective,
    )
    trainer = GRPOTrainer(config=config, policy=policy, reward_model=Closeness())
    trainer.train(
        lambda iteration: make_targets(64, seed=1_000_000 * seed + iteration),
        num_iterations=num_iterations,
        progress=False,
    )
    return trainer.evaluate(make_targets(200, seed=2_000))["eval/avg_reward"]


def print_quality(num_seeds: int, num_iterations: int) -> None:
    """Compare the reward after training with and without the lag, and with and without the correction."""
    columns = {
        "synchronous": (0, None),
        f"{AHEAD} ahead, corrected": (AHEAD, None),
        f"{AHEAD} ahead, uncorrected": (AHEAD, "none"),
    }
    print("\n" + "seed".ljust(8) + "".join(name.rjust(24) for name in columns))
    found: dict[str, list[float]] = {name: [] for name in columns}
    for seed in range(num_seeds):
        for name, (ahead, correction) in columns.items():
            found[name].append(quality(seed, ahead, correction, num_iterations))
        print(f"{seed:<8d}" + "".join(f"{values[-1]:24.3f}" for values in found.values()), flush=True)
    means = {name: statistics.fmean(values) for name, values in found.items()}
    print("mean".ljust(8) + "".join(f"{mean:24.3f}" for mean in means.values()))
    print("ratio".ljust(8) + "".join(f"{mean / means['synchronous']:24.3f}" for mean in means.values()))


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="for the quality; 0: only the speed")
    parser.add_argument("--iterations", type=int, default=400, help="iterations of a run for the quality")
    parser.add_argument("--timed", type=int, default=60, help="iterations of a run for the speed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("grpo").setLevel(logging.ERROR)  # it would name the lag without a correction
    print(f"torch {torch.__version__}, 1 thread, {platform.machine()}")
    print_speed(options.timed)
    if options.seeds:
        print_quality(options.seeds, options.iterations)


if __name__ == "__main__":
    main()
