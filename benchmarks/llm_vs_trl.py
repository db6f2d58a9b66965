"""Time and peak memory of one GRPO iteration of a language model, compared with TRL's `GRPOTrainer` and hand-written loops.

All sides train copies of the same random Qwen3 on the same prompts with the same reward function: sample a group per prompt,
compute rewards, one optimizer update. TRL's own `train()` runs, and after each of its steps the other sides run one step, so
that all sides are timed in turn in one process. Times are CPU seconds on a CPU, and wall-clock seconds on CUDA. Peak memory is
measured in a separate process per side: the maximum resident memory (on CUDA: allocated).

TRL has its best settings (`benchmarks/_trl.py`): its head is applied to completions only, an update takes four passes, and its
fastest sampler on the device is used, and printed. TRL reports the exact entropy in each iteration, so ours computes it too
where the two are compared. The bare loops report nothing, so ours is compared with them without the entropy.

The bare loop (`benchmarks/_bare_llm.py`) uses the same techniques with only torch and transformers. The fused bare loop also
computes its loss's gradient together with the logits: three products with the head instead of four.

    python -m benchmarks.llm_vs_trl                      # the four cases of the table
    python -m benchmarks.llm_vs_trl --cases long --pairs 3
    python -m benchmarks.llm_vs_trl --skip-trl           # only compare with the hand-written loops
    python -m benchmarks.llm_vs_trl --device cuda        # a model with the shape of Qwen3-0.6B, in bfloat16
    python -m benchmarks.llm_vs_trl --cases ragged --max-rows 8 --pairs 8      # only ours, with a bound on the rows
    python -m benchmarks.llm_vs_trl --cases long --checkpointing --pairs 3     # only ours, with gradient checkpointing
"""

import argparse
import copy
import json
import math
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

from adapters.llm import HFOptions, HFPolicy, SamplingConfig
from benchmarks._bare_llm import BareLoop
from benchmarks._trl import LEARNING_RATE, PASSES, SAMPLERS, fastest_sampler, now, run_trl
from grpo import GRPOConfig, GRPOTrainer

SIDES = {
    "trl": "TRL",
    "entropy": "ours with TRL's metrics",
    "ours": "ours",
    "bare": "bare loop",
    "fused": "fused bare loop",
}
"""The compared sides and their printed names."""
HAZARD = 1 / 160
"""Probability per token that a completion of the "ragged" case ends. The mean length is 128 of at most 256 tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The sizes of one iteration."""

    prompt: int
    """Number of tokens of a prompt."""
    completion: int
    """Maximum number of tokens of a completion."""
    group: int
    """Completions per prompt."""
    rows: int = 32
    """Total number of completions."""
    hazard: float = 0.0
    """Probability per token that a completion ends. With 0 all completions have full length."""

    def __str__(self) -> str:
        lengths = f"1 to {self.completion}" if self.hazard else str(self.completion)
        return f"prompt {self.prompt}, completion {lengths}, group {self.group}, {self.rows} rows"


CASES = {
    "medium": Case(prompt=256, completion=64, group=8),
    "long": Case(prompt=512, completion=64, group=16),
    "short": Case(prompt=32, completion=256, group=8),
    "ragged": Case(prompt=32, completion=256, group=8, hazard=HAZARD),
}
TINY = {"tiny": Case(prompt=8, completion=4, group=2, rows=4)}
"""A small case to check that the benchmark runs."""
PROBE = Case(prompt=64, completion=16, group=8)
"""What TRL's samplers are compared on, on a CPU."""
CUDA_CASES = {"gpu": Case(prompt=512, completion=256, group=8, rows=16)}


def make_model(case: Case, device: str, **changes: Any) -> Qwen3ForCausalLM:
    """A model with random weights: small and in float32 on a CPU, or with the shape of Qwen3-0.6B in bfloat16 on CUDA.

    Args:
        case: Sets how often completions end.
        device: "cpu" or "cuda".
        changes: Changes of the model's configuration.
    """
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": 32_000,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "tie_word_embeddings": False,
    }
    if device == "cuda":
        shape |= {
            "vocab_size": 151_936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
        }
    config = Qwen3Config(
        **shape | changes, max_position_embeddings=4096, eos_token_id=1, pad_token_id=0, bos_token_id=None
    )
    model = Qwen3ForCausalLM(config)
    head = nn.Linear(config.hidden_size, config.vocab_size)  # the bias sets how often completions end
    head.weight.data.copy_(model.lm_head.weight.data)
    head.bias.data.zero_()
    head.bias.data[0] = -1e4  # never the padding token
    head.bias.data[1] = math.log(config.vocab_size * case.hazard / (1 - case.hazard)) if case.hazard else -1e4
    model.lm_head = head
    return model.to(device, torch.bfloat16 if device == "cuda" else torch.float32)


def make_tokenizer(vocabulary_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer with one word per token."""
    vocabulary = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, vocabulary_size)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def make_prompts(case: Case, vocabulary_size: int) -> list[str]:
    """One prompt per group."""
    words = torch.randint(
        2, vocabulary_size, (case.rows // case.group, case.prompt), generator=torch.Generator().manual_seed(1)
    )
    return [" ".join(f"w{word}" for word in row) for row in words.tolist()]


def share_of_even_tokens(completion_ids: Any, **_: Any) -> list[float]:
    """Reward function: the share of tokens with an even id. It differs within a group."""
    return [sum(token % 2 == 0 for token in row) / max(len(row), 1) for row in completion_ids]


def our_trainer(case: Case, model: Qwen3ForCausalLM, tokenizer: Any, **options: Any) -> GRPOTrainer:
    """Our trainer. `options` are those of `HFOptions`."""
    sampling = SamplingConfig(max_new_tokens=case.completion)
    policy = HFPolicy(model, tokenizer, sampling=sampling, options=HFOptions(**options))
    config = GRPOConfig(group_size=case.group, learning_rate=LEARNING_RATE, seed=0)

    def reward(_: Any, actions: Any) -> list[float]:
        return share_of_even_tokens([action.token_ids for action in actions])

    return GRPOTrainer(config=config, policy=policy, reward_model=reward)


def our_iteration(
    case: Case, model: Qwen3ForCausalLM, tokenizer: Any, prompts: list[str], *, exact_entropy: bool = False
) -> Callable[[], object]:
    """A function that runs one `GRPOTrainer.step`."""
    trainer = our_trainer(case, model, tokenizer, exact_entropy=exact_entropy)
    return lambda: trainer.step(prompts)


def bare_iteration(
    case: Case, model: Qwen3ForCausalLM, tokenizer: Any, prompts: list[str], *, knows_its_loss: bool = False
) -> Callable[[], object]:
    """A function that runs one step of the hand-written loop."""
    loop = BareLoop(
        model,
        group_size=case.group,
        max_steps=case.completion,
        end_token_id=1,
        reward=share_of_even_tokens,
        learning_rate=LEARNING_RATE,
        knows_its_loss=knows_its_loss,
    )
    return lambda: loop.step(tokenizer(prompts)["input_ids"])


def trl_iterations(
    case: Case,
    model: Qwen3ForCausalLM,
    tokenizer: Any,
    prompts: list[str],
    steps: int,
    after_step: Callable[[float], None],
    *,
    sampler: str,
    passes: int = PASSES,
) -> dict[str, Any]:
    """Run TRL's `train()` and pass its step times to `after_step`. Returns TRL's arguments."""
    arguments, _ = run_trl(
        model,
        tokenizer,
        [{"prompt": prompt} for prompt in prompts],
        steps,
        after_step,
        group=case.group,
        sampler=sampler,
        passes=passes,
        arguments={"max_completion_length": case.completion},
        reward_funcs=share_of_even_tokens,
    )
    return arguments


def timed(run: Callable[[], object], model: Qwen3ForCausalLM) -> float:
    """Seconds of one run."""
    begin = now(model.device.type)
    run()
    return now(model.device.type) - begin


def sampler_for(case: Case, device: str) -> str:
    """TRL's fastest sampler."""
    model = make_model(case, device)
    tokenizer = make_tokenizer(model.config.vocab_size)
    prompts = make_prompts(case, model.config.vocab_size)

    def seconds_of(sampler: str) -> float:
        seconds: list[float] = []
        trl_iterations(case, copy.deepcopy(model), tokenizer, prompts, 2, seconds.append, sampler=sampler)
        return seconds[-1]

    return fastest_sampler(seconds_of)


def compare(case: Case, device: str, pairs: int, *, sampler: str | None, with_memory: bool) -> None:
    """Print the interleaved times and the peak memory.

    Args:
        case: The sizes.
        device: "cpu" or "cuda".
        pairs: Number of iterations of each side, after one that warms up.
        sampler: How TRL samples. None leaves TRL out.
        with_memory: Whether to measure the peak memory.
    """
    model = make_model(case, device)
    tokenizer = make_tokenizer(model.config.vocab_size)
    prompts = make_prompts(case, model.config.vocab_size)
    runs = {
        "entropy": our_iteration(case, copy.deepcopy(model), tokenizer, prompts, exact_entropy=True),
        "ours": our_iteration(case, copy.deepcopy(model), tokenizer, prompts),
        "bare": bare_iteration(case, copy.deepcopy(model), tokenizer, prompts),
        "fused": bare_iteration(case, copy.deepcopy(model), tokenizer, prompts, knows_its_loss=True),
    }
    if sampler is None:
        del runs["entropy"]
    times: dict[str, list[float]] = {name: [] for name in ("trl", *runs)}

    def run_all(seconds_of_trl: float) -> None:
        times["trl"].append(seconds_of_trl)
        for name in list(runs)[:: 1 if len(times["trl"]) % 2 else -1]:
            times[name].append(timed(runs[name], model))
        print("  ", *(f"{name} {values[-1]:.2f}" for name, values in times.items()), flush=True)

    print(f"\n{case}")
    if sampler is not None:
        arguments = trl_iterations(case, model, tokenizer, prompts, pairs + 1, run_all, sampler=sampler)
        print(f"  TRL's arguments: {json.dumps(arguments)}")
    else:
        for _ in range(pairs + 1):
            run_all(math.nan)
    after_warmup = {name: values[1:] for name, values in times.items()}

    def ratio(first: str, second: str) -> str:
        ratios = [a / b for a, b in zip(after_warmup[first], after_warmup[second], strict=True)]
        return f"{statistics.median(ratios):.2f} x ({min(ratios):.2f} to {max(ratios):.2f})"

    sides = [side for side in SIDES if side in runs or (sampler is not None and side == "trl")]
    print("  s/iteration", *(f"  {SIDES[side]} {statistics.median(after_warmup[side]):.2f}" for side in sides))
    if sampler is not None:
        print(
            f"  speed against TRL, same metrics {ratio('trl', 'entropy')}   without exact entropy {ratio('trl', 'ours')}"
        )
    print(f"  time against the bare loop {ratio('ours', 'bare')}   against the fused one {ratio('ours', 'fused')}")
    if with_memory:
        measured = [(SIDES[side], peak_memory(case, device, side)) for side in sides if side != "fused"]
        if sampler is not None:
            measured.insert(1, ("TRL in one pass", peak_memory(case, device, "trl", "--passes", "1")))
        print("  peak MB    ", *(f"  {name} {value:.0f}" for name, value in measured), flush=True)


def our_variants(case: Case, device: str, *, max_rows: int | None, checkpointing: bool) -> dict[str, GRPOTrainer]:
    """Our trainer with default options, and with each of the options that are asked for."""
    model = make_model(case, device)
    tokenizer = make_tokenizer(model.config.vocab_size)
    bounded = {f"{max_rows} rows": {"max_rows_per_decode": max_rows}} if max_rows else {}
    checkpointed: dict[str, dict[str, Any]] = {"packs": {}, "row by row": {}} if checkpointing else {}
    trainers = {
        name: our_trainer(case, copy.deepcopy(model), tokenizer, **options)
        for name, options in ({"default": {}} | bounded | checkpointed).items()
    }
    for name in checkpointed:
        trainers[name].policy.model.gradient_checkpointing_enable()
    if checkpointing:
        trainers["row by row"].policy._scorer._can_pack = False  # as for a model with windows
    return trainers


def compare_variants(case: Case, device: str, pairs: int, trainers: dict[str, GRPOTrainer]) -> None:
    """Print the interleaved times of sampling and updates, in iterations from equal seeds."""
    prompts = make_prompts(case, trainers["default"].policy.model.config.vocab_size)
    times: dict[str, list[tuple[float, ...]]] = {name: [] for name in trainers}
    for number in range(pairs + 1):
        for name in list(trainers)[:: 1 if number % 2 else -1]:
            torch.manual_seed(number)
            begin = now(device)
            batch = trainers[name].collect(prompts)
            sampled = now(device)
            trainers[name].update(batch)
            times[name].append((now(device) - begin, sampled - begin, now(device) - sampled))
    print(f"\n{case}")
    for name, seconds in times.items():
        parts = []
        for part, own, default in zip(
            ("iteration", "sampling", "update"),
            zip(*seconds, strict=True),
            zip(*times["default"], strict=True),
            strict=True,
        ):
            ratios = [a / b for a, b in zip(own[1:], default[1:], strict=True)]
            spread = f"{statistics.median(ratios):.2f} x, {min(ratios):.2f} to {max(ratios):.2f}"
            parts.append(f"  {part} {statistics.median(own[1:]):.2f} s ({spread})")
        print(f"  {name:12s}", *parts, flush=True)


def peak_memory(case: Case, device: str, side: str, *more: str) -> float:
    """Peak memory in megabytes of two iterations in a separate process."""
    names = [name for name, known in (CASES | TINY | CUDA_CASES).items() if known == case]
    options = ["--device", device, "--cases", names[0], "--memory-of", side, *more]
    command = [sys.executable, "-m", "benchmarks.llm_vs_trl", *options]
    finished = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return float(finished.stdout.strip().splitlines()[-1])


def print_peak_memory(case: Case, device: str, side: str, passes: int) -> None:
    """Print the peak memory of two iterations. `peak_memory` runs this function in a separate process."""
    model = make_model(case, device)
    tokenizer = make_tokenizer(model.config.vocab_size)
    prompts = make_prompts(case, model.config.vocab_size)
    if side == "trl":
        trl_iterations(case, model, tokenizer, prompts, 2, lambda _: None, sampler="generate", passes=passes)
    else:
        run = (
            bare_iteration(case, model, tokenizer, prompts)
            if side == "bare"
            else our_iteration(case, model, tokenizer, prompts, exact_entropy=side == "entropy")
        )
        run()
        run()
    if device == "cuda":
        print(torch.cuda.max_memory_allocated() / 2**20)
    else:
        # not getrusage: a forked child inherits its parent's maximum
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        print(int(status["VmHWM"].split()[0]) / 2**10)


def main() -> None:
    """Read the command line and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--cases", nargs="+", help=f"of {', '.join(CASES)}; with --device cuda, of {', '.join(CUDA_CASES)}"
    )
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--skip-trl", action="store_true", help="only ours and the loops by hand")
    parser.add_argument("--sampler", choices=SAMPLERS, help="how TRL samples, instead of the fastest way")
    parser.add_argument("--skip-memory", action="store_true")
    parser.add_argument("--max-rows", type=int, help="only ours, also with so many rows per decoding step")
    parser.add_argument("--checkpointing", action="store_true", help="only ours, also with gradient checkpointing")
    parser.add_argument("--memory-of", choices=("trl", "entropy", "ours", "bare"), help=argparse.SUPPRESS)
    parser.add_argument("--passes", type=int, default=PASSES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    logging.set_verbosity_error()
    cases = CUDA_CASES if options.device == "cuda" else CASES
    chosen = [(TINY | cases)[name] for name in options.cases or cases]
    if options.memory_of:
        print_peak_memory(chosen[0], options.device, options.memory_of, options.passes)
        return
    compares_ours = bool(options.max_rows) or options.checkpointing
    options.skip_trl |= compares_ours
    where = torch.cuda.get_device_name() if options.device == "cuda" else f"{options.threads} thread(s)"
    trl = "" if options.skip_trl else f"TRL {version('trl')}, "
    print(
        f"torch {torch.__version__}, transformers {version('transformers')}, {trl}Python {platform.python_version()}, "
        f"{where}; medians of {options.pairs} interleaved iterations"
    )
    sampler = None
    if not options.skip_trl:
        sampler = options.sampler or sampler_for(PROBE if options.device == "cpu" else chosen[0], options.device)
        print(f"  TRL samples with {sampler}, and divides the rows among {PASSES} passes per update")
    for case in chosen:
        if compares_ours:
            variants = our_variants(
                case, options.device, max_rows=options.max_rows, checkpointing=options.checkpointing
            )
            compare_variants(case, options.device, options.pairs, variants)
            continue
        compare(case, options.device, options.pairs, sampler=sampler, with_memory=not options.skip_memory)


if __name__ == "__main__":
    main()
