"""A hand-written GRPO iteration of a language model with torch and transformers, without this package.

The loop uses the techniques of `HFPolicy` and `GRPOTrainer`. Each prompt is prefilled once for sampling and once per forward
pass with gradient, for all its completions. Finished rows leave the batch. The sampler's log-probs serve as old log-probs. Rows
of similar length are forwarded together. The head is applied only to completions, in blocks. The loop omits the framework: all
prompts have the same length, settings are constants, and nothing is checked or reported.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

CLIP = 0.2
MAX_GRAD_NORM = 1.0
BLOCK = 256
"""Positions per block of the head. It was the fastest size from 64 to 512 for a vocabulary of 32,000."""
SHORTER = 0.75
"""A row that is this much shorter than the longest row of its forward pass starts the next forward pass."""


class BareLoop:
    """A training loop. Each step samples completions, computes rewards and makes one update.

    Args:
        model: A decoder without dropout and with a linear head that has a bias.
        group_size: Completions per prompt.
        max_steps: Maximum number of tokens of a completion.
        end_token_id: Token that ends a completion.
        reward: Maps N token lists to N rewards.
        learning_rate: Learning rate of AdamW, without weight decay.
        knows_its_loss: Whether to compute the gradient together with the logits, instead of computing the logits twice.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        group_size: int,
        max_steps: int,
        end_token_id: int,
        reward: Callable[[list[list[int]]], list[float]],
        learning_rate: float,
        knows_its_loss: bool = False,
    ) -> None:
        self.model = model
        self.group_size = group_size
        self.max_steps = max_steps
        self.end_token_id = end_token_id
        self.reward = reward
        self.backward = loss_at_head if knows_its_loss else loss_of_log_probs
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0, fused=True)

    def step(self, prompts: Sequence[Sequence[int]]) -> None:
        """Run one iteration on B prompts of one length."""
        token_ids = torch.tensor(prompts, device=self.model.device)
        completions, old_log_probs = self.sample(token_ids)
        self.update(token_ids, completions, old_log_probs, self.reward(completions))

    @torch.no_grad()
    def sample(self, prompts: Tensor) -> tuple[list[list[int]], Tensor]:
        """Sample a group per prompt at temperature 1. Returns the tokens, end tokens included, and their log-probs, [N, T]."""
        decoder, head = self.model.eval().base_model, self.model.lm_head
        output = decoder(input_ids=prompts, use_cache=True)
        cache = DynamicCache()
        cache.layers = [Room(layer, self.group_size, self.max_steps) for layer in output.past_key_values.layers]
        hidden = output.last_hidden_state[:, -1].repeat_interleave(self.group_size, 0)
        rows = torch.arange(len(hidden), device=hidden.device)  # rows that are still in the batch
        tokens = rows.new_zeros(len(rows), self.max_steps)
        log_probs = torch.zeros(tokens.shape, device=hidden.device)
        lengths = rows.new_full((len(rows),), self.max_steps)
        going = torch.ones_like(rows, dtype=torch.bool)
        for step in range(self.max_steps):
            probs = head(hidden).float().softmax(1)
            running = probs.cumsum(1)
            uniforms = torch.rand(len(rows), 1, device=hidden.device) * running[:, -1:]
            drawn = torch.searchsorted(running, uniforms, right=True).clamp_max(probs.shape[1] - 1)
            tokens[rows, step], log_probs[rows, step] = drawn[:, 0], probs.gather(1, drawn).log()[:, 0]
            ends = going & (drawn[:, 0] == self.end_token_id)
            lengths[rows[ends]] = step + 1
            going &= ~ends
            num_going = int(going.sum())
            if num_going == 0 or step + 1 == self.max_steps:
                break
            if num_going <= 7 / 8 * len(rows):  # removing rows copies the cache of the other rows
                cache.batch_select_indices(going.nonzero()[:, 0])
                rows, drawn, going = rows[going], drawn[going], going[going]
            hidden = decoder(input_ids=drawn, past_key_values=cache, use_cache=True).last_hidden_state[:, -1]
        completions = [row[:length] for row, length in zip(tokens.tolist(), lengths.tolist(), strict=True)]
        return completions, log_probs

    def update(
        self, prompts: Tensor, completions: list[list[int]], old_log_probs: Tensor, rewards: Sequence[float]
    ) -> None:
        """Take one optimizer step with PPO's clipped loss, averaged per row. The group's mean is the baseline."""
        self.model.train()
        device = prompts.device
        grouped = torch.tensor(rewards, device=device).view(-1, self.group_size)
        advantages = (grouped - grouped.mean(1, keepdim=True)).flatten()
        for rows in by_length([len(row) for row in completions]):
            lengths = torch.tensor([len(completions[row]) for row in rows], device=device)
            width = int(lengths.max())
            padded = [completions[row] + [0] * (width - len(completions[row])) for row in rows]
            tokens = torch.tensor(padded, device=device)
            mask = torch.arange(width, device=device) < lengths[:, None]
            of_row = torch.tensor(rows, device=device)
            hidden = self.hidden(prompts, of_row // self.group_size, tokens)
            weighed = (advantages[of_row] / lengths / len(completions))[:, None].expand_as(mask)
            old = old_log_probs[of_row, :width]
            self.backward(hidden[mask], self.model.lm_head, tokens[mask], weighed[mask], old[mask])
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def hidden(self, prompts: Tensor, prompt_of_row: Tensor, tokens: Tensor) -> Tensor:
        """Hidden states [N, T, H] before each token. The rows' prompts are computed once."""
        some, prompt_of_row = prompt_of_row.unique(return_inverse=True)
        output = self.model.base_model(input_ids=prompts[some], use_cache=True)
        first = output.last_hidden_state[:, -1:].index_select(0, prompt_of_row)
        if tokens.shape[1] == 1:
            return first
        cache = output.past_key_values
        for layer in cache.layers:
            layer.keys = layer.keys.index_select(0, prompt_of_row)
            layer.values = layer.values.index_select(0, prompt_of_row)
        rest = self.model.base_model(input_ids=tokens[:, :-1], past_key_values=cache, use_cache=True)
        return torch.cat([first, rest.last_hidden_state], 1)


class Room(DynamicLayer):
    """Preallocated keys and values of one layer, so that a new position does not copy the earlier positions."""

    def __init__(self, prompts: DynamicLayer, group_size: int, room: int) -> None:
        super().__init__()
        self.is_initialized = True
        self.length = prompts.keys.shape[2]
        self.buffers = [
            nn.functional.pad(part.repeat_interleave(group_size, 0), (0, 0, 0, room))
            for part in (prompts.keys, prompts.values)
        ]
        self.keys, self.values = (buffer[:, :, : self.length] for buffer in self.buffers)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append the keys and values of one position, and return all of them."""
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[:, :, self.length : self.length + 1] = states
        self.length += 1
        self.keys, self.values = (buffer[:, :, : self.length] for buffer in self.buffers)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows."""
        self.buffers = [buffer[indices] for buffer in self.buffers]
        self.keys, self.values = (buffer[:, :, : self.length] for buffer in self.buffers)


def by_length(lengths: list[int]) -> list[list[int]]:
    """Split rows into parts of similar length."""
    parts: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if not parts or lengths[row] < SHORTER * lengths[parts[-1][0]]:
            parts.append([])
        parts[-1].append(row)
    return [sorted(part) for part in parts]


def loss_of_log_probs(
    hidden: Tensor, head: nn.Linear, tokens: Tensor, advantages: Tensor, old_log_probs: Tensor
) -> None:
    """Backward of -sum(min(ratio A, clip(ratio) A)), through log-probs that work for any loss."""
    ratio = (HeadLogProbs.apply(hidden, head.weight, head.bias, tokens) - old_log_probs).exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).sum()
    loss.backward()


class HeadLogProbs(torch.autograd.Function):
    """log softmax(head(hidden))[token], block by block. The backward pass computes the logits again."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor, tokens: Tensor) -> Tensor:
        """Log-probs [M]."""
        log_probs = torch.empty(len(tokens), device=hidden.device)
        for block in blocks(len(tokens)):
            all_log_probs = nn.functional.linear(hidden[block], weight, bias).float().log_softmax(1)
            log_probs[block] = all_log_probs.gather(1, tokens[block, None])[:, 0]
        ctx.save_for_backward(hidden, weight, bias, tokens)
        return log_probs

    @staticmethod
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor | None, ...]:
        """d log p[token] / d logits = onehot - p."""
        hidden, weight, bias, tokens = ctx.saved_tensors
        gradients = HeadGradients(hidden, weight, bias)
        for block in blocks(len(tokens)):
            probs = nn.functional.linear(hidden[block], weight, bias).float().softmax(1)
            gradients.add(block, probs, tokens[block], slopes[block])
        return gradients.hidden, gradients.weight.to(weight.dtype), gradients.bias.to(bias.dtype), None


def loss_at_head(hidden: Tensor, head: nn.Linear, tokens: Tensor, advantages: Tensor, old_log_probs: Tensor) -> None:
    """Backward of the loss of `loss_of_log_probs`, with a hand-written derivative: each block's logits are computed once."""
    gradients = HeadGradients(hidden.detach(), head.weight.detach(), head.bias.detach())
    with torch.no_grad():
        for block in blocks(len(tokens)):
            all_log_probs = head(hidden[block]).float().log_softmax(1)
            ratio = (all_log_probs.gather(1, tokens[block, None])[:, 0] - old_log_probs[block]).exp()
            counts = torch.where(advantages[block] > 0, ratio <= 1 + CLIP, ratio >= 1 - CLIP)
            slopes = -advantages[block] * ratio * counts
            gradients.add(block, all_log_probs.exp_(), tokens[block], slopes)
    for parameter, gradient in ((head.weight, gradients.weight), (head.bias, gradients.bias)):
        gradient = gradient.to(parameter.dtype)
        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
    hidden.backward(gradients.hidden)


class HeadGradients:
    """Accumulates the gradients of hidden states, weight and bias over blocks. Weight and bias gradients are float32."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor) -> None:
        self._inputs, self._weight = hidden, weight
        self.hidden = torch.empty_like(hidden)
        self.weight = torch.zeros_like(weight, dtype=torch.float32)
        self.bias = torch.zeros_like(bias, dtype=torch.float32)

    def add(self, block: slice, probs: Tensor, tokens: Tensor, slopes: Tensor) -> None:
        """Gradient of the logits: (onehot - p) times the gradient of the log-probs. `probs` is overwritten."""
        of_logits = probs.mul_(-slopes[:, None]).scatter_add_(1, tokens[:, None], slopes[:, None])
        self.bias += of_logits.sum(0)
        of_logits = of_logits.to(self._weight.dtype)
        torch.mm(of_logits, self._weight, out=self.hidden[block])
        if self.weight.dtype == of_logits.dtype:
            self.weight.addmm_(of_logits.t(), self._inputs[block])
        else:
            self.weight += of_logits.t() @ self._inputs[block]


def blocks(count: int) -> list[slice]:
    """Consecutive slices of `range(count)` with at most `BLOCK` positions."""
    return [slice(begin, min(begin + BLOCK, count)) for begin in range(0, count, BLOCK)]
