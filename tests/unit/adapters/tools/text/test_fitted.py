"""Encoders that are fitted to texts: their formula by hand, their determinism, and encoders side by side."""

import math

import numpy as np
import pytest
import torch

from adapters.tools import FittedEncoder, HashingEncoder, JoinedEncoder
from grpo.errors import ConfigError

TEXTS = [
    "convert miles to feet", "how many feet are two miles", "metres in feet, please", "convert yards to miles",
    "play a song by Bach", "a song, and loud", "stop the song", "which song is playing", "sort these names",
    "order the names of my friends", "names in alphabetical order",
]  # fmt: skip


def unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_vectors_equal_the_documented_formula() -> None:
    """Written out with numpy's exact singular value decomposition."""
    hashed = HashingEncoder(512)(TEXTS).numpy().astype(np.float64)
    idf = np.log((1 + len(TEXTS)) / (1 + (hashed != 0).sum(0))) + 1
    directions = np.linalg.svd(unit(hashed * idf), full_matrices=False)[2][:4]
    signs = np.sign(directions[np.arange(4), np.abs(directions).argmax(1)])
    new = ["feet to miles", "the song of the friends"]
    expected = unit((HashingEncoder(512)(new).numpy() * idf) @ (directions * signs[:, None]).T)
    found = FittedEncoder(4, num_hashed=512).fit(TEXTS)(new)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-4)


def test_the_projection_of_many_texts_is_near_the_exact_one() -> None:
    """440 texts are more than the method tries directions. V V' is the same for all signs and orders of the directions."""
    texts = [f"{text} {first}{second}" for text in TEXTS for first in "abcdefghij" for second in "wxyz"]
    encoder = FittedEncoder(4, num_hashed=512).fit(texts)
    rows = unit((HashingEncoder(512)(texts) * encoder.idf).numpy().astype(np.float64))
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
    for listed in (lambda texts: [*one(texts)], lambda texts: [*one(texts).numpy()]):
        torch.testing.assert_close(JoinedEncoder(listed)(TEXTS), one(TEXTS))


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
