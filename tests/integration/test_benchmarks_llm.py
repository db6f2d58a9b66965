"""The benchmark of language models runs, and its loops written by hand do the same mathematics as the trainer."""

import ast
import copy
import json
import re
import warnings
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adapters.llm import HFOptions, HFPolicy, SamplingConfig
from adapters.llm.sampling.samplers import SampledTokens
from benchmarks import _bare_llm, _trl, llm_vs_trl
from benchmarks._bare_llm import BareLoop
from benchmarks.gpu import TINY as TINY_SHAPE
from benchmarks.objective import HAS_TRL, INSTALL
from grpo import GRPOConfig, GRPOTrainer
from grpo.errors import GRPOWarning
from tests.support.launches import printed_by
from tests.support.llm_models import forward_shapes

SIDES = ["TRL", "ours with TRL's metrics", "ours", "bare loop", "fused bare loop"]
NUMBERS = rf"  ({'|'.join([*SIDES, 'TRL in one pass'])}) ([\d.]+)"


def run_tiny(tmp_path: Path, *arguments: str) -> list[str]:
    """The lines that the benchmark prints for its tiny case."""
    tiny = "--cases", "tiny", "--pairs", "1"
    return printed_by("-m", "benchmarks.llm_vs_trl", *tiny, *arguments, TMPDIR=str(tmp_path)).splitlines()


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRL, reason=f"TRL is {INSTALL}")
def test_the_language_model_benchmark_reports_times_and_arguments(tmp_path: Path) -> None:
    _, sampler, _, case, *pairs, arguments, times, with_trl, with_loops = run_tiny(
        tmp_path, "--skip-memory", "--sampler", "generate"
    )
    assert sampler == "  TRL samples with generate, and divides the rows among 4 passes per update"
    assert case == "prompt 8, completion 4, group 2, 4 rows"
    assert len(pairs) == 2  # the first warms up
    settings = json.loads(arguments.partition(": ")[2])
    assert (settings["num_generations"], settings["per_device_train_batch_size"]) == (2, 1)
    assert (with_trl.count(" x ("), with_loops.count(" x (")) == (2, 2)
    assert [side for side, _ in re.findall(NUMBERS, times)] == SIDES


@pytest.mark.faults
@pytest.mark.timeout(900)  # six processes
@pytest.mark.skipif(not HAS_TRL, reason=f"TRL is {INSTALL}")
def test_the_language_model_benchmark_reports_memory_from_a_process_for_each_side(tmp_path: Path) -> None:
    memory = run_tiny(tmp_path, "--sampler", "generate")[-1]
    megabytes = {side: float(number) for side, number in re.findall(NUMBERS, memory)}
    assert list(megabytes) == ["TRL", "TRL in one pass", *SIDES[1:4]]
    assert all(100 < number < 10_000 for number in megabytes.values())


@pytest.mark.skipif(not HAS_TRL, reason=f"TRL is {INSTALL}")
def test_trl_scores_completions_only_with_the_same_log_probs_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows of 9 tokens, of which 4 and 3 count: TRL's head gets 16 positions on a CPU, and 7 with the switch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what TRL's dependencies deprecate
        from trl.trainer import utils

    labels = torch.randint(2, TINY_SHAPE["vocab_size"], (2, 9))
    tokens = labels.clone()
    labels[:, :5], labels[1, -1] = -100, -100
    head = utils._ChunkedLogProbFunction
    positions: list[int] = []

    def apply(hidden: torch.Tensor, *rest: Any) -> Any:
        positions.append(len(hidden))
        return head.apply(hidden, *rest)

    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", SimpleNamespace(apply=apply))
    monkeypatch.setattr(utils, "_use_triton", utils._use_triton)  # undone at the end
    model = llm_vs_trl.make_model(TINY_CASE, "cpu", **TINY_SHAPE)
    utils.add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    found = []
    for switch in (lambda: None, _trl.score_completions_only):
        switch()
        model.zero_grad()
        output = model(input_ids=tokens, labels=labels, fused_lm_head=True)
        (output.log_probs * torch.arange(16.0).reshape(2, 8)).sum().backward()
        found.append([output.log_probs.detach(), output.entropy.detach(), *(p.grad for p in model.parameters())])
    assert positions == [16, 7]
    for everywhere, completions in zip(*found, strict=True):
        torch.testing.assert_close(completions, everywhere, rtol=1e-5, atol=1e-6)


def test_the_fastest_sampler_is_chosen_among_those_that_run(capsys: pytest.CaptureFixture[str]) -> None:
    def seconds(sampler: str) -> float:
        if sampler == "vLLM":
            raise ImportError("vLLM is not available.\nInstall it.")
        return {"generate": 3.0, "continuous batching": 2.0}[sampler]

    assert _trl.fastest_sampler(seconds) == "continuous batching"
    assert capsys.readouterr().out.splitlines() == [
        "  TRL with generate: 3.00 s",
        "  TRL with continuous batching: 2.00 s",
        "  TRL with vLLM: not run. ImportError: vLLM is not available.",
    ]


def test_trl_is_measured_with_graphs() -> None:
    assert _trl.SAMPLERS["continuous batching"]["transformers_continuous_batching_config"]["use_cuda_graph"] is True


TINY_CASE = llm_vs_trl.Case(prompt=5, completion=12, group=4, rows=12, hazard=0.15)


def test_ours_is_compared_with_a_bound_on_the_rows_and_with_checkpointing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """3 prompts: 2 of 12 rows are decoded at once, and the last pass of an update has a pack per prompt, or each row."""
    monkeypatch.setattr(llm_vs_trl, "make_model", partial(llm_vs_trl.make_model, **TINY_SHAPE))
    trainers = llm_vs_trl.our_variants(TINY_CASE, "cpu", max_rows=2, checkpointing=True)
    shapes = {name: forward_shapes(trainer.policy.model) for name, trainer in trainers.items()}
    llm_vs_trl.compare_variants(TINY_CASE, "cpu", 1, trainers)
    assert list(shapes) == ["default", "2 rows", "packs", "row by row"]
    decoded = {name: max(rows for rows, width in found if width == 1) for name, found in shapes.items()}
    assert decoded == {"default": 12, "2 rows": 2, "packs": 12, "row by row": 12}
    assert shapes["packs"][-1][0] <= 3 < shapes["row by row"][-1][0]
    lines = capsys.readouterr().out.splitlines()
    assert [line.count(" x, ") for line in lines] == [0, 0, 3, 3, 3, 3]
    assert lines[2].count("1.00 x, 1.00 to 1.00") == 3


@pytest.mark.slow
def test_the_options_are_compared_without_trl(tmp_path: Path) -> None:
    *_, default, bound, packs, rows = run_tiny(tmp_path, "--max-rows", "2", "--checkpointing")
    assert [line.split()[0] for line in (default, bound, packs, rows)] == ["default", "2", "packs", "row"]


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
    tree = ast.parse(Path(_bare_llm.__file__).read_text(encoding="utf-8"))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} == {"collections", "torch", "transformers", "typing"}


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
        options=HFOptions(max_tokens_per_forward=10**9),
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


def test_the_bare_loop_reports_the_log_probs_of_its_samples() -> None:
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


def test_the_bare_loop_samples_from_the_model() -> None:
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
