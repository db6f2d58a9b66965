"""What `HFPolicy` requires of its arguments, and what it makes of them."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from grpo.arguments import describe, refuse_options, require_instances
from grpo.errors import ConfigError, ContractError

from .model.causal_lm import CausalLM
from .model.loading import keep_differentiable
from .model.value_head import ValueHead
from .options import HFOptions
from .prompts.processor import picture_token_ids
from .sampling.sampling_config import SamplingConfig
from .scoring import check_scores


def require_settings(sampling: Any, options: Any, value_head: Any, misplaced: Mapping[str, Any]) -> None:
    """Refuse settings of other types or in other places, and sampling that would teach nothing."""
    refuse_options("HFPolicy", HFOptions, misplaced)
    if misplaced:
        raise ConfigError(f"HFPolicy has no arguments {sorted(misplaced)}.")
    require_instances("HFPolicy", SamplingConfig | None, "a SamplingConfig or None", sampling=sampling)
    require_instances("HFPolicy", HFOptions | None, "HFOptions or None", options=options)
    require_instances("HFPolicy", bool | ValueHead, "True, False or a ValueHead", value_head=value_head)
    if sampling is not None and sampling.temperature == 0:
        raise ConfigError(
            "HFPolicy: sampling.temperature must be above 0; got 0. All completions of a prompt would be equal, "
            "and training would learn nothing. For greedy evaluation, call generate_actions(states, 1, temperature=0)."
        )


def language_model_of(model: Any, value_head: bool | ValueHead, processor: Any) -> CausalLM:
    """The trained model, with its value head and the tokens that stand for pictures."""
    lm = CausalLM(model)
    keep_differentiable(model)
    lm.check_logits()
    lm.value_head = value_head_of(lm, value_head)
    if processor is not None:
        lm.picture_token_ids = picture_token_ids(processor, lm.plain.config)
    return lm


def require_tokenizer(tokenizer: Any, vocabulary_size: int) -> None:
    """Refuse what is not a tokenizer, and a tokenizer whose texts give tokens that the model does not have.

    A tokenizer may have added tokens beyond the vocabulary, for example for images (Gemma 3). They are refused in prompts.
    """
    needed = ("__call__", "batch_decode", "convert_ids_to_tokens", "eos_token_id", "vocab_size")
    if isinstance(tokenizer, type) or not all(hasattr(tokenizer, name) for name in needed):
        raise ContractError(
            f"HFPolicy: tokenizer must be the model's tokenizer; got {describe(tokenizer)}. Pass "
            "AutoTokenizer.from_pretrained(...), or the tokenizer of a processor."
        )
    if tokenizer.vocab_size > vocabulary_size:
        raise ConfigError(
            f"HFPolicy: the tokenizer must not be larger than the model's vocabulary of {vocabulary_size} tokens; it has "
            f"{tokenizer.vocab_size}. Use the model's tokenizer, or call model.resize_token_embeddings(len(tokenizer))."
        )


def end_token_ids(
    tokenizer: Any, lm: CausalLM, given: tuple[int, ...] | None, sampling: SamplingConfig
) -> tuple[int, ...]:
    """The tokens that end a completion: the given ones, or those of the tokenizer and of the model's generation config."""
    size = lm.vocabulary_size
    if given is not None:
        if not all(0 <= token < size for token in given):
            raise ConfigError(
                f"HFPolicy: end_token_ids must be from 0 to {size - 1}, the model's vocabulary; got {given!r}. Pass "
                "tokenizer.convert_tokens_to_ids(...)."
            )
        return given
    configured = getattr(lm.plain.generation_config, "eos_token_id", None)
    listed = configured if isinstance(configured, list) else [configured]
    found = tuple(sorted({token for token in [tokenizer.eos_token_id, *listed] if token is not None and token < size}))
    if not found and not sampling.stop:
        raise ConfigError(
            "HFPolicy: the tokenizer or the model's generation config must have an end-of-sequence token; got none, "
            "so no completion could end before max_new_tokens. Pass options=HFOptions(end_token_ids=(...,)), or "
            "end_token_ids=() if completions should not end."
        )
    return found


def value_head_of(lm: CausalLM, given: bool | ValueHead) -> ValueHead | None:
    """The value head on the model's device, in float32 or better."""
    if given is False:
        return None
    size = lm.hidden_size
    head = ValueHead(size) if given is True else given
    if head.hidden_size != size:
        raise ConfigError(
            f"HFPolicy: value_head must read the model's hidden states of {size} numbers; got hidden_size={head.hidden_size}. "
            f"Pass ValueHead({size}), or value_head=True."
        )
    return head.to(lm.device, torch.promote_types(lm.plain.dtype, torch.float32)).train(lm.plain.training)


def reference_of(lm: CausalLM, reference_model: Any, options: HFOptions) -> CausalLM | None:
    """The frozen model of the KL term, in evaluation mode. None: there is no second model."""
    reference = None if reference_model is None else CausalLM(reference_model)
    if reference is not None:
        require_separate(lm.model, reference_model)
        # dropout in the reference would make the KL noise
        reference_model.requires_grad_(False).eval()
        reference.check_logits()
        reference.picture_token_ids = lm.picture_token_ids
        check_scores(reference, None)
        require_same_vocabulary(lm, reference)
    if options.reference == "base" and reference is not None:
        raise ConfigError("HFPolicy: options.reference='base' and reference_model are two references. Keep one.")
    if options.exact_kl_top is not None and reference is None:
        raise ConfigError(
            "HFPolicy: options.exact_kl_top is for the KL to a second model. Pass reference_model=..., or estimate the KL: "
            "objective.kl_estimator='k2' or 'k3'."
        )
    return reference


def require_same_vocabulary(lm: CausalLM, reference: CausalLM) -> None:
    """Refuse a reference with other tokens. Models of one tokenizer may be padded to different sizes, by less than 1%."""
    sizes = lm.vocabulary_size, reference.vocabulary_size
    if max(sizes) > 1.01 * min(sizes):
        raise ConfigError(
            f"HFPolicy: reference_model must have the vocabulary of the model, {sizes[0]} tokens; it has {sizes[1]}, so the "
            "same token id is another text. Use a reference with the model's tokenizer."
        )


def require_separate(model: Any, reference_model: Any) -> None:
    """Refuse a reference that would freeze the trained model, and move with it."""
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    if reference_model is model or any(id(parameter) in trained for parameter in reference_model.parameters()):
        raise ConfigError(
            "HFPolicy: reference_model must be another model; got the model itself, or one that shares trained "
            "parameters with it, so they would be frozen and the KL would stay 0. Pass copy.deepcopy(model). With LoRA, leave "
            "reference_model out: the model as training began is the reference."
        )


def warn_of_half_precision(model: Any) -> None:
    """Log a warning if trained weights have half precision."""
    if any(p.requires_grad and p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters()):
        logging.getLogger("grpo").warning(
            "HFPolicy: the trained weights have half precision, so small updates are lost to rounding (and float16 may "
            "overflow in the optimizer). Load the model with dtype=torch.float32 and set "
            "GRPOConfig(autocast_dtype='bfloat16'), or train LoRA."
        )


def require_request(states: Any, num_actions_per_state: Any) -> None:
    """Refuse what is not a batch of prompts, and a group without completions."""
    if isinstance(states, str | bytes | Mapping) or not hasattr(states, "__len__"):
        raise ContractError(
            f"HFPolicy: states must be a sequence of prompts; got {describe(states)}. Pass a list, for one prompt too: [...]."
        )
    if len(states) == 0:
        raise ContractError("HFPolicy: states must have at least one prompt; got none. Pass at least one prompt.")
    if not isinstance(num_actions_per_state, int) or num_actions_per_state < 1:
        raise ContractError(
            f"HFPolicy: num_actions_per_state must be an integer of at least 1; got {num_actions_per_state!r}. Pass the number "
            "of completions per prompt."
        )


def require_known(vocabulary_size: int, rows: Sequence[Sequence[int]], whose: str) -> None:
    """Refuse token ids that the model does not have."""
    largest = max((max(row, default=0) for row in rows), default=0)
    if largest >= vocabulary_size:
        raise ContractError(
            f"HFPolicy: {whose} token ids must be below {vocabulary_size}, the size of the model's vocabulary; "
            f"got {largest}. Use the tokens of this model's tokenizer."
        )


def require_room(limit: int | None, lengths: Sequence[int], whose: str) -> None:
    """Refuse rows that are longer than the model's positions."""
    long = [] if limit is None else [row for row, length in enumerate(lengths) if length > limit]
    if long:
        raise ContractError(
            f"HFPolicy: {whose} must fit into the model's {limit} positions; those at {long[:8]}"
            f"{' ...' if len(long) > 8 else ''} need {[lengths[row] for row in long[:8]]}. Shorten or remove these "
            "prompts, or lower max_new_tokens."
        )
