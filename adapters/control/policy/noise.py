"""Random numbers of sampled actions, for episodes that start and end at different times."""

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from .distributions import ActionDistribution

NOISE_AHEAD = 64
"""Steps per block. The random numbers of a block are drawn in one call."""

NOT_RUNNING = -1
"""Position in the ring buffer for a pool member without a running episode."""


class StepNoise:
    """Noise that depends only on the seed, the episode's row and the step, and not on other episodes.

    Block b of row r is the output of a counter-based generator with key (seed, r), starting at counter (0, b, 0, 0) (Philox:
    Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). No generator per episode is needed.

    A member's blocks are stored in a ring buffer that starts at the member's first step, so that the noise of one batch is
    contiguous.

    Args:
        distribution: Distribution that uses the noise.
        num_members: Number of environments in the pool (its members), M.
        seed: Seed from 0 to 2^64 - 1.
    """

    def __init__(self, distribution: ActionDistribution, num_members: int, seed: int) -> None:
        self._distribution = distribution
        self._seed = seed
        # a counter per row: an episode does not depend on the others that still run, nor on a lost worker
        self._philox = np.random.Philox(key=0)
        self._generator = np.random.Generator(self._philox)
        self._at_start = self._philox.state
        self._ring = np.empty((NOISE_AHEAD, num_members, distribution.num_noise), dtype=np.float32)
        self._place = 0
        self._places = np.full(num_members, NOT_RUNNING)  # ring position where each member's blocks begin
        self._rows = np.empty(num_members, dtype=np.int64)
        self._blocks = np.empty(num_members, dtype=np.int64)  # number of each member's next block

    def begin(self, member: int, row: int) -> None:
        """Start the noise of `row` at the member's next step."""
        self._places[member], self._rows[member], self._blocks[member] = self._place, row, 0

    def end(self, member: int) -> None:
        """Stop drawing noise for a member."""
        self._places[member] = NOT_RUNNING

    def of_step(self, members: Int64[np.ndarray, " n"]) -> Float[Tensor, "n num_noise"]:
        """Noise of the next step of all running members, in the order of `members`."""
        for member in (self._places == self._place).nonzero()[0]:
            self._refill(member)
        noise = self._ring[self._place].take(members, axis=0)
        self._place = (self._place + 1) % NOISE_AHEAD
        return torch.from_numpy(noise)

    def _refill(self, member: int) -> None:
        block = self._draw(self._rows[member], self._blocks[member])
        self._blocks[member] += 1
        self._ring[self._place :, member] = block[: NOISE_AHEAD - self._place]
        self._ring[: self._place, member] = block[NOISE_AHEAD - self._place :]

    def _draw(self, row: int, block: int) -> Float[np.ndarray, "steps num_noise"]:
        key, counter = np.array([self._seed, row], dtype=np.uint64), np.array([0, block, 0, 0], dtype=np.uint64)
        self._philox.state = {**self._at_start, "state": {"key": key, "counter": counter}}
        return self._distribution.noise(self._generator, NOISE_AHEAD)
