"""Sampling, training and memory of a language model on one GPU, ours and TRL's, and the tests of `tests/devices`.

One command, at most 8 minutes, without the network. It writes one table with the machine's name. Each line is written as soon
as it is measured, so a run that is stopped loses nothing.

    python -m benchmarks.gpu                                    # writes gpu.md
    python -m benchmarks.gpu --output FILE --seconds 300
    python -m benchmarks.gpu --only ours:decoding "TRL:generate"
    python -m benchmarks.gpu --tiny                             # a small model on a CPU, to check that it runs

The model has the shape of Qwen3-0.6B, random weights and bfloat16. An iteration samples groups of 8, computes rewards, and
makes one update of all weights or of a LoRA adapter. Each sampler of `RUNS` runs in a process of its own, one after another,
and one that is not available is a line with the reason. TRL has its best settings (`benchmarks/_trl.py`). Both sides compute
the exact entropy, and forward at most `TOKENS_PER_PASS` tokens at once in updates.

- "ms/token": time of sampling divided by the number of tokens of a row. All rows are sampled together.
- "sample", "score", "update": seconds of the parts. "score" has the rewards too. TRL's log-probs before the update are those of
  the update, so it has no part of its own for them.
- "first": seconds of the first iteration, which compiles, records and allocates. It is in no other figure.
- "divergence": `train/sampler_divergence`, the mean of log-probs at sampling minus log-probs in the update. Half precision
  rounds them differently. TRL's is not read.
- "peak GB": largest allocated memory, weights included, on a GPU.
"""

import argparse
import gc
import importlib.util
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

from adapters.llm import HFOptions, HFPolicy, SamplingConfig
from benchmarks._trl import first_line, now, run_trl
from benchmarks.llm_vs_trl import Case, make_prompts, make_tokenizer, share_of_even_tokens
from grpo import GRPOConfig, GRPOTrainer
from grpo.errors import ConfigError

OURS = ("recorded", "decoding", "continuous", "generate")
"""Names of samplers of `HFPolicy(sampler=...)`. A name that the installed version does not have is skipped."""
RUNS = [
    f"{side}:{sampler}"
    for side, sampler in (
        ("ours", OURS[0]),
        ("TRL", "generate"),
        ("TRL", "continuous batching"),
        *(("ours", sampler) for sampler in OURS[1:]),
        ("TRL", "vLLM"),
    )
]
"""What runs, in this order."""
TOKENS_PER_PASS = 16_384
SECONDS = 480
SECONDS_OF_TESTS = 100
"""What the runs leave for `tests/devices`."""
COLUMNS = (
    "side",
    "sampler",
    "trained",
    "rows",
    "ms/token",
    "s/iteration",
    "sample",
    "score",
    "update",
    "first",
    "divergence",
    "peak GB",
)
QWEN3 = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
TINY = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What one line of the table measures."""

    case: Case
    lora: bool
    shape: dict[str, int]

    @property
    def device(self) -> str:
        """The GPU, and the CPU for the tiny model."""
        return "cpu" if self.shape == TINY else "cuda"

    @property
    def passes(self) -> int:
        """Passes of TRL per update."""
        tokens = self.case.rows * (self.case.prompt + self.case.completion)
        return next(
            n for n in range(1, self.case.rows + 1) if self.case.rows % n == 0 and tokens <= n * TOKENS_PER_PASS
        )


def setups(*, tiny: bool) -> list[Setup]:
    """The lines of each sampler: 16 and 64 rows, all weights and LoRA."""
    shape, few, many = (TINY, 4, 8) if tiny else (QWEN3, 16, 64)
    sizes = {"prompt": 8, "completion": 4, "group": 2} if tiny else {"prompt": 512, "completion": 256, "group": 8}
    lines = ((few, False), (many, True), (many, False), (few, True))  # time may run out
    return [Setup(case=Case(**sizes, rows=rows), lora=lora, shape=shape) for rows, lora in lines]


@dataclass(slots=True)
class Times:
    """Seconds of iterations and of their parts. Ends a run when the time is up."""

    deadline: float
    """Value of `time.time()`."""
    repeats: int
    whole: list[float] = field(default_factory=list)
    sample: list[float] = field(default_factory=list)
    score: list[float] = field(default_factory=list)
    divergence: str = "-"
    """Of the last iteration."""

    def add(self, seconds: float) -> bool:
        """Add an iteration. Returns whether it was the last."""
        self.whole.append(seconds)
        is_late = len(self.whole) > 1 and time.time() + seconds > self.deadline
        return is_late or len(self.whole) > self.repeats

    def cells(self, num_tokens: int) -> list[str]:
        """The cells from "ms/token" to "divergence"."""
        whole, sample, score = (statistics.median(part[1:]) for part in (self.whole, self.sample, self.score))
        parts = (1e3 * sample / num_tokens, whole, sample, score, whole - sample - score, self.whole[0])
        return [*(f"{part:.2f}" for part in parts), self.divergence]


def make_model(setup: Setup) -> Any:
    """A model with random weights. With LoRA, a PEFT model with an adapter on all linear layers."""
    torch.manual_seed(0)
    is_on_gpu = setup.device == "cuda"
    config = Qwen3Config(
        **setup.shape,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
        dtype=torch.bfloat16 if is_on_gpu else torch.float32,
    )
    with torch.device(setup.device):
        model = Qwen3ForCausalLM(config).to(config.dtype)
    if not setup.lora:
        return model
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))


def run_ours(setup: Setup, sampler: Any, times: Times) -> None:
    """Iterations of `GRPOTrainer.step`."""
    tokenizer = make_tokenizer(setup.shape["vocab_size"])
    policy = HFPolicy(
        make_model(setup),
        tokenizer,
        sampling=SamplingConfig(max_new_tokens=setup.case.completion),
        sampler=sampler,
        options=HFOptions(exact_entropy=True, max_tokens_per_forward=TOKENS_PER_PASS),
    )
    config = GRPOConfig(
        group_size=setup.case.group,
        learning_rate=1e-6,
        seed=0,
        autocast_dtype="bfloat16" if setup.device == "cuda" else None,
    )

    def reward(_: Any, actions: Any) -> list[float]:
        return share_of_even_tokens([action.token_ids for action in actions])

    trainer = GRPOTrainer(config=config, policy=policy, reward_model=reward)
    prompts = make_prompts(setup.case, setup.shape["vocab_size"])
    is_last = False
    while not is_last:
        begin = time.perf_counter()  # as the trainer times its parts
        metrics = trainer.step(prompts)
        if setup.device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        refusal = getattr(policy._sampler, "refusal", None)
        if refusal is not None:  # it has sampled as "decoding" does
            raise ConfigError(refusal)
        times.sample.append(metrics["time/sample"])
        times.score.append(metrics["time/score"] + metrics["time/reward"])
        times.divergence = f"{metrics['train/sampler_divergence']:.5f}"
        is_last = times.add(seconds)


def run_theirs(setup: Setup, sampler: str, times: Times) -> None:
    """Iterations of TRL's `train()`."""

    def timed(method: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            begin = now(setup.device)
            result = method(*args, **kwargs)
            seconds.append(now(setup.device) - begin)
            return result

        return run

    def time_parts(trainer: Any) -> None:
        trainer._generate_single_turn = timed(trainer._generate_single_turn, times.sample)
        trainer._generate_and_score_completions = timed(trainer._generate_and_score_completions, times.score)

    model = make_model(setup)
    tokenizer = make_tokenizer(setup.shape["vocab_size"])
    with tempfile.TemporaryDirectory() as folder:
        if sampler == "vLLM":  # vLLM loads the model itself
            (model.get_base_model() if setup.lora else model).save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            model.name_or_path = folder
        run_trl(
            model,
            tokenizer,
            [{"prompt": prompt} for prompt in make_prompts(setup.case, setup.shape["vocab_size"])],
            1 + times.repeats,
            times.add,
            group=setup.case.group,
            sampler=sampler,
            passes=setup.passes,
            before=time_parts,
            arguments={"max_completion_length": setup.case.completion},
            reward_funcs=share_of_even_tokens,
        )
    times.score = [both - sample for both, sample in zip(times.score, times.sample, strict=True)]


def run_sampler(run: str, output: Path, deadline: float, repeats: int, *, tiny: bool) -> None:
    """Write the lines of one sampler. They end at the first reason that concerns the sampler and not only the line."""
    side, sampler = run.split(":")
    for setup in setups(tiny=tiny):
        cells = [side, sampler, "LoRA" if setup.lora else "all", str(setup.case.rows)]
        times = Times(deadline=deadline, repeats=repeats)
        try:
            if time.time() > deadline:
                raise TimeoutError("no time was left")
            gc.collect()  # the trainer before refers to itself
            if setup.device == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            (run_ours if side == "ours" else run_theirs)(setup, sampler, times)
            peak = f"{torch.cuda.max_memory_allocated() / 1e9:.1f}" if setup.device == "cuda" else "-"
            write_line(output, [*cells, *times.cells(setup.case.completion), peak])
        except (ImportError, ConfigError, TimeoutError) as error:
            write_line(output, [side, sampler, *cells[2:], f"not run. {first_line(error)}"])
            return
        except Exception as error:
            write_line(output, [*cells, f"not run. {first_line(error)}"])


def write_line(output: Path, cells: list[str]) -> None:
    """Append a line to the table, and print it."""
    cells = [cell.replace("|", "/") for cell in cells]
    line = f"| {' | '.join([*cells, *[''] * (len(COLUMNS) - len(cells))])} |"
    with output.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
    print(line, flush=True)


def installed(package: str) -> str:
    """Name and version of a package."""
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"{package} not installed"


def write_head(output: Path, *, tiny: bool) -> None:
    """Begin the table with the machine's name and the versions."""
    name = f"{platform.machine()}, {os.cpu_count()} cores" if tiny else torch.cuda.get_device_name()
    packages = ", ".join(map(installed, ("torch", "transformers", "trl", "peft", "vllm")))
    case = setups(tiny=tiny)[0].case
    head = [
        f"{name}; Python {platform.python_version()}, {packages}; {time.strftime('%d %B %Y')}",
        f"prompt {case.prompt}, completion {case.completion}, group {case.group}; seconds are wall-clock"
        + (", and those of the tiny model mean nothing" if tiny else ""),
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{'---|' * len(COLUMNS)}",
    ]
    output.write_text("\n".join(head) + "\n", encoding="utf-8")
    print("\n".join(head), flush=True)


def run_tests(output: Path, tests: list[str], seconds: float) -> None:
    """Run tests, and append their summary and the names of those that failed."""
    options = [] if importlib.util.find_spec("beartype") else ["-o", "addopts="]  # the options need beartype
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider", *options, *tests]
    begin = time.monotonic()
    with tempfile.TemporaryFile("w+") as printed:
        try:
            subprocess.run(command, stdout=printed, stderr=subprocess.STDOUT, timeout=max(seconds, 1), check=False)
            end = ""
        except subprocess.TimeoutExpired:
            end = f"stopped after {time.monotonic() - begin:.0f} s, "
        printed.seek(0)
        lines = printed.read().strip().splitlines() or ["no output"]
    shown = [line for line in lines if line.startswith(("FAILED", "ERROR"))] + [f"{end}{lines[-1]}"]
    text = "\n".join(["", f"{' '.join(tests)}:", *(f"    {line}" for line in shown)])
    with output.open("a", encoding="utf-8") as file:
        file.write(text + "\n")
    print(text, flush=True)


def run_all(options: argparse.Namespace) -> None:
    """Run each sampler in a process of its own, and then the tests."""
    end = time.time() + options.seconds
    write_head(options.output, tiny=options.tiny)
    for position, run in enumerate(options.only):
        left = end - time.time() - (SECONDS_OF_TESTS if options.tests else 0)
        share = left / (len(options.only) - position)
        command = [sys.executable, "-m", "benchmarks.gpu", "--run", run, "--output", str(options.output)]
        command += ["--deadline", str(time.time() + share), "--repeats", str(options.repeats)]
        reason = ""
        try:
            done = subprocess.run(
                [*command, *(["--tiny"] if options.tiny else [])],
                stderr=subprocess.PIPE,
                text=True,
                timeout=max(share + 20, 1),
                check=False,
            )
            if done.returncode != 0:
                last = (done.stderr.strip().splitlines() or ["no message"])[-1]
                reason = f"ended with {done.returncode}: {last}"
        except subprocess.TimeoutExpired:
            reason = f"stopped after {share + 20:.0f} s"
        if reason:
            write_line(options.output, [*run.split(":"), "", "", reason])
    if options.tests:
        run_tests(options.output, options.tests, end - time.time())


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("gpu.md"), help="the table")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for everything, tests included")
    parser.add_argument("--repeats", type=int, default=2, help="iterations per line, after the first")
    parser.add_argument("--only", nargs="+", choices=RUNS, default=RUNS, metavar="RUN", help=f"of {', '.join(RUNS)}")
    parser.add_argument("--tests", nargs="*", default=["tests/devices"], help="arguments of pytest; none: no tests")
    parser.add_argument("--tiny", action="store_true", help="a small model on a CPU")
    parser.add_argument("--run", choices=RUNS, help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    logging.set_verbosity_error()
    if options.run:
        torch.set_num_threads(1 if options.tiny else torch.get_num_threads())
        run_sampler(options.run, options.output, options.deadline, options.repeats, tiny=options.tiny)
    else:
        run_all(options)


if __name__ == "__main__":
    main()
