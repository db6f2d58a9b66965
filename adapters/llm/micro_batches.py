"""Micro-batches: which rows are forwarded together."""

from collections.abc import Sequence

import numpy as np

FORWARD_COST = 256
"""Fixed cost of a forward pass, in token positions: computing that many positions takes about as long."""


def plan_by_tokens(
    prompt_lengths: Sequence[int],
    prompt_of_row: Sequence[int],
    lengths: Sequence[int],
    budget: int,
    *,
    shares_prompts: bool,
) -> list[Sequence[int]]:
    """Divide the rows into forward passes of at most `budget` positions, with a small total number of positions.

    A pass over R rows of K prompts computes K max P + R max T positions if prompts are shared, and R max(P + T) otherwise.
    The rows are sorted in two ways: by prompt, and by length alone. Dynamic programming cuts each order into passes with the
    lowest total cost, and the cheaper plan is returned. A row that exceeds the budget has a pass of its own.

    Args:
        prompt_lengths: Number of tokens P of each of B prompts.
        prompt_of_row: Index of the prompt of each of N rows.
        lengths: Number of completion tokens T of each row.
        budget: Maximum number of positions per pass.
        shares_prompts: Whether a pass computes each of its prompts once for all rows.

    Returns:
        The rows of each pass. Rows of one prompt are adjacent.
    """
    count = len(lengths)
    prompts, tokens = np.asarray(prompt_of_row), np.asarray(lengths)
    own = np.asarray(prompt_lengths)[prompts]
    total = tokens if shares_prompts else own + tokens
    longest = np.zeros(len(prompt_lengths), dtype=np.int64)
    np.maximum.at(longest, prompts, total)
    by_length = np.lexsort((prompts, -total))
    by_prompt = np.lexsort((-total, prompts, -longest[prompts]))
    shared = own if shares_prompts else np.zeros(count, dtype=np.int64)
    # by prompt, few prompts are computed; by length, little is padded; only the cost tells which is better
    plans = [_cut(order, prompts, shared, total, budget) for order in (by_prompt, by_length)]
    _, parts = min(plans, key=lambda plan: plan[0])
    return [part[np.argsort(prompts[part], kind="stable")].tolist() for part in parts]


def _cut(
    order: np.ndarray, prompts: np.ndarray, prompt_lengths: np.ndarray, lengths: np.ndarray, budget: int
) -> tuple[float, list[np.ndarray]]:
    """The cost and the parts of the cheapest division of this order into consecutive parts.

    best[j] = min over i < j of best[i] + positions(i..j) + FORWARD_COST, over the parts within the budget.
    """
    count = len(order)
    prompts, prompt_lengths, lengths = prompts[order], prompt_lengths[order], lengths[order]
    next_of_prompt = _next_of_the_same(prompts)
    best = np.zeros(count + 1)
    begin_of = np.zeros(count + 1, dtype=np.int64)
    for end in range(1, count + 1):
        back = slice(end - 1, None, -1)  # all parts that start at end - 1, end - 2, ..., 0
        longest = np.maximum.accumulate(lengths[back])
        longest_prompt = np.maximum.accumulate(prompt_lengths[back])
        num_prompts = np.cumsum(next_of_prompt[back] >= end)
        positions = num_prompts * longest_prompt + np.arange(1, end + 1) * longest
        fits = max(1, int(np.searchsorted(positions, budget, side="right")))  # positions grow with the part
        cost = best[back.start :: -1][:fits] + positions[:fits] + FORWARD_COST
        cheapest = int(cost.argmin())
        best[end], begin_of[end] = cost[cheapest], end - 1 - cheapest
    parts = []
    end = count
    while end > 0:
        parts.append(order[begin_of[end] : end])
        end = begin_of[end]
    return float(best[count]), parts[::-1]


def _next_of_the_same(values: np.ndarray) -> np.ndarray:
    """For each position, the next position with the same value, or the length if there is none."""
    following = np.full(len(values), len(values))
    seen: dict[int, int] = {}
    for position in range(len(values) - 1, -1, -1):
        following[position] = seen.get(int(values[position]), len(values))
        seen[int(values[position])] = position
    return following
