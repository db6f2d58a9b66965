"""Speed of `adapters.control` compared with Stable-Baselines3's PPO and a single-file PPO.

- Steps per second, training included: each learner starts from scratch and trains for all steps of the preset on CartPole, or
  for several iterations on HalfCheetah. SB3 uses rl-zoo's settings for CartPole and its defaults for HalfCheetah. Our presets
  make fewer updates per environment step, so a second line has our side with as many updates as the other.
- Seconds until CartPole is learned: the mean return of 20 episodes without noise must reach 475. Policies are evaluated about
  every 2,000 steps, from the same start states. Evaluations and the creation of learners are not counted.
- Steps per second of rollouts alone: they are compared with stepping the environments without a policy, and with a loop of
  only the network and either Gymnasium's vector environment or our own pool.

The two sides of a ratio run in turn. Seconds are CPU seconds (`time.process_time`); ratios by wall time are printed next to
them. Everything runs in one thread.

    python -m benchmarks.control_speed                  # about fifteen minutes
    python -m benchmarks.control_speed --repeats 15 --seeds 10
    python -m benchmarks.control_speed --quick          # whether it runs
"""

import argparse
import gc
import importlib.util
import math
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is loaded

import gymnasium
import numpy as np
import torch
from gymnasium.vector import SyncVectorEnv
from torch import Tensor

from adapters.control import EpisodeOptions, EpisodePolicy, EpisodeStart, episode_starts, make_pool, preset_for
from adapters.control.training.evaluation import EVALUATION_SEED
from benchmarks._ppo import PPO
from benchmarks._timing import keep_freed_memory
from grpo import AdvantageConfig, AdvantageEstimator, ExperienceBatch

HAS_SB3 = importlib.util.find_spec("stable_baselines3") is not None
HAS_MUJOCO = importlib.util.find_spec("mujoco") is not None
INSTALL = 'not installed; to compare with it: pip install -e ".[bench,robots]"'

CARTPOLE, HALF_CHEETAH = "CartPole-v1", "HalfCheetah-v5"

EVALUATE_EVERY, NUM_EVAL_EPISODES, THRESHOLD = 2_000, 20, 475.0

AS_MANY_UPDATES: dict[str, dict[str, Any]] = {
    "CartPole, SB3": {"num_epochs": 20},
    "CartPole, script": {"num_epochs": 12},
    "HalfCheetah, SB3": {"batch_size": 64},
}
"""Changes of our presets that make about as many updates per environment step as the other side. Steps without an advantage
make no update, and with more epochs there are more of them."""

MOST_STEPS = 100_000
"""Maximum steps of a run that ends at the threshold. In these steps, rl-zoo's learning rate and clip range decay to 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Environment steps and the time they took."""

    steps: int
    cpu: float
    """CPU seconds."""
    wall: float
    """Wall-clock seconds."""
    idle: float = 0.0
    """Fraction of the steps that updates skipped because their advantage was 0. Skipped steps make training look faster."""
    updates: int = 0
    """Optimizer steps."""
    is_learned: bool = False
    """Whether the run ended because it reached the threshold."""


Run = Callable[[int], Spent]
"""Maps a seed to a run that starts from scratch."""


class Stopwatch:
    """CPU and wall time since creation, without pauses."""

    def __init__(self) -> None:
        gc.collect()
        self._start = (time.process_time(), time.perf_counter())

    def spent(self, steps: int, **more: Any) -> Spent:
        """Elapsed time."""
        cpu, wall = time.process_time() - self._start[0], time.perf_counter() - self._start[1]
        return Spent(steps=steps, cpu=cpu, wall=wall, **more)

    def leave_out(self, work: Callable[[], Any]) -> Any:
        """Run a function without counting its time."""
        before = (time.process_time(), time.perf_counter())
        result = work()
        self._start = (
            self._start[0] + time.process_time() - before[0],
            self._start[1] + time.perf_counter() - before[1],
        )
        return result


# Learners


def our_learner(
    env_id: str,
    num_steps: int,
    seed: int,
    *,
    reached: Callable[[Any], bool] | None = None,
    changes: dict[str, Any] | None = None,
    **options: Any,
) -> Spent:
    """Our trainer with its preset, for a number of steps or until `reached(policy)`. `changes` are fields of the preset."""
    torch.manual_seed(seed)
    preset = replace(preset_for(env_id), **changes or {})
    policy = preset.make_policy(**options)
    advantages = CountingEstimator(preset.make_config().advantage)
    trainer = preset.make_trainer(policy, seed=seed, advantages=advantages)
    starts = episode_starts(preset.num_groups, seed=seed)
    steps, updates, due, is_reached = 0, 0, EVALUATE_EVERY, False
    watch = Stopwatch()
    while steps < num_steps and not is_reached:
        metrics = trainer.step(starts(trainer.iteration))
        steps += round(metrics["episodes/steps"])
        updates += round(metrics["train/num_updates"])
        if reached is not None and steps >= due:
            due = steps + EVALUATE_EVERY
            is_reached = watch.leave_out(lambda: reached(policy))
    spent = watch.spent(steps, idle=advantages.num_zero / steps, updates=updates, is_learned=is_reached)
    policy.pool.close()
    return spent


class CountingEstimator:
    """The trainer's advantages, with a count of steps with advantage 0. The trainer's metrics count whole episodes only."""

    def __init__(self, config: AdvantageConfig) -> None:
        self._estimate = AdvantageEstimator(config)
        self.num_zero = 0

    def __call__(self, batch: ExperienceBatch) -> Tensor:
        """Advantages per step [N, T]."""
        advantages = self._estimate(batch)
        self.num_zero += int(torch.count_nonzero((advantages == 0) & batch.mask))
        return advantages


def sb3_learner(env_id: str, num_steps: int, seed: int, *, reached: Callable[[Any], bool] | None = None) -> Spent:
    """PPO of Stable-Baselines3, with rl-zoo's settings for CartPole, otherwise with its defaults and one environment."""
    from stable_baselines3 import PPO as SB3PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env

    settings: dict[str, Any] = {}
    if env_id == CARTPOLE:
        settings = {
            "n_steps": 32,
            "batch_size": 256,
            "gae_lambda": 0.8,
            "gamma": 0.98,
            "n_epochs": 20,
            "ent_coef": 0.0,
            "learning_rate": lambda left: left * 1e-3,
            "clip_range": lambda left: left * 0.2,
        }
    envs = make_vec_env(env_id, n_envs=8 if env_id == CARTPOLE else 1, seed=seed)
    learner = SB3PPO("MlpPolicy", envs, seed=seed, device="cpu", **settings)
    updates = CountedUpdates(learner.policy.optimizer)
    watch = Stopwatch()

    class Evaluate(BaseCallback):
        """Called between an update and the next rollout."""

        due, is_reached = EVALUATE_EVERY, False

        def _on_rollout_start(self) -> None:
            if reached is not None and self.num_timesteps >= self.due:
                self.due = self.num_timesteps + EVALUATE_EVERY
                self.is_reached = watch.leave_out(lambda: reached(learner))

        def _on_step(self) -> bool:
            return not self.is_reached

    evaluate = Evaluate()
    learner.learn(num_steps, callback=None if reached is None else evaluate)
    spent = watch.spent(learner.num_timesteps, updates=updates.count, is_learned=evaluate.is_reached)
    envs.close()
    return spent


def script_learner(env_id: str, num_steps: int, seed: int) -> Spent:
    """The PPO of `benchmarks/_ppo.py`."""
    learner = PPO(env_id, num_steps, seed)
    updates = CountedUpdates(learner.optimizer)
    watch = Stopwatch()
    steps = learner.run()
    return watch.spent(steps, updates=updates.count)


class CountedUpdates:
    """Counts an optimizer's steps."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.count = 0
        optimizer.register_step_post_hook(self._add)

    def _add(self, *args: Any) -> None:
        self.count += 1


def is_learned(pool: Any, learner: Any) -> bool:
    """Whether the most likely actions last 475 steps on average over 20 episodes. Works with any SB3-style `predict`."""
    members = np.arange(NUM_EVAL_EPISODES)
    observations, _ = pool.reset(members, [EpisodeStart(seed=EVALUATION_SEED + member) for member in members.tolist()])
    total = 0.0
    while len(members):
        actions, _ = learner.predict(observations, deterministic=True)
        step = pool.step(members, np.asarray(actions))
        total += float(step.rewards.sum())
        alive = ~(step.terminated | step.truncated)
        members, observations = members[alive], step.observations[alive]
    return total / NUM_EVAL_EPISODES >= THRESHOLD


# Rollouts


def our_rollout(policy: EpisodePolicy, num_episodes: int) -> Run:
    """Sample and score the episodes of one group."""

    def run(seed: int) -> Spent:
        torch.manual_seed(seed)
        watch = Stopwatch()
        sampled = policy.sample_actions([EpisodeStart(seed=seed)], num_episodes)
        return watch.spent(round(sampled.metrics["episodes/steps"]))

    return run


def raw_environments(env_id: str, num_envs: int, num_steps: int) -> Run:
    """Step Gymnasium's `SyncVectorEnv` with precomputed actions."""
    envs = SyncVectorEnv([lambda: gymnasium.make(env_id)] * num_envs)
    envs.action_space.seed(0)
    actions = [envs.action_space.sample() for _ in range(num_steps)]

    def run(seed: int) -> Spent:
        watch = Stopwatch()
        envs.reset(seed=seed)
        for action in actions:
            envs.step(action)
        return watch.spent(num_steps * num_envs)

    return run


def bare_loop(policy: EpisodePolicy, num_envs: int, num_steps: int) -> Run:
    """A loop of the policy's network and Gymnasium's `CartPoleVectorEnv`, with precomputed actions and no storage."""
    envs = gymnasium.make_vec(CARTPOLE, num_envs, vectorization_mode="vector_entry_point")
    actions = list(np.random.default_rng(0).integers(2, size=(num_steps, num_envs)))

    @torch.no_grad()
    def run(seed: int) -> Spent:
        watch = Stopwatch()
        observations, _ = envs.reset(seed=seed)
        for action in actions:
            policy.actor(torch.from_numpy(observations))
            observations, *_ = envs.step(action)
        return watch.spent(num_steps * num_envs)

    return run


def bare_pool(policy: EpisodePolicy, num_steps: int) -> Run:
    """A loop of the policy's network and its pool, with the most likely actions and no storage."""
    pool = policy.pool
    members = np.arange(pool.num_members)

    @torch.no_grad()
    def run(seed: int) -> Spent:
        watch = Stopwatch()
        start = EpisodeStart(seed=seed)
        observations, _ = pool.reset(members.tolist(), [start] * len(members))
        for _ in range(num_steps):
            step = pool.step(members, policy.actor(torch.from_numpy(observations)).argmax(1).numpy())
            observations, ended = step.observations, members[step.terminated | step.truncated].tolist()
            if ended:
                observations[ended] = pool.reset(ended, [start] * len(ended))[0]
        return watch.spent(num_steps * len(members))

    return run


# Comparisons


def repeated(run: Run, seconds: float) -> Run:
    """Run with different seeds until a number of CPU seconds is spent. Returns the sum of the runs."""

    def runs(seed: int) -> Spent:
        done: list[Spent] = []
        while not done or sum(one.cpu for one in done) < seconds:
            done.append(run(1000 * seed + len(done)))
        steps = sum(one.steps for one in done)
        return Spent(
            steps=steps,
            cpu=sum(one.cpu for one in done),
            wall=sum(one.wall for one in done),
            idle=sum(one.idle * one.steps for one in done) / steps,
            updates=sum(one.updates for one in done),
        )

    return runs


def in_turn(first: Run, second: Run, repeats: int) -> tuple[list[Spent], list[Spent]]:
    """Run two functions in turn, `repeats` times each. The order within a pair alternates."""
    results: tuple[list[Spent], list[Spent]] = ([], [])
    for pair in range(repeats):
        for which in (0, 1) if pair % 2 == 0 else (1, 0):
            results[which].append((first, second)[which](pair))
    return results


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile of at least one value."""
    low, median, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return low, median, high


def ratio_text(first: list[float], second: list[float]) -> str:
    """Median and quartiles of pairwise ratios, as text."""
    low, median, high = quartiles([a / b for a, b in zip(first, second, strict=True)])
    return f"{median:5.2f} ({low:.2f} to {high:.2f})"


def report_speed(name: str, first: Run, second: Run, repeats: int, target: str) -> None:
    """Print one line: steps per CPU-second of both sides, and the ratios by CPU time and wall time."""
    ours, theirs = in_turn(first, second, repeats)
    rates = [[one.steps / one.cpu for one in side] for side in (ours, theirs)]
    walls = [[one.steps / one.wall for one in side] for side in (ours, theirs)]
    medians = "".join(f"{statistics.median(side):12,.0f}" for side in rates)
    idle = statistics.median(one.idle for one in ours)
    note = f"; {idle:.0%} of our steps had no advantage, and were left out of updates" if idle >= 0.005 else ""
    if ours[0].updates:
        per_thousand = [statistics.median(1e3 * one.updates / one.steps for one in side) for side in (ours, theirs)]
        note += "; updates per 1,000 steps: ours {:.1f}, other {:.1f}".format(*per_thousand)
    print(f"{name:44s}{medians}   {ratio_text(*rates):24s}{ratio_text(*walls):24s}{target}{note}", flush=True)


def report_threshold(num_seeds: int, most_steps: int) -> None:
    """Print the CPU seconds until CartPole is learned. The sides run in turn, seed by seed."""
    pool = make_pool(CARTPOLE, NUM_EVAL_EPISODES)

    def reached(learner: Any) -> bool:
        return is_learned(pool, learner)

    ours, theirs = in_turn(
        lambda seed: our_learner(CARTPOLE, most_steps, seed, reached=reached),
        lambda seed: sb3_learner(CARTPOLE, most_steps, seed, reached=reached),
        num_seeds,
    )
    medians = []
    for name, runs in (("ours", ours), ("SB3 PPO, zoo", theirs)):
        seconds = [run.cpu if run.is_learned else math.inf for run in runs]
        medians.append(statistics.median(seconds))
        print(
            f"{f'CartPole until {THRESHOLD:g}, {name}':44s}{medians[-1]:10.2f} s of CPU ({min(seconds):.2f} to "
            f"{max(seconds):.2f}), {statistics.median(run.steps for run in runs):,.0f} steps, "
            f"{statistics.median(run.updates for run in runs):,.0f} updates, {sum(run.is_learned for run in runs)} of "
            f"{len(runs)} seeds"
        )
    ratio = f"{medians[0] / medians[1]:.2f}" if math.isfinite(max(medians)) else "not learned: no"
    print(f"{'':44s}{ratio} ratio of the medians; at most 0.5", flush=True)


def report_training(repeats: int, seconds: float, *, quick: bool) -> None:
    """Print the steps per second, training included."""
    steps = 600 if quick else preset_for(CARTPOLE).total_steps

    def ours(env_id: str, num_steps: int, changes: dict[str, Any], **options: Any) -> Run:
        return repeated(lambda seed: our_learner(env_id, num_steps, seed, changes=changes, **options), seconds)

    if HAS_SB3:
        theirs = repeated(lambda seed: sb3_learner(CARTPOLE, steps, seed), seconds)
        report_speed("CartPole, training : SB3 PPO, zoo", ours(CARTPOLE, steps, {}), theirs, repeats, "at least 4")
        as_many = ours(CARTPOLE, steps, AS_MANY_UPDATES["CartPole, SB3"])
        report_speed("  with as many updates", as_many, theirs, repeats, "no target")
    script = repeated(lambda seed: script_learner(CARTPOLE, steps, seed), seconds)
    report_speed("CartPole, training : CleanRL-style PPO", ours(CARTPOLE, steps, {}), script, repeats, "at least 3")
    as_many = ours(CARTPOLE, steps, AS_MANY_UPDATES["CartPole, script"])
    report_speed("  with as many updates", as_many, script, repeats, "no target")
    if HAS_SB3 and HAS_MUJOCO:
        options = {"options": EpisodeOptions(max_episode_steps=50)} if quick else {}
        steps_of_robot = 400 if quick else 16_000
        theirs = repeated(lambda seed: sb3_learner(HALF_CHEETAH, steps_of_robot, seed), seconds)
        own = ours(HALF_CHEETAH, steps_of_robot, {}, **options)
        report_speed("HalfCheetah, training : SB3 PPO, defaults", own, theirs, repeats, "at least 4")
        as_many = ours(HALF_CHEETAH, steps_of_robot, AS_MANY_UPDATES["HalfCheetah, SB3"], **options)
        report_speed("  with as many updates", as_many, theirs, repeats, "no target")


def report_rollouts(repeats: int, *, quick: bool) -> None:
    """Print the steps per second of rollouts without training."""
    if HAS_MUJOCO:
        steps = 50 if quick else 1_000
        policy = replace(preset_for(HALF_CHEETAH), max_episode_steps=steps).make_policy(num_members=16)
        report_speed(
            "HalfCheetah, rollout of 16 : raw environments",
            our_rollout(policy, 16),
            raw_environments(HALF_CHEETAH, 16, steps),
            repeats,
            "at least 0.6",
        )
    torch.manual_seed(0)
    preset = replace(preset_for(CARTPOLE), normalize_observations=False)  # the bare loop keeps no statistics
    num_members = 64
    policy = preset.make_policy(num_members=num_members)
    loop = bare_loop(policy, num_members, 50 if quick else 2_000)
    short = our_rollout(policy, 128 if quick else 4_096)
    report_speed("CartPole, 64 members, untrained : bare loop", short, loop, repeats, "at least 0.77")
    trainer, starts = preset.make_trainer(policy, seed=0), episode_starts(preset.num_groups)
    length = 0.0
    while length < (1 if quick else THRESHOLD):  # mean episode length of the last iteration
        length = trainer.step(starts(trainer.iteration))["steps/mean"]
    trained = our_rollout(policy, 64 if quick else 256)
    report_speed("CartPole, 64 members, trained : bare loop", trained, loop, repeats, "at least 0.77")
    own = bare_pool(policy, 50 if quick else 2_000)
    report_speed("CartPole, 64 members, trained : bare pool", trained, own, repeats, "what is not the environment's")


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7, help="pairs per line")
    parser.add_argument("--seconds", type=float, default=6.0, help="of the processor, at least, per side of a pair")
    parser.add_argument("--seeds", type=int, default=5, help="of the runs to the threshold")
    parser.add_argument("--quick", action="store_true", help="everything once, and short")
    args = parser.parse_args()
    repeats, seconds, seeds = (1, 0.0, 1) if args.quick else (args.repeats, args.seconds, args.seeds)
    torch.set_num_threads(1)
    keep_freed_memory()
    print(
        f"torch {torch.__version__}, gymnasium {gymnasium.__version__}, 1 thread on {os.cpu_count()} cores, "
        f"{platform.machine()}, load {os.getloadavg()[0]:.1f}"
    )
    print(f"Stable-Baselines3 {version('stable_baselines3') if HAS_SB3 else INSTALL}")
    print(f"MuJoCo {version('mujoco') if HAS_MUJOCO else INSTALL}")
    print(
        f"{'steps per CPU-second':44s}{'ours':>12s}{'other':>12s}   {'ratio by CPU time':24s}{'by wall time':24s}target"
    )
    report_training(repeats, seconds, quick=args.quick)
    report_rollouts(repeats, quick=args.quick)
    if HAS_SB3:
        report_threshold(seeds, 1_000 if args.quick else MOST_STEPS)


if __name__ == "__main__":
    main()
