"""Cost of the loss: one evaluation of `grpo_objective` with its gradient, compared with TRL's loss and a lower bound.

Both sides use the same tensors [N, T]: log-probs, old log-probs, entropies, advantages, a ragged mask, and with KL also
reference log-probs. A run computes the loss, its metrics and its gradient with respect to the log-probs. TRL's side is its own
`GRPOTrainer._compute_loss`, unbound, on a stand-in trainer that supplies the log-probs instead of a model. The lower bound
("floor") reads the inputs once and writes the gradient once. Peak memory is the memory that a run adds to its inputs, with the
gradient included (see `_memory`).

The ratios are reported and have no target: the loss takes less than 0.01 % of an iteration of a language model, so it is
written for reading (decision 0007, docs/decisions/formulas.md).

    python -m benchmarks.objective
    python -m benchmarks.objective --threads 2
    python -m benchmarks.objective --compile
"""

import argparse
import importlib.util
import os
import platform
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks._memory import peak_extra_memory
from benchmarks._timing import keep_freed_memory, time_pairs
from grpo import ObjectiveConfig, ObjectiveInputs, grpo_objective, step_weights
from grpo.surrogates import Cispo, Sapo, Vespo

Run = Callable[[], tuple[Tensor, Tensor]]
"""One evaluation: the loss, and its gradient with respect to the log-probs."""

TOLERANCE = 1e-5
"""Largest allowed relative difference of losses and of gradients (as norms), in float32."""

KL_COEF, CISPO_BOUND = 0.04, 5.0
VESPO = {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0}

HAS_TRL = importlib.util.find_spec("trl") is not None
INSTALL = 'not installed; to compare with it: pip install -e ".[bench]"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One loss, in the settings of this library and in TRL's settings."""

    ours: ObjectiveConfig
    theirs: dict[str, Any]
    """Settings that TRL's `_compute_loss` reads from its trainer."""


CASES = {
    "clip": Case(ours=ObjectiveConfig(), theirs={"loss_type": "grpo"}),
    "clip + KL": Case(ours=ObjectiveConfig(kl_coef=KL_COEF), theirs={"loss_type": "grpo", "beta": KL_COEF}),
    "cispo": Case(
        ours=ObjectiveConfig(surrogate=Cispo(low=1.0, high=CISPO_BOUND - 1.0), aggregation="step_mean"),
        theirs={"loss_type": "cispo", "epsilon_high": CISPO_BOUND},
    ),
    "sapo": Case(ours=ObjectiveConfig(surrogate=Sapo()), theirs={"loss_type": "sapo"}),
    "vespo": Case(
        ours=ObjectiveConfig(surrogate=Vespo(**VESPO), aggregation="step_mean"),
        theirs={
            "loss_type": "vespo",
            **{f"vespo_{name}": value for name, value in VESPO.items()},
        },
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The input tensors, which are the same for this library and for TRL."""

    log_probs: Tensor
    """Log-probs [N, T] of the policy, which require a gradient."""
    old_log_probs: Tensor
    ref_log_probs: Tensor
    entropy: Tensor
    advantages: Tensor
    mask: Tensor

    @classmethod
    def random(cls, num_rows: int, num_steps: int, device: str) -> "Batch":
        """Rows of T/8 to T steps. Every sixth ratio is beyond its clip bound."""

        def noise() -> Tensor:
            return torch.randn(num_rows, num_steps)

        log_probs = -3.0 * torch.rand(num_rows, num_steps)
        lengths = torch.randint(max(num_steps // 8, 1), num_steps + 1, (num_rows, 1))
        return cls(
            old_log_probs=(log_probs + 0.2 * noise()).to(device),
            ref_log_probs=(log_probs + 0.3 * noise()).to(device),
            entropy=torch.rand(num_rows, num_steps).to(device),
            advantages=torch.randn(num_rows).to(device),
            mask=(torch.arange(num_steps) < lengths).to(device),
            log_probs=log_probs.to(device).requires_grad_(),
        )


def objective_inputs(batch: Batch, config: ObjectiveConfig, log_probs: Tensor, weights: Tensor) -> ObjectiveInputs:
    """The inputs that the trainer would pass."""
    return ObjectiveInputs(
        log_probs=log_probs,
        old_log_probs=batch.old_log_probs,
        advantages=batch.advantages,
        mask=batch.mask,
        weights=weights,
        entropy=batch.entropy,
        ref_log_probs=None if config.kl_coef is None else batch.ref_log_probs,
    )


def our_run(batch: Batch, case: Case, *, compiled: bool = False) -> Run:
    """A function that runs `grpo_objective`. The step weights are precomputed, as in the trainer (once per update)."""
    weights = step_weights(batch.mask, case.ours.aggregation)

    def evaluate(log_probs: Tensor) -> tuple[Tensor, Tensor]:
        output = grpo_objective(objective_inputs(batch, case.ours, log_probs, weights), case.ours)
        return output.loss, torch.stack(list(output.metrics.values()))

    return _with_gradient(torch.compile(evaluate) if compiled else evaluate, batch.log_probs)


def their_run(batch: Batch, case: Case, *, compiled: bool = False) -> Run:
    """A function that runs TRL's `_compute_loss`. Ids and prompts have one column, because only the model would read them."""
    with warnings.catch_warnings():  # deprecation warnings of TRL's dependencies
        warnings.simplefilter("ignore")
        from trl.trainer.grpo_trainer import GRPOTrainer

    column = torch.ones_like(batch.mask[:, :1], dtype=torch.long)
    inputs = {
        **dict.fromkeys(("prompt_ids", "prompt_mask", "completion_ids", "completion_mask"), column),
        "tool_mask": batch.mask.long() if compiled else _WholeMask(batch.mask.long()),
        "advantages": batch.advantages,
        "old_per_token_logps": batch.old_log_probs,
        "ref_per_token_logps": batch.ref_log_probs,
        "num_items_in_batch": batch.mask.sum(),
    }
    self = _stand_in(case, (batch.log_probs, batch.entropy, None))
    self.get_gamma_weights = GRPOTrainer.get_gamma_weights  # of VESPO

    def evaluate(_log_probs: Tensor) -> tuple[Tensor, None]:
        return GRPOTrainer._compute_loss(self, self.model, inputs), None

    return _with_gradient(torch.compile(evaluate) if compiled else evaluate, batch.log_probs)


class _WholeMask:
    """The product of TRL's completion mask and tool mask, returned without a copy.

    Under a compiler the plain product is used, because a compiler cannot trace this class and fuses the product anyway.
    """

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask

    def __rmul__(self, _completion_mask: Tensor) -> Tensor:
        return self.mask


class _Discard:
    """Accepts metrics in place of a list, and discards them."""

    def append(self, value: float) -> None:
        """Discard the value: a growing list would make a compiler recompile every time."""


def _stand_in(case: Case, outputs: tuple[Tensor, Tensor, None]) -> Any:
    """The attributes of the trainer that `_compute_loss` reads: settings, one process, and log-probs instead of a model."""
    settings = {
        "beta": 0.0,
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "delta": None,
        "importance_sampling_level": "token",
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "use_bias_correction_kl": False,
        "use_vllm": False,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "steps_per_generation": 1,
        "current_gradient_accumulation_steps": 1,
    } | case.theirs
    return SimpleNamespace(
        **settings,
        args=SimpleNamespace(**settings),
        model=SimpleNamespace(training=True),
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(_Discard)},
        _get_per_token_logps_and_entropies=lambda *_, **__: outputs,
        accelerator=SimpleNamespace(num_processes=1, gather=lambda values: values, reduce=lambda values, **_: values),
    )


def _with_gradient(evaluate: Callable[[Tensor], tuple[Tensor, Any]], log_probs: Tensor) -> Run:
    def run() -> tuple[Tensor, Tensor]:
        loss, _metrics = evaluate(log_probs)
        (gradient,) = torch.autograd.grad(loss, log_probs)
        if gradient.is_cuda:
            torch.cuda.synchronize()
        return loss.detach(), gradient

    return run


def floor_run(batch: Batch, case: Case) -> Callable[[], None]:
    """Read every byte of the inputs once, and write every byte of the gradient once."""
    inputs = objective_inputs(batch, case.ours, batch.log_probs, step_weights(batch.mask, case.ours.aggregation))
    tensors = [value for name in inputs.__slots__ if isinstance(value := getattr(inputs, name), Tensor)]
    source = torch.ones(sum(tensor.nbytes for tensor in tensors) // 4, device=batch.mask.device)
    target = torch.empty_like(batch.log_probs)

    def run() -> None:
        source.sum()
        target.detach().fill_(0.0)
        if target.is_cuda:
            torch.cuda.synchronize()

    return run


def largest_difference(first: Run, second: Run) -> float:
    """Larger of two differences: of the losses (relative to losses above 1) and of the gradients (relative to the norm)."""
    (our_loss, ours), (their_loss, theirs) = first(), second()
    of_loss = (our_loss - their_loss).abs() / their_loss.abs().clamp(min=1.0)
    return max(float(of_loss), float((ours - theirs).norm() / theirs.norm()))


def report(name: str, first: Run, second: Run, repeats: int) -> None:
    """Print one line of the table: times and memory of two functions that compute the same result."""
    difference = largest_difference(first, second)
    assert difference < TOLERANCE, f"{name}: the two sides do not compute the same, by {difference}"
    line = f"{name:32s}{time_pairs(first, second, repeats=repeats)}"
    ours, theirs = peak_extra_memory(first) / 2**20, peak_extra_memory(second) / 2**20
    print(f"{line}   {ours:8.2f} MiB {theirs:8.2f} MiB   ratio {ours / theirs:.2f}", flush=True)


def compiles(name: str, run: Run) -> bool:
    """Whether a function compiles. Prints the reason if it does not."""
    print(f"compiling {name} ...", file=sys.stderr, flush=True)
    try:
        run()
    except Exception as error:  # any compiler error is a result
        print(f"{name:32s}does not compile: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
        return False
    return True


def report_case(name: str, batch: Batch, repeats: int, *, compiled: bool) -> None:
    """Print all lines of one loss."""
    case = CASES[name]
    ours = our_run(batch, case)
    theirs = their_run(batch, case) if HAS_TRL else None
    if theirs is not None:
        report(f"{name} : TRL", ours, theirs, repeats)
    pair = time_pairs(ours, floor_run(batch, case), repeats=repeats)
    print(f"{f'{name} : floor':32s}{pair}   {peak_extra_memory(ours) / 2**20:8.2f} MiB", flush=True)
    if not compiled:
        return
    ours_compiled = our_run(batch, case, compiled=True)
    if not compiles(f"{name} compiled", ours_compiled):
        return
    report(f"{name} compiled : not", ours_compiled, ours, repeats)
    if theirs is not None:
        theirs_compiled = their_run(batch, case, compiled=True)
        if compiles(f"TRL's {name} compiled", theirs_compiled):
            report(f"{name} compiled : TRL compiled", ours_compiled, theirs_compiled, repeats)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=512)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--repeats", type=int, default=40, help="pairs per line")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--compile", action="store_true", help="measure both sides under torch.compile, too")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    keep_freed_memory()
    batch = Batch.random(args.rows, args.steps, args.device)
    print(
        f"torch {torch.__version__}, {args.threads} thread(s) on {os.cpu_count()} cores, {platform.machine()}, {args.device}, "
        f"[{args.rows}, {args.steps}] float32, {float(batch.mask.double().mean()):.0%} of the steps valid"
    )
    print(f"TRL {version('trl') if HAS_TRL else INSTALL}")
    print(f"{'first : second':32s}{'first':>12s} {'second':>12s}{'peak memory: first, second':>66s}", flush=True)
    for name in args.cases:
        report_case(name, batch, args.repeats, compiled=args.compile)
    name = args.cases[0]
    weights = time_pairs(
        lambda: step_weights(batch.mask, CASES[name].ours.aggregation),
        our_run(batch, CASES[name]),
        repeats=args.repeats,
    )
    print(f"{f'step_weights (once) : {name}':32s}{weights}", flush=True)


if __name__ == "__main__":
    main()
