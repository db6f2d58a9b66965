"""A Hugging Face causal language model as a policy."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from grpo import ActionScores, ExperienceBatch, SampledActions
from grpo.arguments import describe, refuse_options, require_instances, require_lengths
from grpo.errors import ConfigError, ContractError

from .completions import Completion, completion_mask, padded
from .expert_rounding import ExpertRounding
from .micro_batches import plan_by_tokens
from .model.cards import base_on_hub, save_with_card
from .model.causal_lm import CausalLM, is_adapted
from .model.loading import keep_differentiable, load_model, save_model
from .model.packed_groups import can_pack, pack_of_rows
from .model.parts import Part
from .model.references import OwnReference
from .model.router_balance import RouterBalance
from .model.value_head import VALUE_HEAD_FILE, ValueHead
from .options import HFOptions
from .picture_prompts import Ids, distinct, followed_by
from .policy_arguments import (
    end_token_ids,
    require_request,
    require_same_vocabulary,
    require_separate,
    require_tokenizer,
    value_head_of,
)
from .prompts.encoder import PromptEncoder, trial_prompts
from .prompts.processor import Processor, is_processor, picture_token_ids, tokenizer_of
from .prompts.states import Prompt, PromptState, prompt_of
from .sampling.continuous import ContinuousSampler
from .sampling.decoding import DecodingSampler
from .sampling.kept_prefixes import KeptPrefixes
from .sampling.recorded.sampler import RecordedSampler
from .sampling.samplers import (
    GivesRows,
    LimitsRows,
    OnRow,
    ReadsByUnit,
    RowLimit,
    SampledTokens,
    Sampler,
    SamplesBeside,
    sample_by_limit,
)
from .sampling.sampling_config import SamplingConfig
from .scoring import check_pictures, check_scores, score_forked_rows, score_tokens
from .texts import CompletionTexts


class HFPolicy:
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
        sampler: Sampler | Literal["decoding", "recorded", "generate", "continuous"] = "decoding",
        reference_model: Any = None,
        value_head: bool | ValueHead = False,
        options: HFOptions | None = None,
        **misplaced: Any,
    ) -> None:
        refuse_options("HFPolicy", HFOptions, misplaced)
        if misplaced:
            raise ConfigError(f"HFPolicy has no arguments {sorted(misplaced)}.")
        require_instances("HFPolicy", SamplingConfig | None, "a SamplingConfig or None", sampling=sampling)
        require_instances("HFPolicy", HFOptions | None, "HFOptions or None", options=options)
        require_instances("HFPolicy", bool | ValueHead, "True, False or a ValueHead", value_head=value_head)
        self.model = model
        self.processor = tokenizer if is_processor(tokenizer) else None
        """What reads prompts with pictures. None: prompts are texts."""
        self.tokenizer = tokenizer = tokenizer if self.processor is None else tokenizer_of(tokenizer)
        self.sampling = sampling or SamplingConfig()
        self.options = options = options or HFOptions()
        if self.sampling.temperature == 0:
            raise ConfigError(
                "HFPolicy: sampling.temperature must be above 0; got 0. All completions of a prompt would be equal, "
                "and training would learn nothing. For greedy evaluation, call generate_actions(states, 1, temperature=0)."
            )
        self._lm = CausalLM(model)
        keep_differentiable(model)
        self._lm.check_logits()
        self._lm.value_head = value_head_of(self._lm, value_head)
        if self.processor is not None:
            self._lm.picture_token_ids = picture_token_ids(self.processor, self._lm.plain.config)
        self._reference = None if reference_model is None else CausalLM(reference_model)
        if self._reference is not None:
            require_separate(model, reference_model)
            # dropout in the reference would make the KL noise
            reference_model.requires_grad_(False).eval()
            self._reference.check_logits()
            self._reference.picture_token_ids = self._lm.picture_token_ids
            check_scores(self._reference, None)
            require_same_vocabulary(self._lm, self._reference)
        if options.reference == "base" and self._reference is not None:
            raise ConfigError("HFPolicy: options.reference='base' and reference_model are two references. Keep one.")
        if options.exact_kl_top is not None and self._reference is None:
            raise ConfigError(
                "HFPolicy: options.exact_kl_top is for the KL to a second model. Pass reference_model=..., or estimate the KL: "
                "objective.kl_estimator='k2' or 'k3'."
            )
        is_own = self._reference is None and (is_adapted(model) or options.reference == "base")
        self._own_reference = OwnReference(self._lm, options.reference) if is_own else None
        self.reference_is_start = self._reference is None and options.reference == "start"
        """Whether the reference is the policy as training began, so that the KL must begin at 0."""
        if self._reference is not None or is_own:
            # an attribute, because a policy without a reference must not have this method
            self.reference_log_probabilities = self._reference_log_probabilities
        if any(p.requires_grad and p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters()):
            logging.getLogger("grpo").warning(
                "HFPolicy: the trained weights have half precision, so small updates are lost to rounding (and float16 may "
                "overflow in the optimizer). Load the model with dtype=torch.float32 and set "
                "GRPOConfig(autocast_dtype='bfloat16'), or train LoRA."
            )
        for lm in (self._lm, self._reference or self._lm):
            require_tokenizer(tokenizer, lm.vocabulary_size)
        self.end_token_ids = end_token_ids(tokenizer, self._lm, options.end_token_ids, self.sampling)
        """Tokens that end a completion."""
        self._texts = CompletionTexts(tokenizer, self.end_token_ids, keeps_special_tokens=options.keep_special_tokens)
        ends = None if options.end_token_ids is not None else (self.end_token_ids, self.sampling.stop)
        processor = None if self.processor is None else Processor(self.processor, self._lm.picture_token_ids)
        self._encode = PromptEncoder(
            tokenizer, self._lm.vocabulary_size, options.prompt_column, options.chat_template_options, ends, processor
        )
        match sampler:
            case "decoding" | "generate" | "recorded":
                self._sampler: Sampler = (RecordedSampler if sampler == "recorded" else DecodingSampler)(
                    self._lm,
                    tokenizer,
                    with_entropy=options.exact_entropy,
                    max_rows=options.max_rows_per_decode,
                    max_tokens_per_forward=options.max_tokens_per_forward,
                    loop="generate" if sampler == "generate" else "own",
                )
            case "continuous":
                self._sampler = ContinuousSampler(self._lm, max_rows=options.max_rows_per_decode)
            case _ if not isinstance(sampler, str) and hasattr(sampler, "sample") and hasattr(sampler, "sync"):
                self._sampler = sampler
            case _:
                raise ConfigError(
                    "HFPolicy: sampler must be 'decoding', 'recorded', 'generate', 'continuous' or a Sampler, such as "
                    f"VLLMSampler(...); got {sampler!r}."
                )
        self._samples_beside = isinstance(self._sampler, SamplesBeside) and self._sampler.samples_beside
        sampler_here = self._sampler if self.samples_itself else None
        check_scores(self._lm, sampler_here)
        if processor is not None:
            trial = trial_prompts(tokenizer, self._lm.vocabulary_size, options.chat_template_options, processor)
            check_pictures(self._lm, sampler_here, trial)
            if self._reference is not None:
                check_pictures(self._reference, None, trial)
        self._balance = RouterBalance(self._lm, options.router_aux_loss_coef) if options.router_aux_loss_coef else None
        self._lm.balances_experts = self._balance is not None
        self._expert_rounding = ExpertRounding(self._lm)
        self._base_model = base_on_hub(self._lm.plain)  # now, because a folder can be gone when the model is saved
        self._can_pack: bool | None = None

    @classmethod
    def from_pretrained(
        cls,
        name_or_folder: str | Path,
        *,
        dtype: torch.dtype | Literal["auto"] = "auto",
        attention: str | None = None,
        lora: Any = None,
        load_in_4bit: bool = False,
        load_in_8bit: bool = False,
        revision: str | None = None,
        device: torch.device | str | None = None,
        trust_remote_code: bool = False,
        pictures: bool = False,
        train: Sequence[Part] | None = None,
        **arguments: Any,
    ) -> "HFPolicy":
        """A policy of a model on the hub or in a local folder; see `load_model` for its arguments.

        Args:
            arguments: Arguments of `HFPolicy`.

        Example:
            A 4-bit model that trains an adapter::

                policy = HFPolicy.from_pretrained("Qwen/Qwen3-0.6B", lora=True, load_in_4bit=True)

            An image-text model::

                policy = HFPolicy.from_pretrained("Qwen/Qwen2.5-VL-3B-Instruct", pictures=True, lora=True)
        """
        refuse_options("HFPolicy", HFOptions, arguments)  # before a long download
        model, tokenizer = load_model(
            name_or_folder,
            dtype=dtype,
            attention=attention,
            lora=lora,
            load_in_4bit=load_in_4bit,
            load_in_8bit=load_in_8bit,
            revision=revision,
            device=device,
            trust_remote_code=trust_remote_code,
            pictures=pictures,
            train=train,
        )
        if arguments.get("value_head") is True and (Path(name_or_folder) / VALUE_HEAD_FILE).is_file():
            arguments["value_head"] = ValueHead.load(name_or_folder)
        return cls(model, tokenizer, **arguments)

    def save_pretrained(
        self,
        folder: str | Path,
        *,
        merge: bool = False,
        trainer: Any = None,
        push_to_hub: str | None = None,
        private: bool | None = None,
        token: str | None = None,
    ) -> None:
        """Save the model (or only its adapter) and the tokenizer in Hugging Face's format, and the value head if there is one.

        `from_pretrained` loads them. It loads the value head with `value_head=True`. A model card, `README.md`, says what was
        trained and how. A card that somebody has changed is kept, if its line "Written when ..." was removed.

        Args:
            folder: Folder to write to. It is created if it does not exist.
            merge: Whether to save the whole model with the adapter merged into its weights.
            trainer: The `GRPOTrainer` of the run. The card then has the run's settings, rewards and last metrics.
            push_to_hub: Repository on the Hugging Face Hub, `user/name`, to which the written files are uploaded. It is created
                if it does not exist.
            private: Whether a new repository is private. None uses the default of the account.
            token: Token of the account. None uses the token of `hf auth login`.

        Raises:
            ConfigError: An argument is of the wrong kind.
            HfHubHTTPError: The Hub refused the upload. The files are saved.
        """

        def save() -> None:
            save_model(self.model, self.processor or self.tokenizer, folder, merge=merge)
            if self.value_head is not None:
                self.value_head.save(folder)

        save_with_card(
            save,
            folder,
            base_model=self._base_model,
            sampling=self.sampling.to_dict(),
            trainer=trainer,
            is_adapter=is_adapted(self.model) and not merge,
            push_to_hub=push_to_hub,
            private=private,
            token=token,
        )

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
        completions, _ = self._sample(states, num_actions_per_state, config)
        return _grouped(completions, num_actions_per_state)

    def demonstrations(self, states: Sequence[PromptState], texts: Sequence[str]) -> ExperienceBatch:
        """Texts to imitate, as demonstrations. Each is tokenized by itself, without special tokens, and ends with an end token.

        Example:
            A supervised warm start::

                given = policy.demonstrations(prompts, answers)
                trainer.train(None, demonstrations=given, num_epochs=3)

        Raises:
            ContractError: The numbers of states and texts differ.
        """
        require_lengths("HFPolicy.demonstrations", len(states), texts=texts)
        own = self.tokenizer.eos_token_id
        ends = [own] if own in self.end_token_ids else list(self.end_token_ids)[:1]
        completions = [
            Completion(
                token_ids=(*self.tokenizer(text, add_special_tokens=False)["input_ids"], *ends),
                text=text,
                finish_reason="end",
            )
            for text in texts
        ]
        return ExperienceBatch.from_demonstrations(states, completions, mask=completion_mask(completions))

    def sample_actions(self, states: Sequence[PromptState], num_actions_per_state: int) -> SampledActions:
        """Completions with their log-probs under the sampling distribution and, for models in float32, their scores."""
        return self._with_scores(*self._sample(states, num_actions_per_state, self.sampling), num_actions_per_state)

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
        mask = completion_mask(completions, mask_truncated=self.options.mask_truncated).to(self._lm.device)
        width = mask.shape[1]

        def beside(values: Sequence[Sequence[float]]) -> Tensor:
            return padded(values, width).to(mask.device)

        behaviour = beside(sampled.behaviour_log_probs)
        scores = None
        self._expert_rounding.sampled(self.samples_itself and self.sampling.is_exact)
        # below float32, decoding and scoring round differently, so the trainer must score the policy itself
        if sampled.policy_log_probs is not None and self._lm.computes_in_float32:
            scores = ActionScores(
                log_probs=behaviour
                if sampled.policy_log_probs is sampled.behaviour_log_probs
                else beside(sampled.policy_log_probs),
                mask=mask,
                entropy=None if sampled.entropies is None else beside(sampled.entropies),
            )
        num_tokens = sum(len(completion) for completion in completions)
        return SampledActions(
            actions=_grouped(completions, size),
            mask=mask,
            behaviour_log_probs=behaviour,
            scores=scores,
            metrics={
                "completions/tokens": float(num_tokens),
                "completions/truncated": float(sum(completion.is_truncated for completion in completions)),
            },
        )

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
        given = self.sampling.to_dict() | sampling
        if limits is not None:
            longest = max(limit.max_new_tokens for limit in limits)
            given |= {"max_new_tokens": longest, "min_new_tokens": min(given["min_new_tokens"], longest)}
        config = SamplingConfig.from_dict(given)
        numbers = [limit.max_new_tokens for limit in limits or [RowLimit.of(config)] * len(prompts)]
        lengths = [len(prompt) + number for prompt, number in zip(prompts, numbers, strict=True)]
        self._require_room(lengths, "prompts with max_new_tokens")
        ends = sorted({*self.end_token_ids, *end_token_ids})
        different, places = distinct(prompts)
        size, rest = divmod(len(prompts), len(different))
        if rest or places != [place for place in range(len(different)) for _ in range(size)]:
            different, size = list(prompts), 1
        sampler: Any = self._sampler
        # an ended row stays in the batch for a while, so each needs room for as many tokens as the longest
        room, most = self.max_positions, max(map(len, prompts)) + config.max_new_tokens
        limits_rows = isinstance(sampler, LimitsRows) and (room is None or most <= room)
        sample = sampler.sample if limits_rows else partial(sample_by_limit, sampler)
        gives_rows = limits_rows and isinstance(sampler, GivesRows)
        early: dict[str, Any] = {"on_row": on_row} if gives_rows else {}
        sampled = sample(different, size, config, end_token_ids=ends, seeds=seeds, limits=limits, **early)
        return sampled if self._lm.computes_in_float32 else replace(sampled, policy_log_probs=None)

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
        scores = self._score(*_distinct(prompts), actions, log_probs_only=False)
        self._expert_rounding.scored(actions, scores.log_probs, scores.mask)
        return scores

    def get_log_probabilities(
        self, states: Sequence[PromptState], actions: Sequence[Completion]
    ) -> Float[Tensor, " N"]:
        """log pi(completion | prompt): the sum of the log-probs of the completion's tokens."""
        return self._score(*_distinct(self._encode(states)), actions).log_probs.sum(1)  # masked log-probs are 0

    @torch.no_grad()
    def _reference_log_probabilities(
        self, states: Sequence[PromptState], actions: Sequence[Completion]
    ) -> Float[Tensor, "N T"]:
        """Log-probs of the tokens under the reference model, or under the model as it was, or without its adapter."""
        rows = _distinct(self._encode(states))
        if self._reference is not None:
            return self._score(*rows, actions, lm=self._reference).log_probs
        assert self._own_reference is not None
        with self._own_reference.active():
            return self._score(*rows, actions).log_probs

    def plan_micro_batches(self, states: Sequence[PromptState], actions: Sequence[Completion]) -> list[Sequence[int]]:
        """Rows of each forward pass, within `max_tokens_per_forward` positions and with little padding."""
        # what rows share before their first fork counts once, as a prompt does
        shares_forks = self._lm.shares_forks
        shared = [action.token_ids[: min(action.forks, default=0) if shares_forks else 0] for action in actions]
        pairs = zip(self._encode(states), shared, strict=True)
        prompts, prompt_of_row = _distinct([followed_by(prompt, tokens) for prompt, tokens in pairs])
        own = zip(self._scored_tokens(actions), shared, strict=True)
        lengths = [max(len(tokens) - len(before), 0) for tokens, before in own]
        prompt_lengths, given = [len(prompt) for prompt in prompts], prompt_of_row.tolist()
        shares_prompts = self._shares_prompts
        if shares_prompts and self._lm.checkpoints_gradients:  # each pack computes its prompt
            given, prompt_of_pack = pack_of_rows(prompt_lengths, given, lengths, self._lm.embedding_size)
            prompt_lengths = [prompt_lengths[prompt] for prompt in prompt_of_pack]
        limit = self.options.max_tokens_per_forward
        return plan_by_tokens(prompt_lengths, given, lengths, limit, shares_prompts=shares_prompts)

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

    @property
    def _shares_prompts(self) -> bool:
        """Whether a prompt is computed once for several completions: by a cache, or in packs with gradient checkpointing."""
        if not self._lm.shares_prompts or not self._lm.checkpoints_gradients:
            return self._lm.shares_prompts
        if self._can_pack is None:
            self._can_pack = can_pack(self._lm)
            if not self._can_pack:
                logging.getLogger("grpo").warning(
                    "HFPolicy: with gradient checkpointing, layers store no keys and values, so "
                    f"{type(self._lm.plain).__name__} computes the prompt for each row. Without it, the prompt is computed "
                    "once per group. (This message appears once.)"
                )
        return self._can_pack

    def _sample(
        self, states: Sequence[PromptState], size: int, config: SamplingConfig
    ) -> tuple[list[Completion], SampledTokens]:
        return self._begin(states, size, config)()

    def _begin(
        self, states: Sequence[PromptState], size: int, config: SamplingConfig
    ) -> Callable[[], tuple[list[Completion], SampledTokens]]:
        """Check the request and draw the seeds. The function that is returned samples."""
        require_request(states, size)
        prompts = self._encode(states)
        lengths = [len(prompt) + config.max_new_tokens for prompt in prompts]
        self._require_room(lengths, f"prompts with sampling.max_new_tokens={config.max_new_tokens}")
        seeds = torch.randint(2**62, (len(prompts) * size,)).tolist()
        opened = [tag for tag in self._texts.opened_by(prompts) for _ in range(size)]
        return lambda: self._completions(
            self._sampler.sample(prompts, size, config, end_token_ids=self.end_token_ids, seeds=seeds), opened
        )

    def _completions(self, sampled: SampledTokens, opened: Sequence[str]) -> tuple[list[Completion], SampledTokens]:
        require_lengths("HFPolicy: the sampler", len(opened), token_ids=sampled.token_ids)
        self._require_known(sampled.token_ids, "sampled")
        texts = self._texts(sampled.token_ids)
        completions = [
            Completion(
                token_ids=tuple(token_ids),
                text=text,
                finish_reason=reason,
                behaviour_log_probs=tuple(log_probs),
                opened=tag,
            )
            for token_ids, text, reason, log_probs, tag in zip(
                sampled.token_ids, texts, sampled.finish_reasons, sampled.behaviour_log_probs, opened, strict=True
            )
        ]
        return completions, sampled

    def _require_known(self, rows: Sequence[Sequence[int]], whose: str) -> None:
        largest = max((max(row, default=0) for row in rows), default=0)
        if largest >= self._lm.vocabulary_size:
            raise ContractError(
                f"HFPolicy: {whose} token ids must be below {self._lm.vocabulary_size}, the size of the model's vocabulary; "
                f"got {largest}. Use the tokens of this model's tokenizer."
            )

    def _require_room(self, lengths: Sequence[int], whose: str) -> None:
        limit = self._lm.max_positions
        long = [] if limit is None else [row for row, length in enumerate(lengths) if length > limit]
        if long:
            raise ContractError(
                f"HFPolicy: {whose} must fit into the model's {limit} positions; those at {long[:8]}"
                f"{' ...' if len(long) > 8 else ''} need {[lengths[row] for row in long[:8]]}. Shorten or remove these "
                "prompts, or lower max_new_tokens."
            )

    def _scored_tokens(self, actions: Sequence[Completion]) -> list[tuple[int, ...]]:
        """The tokens of each completion that count in the loss. A masked completion has no such tokens and is not forwarded."""
        return [() if self.options.mask_truncated and action.is_truncated else action.token_ids for action in actions]

    def _score(
        self,
        prompts: Sequence[Ids],
        prompt_of_row: Int[Tensor, " N"],
        actions: Sequence[Completion],
        *,
        lm: CausalLM | None = None,
        log_probs_only: bool = True,
    ) -> ActionScores:
        lm = lm or self._lm
        require_lengths("HFPolicy", len(prompt_of_row), actions=actions)
        for action in actions:
            if not isinstance(action, Completion):
                raise ContractError(
                    f"HFPolicy: actions must be Completions; got {describe(action)}. Pass what it generated."
                )
        self._require_known([action.token_ids for action in actions], "scored")
        lengths = [len(prompts[prompt]) + len(c) for prompt, c in zip(prompt_of_row.tolist(), actions, strict=True)]
        self._require_room(lengths, "prompts with their completions")
        mask = completion_mask(actions, mask_truncated=self.options.mask_truncated)
        width, scored = mask.shape[1], self._scored_tokens(actions)
        options: dict[str, Any] = {
            "temperature": self.sampling.scoring_temperature,
            "with_entropy": self.options.exact_entropy and not log_probs_only,
            "value_head": None if log_probs_only else lm.value_head,
            "balance": self._balance if torch.is_grad_enabled() and not log_probs_only else None,
            "is_cut": torch.tensor([action.is_truncated for action in actions], dtype=torch.bool),
        }
        teacher = None
        if self.options.exact_kl_top is not None and torch.is_grad_enabled() and not log_probs_only:
            teacher = self._reference
            options |= {"teacher": teacher, "top": self.options.exact_kl_top}
        shares_prompts = self._shares_prompts if lm is self._lm else lm.shares_prompts
        forks = [action.forks for action in actions]
        shares_forks = lm.shares_forks and (teacher is None or teacher.shares_forks)
        if shares_prompts and shares_forks and any(forks) and width > 0:
            return score_forked_rows(lm, prompts, prompt_of_row, scored, mask, forks, **options)
        padding = [[*tokens, *[0] * (width - len(tokens))] for tokens in scored]
        return score_tokens(
            lm,
            prompts,
            prompt_of_row,
            torch.tensor(padding, dtype=torch.int64).view(mask.shape),
            mask,
            shares_prompts=shares_prompts,
            **options,
        )


def _distinct(prompts: Sequence[Ids]) -> tuple[list[Ids], Int[Tensor, " N"]]:
    """The different prompts, and the index of each row's prompt."""
    different, prompt_of_row = distinct(prompts)
    return different, torch.tensor(prompt_of_row)


def _grouped(completions: list[Completion], size: int) -> list[list[Completion]]:
    return [completions[begin : begin + size] for begin in range(0, len(completions), size)]
