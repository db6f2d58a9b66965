import itertools
import math
from typing import Any

import pytest
import torch
from torch import nn

from adapters.llm.model import token_log_probs as module
from adapters.llm.model.token_log_probs import blocks, token_log_probs
from benchmarks._memory import peak_extra_memory


class Wrapped(nn.Module):
    """A head that is not a plain linear layer."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.linear(hidden)


def reference(
    hidden: torch.Tensor, head: nn.Linear, tokens: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    all_log_probs = (head(hidden) / temperature).log_softmax(-1)
    return all_log_probs[torch.arange(len(tokens)), tokens], -(all_log_probs.exp() * all_log_probs).sum(-1)


def test_two_tokens_by_hand() -> None:
    # logits (ln 3, 0) give p = (3/4, 1/4); at temperature 1/2 they double: p = (9/10, 1/10)
    head = nn.Linear(1, 2, bias=False)
    head.weight.data.copy_(torch.tensor([[math.log(3)], [0.0]]))
    hidden, tokens = torch.ones(2, 1), torch.tensor([0, 1])
    log_probs, entropy = token_log_probs(hidden, head, tokens, with_entropy=True)
    torch.testing.assert_close(log_probs, torch.tensor([math.log(3 / 4), math.log(1 / 4)]))
    by_hand = -(3 / 4) * math.log(3 / 4) - (1 / 4) * math.log(1 / 4)
    torch.testing.assert_close(entropy, torch.full((2,), by_hand))
    log_probs, entropy = token_log_probs(hidden, head, tokens, temperature=0.5)
    torch.testing.assert_close(log_probs, torch.tensor([math.log(9 / 10), math.log(1 / 10)]))
    assert entropy is None


def test_values_and_slopes_are_those_of_the_full_softmax(
    subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BLOCK_BYTES", 4 * 13 * 3)  # three positions of 13 logits per block
    cases = itertools.product((False, True), (1.0, 0.7), (False, True), ("log_probs", "entropy", "both"))
    for bias, temperature, wrapped, terms in cases:
        with subtests.test(bias=bias, temperature=temperature, wrapped=wrapped, terms=terms):
            head = nn.Linear(5, 13, bias=bias, dtype=torch.float64)
            hidden = torch.randn(8, 5, dtype=torch.float64, requires_grad=True)
            tokens = torch.randint(13, (8,))
            weights = torch.randn(2, 8, dtype=torch.float64)
            weights[0, 3] = 0  # a step without a gradient
            expected = reference(hidden, head, tokens, temperature)
            used = Wrapped(head) if wrapped else head
            got = token_log_probs(hidden, used, tokens, temperature=temperature, with_entropy=terms != "log_probs")
            torch.testing.assert_close(got[0], expected[0], rtol=1e-12, atol=1e-12)
            inputs = [hidden, *head.parameters()]
            found = torch.autograd.grad(weighted_sum(got, weights, terms), inputs)
            by_autograd = torch.autograd.grad(weighted_sum(expected, weights, terms), inputs)
            for ours, theirs in zip(found, by_autograd, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def weighted_sum(values: tuple[torch.Tensor, torch.Tensor | None], weights: torch.Tensor, terms: str) -> torch.Tensor:
    log_probs, entropy = values
    loss = weights.new_zeros(())
    if terms != "entropy":
        loss = loss + (weights[0] * log_probs).sum()
    if terms != "log_probs":
        loss = loss + (weights[1] * entropy).sum()
    return loss


def test_half_precision_is_reduced_in_float32() -> None:
    torch.manual_seed(0)
    head = nn.Linear(16, 1000, bias=False).bfloat16()
    hidden = torch.randn(4, 16).bfloat16()
    log_probs, entropy = token_log_probs(hidden, head, torch.arange(4), with_entropy=True)
    assert log_probs.dtype == torch.float32
    logits = head(hidden).double()  # the same rounded logits, reduced in float64
    exact = logits.log_softmax(1)
    torch.testing.assert_close(log_probs.double(), exact[torch.arange(4), torch.arange(4)], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy.double(), -(exact.exp() * exact).sum(1), atol=1e-4, rtol=1e-5)


def test_many_blocks_are_as_exact_as_one_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    head = nn.Linear(16, 50).bfloat16()
    hidden, tokens, slopes = torch.randn(512, 16).bfloat16(), torch.randint(50, (512,)), torch.randn(512)

    def gradient(block_bytes: int) -> torch.Tensor:
        monkeypatch.setattr(module, "BLOCK_BYTES", block_bytes)
        log_probs, _ = token_log_probs(hidden, head, tokens)
        return torch.autograd.grad((slopes * log_probs).sum(), head.weight)[0].double()

    one, many = gradient(2**30), gradient(4 * 50 * 4)  # 128 blocks
    assert float((many - one).norm() / one.norm()) < 3e-3  # summed in bfloat16, they are off by 1 %


def test_under_autocast_the_logits_are_rounded_to_bfloat16_and_gradients_are_float32() -> None:
    torch.manual_seed(0)
    head = nn.Linear(16, 50)
    hidden = torch.randn(4, 16, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        log_probs, _ = token_log_probs(hidden, head, torch.arange(4))
    weight, bias = head.weight.detach().bfloat16(), head.bias.detach().bfloat16()
    logits = nn.functional.linear(hidden.detach().bfloat16(), weight, bias)
    rounded = logits.float().log_softmax(1)
    torch.testing.assert_close(log_probs.detach(), rounded[torch.arange(4), torch.arange(4)])
    log_probs.sum().backward()
    assert head.weight.grad.dtype == head.bias.grad.dtype == torch.float32


def test_the_first_blocks_are_computed_once_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three blocks of two positions, of which one is kept. A second backward pass computes all again; scoring keeps none."""
    monkeypatch.setattr(module, "BLOCK_BYTES", 2 * 5 * 4)
    monkeypatch.setattr(module, "KEPT_BYTES", 3 * 5 * 4)
    products: list[int] = []
    linear = nn.functional.linear

    def counted(*arguments: torch.Tensor) -> torch.Tensor:
        products.append(len(arguments[0]))
        return linear(*arguments)

    monkeypatch.setattr(nn.functional, "linear", counted)
    torch.manual_seed(0)
    head, hidden, tokens = nn.Linear(3, 5), torch.randn(6, 3), torch.arange(6) % 5
    log_probs, entropy = token_log_probs(hidden, head, tokens, with_entropy=True)
    loss = (log_probs * torch.arange(6)).sum() + entropy.sum()
    slopes = [torch.autograd.grad(loss, list(head.parameters()), retain_graph=True) for _ in range(2)]
    assert products == [2] * (3 + 2 + 3)
    assert all(torch.equal(one, other) for one, other in zip(*slopes, strict=True))


def test_the_generator_is_saved_only_where_a_head_draws_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU would wait for its generator's state at each block. With dropout, the backward pass must draw the same numbers."""
    saved: list[bool] = []
    read = torch.get_rng_state
    monkeypatch.setattr(torch, "get_rng_state", lambda: saved.append(True) or read())
    monkeypatch.setattr(module, "BLOCK_BYTES", 2 * 5 * 4)
    for rate, is_training, expected in [(0.0, True, False), (0.5, False, False), (0.5, True, True)]:
        saved.clear()
        linear = nn.Linear(3, 5)
        head = nn.Sequential(nn.Dropout(rate), linear).train(is_training)
        hidden = torch.randn(6, 3, requires_grad=True)
        log_probs, _ = token_log_probs(hidden, head, torch.arange(6) % 5)
        assert bool(saved) == expected, (rate, is_training)
        log_probs.sum().backward()
    dropped = hidden.grad == 0  # the numbers of the forward pass: half of the inputs had no effect
    assert 0 < int(dropped.sum()) < hidden.numel()
    again = hidden.detach().masked_fill(dropped, 0.0) / 0.5
    expected_log_probs, _ = token_log_probs(again, linear, torch.arange(6) % 5)
    torch.testing.assert_close(log_probs, expected_log_probs)


def test_blocks_cover_every_position_once() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert [(b.start, b.stop) for b in blocks(7, module.BLOCK_BYTES // (4 * 3), cpu)] == [(0, 3), (3, 6), (6, 7)]
    assert [(b.start, b.stop) for b in blocks(7, module.GPU_BLOCK_BYTES // (4 * 4), gpu)] == [(0, 4), (4, 7)]
    assert [(b.start, b.stop) for b in blocks(2, 10**12, cpu)] == [(0, 1), (1, 2)]  # a block has at least one position
    # one empty block, so that the gradient is 0 and not missing
    assert [(b.start, b.stop) for b in blocks(0, 10, cpu)] == [(0, 0)]


@pytest.mark.parametrize("wrapped", [False, True])
def test_without_positions_the_gradient_of_the_head_is_zero(wrapped: Any) -> None:
    linear = nn.Linear(4, 6)
    head = Wrapped(linear) if wrapped else linear
    hidden = torch.zeros(0, 4, requires_grad=True)
    log_probs, entropy = token_log_probs(hidden, head, torch.zeros(0, dtype=torch.int64), with_entropy=True)
    assert log_probs.shape == (0,)
    assert entropy.shape == (0,)
    log_probs.sum().backward()
    assert not linear.weight.grad.any()


def test_hooks_and_a_replaced_forward_of_the_head_are_honoured(subtests: pytest.Subtests) -> None:
    """Each doubles the logits, as the temperature 1/2 does."""
    hidden, tokens = torch.randn(5, 4), torch.arange(5)

    def replaced(head: nn.Linear) -> None:
        plain = head.forward
        head.forward = lambda inputs: 2 * plain(inputs)

    for name, change in {
        "forward hook": lambda head: head.register_forward_hook(lambda module, inputs, logits: 2 * logits),
        "forward pre-hook": lambda head: head.register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],)),
        "forward": replaced,
    }.items():
        with subtests.test(name=name):
            head = nn.Linear(4, 7, bias=False)
            expected, _ = token_log_probs(hidden, head, tokens, temperature=0.5)
            change(head)
            found, _ = token_log_probs(hidden, head, tokens)
            torch.testing.assert_close(found, expected)
            torch.testing.assert_close(*(torch.autograd.grad(x.sum(), head.weight)[0] for x in (found, expected)))


# --- the peak memory does not grow with the vocabulary; the allocator's own records are the measurement


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "with_entropy"), [("frozen", True), ("trained", False), ("wrapped", True)])
def test_a_larger_vocabulary_adds_only_the_gradient_of_its_weights(
    kind: str, with_entropy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of a tenth of the real size, with small vocabularies, so that the test is fast."""
    block = 3 * 2**20
    monkeypatch.setattr(module, "BLOCK_BYTES", block)
    monkeypatch.setattr(module, "KEPT_BYTES", block)
    hidden = torch.randn(640, 16, requires_grad=True)

    def peak(size: int) -> int:
        linear = nn.Linear(16, size, bias=False).requires_grad_(kind == "trained")
        head = Wrapped(linear) if kind == "wrapped" else linear
        tokens = torch.randint(size, (640,))

        def score() -> None:
            log_probs, entropy = token_log_probs(hidden, head, tokens, with_entropy=with_entropy)
            (log_probs if entropy is None else log_probs + entropy).sum().backward()

        return peak_extra_memory(score)

    small, large = 4_000, 20_000
    weights = 4 * 16 * (large - small) if kind == "trained" else 0
    assert peak(large) - peak(small) < weights + 2**20
    assert 4 * 640 * large > 8 * block  # all logits at once would be seen
