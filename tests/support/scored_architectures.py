"""Whether a tiny model of a class samples and scores rows beside others as it scores each row alone."""

from typing import Any

import torch

from adapters.llm import HFPolicy, SamplingConfig
from tests.support.llm_models import (
    character_tokenizer,
    encoded,
    gradients,
    relative_difference,
    row_log_probs,
)
from tests.support.tiny_architectures import tiny_of

TOKENIZER = character_tokenizer()


def assert_scores_as_alone(model_type: str, **changes: Any) -> bool:
    """Sampling and scoring beside longer and shorter prompts give the log-probs and gradients of each row alone.

    `changes` are arguments of `tiny_of`. Returns whether the three prompts were computed once for their completions.
    """
    model = tiny_of(model_type, **changes)
    policy = HFPolicy(model, TOKENIZER, sampling=SamplingConfig(max_new_tokens=6))
    states = ["12+34=46+abc", "1", "2+2+a"]
    torch.manual_seed(0)
    groups = policy.generate_actions(states, 2)
    num_rows: list[int] = []
    hook = model.get_input_embeddings().register_forward_hook(lambda module, args, output: num_rows.append(len(output)))
    scores = policy.score_groups(states, groups).log_probs
    hook.remove()
    shares = num_rows[0] == len(states)
    rows = [(state, action) for state, group in zip(states, groups, strict=True) for action in group]
    alone = [row_log_probs(model, encoded(state), action.token_ids) for state, action in rows]
    for scored, (_, action), expected in zip(scores, rows, alone, strict=True):
        torch.testing.assert_close(scored[: len(action)], expected, atol=2e-3, rtol=0)
        torch.testing.assert_close(torch.tensor(action.behaviour_log_probs), expected, atol=2e-3, rtol=0)
    weights = torch.arange(scores.numel()).sin().view(scores.shape)
    found = gradients(model, (scores * weights).sum())
    slopes = gradients(model, sum((row * weight[: len(row)]).sum() for row, weight in zip(alone, weights, strict=True)))
    assert relative_difference(found, slopes) < 1e-3
    return shares
