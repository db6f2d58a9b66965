"""A prompt and its completions in one row: the hidden states and gradients of rows alone."""

import pytest
import torch

from adapters.llm import Completion
from adapters.llm.model.causal_lm import CausalLM
from adapters.llm.model.packed_groups import can_pack, hidden_of_packs, pack_of_rows
from adapters.llm.model.shared_prompts import hidden_of_whole_rows
from tests.support.llm_models import gradients, policy_of, relative_difference, tiny_model
from tests.support.tiny_architectures import PAGE, is_of_page, model_types, tiny_of

PROMPTS = [[5, 6, 7, 8], [9], [1, 2]]
ROWS = torch.tensor([0, 1, 0, 1, 0, 2])
TOKENS = torch.arange(24).view(6, 4)


def test_the_cheapest_size_of_packs_by_hand() -> None:
    """H = 10, P = 30, T = 30. Sizes 1, 2 and 3 cost 3 * 60 * (1 + 60 / 60) = 360, 2 * 90 * (1 + 1.5) = 450 and
    120 * (1 + 2) = 360, so the smallest is taken, and for P = 31 they cost 369, 459 and 365. For P = 60 they cost
    3 * 90 * 2.5 = 675, 2 * 120 * 3 = 720 and 150 * 3.5 = 525. A prompt without tokens to share is not packed. A group of 16
    with a long prompt is one pack: 512 + 16 * 63 positions in place of 16 * 575."""
    assert pack_of_rows([30], [0, 0, 0], [30, 30, 30], 10) == ([0, 1, 2], [0, 0, 0])
    assert pack_of_rows([31], [0, 0, 0], [30, 30, 30], 10) == ([0, 0, 0], [0])
    assert pack_of_rows([60], [0, 0, 0], [30, 20, 30], 10) == ([0, 0, 0], [0])
    assert pack_of_rows([1, 60], [0, 1, 0, 1], [30] * 4, 10) == ([0, 2, 1, 2], [0, 0, 1])
    assert pack_of_rows([512], [0] * 16, [63] * 16, 1024)[1] == [0]


@pytest.mark.parametrize("family", ["qwen3", "llama", "gpt2", "granite", "cohere"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_hidden_states_are_those_of_whole_rows(family: str, attention: str) -> None:
    """Uneven groups of prompts of different lengths, and completions of 4, 1 and 0 tokens."""
    model = tiny_model(family, dtype=torch.float64)
    model.set_attn_implementation(attention)
    lm = CausalLM(model)
    assert can_pack(lm)
    for width in (4, 1, 0):
        tokens = TOKENS[:, :width]
        found = hidden_of_packs(lm, PROMPTS, ROWS, tokens)
        lengths = torch.full((6,), width)
        expected = hidden_of_whole_rows(lm, PROMPTS, ROWS, tokens, lengths)
        # transformers' eager attention has a softmax in float32
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12 if attention == "sdpa" else 1e-5)


def test_several_packs_of_a_prompt_are_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = CausalLM(tiny_model(dtype=torch.float64))
    expected = hidden_of_packs(lm, PROMPTS, ROWS, TOKENS)
    monkeypatch.setattr(CausalLM, "embedding_size", 1e-3)  # as if attention cost more than all else
    assert pack_of_rows([4], [0, 0], [3, 3], lm.embedding_size)[1] == [0, 0]
    torch.testing.assert_close(hidden_of_packs(lm, PROMPTS, ROWS, TOKENS), expected, rtol=0, atol=1e-12)


def test_what_cannot_be_packed_is_found(subtests: pytest.Subtests) -> None:
    """A bias by distance, a window inside the layers, windows in the cache, states, and attention without a mask of pairs."""
    for model_type in ("bloom", "gpt_neo", "mistral", "qwen3_5_text", "mamba"):
        with subtests.test(model_type=model_type):
            assert not can_pack(CausalLM(tiny_of(model_type)))
    model = tiny_model()
    model.set_attn_implementation("flex_attention")
    assert not can_pack(CausalLM(model))


def test_padding_beyond_the_last_position_changes_no_hidden_state() -> None:
    """The model has 12 positions: 9 + 3 tokens, and 2 + 10. Padding makes the first row longer."""
    lm = CausalLM(tiny_model("gpt2", n_positions=12))
    tokens = torch.tensor([[5, 6, 7, *[0] * 7], list(range(2, 12))])
    prompts, rows = [list(range(1, 10)), [1, 2]], torch.tensor([0, 1])
    found = hidden_of_packs(lm, prompts, rows, tokens)
    expected = hidden_of_whole_rows(lm, prompts, rows, tokens, torch.tensor([3, 10]))
    torch.testing.assert_close(found[0, :3], expected[0, :3])
    torch.testing.assert_close(found[1], expected[1])


def test_rows_that_fork_are_packed_with_their_whole_prompt() -> None:
    """Without a cache, nothing behind a prompt is shared."""
    model = tiny_model(dtype=torch.float64)
    policy = policy_of(model).train()
    rows = [Completion(token_ids=(5, 6, 7, last), text="", finish_reason="end", forks=(2,)) for last in (8, 9)]
    expected = policy.score_actions(["abc", "abc"], rows).log_probs
    plan = policy.plan_micro_batches(["abc", "abc"], rows)
    model.gradient_checkpointing_enable()
    found = policy.score_actions(["abc", "abc"], rows).log_probs
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert policy.plan_micro_batches(["abc", "abc"], rows) == plan == [[0, 1]]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_class_that_packs_has_the_gradients_of_whole_rows(subtests: pytest.Subtests) -> None:
    """Prompts of 37 and 5 tokens. The page says how many of the classes of its version of transformers pack."""
    prompts = [[token % 30 + 1 for token in range(37)], [4, 3, 2, 1, 5]]
    packed = set()
    for model_type in model_types():
        try:
            lm = CausalLM(tiny_of(model_type))
            lm.check_logits()
        except Exception:  # configs that are not tiny or that are refused
            continue
        if not (lm.shares_prompts and can_pack(lm)):
            continue
        with subtests.test(model_type=model_type):
            results = []
            for of, more in ((hidden_of_packs, ()), (hidden_of_whole_rows, (torch.full((4,), 4),))):
                hidden = of(lm, prompts, torch.tensor([0, 1, 0, 0]), TOKENS[:4] + 1, *more)
                weights = torch.linspace(-1.0, 1.0, hidden.numel()).view(hidden.shape)
                results.append((hidden, gradients(lm.plain, (hidden * weights).sum())))
            (found, slopes), (expected, expected_slopes) = results
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
            assert relative_difference(slopes, expected_slopes) < 1e-3
            packed.add(model_type)
    assert len(packed) >= 70, sorted(packed)
    if is_of_page():
        assert f"{len(packed)} of the tiny models of transformers' classes pack" in PAGE, sorted(packed)
