"""Hidden states of completions in packs: a prompt and several of its completions in one row, for layers that store no cache.

With gradient checkpointing, layers run again in the backward pass and store no keys and values. In a pack, the prompt is still
computed once for its completions: each token has the position that it has in its own row, and the mask lets it attend to the
prompt and to the earlier tokens of its own completion only. A pack of g completions has P + g T positions, and the attention of
all pairs of them, so very long completions are not packed.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from grpo.errors import ContractError

from .causal_lm import CausalLM
from .token_log_probs import token_log_probs

MASKED = ("sdpa", "eager")
"""Implementations of attention that take a mask of all pairs."""


def pack_of_rows(
    prompt_lengths: Sequence[int], prompt_of_row: Sequence[int], lengths: Sequence[int], hidden_size: int
) -> tuple[list[int], list[int]]:
    """Divide the rows of each prompt, in order, into packs of the cheapest size.

    A pack of L positions costs L (1 + L / 6H) for the hidden size H: linear layers take 24 H^2 operations per position, and
    attention 4 H per pair of positions.

    Returns:
        The pack of each row, and the prompt of each pack.
    """
    rows_of: dict[int, list[int]] = {}
    for row, prompt in enumerate(prompt_of_row):
        rows_of.setdefault(prompt, []).append(row)
    packs = [0] * len(prompt_of_row)
    prompts: list[int] = []
    for prompt, rows in rows_of.items():
        width = max(lengths[row] for row in rows)

        def cost(size: int, count: int = len(rows), begin: int = prompt_lengths[prompt], width: int = width) -> float:
            positions = begin + size * width
            return -(-count // size) * positions * (1 + positions / (6 * hidden_size))

        size = min(range(1, len(rows) + 1), key=cost)
        for begin in range(0, len(rows), size):
            for row in rows[begin : begin + size]:
                packs[row] = len(prompts)
            prompts.append(prompt)
    return packs, prompts


def hidden_of_packs(
    lm: CausalLM, prompts: Sequence[Sequence[int]], prompt_of_row: Int[Tensor, " N"], completions: Int[Tensor, "N T"]
) -> Float[Tensor, "N T H"]:
    """Hidden states that predict the completions' tokens, by one forward pass without a cache."""
    width = max(completions.shape[1] - 1, 0)  # the last token of a completion predicts nothing
    packs, prompt_of_pack = pack_of_rows(
        [len(prompt) for prompt in prompts], prompt_of_row.tolist(), [width] * len(completions), lm.embedding_size
    )
    pack, seen = torch.tensor(packs), [0] * len(prompt_of_pack)
    place = torch.zeros(len(packs), dtype=torch.int64)  # of each row in its pack
    for row, own in enumerate(packs):
        place[row], seen[own] = seen[own], seen[own] + 1
    given = pad_sequence([torch.tensor(prompts[prompt]) for prompt in prompt_of_pack], batch_first=True)
    lengths = torch.tensor([len(prompts[prompt]) for prompt in prompt_of_pack])
    begin, num_places = given.shape[1], max(seen)
    own_tokens = torch.zeros(len(prompt_of_pack), num_places, width, dtype=torch.int64)
    own_tokens[pack, place] = completions[:, :width]
    own_positions = (lengths[:, None, None] + torch.arange(width)).expand_as(own_tokens)
    positions = torch.cat([torch.arange(begin).expand_as(given), own_positions.flatten(1)], 1)
    if lm.max_positions is not None:
        positions = positions.clamp_max(lm.max_positions - 1)  # padding may exceed the last position
    hidden = lm.decoder(
        input_ids=torch.cat([given, own_tokens.flatten(1)], 1).to(lm.device),
        position_ids=positions.to(lm.device),
        attention_mask=_mask(lm, lengths, begin, num_places, width),
        use_cache=False,
    ).last_hidden_state
    pack, place = pack.to(lm.device), place.to(lm.device)
    first = hidden[pack, lengths.to(lm.device)[pack] - 1]
    rest = hidden[:, begin:].unflatten(1, (num_places, width))[pack, place]
    return torch.cat([first[:, None], rest], 1)[:, : completions.shape[1]]


def can_pack(lm: CausalLM) -> bool:
    """Whether packed rows have the log-probs of rows alone, from a trial: biases by distance, for example, ignore positions.

    Models with windows cannot pack, because a trial would have to be longer than the window, and models with pictures neither,
    because they make positions and masks of their own.
    """
    windows = [value for name, value in lm.config.to_dict().items() if "window" in name and "layers" not in name]
    if (
        lm.reads_pictures
        or not lm.has_plain_cache
        or any(windows)
        or lm.plain.config._attn_implementation not in MASKED
    ):
        return False
    limit = lm.max_positions or 1000
    prompts = [
        [token % lm.vocabulary_size for token in range(1, 1 + min(length, max(limit - 3, 1)))] for length in (9, 2)
    ]
    rows, tokens = torch.tensor([0, 0, 1]), torch.arange(9).view(3, 3) % lm.vocabulary_size
    try:
        with lm.on_trial():
            hidden = hidden_of_packs(lm, prompts, rows, tokens)
            packed, _ = token_log_probs(hidden.flatten(0, 1), lm.head, tokens.flatten().to(lm.device))
            pairs = zip(rows.tolist(), tokens.tolist(), strict=True)
            alone = torch.cat([lm.log_probs_alone(prompts[prompt], own) for prompt, own in pairs])
    except ContractError:
        return False
    return bool((packed - alone).abs().max() < (0.01 if lm.computes_in_float32 else 0.5))


def _mask(lm: CausalLM, lengths: Int[Tensor, " K"], begin: int, num_places: int, width: int) -> Tensor:
    """Which positions each position of K packs attends to, [K, 1, L, L]."""
    causal = torch.ones(
        begin + num_places * width, begin + num_places * width, dtype=torch.bool, device=lm.device
    ).tril()
    part = torch.cat([torch.zeros(begin), torch.arange(1, num_places + 1).repeat_interleave(width)]).to(lm.device)
    is_given = torch.arange(len(part), device=lm.device) < lengths.to(lm.device)[:, None]
    of_prompt = is_given & (part == 0)
    allowed: Bool[Tensor, "K L L"] = causal & ((part[:, None] == part) & (part > 0) | of_prompt[:, None])
    if lm.plain.config._attn_implementation == "sdpa":
        return allowed[:, None]
    zeros = torch.zeros((), dtype=lm.plain.dtype, device=lm.device)
    return zeros.where(allowed[:, None], torch.finfo(zeros.dtype).min)
