"""Text encoders: requests, tools and parameter values as vectors."""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b
from itertools import islice, pairwise
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from grpo.arguments import as_tensor, require_integers
from grpo.errors import ContractError

T = TypeVar("T")

Encoder: TypeAlias = Callable[[Sequence[str]], Any]
"""A function from N texts to N vectors [N, F] (a tensor, an array or lists): `HashingEncoder`, or a model's `encode`. A policy
scales the vectors to length 1."""

_STOP_WORDS = """
a about above after again all also am an and another any anything are as at be been before being below between both but by
can could did do does doing done down during each either else every everything few for from further get gets getting give
given gives giving had has have having he her here hers him his how i if in into is it its itself just let like make makes
making may me might mine more most much must my need needs neither no nor not nothing now of off on once one ones only or
other others our out over own please put same shall she should so some something such than that the their them then there
these they this those through to too under until up us use used using very want was we were what whatever when where
whether which while who whom whose why will with within without would yet you your yours
"""
STOP_WORDS = frozenset(_STOP_WORDS.split())
"""English words that are ignored as content words."""

OWN_FEATURE = 3.0
"""Weight of the text-specific feature of a parameter value. It separates "feet" in `from_unit` from "feet" in `to_unit`."""

PAIR_WEIGHT, PIECE_WEIGHT = 1.0, 0.3
"""Weight of two adjacent words, and of all four-letter pieces of a word together, relative to 1 for a word. Word pairs
distinguish "a to z" from "z to a", and pieces make "converting" similar to "convert"."""

_WORD = re.compile(r"[^\W\d_]+|\d+")
_MAX_WORD = 64


class HashingEncoder:
    """Feature hashing of words, word pairs and word pieces. It needs no training and no download, and is for English.

    x = h / |h|, where h_j is the sum of weight(f) sign(f) over the features f of the text that hash to j. All numbers count as
    the same word. A text without any feature is the zero vector.

    Args:
        num_features: Vector length F. Larger values give fewer collisions and use more memory.

    Source:
        Weinberger et al. 2009, Feature Hashing for Large Scale Multitask Learning, arXiv:0902.2206, sec. 2.
    """

    def __init__(self, num_features: int = 1024) -> None:
        require_integers("HashingEncoder", 1, num_features=num_features)
        self.num_features = num_features

    def __call__(self, texts: Sequence[str]) -> Float[Tensor, "N F"]:
        """Encode each text as one unit vector."""
        vectors = np.zeros((len(texts), self.num_features), dtype=np.float32)
        for vector, text in zip(vectors, texts, strict=True):
            places, weights = self._features(text)
            np.add.at(vector, places % self.num_features, weights)
            vector /= max(float(np.linalg.norm(vector)), 1e-12)
        return torch.from_numpy(vectors)

    def _features(self, text: str) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Hashes and signed weights of a text's features."""
        words = [("0" if word.isdigit() else word)[:_MAX_WORD] for word in _WORD.findall(text.lower())]
        found: list[tuple[int, float]] = []
        for word in words:
            if word not in STOP_WORDS:
                found.append(_hashed(f"word {word}", 1.0))
                pieces = _pieces(word)
                found += (_hashed(f"piece {piece}", PIECE_WEIGHT / len(pieces) ** 0.5) for piece in pieces)
        found += (_hashed(f"pair {a} {b}", PAIR_WEIGHT) for a, b in pairwise(words))
        places, weights = zip(*found, strict=True) if found else ((), ())
        return np.asarray(places, dtype=np.int64), np.asarray(weights, dtype=np.float32)


def _pieces(word: str) -> list[str]:
    """Split a word into four-letter pieces, with its ends marked: "sort" -> "<sor", "sort", "ort>"."""
    marked = f"<{word}>"
    return [marked[i : i + 4] for i in range(max(len(marked) - 3, 1))]


def _hashed(feature: str, weight: float) -> tuple[int, float]:
    place = _hash(feature)
    return place >> 1, weight if place & 1 else -weight


@lru_cache(maxsize=100_000)
def _hash(feature: str) -> int:
    """Hash of a text that is the same in every process, unlike `hash`."""
    return int.from_bytes(blake2b(feature.encode(errors="surrogatepass"), digest_size=6).digest(), "little")


def with_own_feature(
    texts: Sequence[str], vectors: Float[Tensor, "N F"], weight: float = OWN_FEATURE
) -> Float[Tensor, "N F"]:
    """(e + weight u) / |e + weight u| for each vector e, where u is +1 or -1 at one position that depends on the whole text.

    Two texts that differ in one word have nearly the same e. u lets a policy learn something about one of them only.
    """
    places, signs = zip(*(_hashed(f"text {text}", 1.0) for text in texts), strict=True)
    own = vectors.clone()
    own[torch.arange(len(texts)), torch.tensor(places) % vectors.shape[1]] += weight * torch.tensor(signs)
    return unit(own)


class TextCache(Generic[T]):
    """What `read` makes of each text. Threads may share it: its dict is replaced, never changed.

    When there are more than `capacity` texts, the older half is dropped.
    """

    def __init__(self, read: Callable[[list[str]], Iterable[T]], capacity: int = 10_000) -> None:
        self.read, self.capacity = read, capacity
        self._known: dict[str, T] = {}

    def __call__(self, texts: Sequence[str]) -> list[T]:
        """The answers for these texts, in their order. `read` gets the new texts, each once."""
        known = self._known
        new = [text for text in dict.fromkeys(texts) if text not in known]
        if new:
            known = known | dict(zip(new, self.read(new), strict=True))
            num_dropped = len(known) - self.capacity // 2 if len(known) > self.capacity else 0
            self._known = dict(islice(known.items(), num_dropped, None)) if num_dropped else known
        return [known[text] for text in texts]


class CachedEncoder:
    """A cache of a frozen encoder's vectors, scaled to length 1."""

    def __init__(self, encoder: Encoder, capacity: int = 10_000) -> None:
        self.encoder = encoder
        self._num_features = 0
        self._cache = TextCache(self._encode, capacity)

    @torch.no_grad()
    def __call__(self, texts: Sequence[str]) -> Float[Tensor, "N F"]:
        """Encode each text as one vector of length 1, float32, on the CPU. F is 0 if no text was ever encoded."""
        vectors = self._cache(texts)
        return torch.stack(vectors) if vectors else torch.zeros(0, self._num_features)

    def _encode(self, texts: list[str]) -> list[Tensor]:
        vectors = as_vectors(self.encoder(texts), len(texts))
        if self._num_features not in (0, vectors.shape[1]):
            raise ContractError(
                f"The encoder must always return vectors of the same length; got {vectors.shape[1]} after {self._num_features}."
            )
        self._num_features = vectors.shape[1]
        return [vector.clone() for vector in unit(vectors)]  # a view would keep the whole batch in memory


def as_vectors(answer: Any, num_texts: int) -> Float[Tensor, "N F"]:
    """An encoder's answer as float32 on the CPU."""
    required = f"The encoder must return finite vectors [N, F] for N = {num_texts} texts"
    vectors = as_tensor(required, answer).detach().to("cpu", torch.float32)
    is_finite = bool(vectors.isfinite().all())
    if vectors.dim() != 2 or len(vectors) != num_texts or vectors.shape[1] == 0 or not is_finite:
        raise ContractError(f"{required}; got {list(vectors.shape)}{'' if is_finite else ' with NaN or infinity'}.")
    return vectors


def unit(vectors: Float[Tensor, "N F"]) -> Float[Tensor, "N F"]:
    """The vectors scaled to length 1. A vector of zeros stays zero."""
    return vectors / vectors.norm(dim=1, keepdim=True).clamp(min=1e-12)
