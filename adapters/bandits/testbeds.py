"""Bandits with arms that change over time, with many independent runs, in numpy.

Axes: R runs, T time steps, K arms, N pulls. A testbed is a table of expected rewards `means[R, T, K]`, a kind of noise,
and a clock per run, which counts the run's pulls.
"""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias, assert_never

import numpy as np
from jaxtyping import Float64, Int64
from numpy.typing import ArrayLike

from grpo.arguments import describe, require_instances, require_integers, require_numbers
from grpo.errors import ConfigError, RewardError

Noise: TypeAlias = Literal["deterministic", "bernoulli", "gaussian"]
"""Reward of a pull with mean m: m itself ("deterministic"), 1 with probability m, else 0 ("bernoulli"), or N(m, 1)
("gaussian")."""

MeansSource: TypeAlias = np.ndarray | Callable[[np.random.Generator], np.ndarray]
"""Expected rewards [R, T, K] or [1, T, K] (shared by all runs), or a function that draws them."""

DYNAMIC_REGIMES = np.array(
    [[0.4, 0.4, 0.4, 0.4, 0.4], [0.1, 0.2, 0.0, 0.8, 0.3], [0.4, 0.4, 0.4, 0.4, 0.4], [0.7, 0.1, 0.3, 0.2, 0.0]]
)
"""Expected rewards of the five arms in the four regimes of the dynamic bandit. In regimes 0 and 2 all arms are equal."""


class Testbed:
    """R independent runs of one non-stationary bandit.

    The reward of a pull has the mean means[r, t, a] with t = (pulls of run r so far) // pulls_per_step.

    Args:
        means: Expected rewards, or a function that draws them. `reset` draws them again from the seed.
        noise: How a reward is drawn around its mean, see `Noise`.
        num_runs: Number of runs R. None uses the number of runs in `means`.
        pulls_per_step: Number of pulls of a run per time step. A larger number slows the change.
        cyclic: Whether the pull after the last step starts over at step 0. If False, that pull is an error.
        seed: Seed of the means and the rewards.

    Raises:
        ConfigError: An argument is invalid. The message names the argument.
    """

    __test__ = False  # pytest: not a test class, whatever its name

    def __init__(
        self,
        means: MeansSource,
        *,
        noise: Noise = "bernoulli",
        num_runs: int | None = None,
        pulls_per_step: int = 1,
        cyclic: bool = False,
        seed: int = 0,
    ) -> None:
        require_integers("Testbed", 1, pulls_per_step=pulls_per_step)
        require_integers("Testbed", 0, seed=seed)
        if num_runs is not None:
            require_integers("Testbed", 1, num_runs=num_runs)
        require_instances("Testbed", Noise, noise=noise)
        self.noise: Noise = noise
        self.pulls_per_step = pulls_per_step
        self.cyclic = cyclic
        self._source = means
        self._requested_runs = num_runs
        self._start(seed)

    def _start(self, seed: int) -> None:
        self.seed = seed
        self._generator = np.random.default_rng(seed)
        means = self._source(self._generator) if callable(self._source) else self._source
        try:
            means = np.asarray(means, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"Testbed: means must be finite numbers [R, T, K]; got {describe(means)}.") from error
        self._check_means(means)
        self.num_runs = means.shape[0] if self._requested_runs is None else self._requested_runs
        self.num_steps, self.num_arms = means.shape[1:]
        # views, so runs that share their means take no memory
        self.means: Float64[np.ndarray, "R T K"] = np.broadcast_to(means, (self.num_runs, *means.shape[1:]))
        self.best_means: Float64[np.ndarray, "R T"] = np.broadcast_to(
            means.max(axis=2), (self.num_runs, self.num_steps)
        )
        self.pulls: Int64[np.ndarray, " R"] = np.zeros(self.num_runs, dtype=np.int64)
        self.regrets: Float64[np.ndarray, " R"] = np.zeros(self.num_runs)

    def _check_means(self, means: np.ndarray) -> None:
        if means.ndim != 3 or 0 in means.shape or not np.isfinite(means).all():
            raise ConfigError(f"Testbed: means must be finite numbers [R, T, K]; got shape {list(means.shape)}.")
        if self.noise == "bernoulli" and (means.min() < 0 or means.max() > 1):
            raise ConfigError(
                f"Testbed: with noise='bernoulli' means are probabilities in [0, 1]; got {means.min():g} to "
                f"{means.max():g}. Choose noise='gaussian' or 'deterministic', or rescale the means."
            )
        requested = self._requested_runs
        if requested is not None and means.shape[0] not in (1, requested):
            raise ConfigError(
                f"Testbed: num_runs must be {means.shape[0]} as in means, or any number >= 1 when means is "
                f"[1, T, K]; got {requested}."
            )

    def reset(self, seed: int | None = None) -> None:
        """Restart all runs from a seed. None uses the previous seed, which repeats the same runs."""
        self._start(self.seed if seed is None else seed)

    def steps_at(self, pulls: ArrayLike) -> Int64[np.ndarray, "..."]:
        """Time step of a run's next pull after `pulls` pulls. It stays at the last step, or restarts at step 0 if cyclic."""
        steps = np.asarray(pulls, dtype=np.int64) // self.pulls_per_step
        return np.asarray(steps % self.num_steps if self.cyclic else np.minimum(steps, self.num_steps - 1))

    def means_now(self, runs: ArrayLike | None = None) -> Float64[np.ndarray, "N K"]:
        """Expected rewards of all arms at each run's current time. None selects all runs. Nothing is pulled."""
        rows = np.arange(self.num_runs) if runs is None else self._indices("runs", runs, self.num_runs)
        return self.means[rows, self.steps_at(self.pulls[rows])]

    def pull(self, runs: ArrayLike, arms: ArrayLike) -> Float64[np.ndarray, " N"]:
        """Pull N arms and return their rewards. Rows with the same run are successive pulls of that run, in row order.

        Splitting rows over several calls gives the same rewards. `regrets[r]` grows by max_a means[r, t, a] minus the pulled
        arm's mean.

        Raises:
            RewardError: A run or an arm does not exist, or a pull is after the last step. In each case, no arm is pulled.
        """
        rows, chosen = self._indices("runs", runs, self.num_runs), self._indices("arms", arms, self.num_arms)
        if rows.shape != chosen.shape:
            raise RewardError(
                f"Testbed: runs and arms must have the same length; got {len(rows)} runs and {len(chosen)} arms."
            )
        counts = np.bincount(rows, minlength=self.num_runs)
        pulls = self.pulls[rows] + _ranks_within(rows, counts)
        after = self.pulls + counts
        if not self.cyclic and after.max() > self.num_steps * self.pulls_per_step:
            raise RewardError(
                f"Testbed.pull: a run has {self.num_steps * self.pulls_per_step} pulls ({self.num_steps} steps of "
                f"{self.pulls_per_step}); run {int(after.argmax())} would come to {int(after.max())}. "
                f"Call reset(), or build a testbed with more steps."
            )
        steps = self.steps_at(pulls)
        means = self.means[rows, steps, chosen]
        self.pulls = after
        self.regrets = self.regrets + np.bincount(rows, self.best_means[rows, steps] - means, self.num_runs)
        return self._noisy(means)

    def _noisy(self, means: Float64[np.ndarray, " N"]) -> Float64[np.ndarray, " N"]:
        match self.noise:
            case "deterministic":
                return means
            case "bernoulli":
                return (self._generator.random(len(means)) < means).astype(np.float64)
            case "gaussian":
                return means + self._generator.standard_normal(len(means))
            case _:
                assert_never(self.noise)

    @staticmethod
    def _indices(name: str, values: ArrayLike, limit: int) -> Int64[np.ndarray, " N"]:
        indices = np.asarray(values)
        if indices.ndim != 1 or not (np.issubdtype(indices.dtype, np.integer) or indices.size == 0):
            raise RewardError(f"Testbed: {name} must be integers [N]; got {indices.dtype} {list(indices.shape)}.")
        if indices.size and (indices.min() < 0 or indices.max() >= limit):
            raise RewardError(
                f"Testbed: {name} must lie in 0..{limit - 1}; got {int(indices.min())} to {int(indices.max())}."
            )
        return indices.astype(np.int64, copy=False)

    def state_dict(self) -> dict[str, Any]:
        """State for an exact resume. The means are not stored; the seed reproduces them."""
        return {
            "seed": self.seed,
            "pulls": self.pulls.copy(),
            "regrets": self.regrets.copy(),
            "generator": self._generator.bit_generator.state,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state, so that the rewards continue exactly.

        Raises:
            ConfigError: The state has another number of runs.
        """
        if np.shape(state["pulls"]) != (self.num_runs,):
            raise ConfigError(
                f"Testbed.load_state_dict: the state must have {self.num_runs} runs; it has {np.size(state['pulls'])}. "
                f"Build the testbed with the same num_runs."
            )
        self._start(state["seed"])  # draws the means again
        self.pulls = np.array(state["pulls"], dtype=np.int64)
        self.regrets = np.array(state["regrets"], dtype=np.float64)
        self._generator.bit_generator.state = state["generator"]


def _ranks_within(rows: Int64[np.ndarray, " N"], counts: Int64[np.ndarray, " R"]) -> Int64[np.ndarray, " N"]:
    """Number of earlier rows with the same run: [5, 7, 5, 5, 7] -> [0, 0, 1, 2, 1]."""
    if counts.max() == 1:  # as in `play`, which pulls once per run: nothing to sort
        return np.zeros(len(rows), dtype=np.int64)
    order = np.argsort(rows, kind="stable")
    ranks = np.empty_like(rows)
    ranks[order] = np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows[order]]
    return ranks


def dynamic_testbed(*, num_runs: int = 1, pulls_per_step: int = 32, seed: int = 0) -> Testbed:
    """Five arms, 100 steps, deterministic rewards. The regime is (step // 20) % 4 and starts over after 100 steps.

    Regimes 0 and 2 pay .4 on every arm. In regime 1 arm 3 is best (.8), in regime 3 arm 0 is best (.7).
    One step is one GRPO iteration if `pulls_per_step` is the number of rows per iteration.
    """
    means = DYNAMIC_REGIMES[dynamic_regimes(100)][None]
    return Testbed(
        means, noise="deterministic", num_runs=num_runs, pulls_per_step=pulls_per_step, cyclic=True, seed=seed
    )


def dynamic_regimes(num_steps: int = 100) -> Int64[np.ndarray, " S"]:
    """The dynamic bandit's regime at each step: (step // 20) % 4, starting over at step 100."""
    return (np.arange(num_steps) % 100 // 20) % 4


def abrupt_testbed(*, num_runs: int = 1, pulls_per_step: int = 1, seed: int = 0) -> Testbed:
    """Three Bernoulli arms, 10,000 steps. The second-best arm becomes the best arm for 2,000 steps.

    The means are .5, .3 and .4; the third is .9 for 3000 <= t < 5000.

    Source:
        Garivier & Moulines 2008, arXiv:0805.3415, section 4.
    """
    means = np.tile([0.5, 0.3, 0.4], (1, 10_000, 1))
    means[0, 3_000:5_000, 2] = 0.9
    return Testbed(means, noise="bernoulli", num_runs=num_runs, pulls_per_step=pulls_per_step, seed=seed)


def random_walk_testbed(
    *, num_runs: int = 1, num_steps: int = 10_000, pulls_per_step: int = 1, step_std: float = 0.01, seed: int = 0
) -> Testbed:
    """Ten arms with means that start equal and follow independent random walks. Rewards have unit variance.

    means[r, 0, a] = 0,  means[r, t+1, a] = means[r, t, a] + N(0, step_std^2), with a separate walk in each run.

    Source:
        Sutton & Barto, Reinforcement Learning, 2nd edition 2018, exercise 2.5.
    """

    def draw_walks(generator: np.random.Generator) -> Float64[np.ndarray, "R T 10"]:
        walks = generator.standard_normal((num_runs, num_steps, 10))
        walks *= step_std
        walks[:, 0] = 0.0
        return np.cumsum(walks, axis=1, out=walks)

    require_integers("random_walk_testbed", 1, num_runs=num_runs, num_steps=num_steps)
    require_numbers("random_walk_testbed", step_std=step_std)
    if step_std < 0:
        raise ConfigError(f"random_walk_testbed: step_std must be >= 0; got {step_std}.")
    return Testbed(draw_walks, noise="gaussian", num_runs=num_runs, pulls_per_step=pulls_per_step, seed=seed)
