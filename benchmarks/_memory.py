"""How much memory a computation takes at its peak, beyond what was there before: measured, not estimated."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity, profile


def peak_extra_memory(run: Callable[[], object]) -> int:
    """The most bytes of tensors at once that `run` adds: results, what backward keeps, temporaries within operations.

    On the CPU the allocator tells the profiler of every block it hands out or takes back, and these are added up in order; on
    CUDA the allocator keeps the peak itself. Either is exact, and the same for every `run`, however it is written.
    """
    run()  # what is allocated once, and kept
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
    """The profiler announces every start and stop there, whatever its log level."""
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:  # noqa: PTH123 - a device
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
