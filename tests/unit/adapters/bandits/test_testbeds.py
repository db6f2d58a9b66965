"""Testbeds, their environments and rewards, playing, metrics and plots, against values worked out by hand."""

import subprocess
import sys
from collections.abc import Iterator

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env

from adapters.bandits import (
    BanditReward,
    Oracle,
    Testbed,
    Uniform,
    abrupt_testbed,
    best_arm_probability,
    cumulative_regret,
    dynamic_regimes,
    dynamic_testbed,
    mean_by_regime,
    play,
    pull_fractions,
    random_walk_testbed,
    segment_starts,
    structured_reward,
    time_to_reach,
)
from adapters.bandits.environments import register_environments
from adapters.bandits.plots import Run, arm_colours, mark_regimes, plot_arm_probabilities, plot_dynamic_runs
from adapters.plots import pyplot
from grpo.errors import ConfigError, RewardError


def test_dynamic_regimes_equal_hand_worked_regimes() -> None:
    # (step // 20) % 4 over 100 steps is 0, 1, 2, 3, 0; step 100 starts over with 0, step 120 is step 20: regime 1.
    regimes = dynamic_regimes(140)
    np.testing.assert_array_equal(regimes, np.repeat([0, 1, 2, 3, 0, 0, 1], 20))


def test_dynamic_testbed_moves_one_step_per_32_pulls_and_starts_over_after_100_steps() -> None:
    testbed = dynamic_testbed()
    rewards = testbed.pull(np.zeros(100 * 32 + 21 * 32, dtype=int), np.full(121 * 32, 3)).reshape(121, 32)
    # arm 3 pays .4, .8, .4, .2, .4 in the five blocks of 20 steps, then again .4 from step 100, .8 from step 120.
    expected = np.concatenate([np.repeat([0.4, 0.8, 0.4, 0.2, 0.4, 0.4], 20), [0.8]])
    np.testing.assert_array_equal(rewards, expected[:, None] * np.ones(32))
    # regret: only in regime 3, where arm 0 pays .7: 20 steps * 32 pulls * (.7 - .2) = 320
    np.testing.assert_allclose(testbed.regrets, [320.0])


def test_abrupt_testbed_changes_where_the_paper_says() -> None:
    means = abrupt_testbed(num_runs=3).means
    assert means.shape == (3, 10_000, 3)
    for step, expected in ((0, 0.4), (2_999, 0.4), (3_000, 0.9), (4_999, 0.9), (5_000, 0.4), (9_999, 0.4)):
        np.testing.assert_array_equal(means[:, step], np.tile([0.5, 0.3, expected], (3, 1)))


def test_random_walk_steps_are_independent_normals_of_std_001() -> None:
    testbed = random_walk_testbed(num_runs=4, num_steps=2_000, seed=5)
    np.testing.assert_array_equal(testbed.means[:, 0], np.zeros((4, 10)))
    steps = np.diff(testbed.means, axis=1)
    # 4 * 1999 * 10 = 79,960 steps: the standard error of their mean is .01 / 283, of their std .01 / 400
    assert abs(steps.mean()) < 4 * 0.01 / 283
    assert abs(steps.std() - 0.01) < 4 * 0.01 / 400
    correlation = np.corrcoef(steps.transpose(0, 2, 1).reshape(40, -1))
    off_diagonal = correlation[~np.eye(40, dtype=bool)]
    assert np.abs(off_diagonal).max() < 5 / np.sqrt(1_999)  # every arm of every run has a walk of its own


def test_one_call_of_many_pulls_equals_pulling_row_by_row(subtests: pytest.Subtests) -> None:
    for noise in ("deterministic", "bernoulli", "gaussian"):
        with subtests.test(noise):
            rng = np.random.default_rng(0)
            means = rng.random((4, 30, 3))
            runs, arms = rng.integers(4, size=100), rng.integers(3, size=100)
            build = {"noise": noise, "pulls_per_step": 3, "cyclic": True, "seed": 7}
            together, one_by_one = Testbed(means, **build), Testbed(means, **build)
            rewards = together.pull(runs, arms)
            singly = np.concatenate([one_by_one.pull([run], [arm]) for run, arm in zip(runs, arms, strict=True)])
            np.testing.assert_array_equal(rewards, singly)
            np.testing.assert_array_equal(together.pulls, np.bincount(runs, minlength=4))

            clocks, regrets, expected = np.zeros(4, dtype=int), np.zeros(4), []
            for run, arm in zip(runs, arms, strict=True):
                now = means[run, clocks[run] // 3 % 30]
                expected.append(now[arm])
                regrets[run] += now.max() - now[arm]
                clocks[run] += 1
            np.testing.assert_allclose(together.regrets, regrets)
            np.testing.assert_allclose(one_by_one.regrets, regrets)
            if noise == "deterministic":
                np.testing.assert_array_equal(rewards, expected)


def test_noise_has_the_right_mean_and_variance() -> None:
    num_pulls, zeros = 40_000, np.zeros(40_000, dtype=int)
    coin = Testbed(np.array([[[0.3]]]), noise="bernoulli", cyclic=True, seed=1)
    flips = coin.pull(zeros, zeros)
    assert set(np.unique(flips)) == {0.0, 1.0}
    assert abs(flips.mean() - 0.3) < 4 * np.sqrt(0.3 * 0.7 / num_pulls)
    normal = Testbed(np.array([[[-2.0]]]), noise="gaussian", cyclic=True, seed=1)
    draws = normal.pull(zeros, zeros)
    assert abs(draws.mean() + 2) < 4 / np.sqrt(num_pulls)
    assert abs(draws.var() - 1) < 4 * np.sqrt(2 / num_pulls)


def test_means_now_follow_each_runs_clock_without_advancing_it() -> None:
    testbed = Testbed(np.array([[[0.0, 1.0], [2.0, 3.0]]]), noise="gaussian", num_runs=2, seed=0)
    testbed.pull([1], [0])
    before = testbed.state_dict()
    np.testing.assert_array_equal(testbed.means_now(), [[0, 1], [2, 3]])
    np.testing.assert_array_equal(testbed.means_now([1, 0, 1]), [[2, 3], [0, 1], [2, 3]])
    after = testbed.state_dict()
    np.testing.assert_array_equal(before["pulls"], after["pulls"])
    assert before["generator"] == after["generator"]


def test_a_resumed_reward_model_gives_bitwise_equal_rewards(subtests: pytest.Subtests) -> None:
    for build in (abrupt_testbed, random_walk_testbed, dynamic_testbed):
        with subtests.test(build.__name__):
            testbed = build(num_runs=3, seed=11)
            reward_model = BanditReward(testbed)
            rng = np.random.default_rng(1)
            rows = [(rng.integers(3, size=50), rng.integers(3, size=50)) for _ in range(4)]
            for runs, arms in rows[:2]:
                reward_model.compute_rewards(runs, arms)
            state = reward_model.state_dict()
            expected = [reward_model.compute_rewards(runs, arms) for runs, arms in rows[2:]]
            other = BanditReward(build(num_runs=3, seed=99))  # another walk, other noise: all must come from the state
            other.load_state_dict(state)
            for (runs, arms), rewards in zip(rows[2:], expected, strict=True):
                assert torch.equal(other.to("cpu").compute_rewards(runs, arms), rewards)
            np.testing.assert_array_equal(other.testbed.regrets, testbed.regrets)
            np.testing.assert_array_equal(other.testbed.pulls, testbed.pulls)


def test_reset_repeats_the_runs_and_a_seed_makes_new_ones() -> None:
    testbed = random_walk_testbed(num_runs=2, num_steps=50, seed=3)
    walk, rewards = testbed.means.copy(), testbed.pull([0, 1, 1], [0, 1, 2])
    testbed.reset()
    np.testing.assert_array_equal(testbed.pulls, [0, 0])
    np.testing.assert_array_equal(testbed.means, walk)
    np.testing.assert_array_equal(testbed.pull([0, 1, 1], [0, 1, 2]), rewards)
    testbed.reset(4)
    assert not np.array_equal(testbed.means, walk)
    np.testing.assert_array_equal(testbed.means, random_walk_testbed(num_runs=2, num_steps=50, seed=4).means)


def test_a_pull_past_the_end_is_refused_and_changes_nothing() -> None:
    testbed = Testbed(np.array([[[0.5], [0.6]]]), num_runs=2, pulls_per_step=2)
    testbed.pull([1, 1, 1], [0, 0, 0])
    state = testbed.state_dict()
    with pytest.raises(RewardError, match=r"a run has 4 pulls \(2 steps of 2\); run 1 would come to 5"):
        testbed.pull([0, 1, 1], [0, 0, 0])
    np.testing.assert_array_equal(testbed.pulls, [0, 3])
    assert testbed.state_dict()["generator"] == state["generator"]
    testbed.pull([1], [0])
    np.testing.assert_array_equal(testbed.means_now([1]), [[0.6]])  # over, but the last means can be looked at


def test_what_does_not_exist_or_is_invalid_is_refused(subtests: pytest.Subtests) -> None:
    two, three = abrupt_testbed(num_runs=2), abrupt_testbed(num_runs=3).state_dict()
    for call, error, message in (
        (lambda: two.pull([0, 1], [0]), RewardError, "runs and arms must have the same length; got 2 runs and 1 arms"),
        (lambda: two.pull([0], [3]), RewardError, r"arms must lie in 0\.\.2; got 3 to 3"),
        (lambda: two.pull([-1], [0]), RewardError, r"runs must lie in 0\.\.1; got -1 to -1"),
        (lambda: two.pull([0], [0.5]), RewardError, "arms must be integers"),
        (lambda: two.pull([[0]], [[0]]), RewardError, "runs must be integers"),
        (lambda: two.load_state_dict(three), ConfigError, "the state must have 2 runs; it has 3"),
        (lambda: Testbed(np.zeros((2, 3))), ConfigError, r"must be finite numbers \[R, T, K\]; got shape \[2, 3\]"),
        (lambda: Testbed(np.full((1, 1, 1), np.nan)), ConfigError, "means must be finite"),
        (lambda: Testbed(np.full((1, 1, 1), 1.5)), ConfigError, r"means are probabilities in \[0, 1\]; got 1.5 to 1.5"),
        (lambda: Testbed(np.zeros((2, 1, 1)), num_runs=3), ConfigError, "num_runs must be 2 as in means"),
    ):
        with subtests.test(message), pytest.raises(error, match=message):
            call()
    assert two.pulls.tolist() == [0, 0]


# --- the reward model


def test_every_row_pulls_an_arm_once_in_order_and_states_are_run_numbers_if_there_are_several() -> None:
    reward_model = BanditReward(dynamic_testbed(pulls_per_step=2))
    arm = torch.full((40,), 3)
    assert reward_model.compute_rewards(["any"] * 40, arm).tolist() == [0.4] * 40  # 20 steps of 2 pulls: regime 0
    assert reward_model.eval() is reward_model
    assert reward_model.compute_rewards([None] * 3, [3, 0, 2]).tolist() == [0.8, 0.1, 0.0]  # steps 20, 20 and 21
    assert reward_model.testbed.pulls.tolist() == [43]
    testbed = Testbed(np.array([[[0.0, 1.0]], [[2.0, 3.0]]]), noise="deterministic", cyclic=True)
    reward_model = BanditReward(testbed)
    rewards = reward_model.compute_rewards(torch.tensor([1, 0, 1]), torch.tensor([0, 1, 1]))
    assert rewards.dtype == torch.float64
    assert rewards.tolist() == [2.0, 1.0, 3.0]
    assert testbed.pulls.tolist() == [1, 2]


# --- Gymnasium environments


def test_environments_pass_gymnasiums_checker_and_end_truncated_after_their_last_step(
    subtests: pytest.Subtests,
) -> None:
    for name, num_arms, num_steps in (("Dynamic", 5, 100), ("Abrupt", 3, 10_000), ("RandomWalk", 10, 10_000)):
        with subtests.test(name):
            spec = gymnasium.spec(f"bandits/{name}Bandit-v0")
            register_environments()  # Gymnasium warns when a name is overridden, and warnings are errors here
            assert gymnasium.spec(spec.id) is spec
            environment = gymnasium.make(spec)
            assert environment.action_space.n == num_arms
            check_env(environment.unwrapped)
            environment.reset(seed=0)
            ends = [environment.step(0)[2:4] for _ in range(num_steps)]
            assert ends[:-1] == [(False, False)] * (num_steps - 1)
            assert ends[-1] == (False, True)


def test_info_holds_the_best_arm_of_the_next_pull() -> None:
    environment = gymnasium.make("bandits/DynamicBandit-v0")
    _, info = environment.reset(seed=1)
    assert (info["step"], info["best_arm"]) == (0, 0)
    for _ in range(20):
        _, reward, _, _, info = environment.step(3)
        assert reward == 0.4
    assert (info["step"], info["best_arm"]) == (20, 3)
    np.testing.assert_array_equal(info["means"], [0.1, 0.2, 0.0, 0.8, 0.3])
    assert environment.step(3)[1] == 0.8


def test_rewards_are_those_of_the_testbed() -> None:
    environment = gymnasium.make("bandits/AbruptBandit-v0")
    environment.reset(seed=3)
    testbed = abrupt_testbed(seed=environment.unwrapped.testbed.seed)
    rewards = [environment.step(arm)[1] for arm in (0, 1, 2) * 10]
    np.testing.assert_array_equal(rewards, testbed.pull(np.zeros(30, dtype=int), np.array([0, 1, 2] * 10)))


def test_a_seed_fixes_the_random_walk_and_two_hundred_seeds_give_two_hundred_runs() -> None:
    environment = gymnasium.make("bandits/RandomWalkBandit-v0", num_steps=20)
    walks = []
    for seed in (0, None, 0):
        environment.reset(seed=seed)
        walks.append(environment.unwrapped.testbed.means.copy())
    assert np.array_equal(walks[0], walks[2])
    assert not np.array_equal(walks[0], walks[1])
    rewards = set()
    for seed in range(200):
        environment.reset(seed=seed)
        rewards.add(environment.step(0)[1])
    assert len(rewards) == 200


@pytest.mark.slow
def test_only_the_environments_need_gymnasium() -> None:
    script = (
        "import sys; sys.modules['gymnasium'] = None; import adapters.bandits; "
        "print('imported', hasattr(adapters.bandits, 'other')); from adapters.bandits import AbruptBanditEnv"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ran.returncode != 0
    assert ran.stdout == "imported False\n"
    assert 'The environments of adapters.bandits need Gymnasium: pip install ".[gym]" in the checkout' in ran.stderr


# --- playing


def test_play_records_arms_rewards_and_regrets_and_repeats_by_seed() -> None:
    testbed = abrupt_testbed(num_runs=3)
    testbed.pull(np.repeat([0, 1, 2], 2_990), np.zeros(3 * 2_990, dtype=int))  # ten pulls before the change
    earlier = testbed.regrets.copy()
    record = play(Uniform(3, 3), testbed, 20, seed=4)
    np.testing.assert_allclose(record.regrets.sum(axis=1), testbed.regrets - earlier)
    means = testbed.means[:, 2_990:3_010]
    np.testing.assert_allclose(record.regrets.cumsum(axis=1), cumulative_regret(means, record.arms))
    assert set(np.unique(record.rewards)) <= {0.0, 1.0}
    again = abrupt_testbed(num_runs=3, seed=1)
    np.testing.assert_array_equal(
        play(Uniform(3, 3), again, 20, seed=4).arms, play(Uniform(3, 3), again, 20, seed=4).arms
    )


@pytest.mark.parametrize("testbed", [dynamic_testbed(num_runs=2), random_walk_testbed(num_runs=2, num_steps=3_200)])
def test_the_oracle_has_no_regret(testbed) -> None:
    assert play(Oracle(testbed), testbed, 3_200).regrets.max() == 0.0


# --- metrics


def test_structured_rewards_equal_hand_worked_values() -> None:
    # steps of regimes 1 and 3 pay .8, .2 and .5: mean .5
    assert structured_reward([9, 0.8, 0.2, 9, 0.5], [0, 1, 1, 2, 3]) == pytest.approx(0.5)
    np.testing.assert_allclose(structured_reward([[1, 2], [3, 5]], [1, 3]), [1.5, 4.0])
    with pytest.raises(ConfigError, match="at least one step must be in the regimes"):
        structured_reward([1.0], [0])
    testbed = dynamic_testbed(pulls_per_step=1)
    regimes = dynamic_regimes()
    # chance: the mean of the arms, (.1 + .2 + 0 + .8 + .3) / 5 = .28 and (.7 + .1 + .3 + .2 + 0) / 5 = .26 -> .27
    assert structured_reward(testbed.means[0].mean(axis=-1), regimes) == pytest.approx(0.27)
    # oracle: .8 and .7 -> .75
    assert structured_reward(play(Oracle(testbed), testbed, 100).rewards, regimes) == pytest.approx([0.75])


def test_best_arm_probability_counts_all_best_arms() -> None:
    means = [[0.1, 0.9, 0.5], [0.4, 0.4, 0.0], [0.2, 0.2, 0.2]]
    probabilities = [[0.2, 0.7, 0.1], [0.3, 0.5, 0.2], [0.3, 0.5, 0.2]]
    np.testing.assert_allclose(best_arm_probability(probabilities, means), [0.7, 0.8, 1.0])


def test_pull_fractions_are_the_share_of_each_arm_per_step() -> None:
    fractions = pull_fractions([[0, 2, 1, 1], [2, 2, 0, 2]], num_arms=3, pulls_per_step=2)
    np.testing.assert_array_equal(fractions, [[[0.5, 0, 0.5], [0, 1, 0]], [[0, 0, 1], [0.5, 0, 0.5]]])
    with pytest.raises(ConfigError, match="must be a multiple of pulls_per_step=2; got 3"):
        pull_fractions([0, 1, 2], num_arms=3, pulls_per_step=2)


def test_mean_by_regime_averages_the_steps_of_each_regime() -> None:
    means = mean_by_regime([[1, 2, 3, 4], [0, 0, 8, 4]], [0, 2, 2, 0])
    assert set(means) == {0, 2}
    np.testing.assert_allclose(means[0], [2.5, 2.0])
    np.testing.assert_allclose(means[2], [2.5, 4.0])


def test_time_to_reach_restarts_at_every_change_of_regime() -> None:
    regimes = np.array([0, 0, 0, 1, 1, 0, 0])
    np.testing.assert_array_equal(segment_starts(regimes), [0, 3, 5])
    #         segment 0: at its step 2 | segment 1: at once | segment 2: never, so its length
    values = [0.1, 0.2, 0.5, 0.9, 0.1, 0.4, 0.4]
    np.testing.assert_array_equal(time_to_reach(values, regimes), [2, 0, 2])
    np.testing.assert_array_equal(time_to_reach([values, [1.0] * 7], regimes, threshold=0.4), [[2, 0, 0], [0, 0, 0]])


def test_cumulative_regret_sums_the_losses_against_the_best_arm() -> None:
    means = [[0.5, 0.3], [0.5, 0.9], [0.5, 0.9]]
    # lost: .5 - .3 = .2, then 0, then .9 - .5 = .4
    np.testing.assert_allclose(cumulative_regret(means, [1, 1, 0]), [0.2, 0.2, 0.6])
    np.testing.assert_allclose(cumulative_regret(means, [[1, 1, 0], [0, 0, 0]]), [[0.2, 0.2, 0.6], [0, 0.4, 0.8]])


# --- plots


# Ten steps each: two arms are the best, then all are alike, then arm 2 is the best; its lead grows in the last steps.
MEANS = np.repeat([[0.5, 0.5, 0.1], [0.2, 0.2, 0.2], [0.1, 0.2, 0.3], [0.1, 0.2, 0.9]], 10, axis=0)


@pytest.fixture
def axis(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    monkeypatch.setenv("MPLBACKEND", "Agg")
    yield pyplot().figure().subplots()
    pyplot().close("all")


def texts(axis: object) -> list[str]:
    return [text.get_text() for text in axis.texts]


def test_long_regimes_are_named_by_the_arms_that_are_the_best_if_names_are_wanted(axis: object) -> None:
    mark_regimes(axis, MEANS)
    assert texts(axis) == ["arm 0, arm 1 best", "all alike", "arm 2 best"]
    assert [patch.get_x() for patch in axis.patches] == [0, 20]  # where some arms are better
    assert [line.get_xdata()[0] for line in axis.lines] == [10, 20]
    mark_regimes(axis, MEANS, named=False)
    assert len(axis.texts) == 3
    mark_regimes(axis, np.eye(2)[[0] * 40 + [1, 0, 1, 0] + [1] * 56])  # short regimes have no name
    assert texts(axis)[3:] == ["arm 0 best", "arm 1 best"]
    assert len(axis.lines) == 2 + 2 + 5


@pytest.mark.parametrize("num_arms", [3, 5, 6, 12])
def test_each_arm_has_its_own_colour_and_name(axis: object, num_arms: int) -> None:
    plot_arm_probabilities(axis, np.full((10, num_arms), 1 / num_arms), np.zeros((10, num_arms)), title="")
    assert len({str(line.get_color()) for line in axis.lines}) == num_arms
    assert texts(axis) == [*(f"arm {arm}" for arm in range(num_arms)), "all alike"]
    assert len(arm_colours(num_arms)) == num_arms


def test_the_dynamic_bandit_is_shaded_where_an_arm_is_the_best(axis: object) -> None:
    run = Run(name="a", rewards=np.zeros(100), probabilities=np.full((101, 5), 0.2))
    figure = plot_dynamic_runs([run, run], None, dynamic_testbed().means[0])
    first = figure.axes[0]
    assert [text for text in texts(first) if not text.startswith("arm ") or "best" in text] == [
        "all alike", "arm 3 best", "all alike", "arm 0 best", "all alike",
    ]  # fmt: skip
    best = next(axis for axis in figure.axes if axis.get_title(loc="left") == "Probability of the best arm").lines[0]
    assert np.flatnonzero(np.isfinite(best.get_ydata())).tolist() == [*range(20, 40), *range(60, 80)]
