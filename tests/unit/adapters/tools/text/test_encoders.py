"""Text encoders: hashed, cached, fitted and joined vectors equal hand-worked ones."""

import copy
import math
from collections.abc import Sequence
from functools import partial
from hashlib import blake2b

import numpy as np
import pytest
import torch
from torch import Tensor

from adapters.tools import FittedEncoder, HashingEncoder, JoinedEncoder
from adapters.tools.text.encoders import CachedEncoder, with_own_feature
from grpo.errors import ConfigError, ContractError
from tests.support.threads import run_together

TEXTS = [
    "convert miles to feet", "how many feet are two miles", "metres in feet, please", "convert yards to miles",
    "play a song by Bach", "a song, and loud", "stop the song", "which song is playing", "sort these names",
    "order the names of my friends", "names in alphabetical order",
]  # fmt: skip


def hashed(text: str) -> tuple[int, float]:
    """A number, and the sign that belongs to it."""
    number = int.from_bytes(blake2b(text.encode(errors="surrogatepass"), digest_size=6).digest(), "little")
    return number >> 1, 1.0 if number % 2 else -1.0


def by_hand(features: dict[str, float], num_features: int) -> Tensor:
    """Weights of features as the vector of length 1 that the docstring describes."""
    vector = torch.zeros(num_features)
    for feature, weight in features.items():
        number, sign = hashed(feature)
        vector[number % num_features] += sign * weight
    return vector / vector.norm()


def test_features_of_words_equal_hand_worked_values() -> None:
    """ "Add 12": both words, their pieces of four letters (weight .3 in all: the squares add up to .09), and the pair.
    Stop words count only in pairs."""
    two = 0.3 / 2**0.5
    of_words, of_pieces = {"word add": 1.0, "word 0": 1.0}, {"piece <add": two, "piece add>": two, "piece <0>": 0.3}
    features = of_words | of_pieces | {"pair add 0": 1.0}
    torch.testing.assert_close(HashingEncoder(64)(["Add 12"])[0], by_hand(features, 64))
    assert torch.equal(HashingEncoder(64)(["Add 12"]), HashingEncoder(64)(["add, 345!"])), "a number is a number"
    features = {"word add": 2.0, "piece <add": 2 * two, "piece add>": 2 * two, "pair add to": 1.0, "pair to add": 1.0}
    torch.testing.assert_close(HashingEncoder(512)(["add to add"])[0], by_hand(features, 512))


def test_vectors_have_length_1_and_texts_without_features_are_0() -> None:
    vectors = HashingEncoder()(["sort these items", "17 percent of 230?", "größer als", "", "?!", "the"])
    assert (vectors.dtype, vectors.shape) == (torch.float32, (6, 1024))
    torch.testing.assert_close(vectors.norm(dim=1), torch.tensor([1.0, 1, 1, 0, 0, 0]))
    assert bool(vectors.isfinite().all())
    assert HashingEncoder()([]).shape == (0, 1024)
    with pytest.raises(ConfigError, match="HashingEncoder: num_features must be an integer >= 1; got int 0"):
        HashingEncoder(0)


def test_own_features_equal_hand_worked_vectors() -> None:
    """e = [1, 0, 0, ...]: (e + 3 u) / |e + 3 u|, u = sign at one place; where that place is 0, e's own, they add up. JSON may
    hold a lone surrogate as a value, which UTF-8 does not."""
    given = torch.eye(4)[:1]
    for text in ("mile from unit", "mile to unit", "a", "b", "c", "d", "\ud83d"):
        number, sign = hashed(f"text {text}")
        wanted = torch.eye(4)[:1] + 3 * sign * torch.eye(4)[number % 4]
        length = 10**0.5 if number % 4 else abs(1 + 3 * sign)
        torch.testing.assert_close(with_own_feature([text], given, 3.0), wanted / length)
    assert torch.equal(given, torch.eye(4)[:1]), "what was given stays as it was"


class Counting:
    """An encoder that records the texts it encodes. A text's vector has length 5, and signs by its letter."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def __call__(self, texts: Sequence[str]) -> list[list[float]]:
        self.asked.append(list(texts))
        return [[3.0 if ord(text[0]) & 1 else -3.0, 4.0 if ord(text[0]) & 2 else -4.0] for text in texts]


def test_a_cached_encoder_encodes_each_text_once() -> None:
    """The model is not called without texts."""
    encoder = Counting()
    cached = CachedEncoder(encoder)
    a, bb, ccc = torch.tensor([[0.6, -0.8], [-0.6, 0.8], [0.6, 0.8]])  # 97 = 0b01, 98 = 0b10, 99 = 0b11 at the end
    assert cached([]).shape == (0, 0)
    torch.testing.assert_close(cached(["a", "bb", "a"]), torch.stack([a, bb, a]))
    torch.testing.assert_close(cached(["bb", "ccc", "a"]), torch.stack([bb, ccc, a]))
    torch.testing.assert_close(cached(["a"]), torch.stack([a]))
    assert (cached([]).shape, cached([]).dtype) == ((0, 2), torch.float32)
    assert encoder.asked == [["a", "bb"], ["ccc"]]


def test_a_full_cached_encoder_forgets_the_older_half_and_takes_more_texts_at_once_than_its_capacity() -> None:
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
    encoder = Counting()
    cached = CachedEncoder(encoder, capacity=2)
    cached(["d"])
    assert cached(["a", "b", "c", "d"]).sign().tolist() == [[1, -1], [-1, 1], [1, 1], [-1, -1]]
    cached(["b", "c"])
    assert encoder.asked[:2] == [["d"], ["a", "b", "c"]]
    assert len(encoder.asked) <= 3


def test_an_encoder_may_return_lists_arrays_or_tensors(subtests: pytest.Subtests) -> None:
    rows = [[3.0, 4.0], [0.0, 0.0]]
    for answer in (
        rows, np.array(rows), [np.array(row) for row in rows], torch.tensor(rows, dtype=torch.bfloat16),
        torch.tensor(rows, dtype=torch.float64, requires_grad=True),
    ):  # fmt: skip
        with subtests.test(type(answer).__name__):
            vectors = CachedEncoder(lambda texts, answer=answer: answer)(["a", "b"])
            assert vectors.dtype == torch.float32
            assert not vectors.requires_grad
            torch.testing.assert_close(vectors, torch.tensor([[0.6, 0.8], [0.0, 0.0]]))
    for scale in (0.1, 1.0, 10.0):  # a policy multiplies vectors, so a larger length would weigh more
        scaled = CachedEncoder(lambda texts, scale=scale: scale * torch.tensor(rows))(["a", "b"])
        torch.testing.assert_close(scaled, torch.tensor([[0.6, 0.8], [0.0, 0.0]]))


def test_encoder_outputs_that_are_no_vectors_are_refused(subtests: pytest.Subtests) -> None:
    for answer, got in (
        (torch.zeros(1, 4), r"got \[1, 4\]\."), (torch.zeros(2), r"got \[2\]\."), (torch.zeros(2, 1, 4), r"got \[2, 1, 4\]\."),
        ([[0.0, 1.0], [float("nan"), 1.0]], r"got \[2, 2\] with NaN or infinity\."),
        (np.array([[np.inf], [0.0]]), r"got \[2, 1\] with NaN or infinity\."), (torch.zeros(2, 0), r"got \[2, 0\]\."),
        ([[0.0], [1.0, 2.0]], r"got a list of 2 list\. Use a list, array or tensor of numbers"),
        (None, r"got NoneType None\. Use a list"),
    ):  # fmt: skip
        message = rf"The encoder must return finite vectors \[N, F\] for N = 2 texts; {got}"
        with subtests.test(got), pytest.raises(ContractError, match=message):
            CachedEncoder(lambda texts, answer=answer: answer)(["a", "b"])
    answers = [torch.tensor([[float("nan")]]), torch.tensor([[2.0]]), torch.ones(1, 3)]
    cached = CachedEncoder(lambda texts: answers.pop(0))
    with pytest.raises(ContractError, match="finite"):
        cached(["a"])
    assert cached(["a"]).tolist() == [[1.0]], "what was refused is not cached"
    with pytest.raises(ContractError, match="always return vectors of the same length; got 3 after 1"):
        cached(["b"])


def test_a_cached_encoder_frees_the_memory_of_forgotten_texts() -> None:
    """A cached row that is a view would keep its whole batch in memory."""
    cached = CachedEncoder(HashingEncoder(64), capacity=10)
    cached([f"text {number}" for number in range(1000)])
    storages = [vector.untyped_storage() for vector in cached._cache._known.values()]
    assert len({storage.data_ptr() for storage in storages}) == 5
    assert [storage.nbytes() for storage in storages] == [64 * 4] * 5


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


# --- fitted and joined encoders
def normed(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_vectors_equal_the_documented_formula() -> None:
    """Written out with numpy's exact singular value decomposition."""
    hashed = HashingEncoder(512)(TEXTS).numpy().astype(np.float64)
    idf = np.log((1 + len(TEXTS)) / (1 + (hashed != 0).sum(0))) + 1
    directions = np.linalg.svd(normed(hashed * idf), full_matrices=False)[2][:4]
    signs = np.sign(directions[np.arange(4), np.abs(directions).argmax(1)])
    new = ["feet to miles", "the song of the friends"]
    expected = normed((HashingEncoder(512)(new).numpy() * idf) @ (directions * signs[:, None]).T)
    found = FittedEncoder(4, num_hashed=512).fit(TEXTS)(new)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-4)


def test_the_projection_of_many_texts_is_near_the_exact_one() -> None:
    """440 texts are more than the method tries directions. V V' is the same for all signs and orders of the directions."""
    texts = [f"{text} {first}{second}" for text in TEXTS for first in "abcdefghij" for second in "wxyz"]
    encoder = FittedEncoder(4, num_hashed=512).fit(texts)
    rows = normed((HashingEncoder(512)(texts) * encoder.idf).numpy().astype(np.float64))
    exact = np.linalg.svd(rows, full_matrices=False)[2][:4].T
    found = encoder.projection.numpy()
    np.testing.assert_allclose(found @ found.T, exact @ exact.T, atol=1e-4)


def test_weights_count_all_of_many_texts() -> None:
    """All numbers are one word, so 1,030 different texts have the same features: idf = log(1031 / 1031) + 1 = 1.

    Features that no text has: log(1031 / 1) + 1.
    """
    encoder = FittedEncoder(1, num_hashed=512).fit([f"show {number}" for number in range(1030)])
    is_shown = HashingEncoder(512)(["show 1"])[0] != 0
    torch.testing.assert_close(encoder.idf, torch.where(is_shown, 1.0, math.log(1031) + 1), rtol=0, atol=1e-5)


def test_fitting_is_deterministic_and_draws_from_no_other_generator() -> None:
    torch.manual_seed(3)
    first = FittedEncoder(4).fit(TEXTS)
    drawn = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(1), drawn)
    second = FittedEncoder(4).fit([*TEXTS, *TEXTS])
    assert torch.equal(first(TEXTS), second(TEXTS)), "repeated texts count once"


def test_the_length_is_at_most_the_number_of_texts() -> None:
    assert FittedEncoder().fit(TEXTS)(["a"]).shape == (1, len(TEXTS))
    assert FittedEncoder(4).fit(TEXTS)(["a"]).shape == (1, 4)
    assert (FittedEncoder().num_features, FittedEncoder().hashing.num_features) == (512, 8192)


def test_many_texts_are_encoded_as_few_are() -> None:
    encoder = FittedEncoder(4).fit([f"{text} {i}a" for i in range(120) for text in TEXTS])
    many = [f"{text} {i}" for i in range(100) for text in TEXTS]
    torch.testing.assert_close(encoder(many)[-3:], encoder(many[-3:]), rtol=0, atol=1e-5)


def test_what_cannot_be_fitted_or_joined_is_refused(subtests: pytest.Subtests) -> None:
    texts = r"needs a list of texts; got .*Pass the requests and the texts of the tools"
    for make, message in (
        (lambda: FittedEncoder()(TEXTS), "must be fitted before it encodes"),
        (lambda: FittedEncoder().fit([]), texts), (lambda: FittedEncoder().fit("one text"), texts),
        (lambda: FittedEncoder(2).fit(TEXTS).fit(TEXTS), "is fitted already, and policies may use it"),
        (lambda: FittedEncoder(0), "must be an integer >= 1"), (lambda: FittedEncoder(num_hashed=0), "must be an integer >= 1"),
        (lambda: JoinedEncoder(), "needs encoders, one argument each"),
        (lambda: JoinedEncoder([HashingEncoder(4)]), "needs encoders, one argument each"),
        (lambda: JoinedEncoder(HashingEncoder(4), None), "needs encoders, one argument each"),
    ):  # fmt: skip
        with subtests.test(message), pytest.raises(ConfigError, match=message):
            make()


def test_a_restored_encoder_equals_the_fitted_one() -> None:
    fitted = FittedEncoder(4, num_hashed=512).fit(TEXTS)
    new = FittedEncoder()
    restored = new.restored(fitted.fitted())
    assert torch.equal(restored(TEXTS), fitted(TEXTS))
    assert restored.num_features == 4
    assert new.idf is None, "the encoder itself does not change"
    assert torch.equal(restored.restored(new.fitted())(TEXTS), fitted(TEXTS)), "nothing fitted, nothing restored"


def test_cosines_of_joined_encoders_are_means() -> None:
    """An encoder may return lists of vectors, of any length."""
    one, other = HashingEncoder(64), FittedEncoder(4).fit(TEXTS)
    joined = JoinedEncoder(one, lambda texts: other(texts).tolist())(TEXTS)
    assert joined.shape == (len(TEXTS), 68)
    torch.testing.assert_close(joined @ joined.T, (one(TEXTS) @ one(TEXTS).T + other(TEXTS) @ other(TEXTS).T) / 2)
    torch.testing.assert_close(JoinedEncoder(lambda texts: 7 * one(texts), other)(TEXTS), joined)


def test_joined_encoders_restore_what_each_has_fitted() -> None:
    """An encoder that was not fitted takes over nothing."""
    first, second = FittedEncoder(3).fit(TEXTS), FittedEncoder(2).fit(TEXTS[:5])
    fitted = JoinedEncoder(first, HashingEncoder(16), second)
    new = JoinedEncoder(FittedEncoder(), HashingEncoder(16), FittedEncoder())
    assert torch.equal(new.restored(fitted.fitted())(TEXTS), fitted(TEXTS))
    assert new.fitted() == {}
    saved = JoinedEncoder(FittedEncoder(), second).fitted()
    assert set(saved) == {"1.idf", "1.projection"}
    restored = JoinedEncoder(first, FittedEncoder()).restored(saved)
    assert torch.equal(restored(TEXTS), JoinedEncoder(first, second)(TEXTS))
