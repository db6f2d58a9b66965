"""Text encoders: hashed features equal hand-worked ones, are the same in every process, and are cached."""

import copy
import pickle
from collections.abc import Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from adapters.tools.text.encoders import CachedEncoder, HashingEncoder, with_own_feature
from examples.tool_workbench import workbench_catalogue
from grpo.errors import ConfigError, ContractError
from tests.support.threads import run_together

ROOT = Path(__file__).resolve().parents[5]
TEXTS = ["sort these items", "what is 17 percent of 230?", "größer als zwei"]


def by_hand(features: dict[str, float], num_features: int) -> Tensor:
    """Weights of features as the vector of length 1 that the docstring describes."""
    vector = torch.zeros(num_features)
    for feature, weight in features.items():
        number = int.from_bytes(blake2b(feature.encode(), digest_size=6).digest(), "little")
        vector[(number >> 1) % num_features] += weight if number % 2 else -weight
    return vector / vector.norm()


def test_features_of_two_words_equal_hand_worked_values() -> None:
    """ "Add 12": both words, their pieces of four letters (weight .3 in all: the squares add up to .09), and the pair."""
    three, two_pieces = 0.3 / 2**0.5, 0.3
    features = {
        "word add": 1.0, "piece <add": three, "piece add>": three,
        "word 0": 1.0, "piece <0>": two_pieces,
        "pair add 0": 1.0,
    }  # fmt: skip
    torch.testing.assert_close(HashingEncoder(64)(["Add 12"])[0], by_hand(features, 64))
    assert torch.equal(HashingEncoder(64)(["Add 12"]), HashingEncoder(64)(["add, 345!"])), "a number is a number"


def test_stop_words_count_only_in_pairs() -> None:
    features = {"word add": 2.0, "piece <add": 2 * 0.3 / 2**0.5, "piece add>": 2 * 0.3 / 2**0.5}
    pairs = {"pair add to": 1.0, "pair to add": 1.0}
    torch.testing.assert_close(HashingEncoder(512)(["add to add"])[0], by_hand(features | pairs, 512))


def test_vectors_have_length_1_and_texts_without_features_are_0() -> None:
    vectors = HashingEncoder()([*TEXTS, "", "?!", "the"])
    assert vectors.dtype == torch.float32
    assert vectors.shape == (6, 1024)
    torch.testing.assert_close(vectors.norm(dim=1), torch.tensor([1.0, 1, 1, 0, 0, 0]))
    assert bool(vectors.isfinite().all())
    assert HashingEncoder()([]).shape == (0, 1024)


def test_cosines_of_texts_without_a_common_feature_are_near_zero() -> None:
    """Only collisions remain: over 1024 places with random signs they have a mean of 0 and a deviation of 1/32 at most."""
    unrelated = ["convert miles", "sort items", "weekday", "uppercase", "checksum", "factor", "roman numeral", "join"]
    cosines = HashingEncoder()(unrelated) @ HashingEncoder()(unrelated).T
    cosines = cosines[~torch.eye(8, dtype=torch.bool)]
    assert float(cosines.abs().max()) < 0.15
    assert abs(float(cosines.mean())) < 0.02


def test_forms_of_a_word_are_similar_and_word_order_is_distinguished() -> None:
    """ "converting" has 9 pieces, "convert" 6, and 5 in common: 5 (.3 / 3) (.3 / sqrt 6) / (1 + .09)."""
    converting, convert = HashingEncoder(2**16)(["converting", "convert"])
    assert float(converting @ convert) == pytest.approx(5 * 0.3 / 3 * 0.3 / 6**0.5 / 1.09, abs=1e-6)
    one, other = HashingEncoder()(["mile to foot", "foot to mile"])
    assert float(one @ other) < 0.7


def test_the_tools_of_the_workbench_have_distinct_vectors() -> None:
    vectors = HashingEncoder()([tool.text for tool in workbench_catalogue().values()])
    cosines = vectors @ vectors.T - torch.eye(len(vectors))
    assert float(cosines.max()) < 0.8


def test_a_size_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="HashingEncoder: num_features must be an integer >= 1; got int 0"):
        HashingEncoder(0)


def test_own_features_equal_hand_worked_vectors() -> None:
    """e = [1, 0, 0, ...]: (e + 3 u) / |e + 3 u|, u = sign at one place; where that place is 0, e's own, they add up."""
    for text in ("mile from unit", "mile to unit", "a", "b", "c", "d"):
        number = int.from_bytes(blake2b(f"text {text}".encode(), digest_size=6).digest(), "little")
        place, sign = (number >> 1) % 4, 1.0 if number % 2 else -1.0
        wanted = [1.0, 0.0, 0.0, 0.0]
        wanted[place] += 3 * sign
        length = (10**0.5) if place else abs(1 + 3 * sign)
        found = with_own_feature([text], torch.eye(4)[:1], 3.0)
        torch.testing.assert_close(found, torch.tensor([wanted]) / length)


def test_own_features_distinguish_values_with_the_same_words() -> None:
    same = torch.eye(64)[:1].expand(2, -1)
    one, other = with_own_feature(["mile from unit", "mile to unit"], same, 3.0)
    assert abs(float(one @ other)) == pytest.approx(0.1, abs=1e-6), "1 / (1 + 9): only e is common"
    assert torch.equal(same[0], torch.eye(64)[0]), "what was given stays as it was"


def test_a_lone_surrogate_gets_an_own_feature() -> None:
    """JSON may hold a lone surrogate as a value, which UTF-8 does not."""
    vectors = with_own_feature(["\ud83d", "\ude00"], HashingEncoder(64)(["\ud83d", "\ude00"]), 3.0)
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(2))
    assert not torch.equal(vectors[0], vectors[1])


class Counting:
    """An encoder that records the texts it encodes. A text's vector has length 5, and signs by its letter."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def __call__(self, texts: Sequence[str]) -> list[list[float]]:
        self.asked.append(list(texts))
        return [[3.0 if ord(text[0]) & 1 else -3.0, 4.0 if ord(text[0]) & 2 else -4.0] for text in texts]


def test_a_cached_encoder_encodes_each_text_once() -> None:
    encoder = Counting()
    cached = CachedEncoder(encoder)
    a, bb, ccc = torch.tensor([[0.6, -0.8], [-0.6, 0.8], [0.6, 0.8]])  # 97 = 0b01, 98 = 0b10, 99 = 0b11 at the end
    torch.testing.assert_close(cached(["a", "bb", "a"]), torch.stack([a, bb, a]))
    torch.testing.assert_close(cached(["bb", "ccc", "a"]), torch.stack([bb, ccc, a]))
    torch.testing.assert_close(cached(["a"]), torch.stack([a]))
    assert encoder.asked == [["a", "bb"], ["ccc"]]


def test_a_cached_encoder_gives_no_vectors_for_no_texts() -> None:
    """The model is not called without texts."""
    encoder = Counting()
    cached = CachedEncoder(encoder)
    assert cached([]).shape == (0, 0)
    cached(["a"])
    assert cached([]).shape == (0, 2)
    assert cached([]).dtype == torch.float32
    assert encoder.asked == [["a"]]


def test_a_full_cached_encoder_forgets_the_older_half() -> None:
    encoder = Counting()
    cached = CachedEncoder(encoder, capacity=4)
    for text in "abcd":
        cached([text])
    cached(["e", "a"])  # a is forgotten only after this
    del encoder.asked[:]
    cached(["d", "e"])
    assert encoder.asked == []
    cached(["c", "e", "a"])
    assert encoder.asked == [["c", "a"]]


def test_a_cached_encoder_handles_more_texts_at_once_than_its_capacity() -> None:
    encoder = Counting()
    cached = CachedEncoder(encoder, capacity=2)
    cached(["d"])
    assert cached(["a", "b", "c", "d"]).sign().tolist() == [[1, -1], [-1, 1], [1, 1], [-1, -1]]
    cached(["b", "c"])
    assert encoder.asked[:2] == [["d"], ["a", "b", "c"]]
    assert len(encoder.asked) <= 3


def test_an_encoder_may_return_lists_arrays_or_tensors(subtests: pytest.Subtests) -> None:
    for answer in (
        [[3.0, 4.0], [0.0, 0.0]],
        np.array([[3.0, 4.0], [0.0, 0.0]]),
        torch.tensor([[3.0, 4.0], [0.0, 0.0]], dtype=torch.float64, requires_grad=True),
        torch.tensor([[3.0, 4.0], [0.0, 0.0]], dtype=torch.bfloat16),
        [np.array([3.0, 4.0]), np.array([0.0, 0.0])],
    ):
        with subtests.test(type(answer).__name__):
            vectors = CachedEncoder(lambda texts, answer=answer: answer)(["a", "b"])
            assert vectors.dtype == torch.float32
            assert not vectors.requires_grad
            torch.testing.assert_close(vectors, torch.tensor([[0.6, 0.8], [0.0, 0.0]]))


def test_the_length_of_an_encoders_vectors_does_not_matter() -> None:
    """A policy multiplies vectors: with vectors of length 10, an untrained policy would always take the nearest tool."""
    texts = ["convert miles", "sort words", ""]
    vectors = HashingEncoder(64)(texts)
    for scale in (0.1, 1.0, 10.0):
        torch.testing.assert_close(CachedEncoder(lambda texts, scale=scale: scale * vectors)(texts), vectors)


def test_vectors_of_another_length_than_before_are_refused() -> None:
    sizes = iter((2, 3))
    cached = CachedEncoder(lambda texts: torch.ones(len(texts), next(sizes)))
    cached(["a"])
    with pytest.raises(ContractError, match="always return vectors of the same length; got 3 after 2"):
        cached(["b"])


def test_encoder_outputs_that_are_no_vectors_are_refused(subtests: pytest.Subtests) -> None:
    for answer, got in (
        (torch.zeros(1, 4), r"got \[1, 4\]\."),
        (torch.zeros(2), r"got \[2\]\."),
        (torch.zeros(2, 1, 4), r"got \[2, 1, 4\]\."),
        ([[0.0, 1.0], [float("nan"), 1.0]], r"got \[2, 2\] with NaN or infinity\."),
        (np.array([[np.inf], [0.0]]), r"got \[2, 1\] with NaN or infinity\."),
        (torch.zeros(2, 0), r"got \[2, 0\]\."),
        ([[0.0], [1.0, 2.0]], r"got a list of 2 list\. Use a list, array or tensor of numbers"),
        (None, r"got NoneType None\. Use a list"),
    ):
        with (
            subtests.test(got),
            pytest.raises(
                ContractError, match=rf"The encoder must return finite vectors \[N, F\] for N = 2 texts; {got}"
            ),
        ):
            CachedEncoder(lambda texts, answer=answer: answer)(["a", "b"])


def test_a_refused_encoder_output_is_not_cached() -> None:
    answers = [torch.tensor([[float("nan")]]), torch.tensor([[2.0]])]
    cached = CachedEncoder(lambda texts: answers.pop(0))
    with pytest.raises(ContractError):
        cached(["a"])
    assert cached(["a"]).tolist() == [[1.0]]


# Memory and threads


def test_a_cached_encoder_frees_the_memory_of_forgotten_texts() -> None:
    """A cached row that is a view would keep its whole batch in memory."""
    cached = CachedEncoder(HashingEncoder(64), capacity=10)
    cached([f"text {number}" for number in range(1000)])
    kept = {
        vector.untyped_storage().data_ptr(): vector.untyped_storage().nbytes()
        for vector in cached._cache._known.values()
    }
    assert list(kept.values()) == [64 * 4] * 5


def test_threads_that_evict_each_others_texts_get_correct_vectors() -> None:
    encoder = HashingEncoder(16)
    cached = CachedEncoder(encoder, capacity=8)
    texts = [f"w{letter}" for letter in "abcdefghijklmnop"]
    expected = dict(zip(texts, CachedEncoder(encoder)(texts), strict=True))

    def encode(seed: int) -> None:
        for number in range(300):
            mine = [texts[(seed * number + 5 * place) % 16] for place in range(3)]
            assert torch.equal(cached(mine), torch.stack([expected[text] for text in mine]))
            if number % 50 == 0:
                copy.deepcopy(cached)

    run_together(*(partial(encode, seed) for seed in (1, 3, 7, 11)))
    assert 4 <= len(cached._cache._known) <= 8


def test_a_copied_cached_encoder_keeps_its_cache_and_is_independent() -> None:
    cached = CachedEncoder(HashingEncoder(16))
    cached(["a"])
    for other in (copy.deepcopy(cached), pickle.loads(pickle.dumps(cached))):
        assert torch.equal(other(["a", "b"]), cached(["a", "b"]))
        other(["only here"])
    assert set(cached._cache._known) == {"a", "b"}
