"""Measure the peak memory that a computation adds."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity, profile


def peak_extra_memory(run: Callable[[], object]) -> int:
    """Peak bytes of tensors that `run` adds: results, tensors saved for backward, and temporaries within operations.

    On the CPU, the profiler records every allocation and release, and this function sums them in order. On CUDA, the allocator
    tracks the peak itself. Both are exact.
    """
    run()  # one-time allocations
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with _without_stderr(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    assert profiled.profiler is not None
    blocks = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for block in sorted(blocks, key=lambda event: event.start_ns()):
        held += block.nbytes()
        peak = max(peak, held)
    return peak


@contextmanager
def _without_stderr() -> Iterator[None]:
    """Discard stderr, because the profiler writes a message to it at every start and stop, at any log level."""
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:  # noqa: PTH123 - a device
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
