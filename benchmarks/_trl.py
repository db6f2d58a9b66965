"""TRL's `GRPOTrainer` with the settings that are best for it, for comparisons.

- The output head is applied to completions only (`score_completions_only`).
- The rows of an iteration take several passes of forward and backward. This keeps the memory low and costs no time.
- `fastest_sampler` tries every way in which TRL can sample on this machine.
"""

import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PrinterCallback, TrainerCallback

LEARNING_RATE = 1e-6
PASSES = 4
"""Passes of an update. In each, TRL forwards this part of the rows."""

SAMPLERS: dict[str, dict[str, Any]] = {
    "generate": {},
    "continuous batching": {
        "use_transformers_continuous_batching": True,
        # on a CPU the cache takes a share of all free memory; a GPU has TRL's own share
        "transformers_continuous_batching_config": {"use_cuda_graph": True}
        | ({} if torch.cuda.is_available() else {"max_memory_percent": 0.05}),
    },
    "vLLM": {"use_vllm": True, "vllm_mode": "colocate"},
}
"""TRL's samplers, with their arguments of `trl.GRPOConfig`. A static cache is no fast sampler: TRL switches compilation off."""


def score_completions_only() -> None:
    """Make TRL apply its output head to completions only on every device, as it does on a GPU.

    On devices without Triton, TRL 1.16 applies the head to prompts and padding too, and drops the results. Log-probs and
    gradients are the same.

    Raises:
        RuntimeError: This version of TRL has no such switch.
    """
    from trl.trainer import utils

    if not hasattr(utils, "_use_triton"):
        raise RuntimeError("trl.trainer.utils has no _use_triton. Install TRL 1.16, or look up what decides now.")
    utils._use_triton = lambda _: True  # the kernels look the function up in their own module, which keeps it


def fastest_sampler(seconds: Callable[[str], float]) -> str:
    """The fastest of TRL's samplers on this machine. Prints the seconds of all, or the error of one that does not run.

    Args:
        seconds: Maps a sampler's name to the seconds of an iteration, after a warm-up.
    """
    took: dict[str, float] = {}
    for sampler in SAMPLERS:
        try:
            took[sampler] = seconds(sampler)
            print(f"  TRL with {sampler}: {took[sampler]:.2f} s", flush=True)
        except Exception as error:
            print(f"  TRL with {sampler}: not run. {first_line(error)}", flush=True)
    return min(took, key=lambda sampler: took[sampler])


def first_line(error: BaseException) -> str:
    """The type of an error, and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def now(device: str) -> float:
    """Current time in seconds: CPU time, or on CUDA the wall-clock time after synchronisation."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def run_trl(
    model: Any,
    tokenizer: Any,
    rows: Sequence[dict[str, Any]],
    steps: int,
    after_step: Callable[[float], object],
    *,
    group: int,
    sampler: str = "generate",
    passes: int = PASSES,
    before: Callable[[Any], None] | None = None,
    arguments: dict[str, Any],
    **options: Any,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run TRL's `train()`: an iteration samples a group for each row of the data set, and makes one update.

    Args:
        model: The model. It is trained in place.
        tokenizer: The model's tokenizer.
        rows: The data set.
        steps: Number of iterations.
        after_step: Called after each iteration with its seconds. A true result ends the run.
        group: Completions per row of the data set.
        sampler: A name in `SAMPLERS`.
        passes: Passes of forward and backward per update.
        before: Called with the trainer before it trains, for example to time its methods.
        arguments: More arguments of `trl.GRPOConfig`.
        options: More arguments of `trl.GRPOTrainer`.

    Returns:
        The arguments of `trl.GRPOConfig`, and TRL's metrics of each iteration.
    """
    device = model.device.type

    class Timer(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.begin = now(device)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop |= bool(after_step(now(device) - self.begin))

    settings = {
        "per_device_train_batch_size": len(rows) * group // passes,
        "gradient_accumulation_steps": passes,
        "num_generations": group,
        "loss_type": "grpo",
        "learning_rate": LEARNING_RATE,
        "max_steps": steps,
        "gradient_checkpointing": False,
        "bf16": device == "cuda",
        "use_cpu": device == "cpu",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        **SAMPLERS[sampler],
        **arguments,
    }
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what TRL's dependencies deprecate is not ours to fix
        import trl
        from datasets import Dataset

        score_completions_only()
        trainer = trl.GRPOTrainer(
            model=model,
            processing_class=tokenizer,
            args=trl.GRPOConfig(output_dir=folder, **settings),
            train_dataset=Dataset.from_list(list(rows)),
            callbacks=[Timer()],
            **options,
        )
        trainer.remove_callback(PrinterCallback)
        if before is not None:
            before(trainer)
        trainer.train()
    return settings, [entry for entry in trainer.state.log_history if "reward" in entry]
