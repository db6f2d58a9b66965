"""Benchmarks run, and what they compare is the same. How fast is for a person to read, not for a test."""

import copy
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from adapters.llm import HFPolicy, SamplingConfig
from adapters.llm.sampling.samplers import SampledTokens
from adapters.tools import ToolCall, ToolCatalogue, ToolResult, ToolTask
from adapters.tools.workbench import workbench_catalogue
from benchmarks import _bare_llm, control_speed, llm_vs_trl, tool_speed, tools
from benchmarks._bare_llm import BareLoop
from benchmarks._memory import peak_extra_memory
from benchmarks._tool_baselines import LinearArms, LinUCB, NearestDescription, Remembering, in_batches
from benchmarks.objective import CASES, HAS_TRL, INSTALL, TOLERANCE, Batch, largest_difference, our_run, their_run
from benchmarks.overhead import check_same
from grpo import GRPOConfig, GRPOTrainer
from grpo.errors import GRPOWarning

ROOT = Path(__file__).resolve().parents[2]

STRICT = ["-W", "error"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
"""Elsewhere an executor warns that its workers are less confined."""


@pytest.mark.parametrize("by_group", [False, True])
def test_the_hand_written_loop_does_the_same_mathematics(by_group: bool) -> None:
    assert check_same(by_group) < 1e-9


def test_the_overhead_benchmark_prints_a_ratio_for_each_size() -> None:
    command = [sys.executable, "-W", "error", "-m", "benchmarks.overhead", "--rows", "64", "128", "--repeats", "3"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert printed.count("ratio") == 4
    assert printed.count("state once per group") == 2


def test_peak_memory_counts_what_is_freed_again_and_temporaries_of_an_operation() -> None:
    """Of four float32 tensors of 1000 in a row two exist at once; a sum in float64 copies its operand first."""
    values = torch.ones(1000)
    assert peak_extra_memory(lambda: values.neg()) == 4000
    assert peak_extra_memory(lambda: values.neg().neg().neg().neg()) == 8000
    assert peak_extra_memory(lambda: values.sum(dtype=torch.float64)) >= 8000


@pytest.mark.skipif(not HAS_TRL, reason=f"TRL is {INSTALL}")
@pytest.mark.parametrize("name", CASES)
def test_the_objective_and_trl_compute_the_same(name: str) -> None:
    torch.manual_seed(0)
    batch = Batch.random(64, 32, "cpu")
    assert largest_difference(our_run(batch, CASES[name]), their_run(batch, CASES[name])) < TOLERANCE


def test_the_objective_benchmark_prints_a_line_for_each_comparison() -> None:
    size = ["--rows", "64", "--steps", "32", "--repeats", "3"]
    command = [sys.executable, "-W", "error", "-m", "benchmarks.objective", *size]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert printed.count(" : floor") == len(CASES)
    assert printed.count(" : TRL") == (len(CASES) if HAS_TRL else 0)
    assert (INSTALL in printed) != HAS_TRL


@pytest.mark.skipif(not HAS_TRL, reason=f"TRL is {INSTALL}")
def test_the_language_model_benchmark_reports_times_arguments_and_memory() -> None:
    command = [sys.executable, "-m", "benchmarks.llm_vs_trl", "--cases", "tiny", "--pairs", "1"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    case, arguments, times, *ratios, memory = printed.splitlines()[2:]
    assert case == "prompt 8, completion 4, group 2, 4 rows"
    assert json.loads(arguments.partition(": ")[2])["num_generations"] == 2
    assert [line.count(" x (") for line in ratios] == [1, 2]  # TRL; the bare loop, and the fused one
    numbers = r"  (TRL|ours|bare loop|fused bare loop) ([\d.]+)"
    assert [side for side, _ in re.findall(numbers, times)] == ["TRL", "ours", "bare loop", "fused bare loop"]
    megabytes = {side: float(number) for side, number in re.findall(numbers, memory)}
    assert list(megabytes) == ["TRL", "ours", "bare loop"]
    assert all(100 < number < 10_000 for number in megabytes.values())


TINY_SHAPE = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
TINY_CASE = llm_vs_trl.Case(prompt=5, completion=12, group=4, rows=12, hazard=0.15)


def bare_loop(model: Any, knows_its_loss: bool = False) -> BareLoop:
    return BareLoop(
        model,
        group_size=TINY_CASE.group,
        max_steps=TINY_CASE.completion,
        end_token_id=1,
        reward=llm_vs_trl.share_of_even_tokens,
        learning_rate=1e-3,
        knows_its_loss=knows_its_loss,
    )


def test_the_bare_loop_imports_nothing_of_this_package() -> None:
    check = "import sys, benchmarks._bare_llm; assert not {'grpo', 'adapters'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], cwd=ROOT, check=True)


@pytest.mark.parametrize("norm", ["below the bound", "clipped"])
@pytest.mark.parametrize("knows_its_loss", [False, True])
def test_the_bare_loop_and_the_trainer_have_the_same_gradient(
    knows_its_loss: bool, norm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given completions of different lengths, off-policy by as much as PPO's clip needs to act, in several blocks."""
    monkeypatch.setattr(_bare_llm, "BLOCK", 7)
    model = llm_vs_trl.make_model(TINY_CASE, "cpu", **TINY_SHAPE)
    tokenizer = llm_vs_trl.make_tokenizer(TINY_SHAPE["vocab_size"])
    prompts = llm_vs_trl.make_prompts(TINY_CASE, TINY_SHAPE["vocab_size"])
    prompt_ids = torch.tensor(tokenizer(prompts)["input_ids"])
    loop = bare_loop(copy.deepcopy(model), knows_its_loss)
    torch.manual_seed(0)
    completions, old_log_probs = loop.sample(prompt_ids)
    completions[5] = completions[5][:1]
    lengths = [len(row) for row in completions]
    assert len(_bare_llm.by_length(lengths)) > 2
    old_log_probs += 0.3 * torch.randn(old_log_probs.shape)
    scale = {"below the bound": 0.1, "clipped": 100.0}[norm]
    rewards = [scale * share for share in llm_vs_trl.share_of_even_tokens(completions)]

    theirs = Recorder(loop.model.parameters())
    loop.optimizer = theirs
    loop.update(prompt_ids, completions, old_log_probs, rewards)
    policy = HFPolicy(
        model,
        tokenizer,
        sampling=SamplingConfig(max_new_tokens=TINY_CASE.completion),
        sampler=Given(completions, old_log_probs.tolist()),
        max_tokens_per_forward=10**9,
    )
    ours = Recorder(model.parameters())
    trainer = GRPOTrainer(
        config=GRPOConfig(group_size=TINY_CASE.group),
        policy=policy,
        reward_model=lambda states, actions: rewards,
        optimizer=ours,
    )
    with pytest.warns(GRPOWarning, match="the first ratio is not 1"):
        metrics = trainer.step(prompts)

    assert 0.1 < metrics["train/clip_fraction"] < 0.9
    assert (metrics["train/grad_norm"] > 1) == (norm == "clipped")
    assert len(ours.gradients) == len(theirs.gradients) > 20
    for our_gradient, their_gradient in zip(ours.gradients, theirs.gradients, strict=True):
        assert (our_gradient - their_gradient).norm() <= 1e-5 * our_gradient.norm()


def test_the_bare_loop_says_how_likely_what_it_draws_was() -> None:
    """By one forward pass per row, without a cache; rows end with their end token or the limit."""
    model = llm_vs_trl.make_model(TINY_CASE, "cpu", **TINY_SHAPE)
    loop = bare_loop(model)
    torch.manual_seed(1)
    prompts = torch.randint(2, TINY_SHAPE["vocab_size"], (3, TINY_CASE.prompt))
    completions, log_probs = loop.sample(prompts)
    assert {len(row) < TINY_CASE.completion for row in completions} == {True, False}
    for number, row in enumerate(completions):
        assert (row.index(1) if 1 in row else TINY_CASE.completion - 1) == len(row) - 1
        whole = torch.cat([prompts[number // TINY_CASE.group], torch.tensor(row)])
        with torch.no_grad():
            logits = model(input_ids=whole[None]).logits[0, TINY_CASE.prompt - 1 : -1]
        expected = logits.log_softmax(1).gather(1, torch.tensor(row)[:, None])[:, 0]
        torch.testing.assert_close(log_probs[number, : len(row)], expected, rtol=1e-5, atol=1e-5)


def test_the_bare_loop_draws_from_the_model() -> None:
    """20,000 first tokens: each one's frequency is within five standard errors of its probability."""
    model = llm_vs_trl.make_model(TINY_CASE, "cpu", **TINY_SHAPE)
    model.lm_head.weight.data *= 20
    loop = bare_loop(model)
    loop.group_size, loop.max_steps = 20_000, 1
    torch.manual_seed(2)
    prompt = torch.arange(2, 7)[None]
    completions, _ = loop.sample(prompt)
    with torch.no_grad():
        probs = model(input_ids=prompt).logits[0, -1].softmax(0)
    frequencies = torch.tensor(completions)[:, 0].bincount(minlength=len(probs)) / 20_000
    assert probs.max() > 3 * probs[2:].min()  # not all alike
    assert ((frequencies - probs).abs() <= 5 * (probs * (1 - probs) / 20_000).sqrt()).all()


class Recorder(torch.optim.SGD):
    """Changes nothing, and keeps the gradients it was asked to apply."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        super().__init__(parameters, lr=1e-3)
        self.gradients: list[torch.Tensor] = []

    def step(self, closure: Any = None) -> None:
        self.gradients = [value.grad.clone() for group in self.param_groups for value in group["params"]]


class Given:
    """A sampler that draws what it was given."""

    def __init__(self, completions: list[list[int]], log_probs: list[list[float]]) -> None:
        cut = [numbers[: len(row)] for numbers, row in zip(log_probs, completions, strict=True)]
        self.sampled = SampledTokens(
            token_ids=completions,
            finish_reasons=["end"] * len(completions),
            behaviour_log_probs=cut,
            policy_log_probs=cut,
        )

    def sample(self, *args: Any, **kwargs: Any) -> SampledTokens:
        return self.sampled

    def sync(self, model: Any) -> None:
        """Nothing to take over."""


def test_the_control_benchmark_prints_a_line_for_each_comparison() -> None:
    command = [sys.executable, "-W", "error", "-m", "benchmarks.control_speed", "--quick"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    has_sb3, has_mujoco = control_speed.HAS_SB3, control_speed.HAS_MUJOCO
    assert printed.count("CartPole, training : ") == 1 + has_sb3
    assert printed.count("HalfCheetah, training : ") == (has_sb3 and has_mujoco)
    assert printed.count("HalfCheetah, rollout of 16 : ") == has_mujoco
    assert (printed.count(" : bare loop"), printed.count(" : bare pool")) == (2, 1)
    assert printed.count("CartPole until 475, ") == 2 * has_sb3
    assert (control_speed.INSTALL in printed) != (has_sb3 and has_mujoco)


def test_an_evaluation_is_the_mean_length_of_twenty_episodes() -> None:
    """Pushing left always ends within a dozen steps; pushing towards where the pole falls lasts to the end."""
    pool = control_speed.make_pool(control_speed.CARTPOLE, control_speed.NUM_EVAL_EPISODES)
    assert not control_speed.is_learned(pool, _Rule(lambda seen: 0 * seen[:, 0]))
    assert control_speed.is_learned(pool, _Rule(lambda seen: seen @ [0.0, 0.1, 1.0, 0.5] > 0))


class _Rule:
    """Acts as Stable-Baselines3's learners are asked to, by a rule instead of a network."""

    def __init__(self, rule: Callable[[np.ndarray], np.ndarray]) -> None:
        self.rule = rule

    def predict(self, observations: np.ndarray, *, deterministic: bool) -> tuple[np.ndarray, None]:
        return self.rule(observations).astype(np.int64), None


def test_the_benchmark_of_tools_gives_every_method_the_same_tasks_and_calls() -> None:
    command = [sys.executable, *STRICT, "-m", "benchmarks.tools", "--seeds", "1", "--iterations", "3"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines() if line.startswith("| ")]
    methods = {row[0]: row for row in rows if len(row) == 8}
    right_tool = {
        name: [float(cell.split()[0]) for cell in row[1:5]] for name, row in methods.items() if name != "method"
    }

    # without weights every task has the call of the first tool, which is right for 20 of 660 (10 of 330)
    assert right_tool["untrained policy"][::2] == [3.0, 3.0]
    # a description is of use only where words are shared
    assert right_tool["nearest description"][0] > 30.0
    assert right_tool["nearest description"][2] < 10.0
    # 3 iterations of 128 tasks show some of the 33 tools; nobody is right in more calls than in tools
    assert right_tool["supervised (right calls given)"][0] > 30.0
    assert all(of[1] <= of[0] and of[3] <= of[2] for of in right_tool.values())

    calls = {name: row[5] for name, row in methods.items()}
    learners = ("GRPO", "REINFORCE, running baseline", "LinUCB")
    assert [calls[name] for name in learners] == ["1,536"] * 3  # 3 x 128 x 4
    assert {calls[name] for name in right_tool.keys() - set(learners)} == {"0"}
    executed = re.search(r"384 tasks, 1,536 calls, of which ([\d,]+) were executed", printed)
    assert executed is not None
    assert 384 < int(executed[1].replace(",", "")) < 1_536
    assert re.search(r"One that was executed: \w+\(\{.*\}\) -> ", printed)
    assert [row[0] for row in rows if len(row) == 4][1:] == [
        "the two that are added", "of them, close to the description", "of them, other words", "the other 33",
        "the other 33, right call",
    ]  # fmt: skip
    assert "right tool >= 95 %: MISSED" in printed
    assert "under 120 s: met" in printed


def test_the_benchmarks_of_tools_can_end_with_an_error_where_a_target_is_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["tools", "--methods", "GRPO", "--seeds", "1", "--iterations", "1", "--check"])
    with pytest.raises(SystemExit) as ended:
        tools.main()
    assert ended.value.code == 1

    monkeypatch.setattr(sys, "argv", ["tool_speed", "--quick", "--check"])
    monkeypatch.setattr(tool_speed, "print_rate", lambda *_: None)
    monkeypatch.setattr(tool_speed, "timed_run", lambda *_: 0.29)  # the ideal is 0.1
    monkeypatch.setattr(tool_speed, "time_pairs", lambda *_, **__: SimpleNamespace(ratio=1.19))
    tool_speed.main()
    monkeypatch.setattr(tool_speed, "time_pairs", lambda *_, **__: SimpleNamespace(ratio=1.21))
    with pytest.raises(SystemExit):
        tool_speed.main()
    monkeypatch.setattr(tool_speed, "time_pairs", lambda *_, **__: SimpleNamespace(ratio=1.19))
    monkeypatch.setattr(tool_speed, "timed_run", lambda *_: 0.31)
    with pytest.raises(SystemExit):
        tool_speed.main()


def test_a_baseline_meets_all_tasks_equally_often() -> None:
    """21 of 7 tasks, 4 at a time: each one three times, and in every round of 7 once."""
    tasks = [_task(str(i)) for i in range(7)]
    batches = list(in_batches(tasks, 21, 4, seed=0))
    assert [len(batch) for batch in batches] == [4, 4, 4, 4, 4, 1]
    texts = [task.text for batch in batches for task in batch]
    assert all(Counter(texts[i : i + 7]) == Counter("0123456") for i in (0, 7, 14))
    assert texts[:7] != texts[7:14]


def test_a_call_is_remembered_with_its_result() -> None:
    asked: list[ToolCall] = []

    class Executor:
        def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
            asked.extend(calls)
            return [ToolResult(output=call.arguments["a"]) for call in calls]

    remembering = Remembering(Executor())
    one, two = (ToolCall(tool="t", arguments={"a": a}) for a in (1, 2))
    assert [result.output for result in remembering.run([one, two, one])] == [1, 2, 1]
    assert [result.output for result in remembering.run([two, ToolCall(tool="t", arguments={"a": 3})])] == [2, 3]
    assert [call.arguments["a"] for call in asked] == [1, 2, 3]


def test_the_nearest_description_takes_defaults() -> None:
    """`order` and `key` have defaults; what the request does not say of `items` comes from its slots."""
    nearest = NearestDescription(workbench_catalogue())
    [call] = nearest.predict([_task("sort this list of items", slots={"items": ["b", "a"]})])
    assert call == ToolCall(tool="sort_items", arguments={"items": ["b", "a"], "key": "alphabet", "order": "ascending"})
    [call] = nearest.predict([_task("list the files in a folder")])
    assert call == ToolCall(tool="list_files", arguments={"order": "name"})  # without the optional kind


def test_the_arms_of_linucb_are_ridge_regressions() -> None:
    """x = 2, r = 3, then twice x = 1, r = 0 and 1: A = 1 + 4 + 1 + 1 = 7, b = 6 + 1 = 7, theta = 1, bound 2 / sqrt(7)."""
    arms = LinearArms(2, 1, alpha=2.0)
    arms.learn(1, torch.tensor([[2.0]]), torch.tensor([3.0]))
    arms.learn(1, torch.tensor([[1.0], [1.0]]), torch.tensor([0.0, 1.0]))
    x = torch.tensor([[1.0], [3.0]])
    torch.testing.assert_close(arms.scores(x, slice(0, 2), explore=False), torch.tensor([[0.0, 1.0], [0.0, 3.0]]))
    # nothing is known of the first: A = 1
    bounds = torch.tensor([[2.0, 1 + 2 / 7**0.5], [6.0, 3 + 6 / 7**0.5]])
    torch.testing.assert_close(arms.scores(x, slice(0, 2), explore=True), bounds)


def test_linucb_learns_the_tool_and_its_value_from_their_own_rewards() -> None:
    """Two requests: one for `sort_items`, descending; one for `unique_items`. No other call brings anything."""
    catalogue = workbench_catalogue()
    small = ToolCatalogue([catalogue["sort_items"], catalogue["unique_items"]])
    tasks = [_task("up to down", tool="sort_items", order="descending"), _task("once each", tool="unique_items")]

    class Rewards:
        def compute_components(self, states: Sequence[ToolTask], calls: Sequence[ToolCall]) -> dict[str, torch.Tensor]:
            pairs = list(zip(states, calls, strict=True))
            right = [call.tool == task.tool for task, call in pairs]
            same = [all(call.arguments.get(k) == v for k, v in task.arguments.items()) for task, call in pairs]
            return {
                "tool": 0.5 * torch.tensor(right),
                "parameters": 0.3 * torch.tensor([a and b for a, b in zip(right, same, strict=True)]),
            }

    bandit = LinUCB(small, lambda texts: torch.eye(2)[[int("once" in text) for text in texts]], alpha=1.0, seed=0)
    bandit.train(tasks, Rewards(), num_calls=200, batch_size=4, seed=0)  # type: ignore[arg-type]
    first, second = bandit.predict(tasks)
    assert (first.tool, first.arguments["order"], second.tool) == ("sort_items", "descending", "unique_items")


def test_the_policy_over_a_thousand_tools_and_the_bare_loop_draw_and_score_the_same() -> None:
    assert tool_speed.check_same(tool_speed.make_problem(12, 8, 6)) < 1e-6


def test_the_benchmark_of_the_executor_prints_each_figure() -> None:
    command = [sys.executable, *STRICT, "-m", "benchmarks.tool_speed", "--quick"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    ratios = [float(ratio) for ratio in re.findall(r"([\d.]+) x the ideal", printed)]
    assert len(ratios) == 2
    assert min(ratios) >= 1.0  # no call can be faster than it sleeps
    assert len(re.findall(r"calls that only add, .* per second", printed)) == 3
    assert printed.count("400 calls, 1,000 tools") == 2


def _task(text: str, *, tool: str = "t", slots: dict[str, object] | None = None, **arguments: object) -> ToolTask:
    return ToolTask(
        text=text, tool=tool, arguments=arguments, category="c", difficulty="easy", slots=slots or {}, shares_words=True
    )
