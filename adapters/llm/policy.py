"""A Hugging Face causal language model as a policy."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from grpo import ActionScores, ExperienceBatch, SampledActions
from grpo.arguments import require_lengths
from grpo.errors import ConfigError

from .completions import Completion, completion_mask
from .expert_rounding import ExpertRounding
from .model.cards import base_on_hub
from .model.causal_lm import is_adapted
from .model.references import OwnReference
from .model.value_head import ValueHead
from .options import HFOptions
from .picture_prompts import Ids
from .policy_arguments import (
    end_token_ids,
    language_model_of,
    reference_of,
    require_request,
    require_room,
    require_settings,
    require_tokenizer,
    warn_of_half_precision,
)
from .policy_files import PretrainedPolicy
from .policy_sampling import (
    SamplerName,
    completions_of,
    demonstrated,
    grouped,
    sample_rows,
    sampler_of,
    with_scores,
)
from .policy_scoring import CompletionScorer
from .prompts.encoder import PromptEncoder, trial_prompts
from .prompts.processor import Processor, is_processor, tokenizer_of
from .prompts.states import Prompt, PromptState, prompt_of
from .sampling.continuous import ContinuousSampler
from .sampling.decoding import DecodingSampler
from .sampling.kept_prefixes import KeptPrefixes
from .sampling.recorded.sampler import RecordedSampler
from .sampling.samplers import OnRow, ReadsByUnit, RowLimit, SampledTokens, Sampler, SamplesBeside
from .sampling.sampling_config import SamplingConfig
from .scoring import check_pictures, check_scores
from .texts import CompletionTexts


class HFPolicy(PretrainedPolicy):
    """A policy of any Hugging Face causal language model: prompts are states, `Completion`s are actions, tokens are steps.

    Sampling draws one number per row from torch's global generator. This number seeds all random numbers of the row, so a row
    does not depend on its batch, and sampling follows `GRPOConfig.seed` and continues exactly after a resume.

    Scoring uses the sampled token ids; text is never tokenized again. A prompt is computed once for all its completions,
    forward and backward, and logits are computed in blocks (`model/shared_prompts.py`, `model/token_log_probs.py`).

    The policy trains the parameters that require a gradient. Freeze the others, or adapt the model with LoRA
    (`HFPolicy.from_pretrained(..., lora=...)`).

    Args:
        model: A `PreTrainedModel` with an output head, or a PEFT model around one.
        tokenizer: The model's tokenizer. It needs no padding token, because masks are made from lengths. For prompts with
            pictures, the processor of an image-text model, with its tokenizer.
        sampling: Sampling settings. The temperature also applies to scoring.
        sampler: "decoding" for the loop of this package, "recorded" for the same loop with steps that a GPU records,
            "generate" for transformers' loop, "continuous" for transformers' continuous batching, or another engine with its
            own weights (`VLLMSampler`).
        reference_model: A frozen model with the same tokenizer, for a KL term. With an adapter, None uses
            `options.reference`.
        value_head: Whether scores include the value of the state before each token, for `advantage.credit="gae"`. True makes a
            new head; pass a `ValueHead` for other sizes or another dropout.
        options: All other settings. None uses the defaults of `HFOptions`.

    Raises:
        ConfigError: A setting is invalid, or the model's sampling and scoring disagree.
        ContractError: The model is not a decoder-only language model.

    Example:
        Teach a model from rewards::

            policy = HFPolicy(model, tokenizer, sampling=SamplingConfig(max_new_tokens=64))
            trainer = GRPOTrainer(config=GRPOConfig(group_size=8, learning_rate=1e-5), policy=policy, reward_model=...)
            trainer.train(prompts, num_iterations=100)
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        sampling: SamplingConfig | None = None,
        sampler: Sampler | SamplerName = "decoding",
        reference_model: Any = None,
        value_head: bool | ValueHead = False,
        options: HFOptions | None = None,
        **misplaced: Any,
    ) -> None:
        require_settings(sampling, options, value_head, misplaced)
        self.model = model
        self.processor = tokenizer if is_processor(tokenizer) else None
        """What reads prompts with pictures. None: prompts are texts."""
        self.tokenizer = tokenizer = tokenizer if self.processor is None else tokenizer_of(tokenizer)
        self.sampling = sampling or SamplingConfig()
        self.options = options = options or HFOptions()
        self._lm = language_model_of(model, value_head, self.processor)
        self._reference = reference_of(self._lm, reference_model, options)
        is_own = self._reference is None and (is_adapted(model) or options.reference == "base")
        self._own_reference = OwnReference(self._lm, options.reference) if is_own else None
        self.reference_is_start = self._reference is None and options.reference == "start"
        """Whether the reference is the policy as training began, so that the KL must begin at 0."""
        if self._reference is not None or is_own:
            # an attribute, because a policy without a reference must not have this method
            self.reference_log_probabilities = self._reference_log_probabilities
        warn_of_half_precision(model)
        for lm in (self._lm, self._reference or self._lm):
            require_tokenizer(tokenizer, lm.vocabulary_size)
        self.end_token_ids = end_token_ids(tokenizer, self._lm, options.end_token_ids, self.sampling)
        """Tokens that end a completion."""
        self._texts = CompletionTexts(tokenizer, self.end_token_ids, keeps_special_tokens=options.keep_special_tokens)
        ends = None if options.end_token_ids is not None else (self.end_token_ids, self.sampling.stop)
        self.picture_reader = None if self.processor is None else Processor(self.processor, self._lm.picture_token_ids)
        """Encodes texts with pictures. None: there is no processor."""
        self._encode = PromptEncoder(
            tokenizer,
            self._lm.vocabulary_size,
            options.prompt_column,
            options.chat_template_options,
            ends,
            self.picture_reader,
        )
        self._sampler = sampler_of(sampler, self._lm, tokenizer, options)
        self._samples_beside = isinstance(self._sampler, SamplesBeside) and self._sampler.samples_beside
        sampler_here = self._sampler if self.samples_itself else None
        check_scores(self._lm, sampler_here)
        if self.picture_reader is not None:
            trial = trial_prompts(
                tokenizer, self._lm.vocabulary_size, options.chat_template_options, self.picture_reader
            )
            check_pictures(self._lm, sampler_here, trial)
            if self._reference is not None:
                check_pictures(self._reference, None, trial)
        self._scorer = CompletionScorer(self._lm, self._reference, options, self.sampling.scoring_temperature)
        self._expert_rounding = ExpertRounding(self._lm)
        self._base_model = base_on_hub(self._lm.plain)  # now, because a folder can be gone when the model is saved

    def generate_actions(
        self, states: Sequence[PromptState], num_actions_per_state: int, **sampling: Any
    ) -> list[list[Completion]]:
        """`num_actions_per_state` completions of each prompt.

        Args:
            states: B prompts.
            num_actions_per_state: Number of completions per prompt, G.
            sampling: Settings of `SamplingConfig` for this call only, for example `temperature=0`.

        Raises:
            ConfigError: A setting does not exist, or its value is invalid.
            ContractError: `states` are not prompts, or `num_actions_per_state` is not a positive integer.
        """
        config = SamplingConfig.from_dict(self.sampling.to_dict() | sampling)
        completions, _ = self._begin(states, num_actions_per_state, config)()
        return grouped(completions, num_actions_per_state)

    def demonstrations(self, states: Sequence[PromptState], texts: Sequence[str]) -> ExperienceBatch:
        """Texts to imitate, as demonstrations. Each is tokenized by itself, without special tokens, and ends with an end token.

        Example:
            A supervised warm start::

                given = policy.demonstrations(prompts, answers)
                trainer.train(None, demonstrations=given, num_epochs=3)

        Raises:
            ContractError: The numbers of states and texts differ, or a text is none.
        """
        require_lengths("HFPolicy.demonstrations", len(states), texts=texts)
        completions = demonstrated(texts, self.tokenizer, self.end_token_ids)
        return ExperienceBatch.from_demonstrations(states, completions, mask=completion_mask(completions))

    def sample_actions(self, states: Sequence[PromptState], num_actions_per_state: int) -> SampledActions:
        """Completions with their log-probs under the sampling distribution and, for models in float32, their scores."""
        sample = self._begin(states, num_actions_per_state, self.sampling)
        return self._with_scores(*sample(), num_actions_per_state)

    def begin_sampling(
        self, states: Sequence[PromptState], num_actions_per_state: int
    ) -> Callable[[], SampledActions] | None:
        """Draw the seeds of the completions, and return the function that samples them. None: the sampler is in this process.

        The function may be called in a second thread, while the model is updated; see `grpo.BeginsSampling`.
        """
        if not self._samples_beside:
            return None
        sample = self._begin(states, num_actions_per_state, self.sampling)
        return lambda: self._with_scores(*sample(), num_actions_per_state)

    def _with_scores(self, completions: list[Completion], sampled: SampledTokens, size: int) -> SampledActions:
        self._expert_rounding.sampled(self.samples_itself and self.sampling.is_exact)
        return with_scores(completions, sampled, size, self._lm, mask_truncated=self.options.mask_truncated)

    def sample_tokens(
        self,
        prompts: Sequence[Ids],
        *,
        seeds: Sequence[int],
        end_token_ids: Sequence[int] = (),
        limits: Sequence[RowLimit] | None = None,
        on_row: OnRow | None = None,
        **sampling: Any,
    ) -> SampledTokens:
        """One completion of each prompt. The prompts are token ids, and a row depends on its seed and not on the batch.

        Args:
            prompts: Token ids of N prompts.
            seeds: N seeds below 2**63.
            end_token_ids: Tokens that end a completion, in addition to the policy's own.
            limits: Where each of the N rows ends. None: at `max_new_tokens` and `stop` of the settings.
            on_row: Called with each row once, as soon as it has ended, by samplers that are `GivesRows` ("recorded" looks for
                ends every 16 steps). It gets the row's index, token ids, log-probs under the sampling distribution and finish
                reason, which are those of the result.
            sampling: Settings of `SamplingConfig` for this call only.

        Returns:
            The samples. `policy_log_probs` is None if decoding and scoring round differently (below float32).
        """
        return sample_rows(
            self._sampler,
            self._lm,
            prompts,
            self.sampling.to_dict() | sampling,
            end_token_ids=sorted({*self.end_token_ids, *end_token_ids}),
            seeds=seeds,
            limits=limits,
            on_row=on_row,
        )

    @contextmanager
    def keeping_prefixes(self, max_rows: int) -> Iterator[None]:
        """Keep the caches of sampled rows until the context ends.

        Inside the context, `sample_tokens` keeps the keys and values of each row that it samples. A later prompt that begins
        with the tokens of a kept row computes only the tokens after them. Do not change the weights inside the context,
        because the kept keys and values would be wrong.

        The context has no effect on samplers with weights of their own: vLLM's servers keep prefixes anyway. It has no effect
        on models with sliding windows or states, which compute each prompt as a whole (`CausalLM.has_plain_cache` is False).

        Args:
            max_rows: Maximum number of kept rows. The oldest row is dropped first. A larger number needs more memory.
        """
        if isinstance(self._sampler, DecodingSampler) and self._lm.has_plain_cache:
            self._sampler.kept = KeptPrefixes(max_rows)
        try:
            yield
        finally:
            if isinstance(self._sampler, DecodingSampler):
                self._sampler.kept = None

    @property
    def value_head(self) -> ValueHead | None:
        """The head that computes values. None: there is none."""
        return self._lm.value_head

    @property
    def samples_itself(self) -> bool:
        """Whether the model samples its completions in this process. Other engines, such as vLLM, have their own weights."""
        return isinstance(self._sampler, DecodingSampler | ContinuousSampler)

    @property
    def picture_token_ids(self) -> tuple[int, ...]:
        """Tokens that stand for pictures in prompts. No completion has them. Empty without a processor."""
        return self._lm.picture_token_ids

    @property
    def reference_model(self) -> Any:
        """The frozen model of the KL term. None if there is none, or if the trained model gives it."""
        return None if self._reference is None else self._reference.model

    def prompt_of(self, state: PromptState) -> Prompt:
        """The prompt of a state: the state itself, or the prompt column of a row."""
        return prompt_of(state, self._encode.column)

    @property
    def max_positions(self) -> int | None:
        """Maximum number of tokens of a prompt with its completion. None if the model's configuration has no maximum."""
        return self._lm.max_positions

    def score_groups(self, states: Sequence[PromptState], actions: Sequence[Sequence[Completion]]) -> ActionScores:
        """Scores of all completions, group by group."""
        require_lengths("HFPolicy.score_groups", len(states), actions=actions)
        rows = [prompt for prompt, group in zip(self._encode(states), actions, strict=True) for _ in group]
        completions = [completion for group in actions for completion in group]
        return self._scored_in_full(rows, completions)

    def score_actions(self, states: Sequence[PromptState], actions: Sequence[Completion]) -> ActionScores:
        """Scores of N rows. Equal prompts are computed once."""
        return self._scored_in_full(self._encode(states), actions)

    def _scored_in_full(self, prompts: Sequence[Ids], actions: Sequence[Completion]) -> ActionScores:
        scores = self._scorer.scores(prompts, actions)
        self._expert_rounding.scored(actions, scores.log_probs, scores.mask)
        return scores

    def get_log_probabilities(
        self, states: Sequence[PromptState], actions: Sequence[Completion]
    ) -> Float[Tensor, " N"]:
        """log pi(completion | prompt): the sum of the log-probs of the completion's tokens."""
        scores = self._scorer.scores(self._encode(states), actions, log_probs_only=True)
        return scores.log_probs.sum(1)  # masked log-probs are 0

    @torch.no_grad()
    def _reference_log_probabilities(
        self, states: Sequence[PromptState], actions: Sequence[Completion]
    ) -> Float[Tensor, "N T"]:
        """Log-probs of the tokens under the reference model, or under the model as it was, or without its adapter."""
        prompts = self._encode(states)
        if self._reference is not None:
            return self._scorer.scores(prompts, actions, lm=self._reference, log_probs_only=True).log_probs
        assert self._own_reference is not None
        with self._own_reference.active():
            return self._scorer.scores(prompts, actions, log_probs_only=True).log_probs

    def plan_micro_batches(self, states: Sequence[PromptState], actions: Sequence[Completion]) -> list[Sequence[int]]:
        """Rows of each forward pass, within `max_tokens_per_forward` positions and with little padding."""
        return self._scorer.plan(self._encode(states), actions)

    def shard_units(self) -> list[torch.nn.Module]:
        """The layers, and the models around them. From now on, each pass calls each layer equally often: rows that fork are
        scored without sharing what is behind their prompts."""
        if self.processor is not None:
            raise ConfigError(
                "HFPolicy: a model that reads pictures cannot be divided among ranks, because a rank without a picture would "
                "not call the layers of the vision tower that others wait for. Use Replicated, or pass the tokenizer."
            )
        models = [lm for lm in (self._lm, self._reference) if lm is not None]
        for lm in models:
            lm.has_equal_passes = True
        modules = [*self._trained_modules, *([] if self._reference is None else [self._reference.model])]
        return [layer for lm in models for layer in lm.layers] + modules

    def release_memory(self) -> None:
        """Free the memory that the sampler keeps between calls. An update that runs out of memory calls it."""
        if isinstance(self._sampler, RecordedSampler):
            self._sampler.forget()

    @property
    def reads_by_unit(self) -> bool:
        """Whether `sync_sampler` gathers divided weights layer by layer. Otherwise all are gathered for it."""
        return isinstance(self._sampler, ReadsByUnit) and self._sampler.reads_by_unit

    def sync_sampler(self) -> None:
        """Send the model's weights to the sampler, if the sampler has its own copy of them."""
        self._sampler.sync(self.model)

    def settings(self) -> dict[str, Any]:
        """What must be the same on all ranks beside the weights of the model: how it samples, and the reference model."""
        reference = {} if self._reference is None else dict(self._reference.model.named_parameters())
        return {
            "sampling": self.sampling.to_dict(),
            "sampler": type(self._sampler).__name__,
            "end_token_ids": self.end_token_ids,
            "reference_model": reference,
        }

    def get_parameters(self) -> dict[str, Tensor]:
        """The trained parameters by name, with those of the value head. If every parameter of the model is frozen, all of
        them, because `GRPOTrainer` refuses such a policy."""
        parameters = dict(self.model.named_parameters())
        # with LoRA, checkpoints of all weights would be many times as large, and most would never change
        trained = {name: value for name, value in parameters.items() if value.requires_grad}
        own = {} if self.value_head is None else dict(self.value_head.named_parameters(prefix="value_head"))
        return trained | own if trained else parameters

    def train(self) -> "HFPolicy":
        """Set the model to training mode, which turns dropout on."""
        for module in self._trained_modules:
            module.train()
        return self

    def eval(self) -> "HFPolicy":
        """Set the model to evaluation mode, which turns dropout off."""
        for module in self._trained_modules:
            module.eval()
        return self

    def to(self, device: torch.device | str) -> "HFPolicy":
        """Move the model, its value head and the reference model to a device."""
        for module in self._trained_modules:
            module.to(device)
        if self._reference is not None:
            self._reference.model.to(device)
        return self

    @property
    def _trained_modules(self) -> list[torch.nn.Module]:
        return [self.model, *([] if self.value_head is None else [self.value_head])]

    def _begin(
        self, states: Sequence[PromptState], size: int, config: SamplingConfig
    ) -> Callable[[], tuple[list[Completion], SampledTokens]]:
        """Check the request and draw the seeds. The function that is returned samples."""
        require_request(states, size)
        prompts = self._encode(states)
        lengths = [len(prompt) + config.max_new_tokens for prompt in prompts]
        require_room(self.max_positions, lengths, f"prompts with sampling.max_new_tokens={config.max_new_tokens}")
        seeds = torch.randint(2**62, (len(prompts) * size,)).tolist()
        opened = [tag for tag in self._texts.opened_by(prompts) for _ in range(size)]

        def sample() -> tuple[list[Completion], SampledTokens]:
            sampled = self._sampler.sample(prompts, size, config, end_token_ids=self.end_token_ids, seeds=seeds)
            return completions_of(sampled, self._texts, opened, self._lm.vocabulary_size), sampled

        return sample
