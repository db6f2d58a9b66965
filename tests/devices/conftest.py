"""The device of these tests: CUDA where there is a GPU, the CPU elsewhere.

Expected values come from the CPU. On a machine without a GPU, the tests only show that they run and that their own arithmetic
is right.
"""

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    """The device that is compared with the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
