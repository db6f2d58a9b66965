"""The protocol of samplers, which draw completions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, TypeAlias, runtime_checkable

from adapters.llm.completions import FinishReason
from grpo.arguments import describe
from grpo.errors import ContractError, GRPOError

from .sampling_config import SamplingConfig

Ints: TypeAlias = Sequence[int]


class SamplerError(GRPOError, RuntimeError):
    """A sampling engine or server did not answer, or rejected a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLimit:
    """Where one row ends, in place of the limits in `SamplingConfig`."""

    max_new_tokens: int
    """Maximum number of tokens. A smaller one than `min_new_tokens` counts."""
    stop: tuple[str, ...] = ()
    """Strings that end the row."""

    @classmethod
    def of(cls, config: SamplingConfig) -> "RowLimit":
        """The limit of rows for which nothing else is said."""
        return cls(max_new_tokens=config.max_new_tokens, stop=config.stop)

    def applied_to(self, config: SamplingConfig) -> SamplingConfig:
        """The settings with this limit."""
        longest = self.max_new_tokens
        changed = {"max_new_tokens": longest, "min_new_tokens": min(config.min_new_tokens, longest), "stop": self.stop}
        return SamplingConfig.from_dict(config.to_dict() | changed)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """Samples of N rows, group by group. Each field has one entry per row."""

    token_ids: Sequence[Sequence[int]]
    """The tokens of each row, including an end-of-sequence token if there is one."""
    finish_reasons: Sequence[FinishReason]
    """Why each row ended: at an end-of-sequence token, at a stop string, or at the limit of new tokens."""
    behaviour_log_probs: Sequence[Sequence[float]]
    """Log-probs under the sampling distribution, with temperature, penalties and truncation."""
    policy_log_probs: Sequence[Sequence[float]] | None = None
    """Log-probs under the policy, equal to those of `HFPolicy.score_actions` up to rounding. None if the sampler cannot
    compute them."""
    entropies: Sequence[Sequence[float]] | None = None
    """Entropy of the policy at each token. None if it was not requested."""

    def __post_init__(self) -> None:
        """Check that all fields have the same rows.

        Raises:
            ContractError: The numbers of rows, or of a row's tokens and log-probs, differ.
        """
        for name in ("token_ids", "behaviour_log_probs", "policy_log_probs", "entropies"):
            rows: Any = getattr(self, name)
            is_optional = name in ("policy_log_probs", "entropies")
            if not (rows is None and is_optional) and not (_is_list(rows) and all(_is_list(row) for row in rows)):
                raise ContractError(
                    f"SampledTokens.{name} must have one sequence of numbers per row; got {describe(rows)}."
                )
        reasons: Any = self.finish_reasons
        lengths = [len(row) for row in self.token_ids]
        if not _is_list(reasons) or len(reasons) != len(lengths):
            raise ContractError(
                f"SampledTokens.finish_reasons must have one entry per row ({len(lengths)}); got {describe(reasons)}."
            )
        for name in ("behaviour_log_probs", "policy_log_probs", "entropies"):
            values = getattr(self, name)
            if values is not None and [len(row) for row in values] != lengths:
                raise ContractError(
                    f"SampledTokens.{name} must have one number per token, {lengths[:8]} in the first rows; got "
                    f"{[len(row) for row in values][:8]}."
                )


FIELDS = tuple(each.name for each in fields(SampledTokens))
"""The names of what is sampled of each row."""


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


OnRow: TypeAlias = Callable[[int, Sequence[int], Sequence[float], FinishReason], None]
"""Gets a row that has ended: its index, token ids, log-probs under the sampling distribution, and why it ended."""


class Sampler(Protocol):
    """Draws completions of prompts. A sampler may hold its own weights, which `sync` updates."""

    def sample(
        self, prompts: Sequence[Ints], num_per_prompt: int, config: SamplingConfig, *, end_token_ids: Ints, seeds: Ints
    ) -> SampledTokens:
        """Sample `num_per_prompt` completions of each of B prompts.

        Args:
            prompts: Token ids of B prompts. No prompt is empty.
            num_per_prompt: Number of completions per prompt, G.
            config: Sampling settings.
            end_token_ids: Each of these tokens ends a completion and is then its last token.
            seeds: N = B * G seeds below 2**63, one per row. A row's completion must depend on its seed and not on the batch.
        """
        ...

    def sync(self, model: Any) -> None:
        """Copy the weights of the trained model, which is a plain model or a `PeftModel`."""
        ...


@runtime_checkable
class LimitsRows(Protocol):
    """A sampler whose `sample` takes `limits=...`, one `RowLimit` per row, or None. The settings have the largest limit."""

    limits_rows: bool
    """Whether rows of one call can end at different limits."""


@runtime_checkable
class GivesRows(Protocol):
    """A sampler whose `sample` takes `on_row=...`, an `OnRow` or None, and gives it each row once, as soon as it has ended."""

    gives_rows: bool
    """Whether rows are given before the longest one has ended."""


@runtime_checkable
class ExcludesTokens(Protocol):
    """A sampler with an output head of its own. It gets the tokens that stand for pictures, so that it does not draw them."""

    excluded_token_ids: Ints
    """Tokens that no completion may have."""


@runtime_checkable
class SamplesBeside(Protocol):
    """A sampler that can sample in a second thread while the model is updated, such as a server."""

    samples_beside: bool
    """Whether this sampler reads neither the trained model nor the global random generators."""


@runtime_checkable
class ReadsByUnit(Protocol):
    """A sampler whose `sync` reads the weights one after another with `merged_weights`, on all ranks."""

    reads_by_unit: bool
    """Whether layers that `Sharded` divides among the ranks may be gathered and dropped one after another. All ranks then call
    `merged_weights` in `sync`, and no rank ever has all weights. Otherwise all weights are gathered for `sync`."""


def sample_by_limit(
    sampler: Sampler,
    prompts: Sequence[Ints],
    num_per_prompt: int,
    config: SamplingConfig,
    *,
    end_token_ids: Ints,
    seeds: Ints,
    limits: Sequence[RowLimit] | None = None,
) -> SampledTokens:
    """Sample with any sampler. If it does not limit single rows, the rows of each limit are sampled by themselves.

    Arguments are those of `Sampler.sample`, and one limit for each of the N rows. None: those of the settings.
    """
    if limits is None or {*limits} == {RowLimit.of(config)}:
        return sampler.sample(prompts, num_per_prompt, config, end_token_ids=end_token_ids, seeds=seeds)
    found: dict[int, tuple[Any, ...]] = {}
    for limit in dict.fromkeys(limits):
        rows = [row for row, own in enumerate(limits) if own == limit]
        part = sampler.sample(
            [prompts[row // num_per_prompt] for row in rows],
            1,
            limit.applied_to(config),
            end_token_ids=end_token_ids,
            seeds=[seeds[row] for row in rows],
        )
        columns = [getattr(part, name) for name in FIELDS]
        entries = zip(*(column or [None] * len(rows) for column in columns), strict=True)
        found |= dict(zip(rows, entries, strict=True))
    whole: dict[str, Any] = {
        name: [found[row][place] for row in range(len(seeds))] for place, name in enumerate(FIELDS)
    }
    missing: dict[str, Any] = {name: None for name, column in whole.items() if None in column}
    return SampledTokens(**whole | missing)
