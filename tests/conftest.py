"""What holds for every test: one thread unless OMP_NUM_THREADS says more, a fixed seed, no deadline, the right `adapters`."""

import gc
import importlib.util
import os
import signal
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch

from tests.support.faults_table import write_faults_table

ROOT = Path(__file__).resolve().parents[1]

# Tiny tensors do not pay for a thread pool. Subprocesses inherit the number.
torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))

# A shell starts `make test &` with interrupts ignored, and subprocesses inherit that; some tests interrupt what they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def checking_outer_functions(jaxtyped: Callable[..., Any]) -> Callable[..., Any]:
    """The decorator of pytest's jaxtyping hook, which leaves functions within functions as they are.

    They would be wrapped anew in each call of the outer function, which takes longer than most tests.
    """

    def decorator(**options: Any) -> Callable[[Any], Any]:
        wrap = jaxtyped(**options)
        return lambda defined: defined if "<locals>" in defined.__qualname__ else wrap(defined)

    return decorator


jaxtyping.jaxtyped = checking_outer_functions(jaxtyping.jaxtyped)

if (
    importlib.util.find_spec("hypothesis") is not None
):  # the environments of vLLM and of agent frameworks do not have it
    import hypothesis

    # How long an example takes depends on what else this machine does.
    hypothesis.settings.register_profile("without a deadline", deadline=None)
    hypothesis.settings.load_profile("without a deadline")


def foreign_adapters() -> str | None:
    """What stands in the way of our `adapters`, in words; None when nothing does."""
    if any(distribution.name == "adapters" for distribution in metadata.distributions(name="adapters")):
        return "AdapterHub's distribution `adapters` is installed"
    spec = importlib.util.find_spec("adapters")
    if spec is None:
        return "there is no package `adapters`"
    found = [Path(entry).resolve() for entry in spec.submodule_search_locations or ()]
    return None if found == [ROOT / "adapters"] else f"`import adapters` finds {spec.origin or found}"


def pytest_configure(config: pytest.Config) -> None:
    """Stop before the first test when `import adapters` could mean another package than ours."""
    del config
    obstacle = foreign_adapters()
    if obstacle is not None:
        raise pytest.UsageError(
            f"These tests need the `adapters` of {ROOT}, but {obstacle}. AdapterHub's package on PyPI has the same "
            f"import name, so only one of them can be used in one environment: run `pip uninstall adapters`, then "
            f'`pip install -e ".[all,dev]"` in {ROOT}.'
        )


def pytest_collection_finish() -> None:
    """Exempt what importing the tests has made from garbage collection: there are millions of objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Every test starts from the same random state, whichever ran before it."""
    torch.manual_seed(0)


@pytest.fixture
def without_type_checks() -> Iterator[None]:
    """Type checks before each call into grpo, which users have not, are off: where values have wrong types, where checks take
    most of the time, and where Python's global generator counts, from which beartype draws the items that it looks at."""
    from tests.support.objective_inputs import as_users_run_it  # not earlier: it imports grpo, which pytest wraps first

    with as_users_run_it():
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table of faults. Here, because pytest-xdist's main process reads no deeper file than this."""
    write_faults_table(terminalreporter)
