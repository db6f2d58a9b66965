"""Encoders that are fitted to texts, and encoders side by side."""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from grpo.arguments import require_integers
from grpo.errors import ConfigError

from .encoders import Encoder, HashingEncoder, as_vectors, unit

_CHUNK = 1024
"""Texts that are hashed at once, to a dense matrix."""


class FittedEncoder:
    """Latent semantic analysis: IDF weights and a projection, fitted to texts, on the features of a `HashingEncoder`.

    Let h be a text's hashed features, N the number of fitted texts, and df_j the number of them that have feature j:

        z = (idf * h) V / |(idf * h) V|,  idf_j = log((1 + N) / (1 + df_j)) + 1

    V holds the first right singular vectors of the fitted texts' matrix of idf * h. Rare words weigh more, and words that occur
    in the same texts become similar. Fit it to the training requests and `tool.text` of the tools. It takes seconds.

    Args:
        num_features: Maximum vector length; the number of different fitted texts if that is smaller. Larger keeps more detail.
        num_hashed: Number of hashed features. Larger values give fewer collisions and use more memory.

    Example:
        >>> encoder = FittedEncoder(2).fit(["convert miles to feet", "miles in feet", "play a song", "a song by Bach"])
        >>> miles, feet, bach = encoder(["miles", "feet", "Bach"])
        >>> bool(miles @ feet > 0.9), bool(miles @ bach < 0.2)
        (True, True)

    Source:
        Deerwester et al. 1990, Indexing by Latent Semantic Analysis, JASIS 41, 391-407; Spärck Jones 1972 (IDF).
    """

    def __init__(self, num_features: int = 512, *, num_hashed: int = 8192) -> None:
        require_integers("FittedEncoder", 1, num_features=num_features, num_hashed=num_hashed)
        self.num_features = num_features
        self.hashing = HashingEncoder(num_hashed)
        self.idf: Float[Tensor, " H"] | None = None
        self.projection: Float[Tensor, "H F"] | None = None

    def fit(self, texts: Sequence[str]) -> "FittedEncoder":
        """Fit the weights and the projection to texts, and return this encoder.

        Raises:
            ConfigError: There is no text, or the encoder is fitted already: policies that use it would get other vectors.
        """
        different = list(dict.fromkeys(texts))
        if isinstance(texts, str) or not different:
            raise ConfigError(
                f"FittedEncoder.fit needs a list of texts; got {texts!r:.100}. Pass the requests and the texts of the tools."
            )
        if self.idf is not None:
            raise ConfigError(
                "FittedEncoder is fitted already, and policies may use it. Create another one to fit it again."
            )
        chunks = [different[i : i + _CHUNK] for i in range(0, len(different), _CHUNK)]
        frequency = torch.stack([(self.hashing(chunk) != 0).sum(0) for chunk in chunks]).sum(0)
        self.idf = ((1 + len(different)) / (1 + frequency)).log() + 1
        rows = torch.cat([unit(self.hashing(chunk) * self.idf).to_sparse() for chunk in chunks])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # the method is randomised
            num_tried = min(self.num_features + 32, len(different))  # a few more, for precision
            vectors = torch.svd_lowrank(rows, q=num_tried, niter=4)[2][:, : self.num_features]
        largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
        self.projection = vectors * largest.sign()  # singular vectors have no sign of their own
        return self

    def __call__(self, texts: Sequence[str]) -> Float[Tensor, "N F"]:
        """Encode each text as one unit vector.

        Raises:
            ConfigError: The encoder was not fitted.
        """
        if self.idf is None or self.projection is None:
            raise ConfigError("FittedEncoder must be fitted before it encodes. Call fit(texts) first.")
        chunks = [texts[i : i + _CHUNK] for i in range(0, len(texts), _CHUNK)] or [texts]
        vectors = torch.cat([(self.hashing(chunk) * self.idf) @ self.projection for chunk in chunks])
        return unit(vectors)

    def fitted(self) -> dict[str, Tensor]:
        """The weights and the projection. Empty before `fit`."""
        return {} if self.idf is None or self.projection is None else {"idf": self.idf, "projection": self.projection}

    def restored(self, fitted: Mapping[str, Tensor]) -> "FittedEncoder":
        """A new encoder with the numbers that `fitted` returned. This encoder if there are none."""
        if not fitted:
            return self
        idf, projection = fitted["idf"], fitted["projection"]
        other = FittedEncoder(projection.shape[1], num_hashed=len(idf))
        other.idf, other.projection = idf, projection
        return other


class JoinedEncoder:
    """Several encoders side by side: x = (x_1 / |x_1|, ..., x_n / |x_n|) / sqrt(n). A cosine is the mean of their cosines.

    Args:
        encoders: At least one encoder, such as a sentence embedder and a `FittedEncoder`.

    Raises:
        ConfigError: There is no encoder, or one of them is not a function.
    """

    def __init__(self, *encoders: Encoder) -> None:
        if not encoders or not all(callable(encoder) for encoder in encoders):
            raise ConfigError(f"JoinedEncoder needs encoders, one argument each; got {encoders!r:.100}.")
        self.encoders = encoders
        self._fits = {i: each for i, each in enumerate(encoders) if isinstance(each, FittedEncoder | JoinedEncoder)}

    def __call__(self, texts: Sequence[str]) -> Float[Tensor, "N F"]:
        """Encode each text."""
        parts = [unit(as_vectors(encoder(texts), len(texts))) for encoder in self.encoders]
        return torch.cat(parts, dim=1) / len(parts) ** 0.5

    def fitted(self) -> dict[str, Tensor]:
        """The fitted numbers of all encoders that have them."""
        return {f"{place}.{name}": value for place, fit in self._fits.items() for name, value in fit.fitted().items()}

    def restored(self, fitted: Mapping[str, Tensor]) -> "JoinedEncoder":
        """A new encoder with the numbers that `fitted` returned."""
        encoders = list(self.encoders)
        for place, fit in self._fits.items():
            start = f"{place}."
            own = {name.removeprefix(start): value for name, value in fitted.items() if name.startswith(start)}
            encoders[place] = fit.restored(own)
        return JoinedEncoder(*encoders)
