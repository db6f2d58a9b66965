"""The parts of a Hugging Face causal language model: its decoder, its output head, and the capabilities of its cache."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from adapters.llm.picture_prompts import Ids, joined_fields
from grpo.errors import ContractError, GRPOError

from .time_steps import keep_time_step_limits
from .token_log_probs import is_intercepted
from .value_head import ValueHead

try:  # a layer without keys of its own, from transformers 5.18 on
    from transformers.cache_utils import DummyLayer as DummyLayer
except ImportError:  # GPU images of the cloud are often older

    class DummyLayer:  # type: ignore[no-redef]
        """No layer has this class before."""


SHAREABLE = {
    DynamicLayer,
    DummyLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
}
"""Layers of a cache whose keys, values and states after a prompt can be copied to rows."""


class CausalLM:
    """The parts of a causal language model, plain or adapted by PEFT.

    Args:
        model: A `PreTrainedModel` with an output head, or a `PeftModel` around one.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        _refuse_unusable(model)
        self.adapters = adapters_of(model)
        """Configurations of PEFT's active adapters, by name."""
        plain = model.get_base_model() if hasattr(model, "get_base_model") else model
        head = plain.get_output_embeddings() if hasattr(plain, "get_output_embeddings") else None
        if head is None or plain.config.is_encoder_decoder:
            remedy = (
                f"Use HFPolicy.from_pretrained({model!r})."
                if isinstance(model, str | Path)
                else "Load it with AutoModelForCausalLM."
            )
            raise ContractError(
                "HFPolicy: the model must be a decoder-only causal language model of transformers with an output head, or a "
                f"PeftModel around one; got {repr(model) if isinstance(model, str) else type(plain).__name__}. {remedy}"
            )
        _refuse_adapters(model, self.adapters)
        _require_one_device(plain)
        if not getattr(plain.config, "return_dict", True):
            raise ContractError(
                f"HFPolicy: the model must return its outputs by name; {type(plain).__name__} has return_dict=False. Set "
                "model.config.return_dict = True."
            )
        if not isinstance(getattr(plain.get_input_embeddings(), "weight", None), Tensor):
            raise ContractError(
                f"HFPolicy: the model must read one token per position; {type(plain).__name__} has several embeddings (of "
                "codebooks). Use a language model of text."
            )
        self.plain = plain
        self.config = plain.config.get_text_config(decoder=True)
        # some classes name the attribute of a wrapper that they are a part of (Llama 4: "language_model")
        self.decoder: nn.Module = (
            plain.model if plain.base_model is plain and hasattr(plain, "model") else plain.base_model
        )
        """The part from token ids to hidden states: all layers except the output head."""
        keep_time_step_limits(self.decoder)
        self.value_head: ValueHead | None = None
        """The part from hidden states to values, if there is one. It is no part of the Hugging Face model."""
        kinds = {type(layer) for layer in DynamicCache(config=self.config).layers}
        self.has_plain_cache = kinds == {DynamicLayer}
        """Whether each layer caches keys and values and attends to all past positions, wherever padding is between them."""
        is_stateful = getattr(plain, "_is_stateful", False)
        self.shares_prompts = (
            kinds <= SHAREABLE
            and kinds != {LinearAttentionLayer}  # Mamba: without attention, the cache has no length
            and not (self.has_plain_cache and is_stateful)  # RWKV and xLSTM: the state is outside the cache
            and self.config.model_type != "jamba"  # its scan of several tokens begins without a state
        )
        """Whether completions continue a copy of their prompt's cache. `check_scores` sets it to False if the scores differ."""
        self.balances_experts = False
        """Whether scores have the auxiliary loss of the routers."""
        self._exclusion: Tensor | None = None
        self._postprocesses = True
        self._counting: list[Any] = [part for part in plain.modules() if hasattr(part, "rope_deltas")]
        """Parts that give pictures positions of their own, and store how many fewer positions than tokens they have."""
        self.picture_token_ids: tuple[int, ...] = ()
        """Tokens that stand for pictures. No completion has them, because `head` excludes them. Empty: the model reads text."""
        self.has_equal_passes = False
        """Whether each scoring pass calls each layer equally often, whatever the rows are. Weights that are divided among ranks
        need it."""

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder's layers, by the names of the classes that transformers keeps on one device."""
        kinds = set(getattr(self.plain, "_no_split_modules", None) or ())
        found = [module for module in self.decoder.modules() if type(module).__name__ in kinds]
        inside = {part for module in found for part in module.modules() if part is not module}
        return [module for module in found if module not in inside]

    @property
    def head(self) -> nn.Module:
        """The part from hidden states to logits: the output head and its postprocessing."""
        linear = self.plain.get_output_embeddings()
        post = LogitsPostprocessing(self.config)
        head = linear if post.is_identity or not self._postprocesses else nn.Sequential(linear, post)
        return with_bias(head, self.exclusion) if self.reads_pictures else head

    @property
    def exclusion(self) -> Float[Tensor, " V"]:
        """What is added to the logits, so that no completion has a token that stands for a picture."""
        weight = self.plain.get_input_embeddings().weight
        dtype = torch.promote_types(self.plain.dtype, torch.bfloat16)  # of quantised weights, too
        if self._exclusion is None or self._exclusion.device != weight.device or self._exclusion.dtype != dtype:
            bias = torch.zeros(self.vocabulary_size, dtype=dtype)
            bias[list(self.picture_token_ids)] = EXCLUDED
            self._exclusion = bias.to(weight.device)
        return self._exclusion

    @property
    def reads_pictures(self) -> bool:
        """Whether prompts may have pictures."""
        return bool(self.picture_token_ids)

    @property
    def shifts_positions(self) -> bool:
        """Whether a picture can have fewer positions than tokens, so that positions cannot be counted from lengths."""
        return self.reads_pictures and bool(self._counting)

    def fields(self, prompts: Sequence[Ids], width: int, *, on_the_left: bool = False) -> dict[str, Any]:
        """The fields of a pass over prompts that are padded to `width` tokens. Empty if no prompt has pictures."""
        return joined_fields(prompts, width, on_the_left=on_the_left, device=self.device, dtype=self.plain.dtype)

    def take_shifts(self) -> Int[Tensor, " B"] | int:
        """How many more positions than tokens the prompts of the last pass have. The model forgets them, because it would add
        them in other passes."""
        found: Tensor | int = 0
        for part in self._counting:
            found = found if part.rope_deltas is None else part.rope_deltas.flatten()
            part.rope_deltas = None
        return found

    @property
    def hidden_size(self) -> int:
        """Number of values of a hidden state, from a trial. Configurations name it in several ways."""
        with self.on_trial():
            token_ids = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
            return self.decoder(input_ids=token_ids, use_cache=False).last_hidden_state.shape[-1]

    @property
    def embedding_size(self) -> int:
        """Number of values of a token's embedding."""
        return self.plain.get_input_embeddings().weight.shape[1]

    @property
    def vocabulary_size(self) -> int:
        """Number of token embeddings. Token ids are below it."""
        return len(self.plain.get_input_embeddings().weight)

    @property
    def device(self) -> torch.device:
        """Device of the token embedding."""
        return self.plain.get_input_embeddings().weight.device

    @property
    def computes_in_float32(self) -> bool:
        """Whether the model computes in float32 or better: no half-precision or quantised weights, and no autocast."""
        is_wide = self.plain.dtype in (torch.float32, torch.float64) and not getattr(self.plain, "is_quantized", False)
        return is_wide and not torch.is_autocast_enabled(self.device.type)

    @property
    def may_choose_other_experts(self) -> bool:
        """Whether rounding can choose other experts in one pass than in another: a mixture of experts below float32."""
        has_experts = any("expert" in type(part).__name__.lower() for part in self.decoder.modules())
        return has_experts and not self.computes_in_float32

    @property
    def max_positions(self) -> int | None:
        """Maximum sequence length of the model. None if the configuration does not have it.

        With LongRoPE (arXiv:2402.13753) the result is the original length: for longer sequences, LongRoPE rescales all
        positions, and the scores of a row would depend on the other rows of its batch.
        """
        rotary = getattr(self.config, "rope_parameters", None) or {}
        if rotary.get("rope_type") == "longrope":
            return int(rotary["original_max_position_embeddings"])
        return getattr(self.config, "max_position_embeddings", None)

    @property
    def shares_forks(self) -> bool:
        """Whether completions can also share what is behind their prompt. Padding between edges would move a sliding window,
        and change a state. The load of experts is that of whole rows."""
        shares = self.shares_prompts and self.has_plain_cache and not self.balances_experts
        return shares and not self.has_equal_passes and not self.checkpoints_gradients

    @property
    def checkpoints_gradients(self) -> bool:
        """Whether gradient checkpointing is active. Layers then run again in the backward pass and store no cache."""
        return self.plain.training and any(
            getattr(part, "gradient_checkpointing", False) for part in self.plain.modules()
        )

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context in which the model is in evaluation mode."""
        was_training = self.plain.training
        self.plain.eval()
        try:
            yield
        finally:
            self.plain.train(was_training)

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """Context in which the adapter is switched off and the model is in evaluation mode."""
        trained = {parameter: parameter.requires_grad for parameter in self.model.parameters()}
        is_integrated = not hasattr(self.model, "disable_adapter")  # `add_adapter` of transformers
        try:
            with self.evaluating(), nullcontext() if is_integrated else self.model.disable_adapter():
                if is_integrated:
                    self.model.disable_adapters()
                yield
        finally:
            if is_integrated:
                self.model.enable_adapters()
            # PEFT makes all parts of the adapter trainable, also frozen ones
            for parameter, requires_grad in trained.items():
                parameter.requires_grad_(requires_grad)

    @contextmanager
    def on_trial(self) -> Iterator[None]:
        """Context of trial forward passes. An error of the model's own code becomes a `ContractError`."""
        try:
            with torch.no_grad(), self.evaluating():
                yield
        except (GRPOError, torch.OutOfMemoryError):
            raise
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise ContractError(
                f"HFPolicy: the model must decode and score as a decoder-only model; {type(self.plain).__name__} raised "
                f"{type(error).__name__}: {str(error).strip()[:300]}. Correct what this error names, or use another "
                "architecture: a class that is older than caches, or that encodes, does not work."
            ) from error

    def log_probs_alone(self, prompt: Ids, tokens: Sequence[int]) -> Float[Tensor, " T"]:
        """Log-probs of a completion, by a forward pass of the whole model on this row alone: no padding and no cache."""
        row = torch.tensor([[*prompt, *tokens]], device=self.device)
        self.take_shifts()
        fields = self.fields([prompt], row.shape[1])
        logits = self.plain(input_ids=row, use_cache=False, **fields).logits[0, len(prompt) - 1 : -1].float()
        logits = logits + self.exclusion if self.reads_pictures else logits
        return logits.log_softmax(1).gather(1, row[0, len(prompt) :, None]).squeeze(1)

    def check_logits(self) -> None:
        """Check that the head, applied to the decoder's hidden states, gives the logits of the whole model, and that no logits
        depend on later tokens.
        """
        # several tokens, because the embedding of a padding token may be 0, and then its logits are 0
        row = torch.arange(8, device=self.device)
        tokens = torch.stack([row, torch.cat([row[:4], row[4:].flip(0)])]) % self.vocabulary_size
        with self.on_trial():
            expected = self.model(input_ids=tokens, use_cache=False).logits.float()
            hidden = self.decoder(input_ids=tokens, use_cache=False).last_hidden_state
            got = self.head(hidden).float()
            if not torch.allclose(got, expected, rtol=1e-2, atol=1e-2 * expected.abs().max().item()):
                self._postprocesses = False  # Aya Vision leaves out what its text model does
                got = self.head(hidden).float()
        tolerance = 1e-4 if self.computes_in_float32 else 1e-2
        name, size = type(self.plain).__name__, expected.abs().max().item()
        if not torch.allclose(expected[0, :4], expected[1, :4], rtol=tolerance, atol=10 * tolerance * size):
            raise ContractError(
                f"HFPolicy: the model must be causal; the logits of {name} depend on later tokens. It is an encoder, "
                "or reads a prompt in both directions (PaliGemma). Load a decoder with AutoModelForCausalLM, or set "
                "is_decoder=True in its config if it was trained as a decoder."
            )
        if got.shape != expected.shape or not torch.allclose(got, expected, rtol=tolerance, atol=tolerance * size):
            raise ContractError(
                f"HFPolicy: the output head, applied to the last hidden states, must give the model's logits; with {name} they "
                "differ, because this architecture changes its hidden states or its logits in an unsupported way (encoders "
                "have another layer before the head). Report the architecture, or use another one."
            )


OUTSIDE_LAYERS = {
    "CARTRIDGE": "adds keys and values outside the decoder",
    "LILY": "mixes its experts by an average over all tokens of a batch, later ones included",
    "POLY": "needs the id of a task for each row",
    "SHADOW": "runs a second model beside the decoder",
    "XLORA": "runs the model twice, to weigh its adapters",
}
"""Types of adapters whose effect is not in the decoder's layers alone, and what each does."""


def is_adapted(model: Any) -> bool:
    """Whether PEFT has adapted a model, itself or through `add_adapter` of transformers."""
    return hasattr(model, "disable_adapter") or getattr(model, "_hf_peft_config_loaded", False)


def adapters_of(model: Any) -> dict[str, Any]:
    """Configurations of the active adapters, by name. Empty: the model has no adapter."""
    configs = getattr(model, "peft_config", None) or {}
    if not configs or not is_adapted(model):  # PEFT leaves its configurations on the model that it has adapted
        return {}
    active = getattr(model, "active_adapters", None) or []
    active = active() if callable(active) else active  # transformers has a method, and PEFT a property
    return {name: configs[name] for name in ([active] if isinstance(active, str) else active) if name in configs}


def _refuse_unusable(model: Any) -> None:
    """Refuse what only looks like a model that can be trained."""
    compiled = getattr(model, "_orig_mod", None) is not None
    wrapped = [model, model.get_base_model()] if hasattr(model, "get_base_model") else [model]
    if compiled or any(getattr(part, "_compiled_call_impl", None) is not None for part in wrapped):
        raise ContractError(
            "HFPolicy: the model must not be compiled as a whole, because its decoder and its head are called apart, so the "
            "compiled forward would never run. Pass the model itself, and compile its layers: "
            "[layer.compile() for layer in model.model.layers]."
        )
    if type(model).__name__ == "PeftMixedModel":
        raise ContractError(
            "HFPolicy: the model must not be a PeftMixedModel, because PEFT can neither save nor load one. Use adapters of one "
            "type: peft.get_peft_model(model, config)."
        )


def _refuse_adapters(model: Any, adapters: Mapping[str, Any]) -> None:
    """Refuse adapters that do not act where the decoder is called, and adapters that are merged."""
    for config in adapters.values():
        kind = getattr(config.peft_type, "value", str(config.peft_type))
        cause = OUTSIDE_LAYERS.get(kind)
        if config.is_prompt_learning:
            cause = "adds virtual tokens outside the decoder"
        if getattr(config, "alora_invocation_tokens", None):
            kind, cause = "aLoRA", "acts only behind its invocation tokens, which PEFT looks for outside the decoder"
        if cause is not None:
            raise ContractError(
                f"HFPolicy: an adapter must change the decoder's layers, as LoRA does; got {kind}, which {cause}. Use LoRA."
            )
    merged = [name for name, module in model.named_modules() if getattr(module, "merged_adapters", None)]
    if merged:
        raise ContractError(
            f"HFPolicy: the adapter must not be merged into the base weights, because its own weights then have no effect and "
            f"no gradient; {merged[0]} is merged. Call model.unmerge_adapter(), or train the model that merge_and_unload() "
            "returns."
        )


def _require_one_device(plain: Any) -> None:
    """Refuse weights without values, and weights on several devices."""
    devices = {str(parameter.device) for parameter in plain.parameters()}
    if "meta" in devices:
        raise ContractError(
            "HFPolicy: the model's weights must be in memory; some are on the meta device, which holds no values: the model "
            "was built without weights, or device_map has put them on disk. Load it with from_pretrained, without offloading."
        )
    if len(devices) > 1 or len(set(getattr(plain, "hf_device_map", {}).values())) > 1:
        raise ContractError(
            f"HFPolicy: all weights of a model must be on one device; they are on {sorted(devices)}, by device_map. Load it "
            "with device_map={'': device}. To divide a model among GPUs, use GRPOTrainer(engine=grpo.distributed.Sharded())."
        )


class LogitsPostprocessing(nn.Module):
    """Postprocessing of the head's output: a soft cap (Gemma), a division (Granite) or a factor (Cohere)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.cap = getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)
        self.factor = float(getattr(config, "logit_scale", None) or 1) / float(
            getattr(config, "logits_scaling", None) or 1
        )

    @property
    def is_identity(self) -> bool:
        """Whether logits are left unchanged."""
        return self.cap is None and self.factor == 1

    def forward(self, logits: Float[Tensor, "*any V"]) -> Float[Tensor, "*any V"]:
        """Scale and cap the logits."""
        logits = logits if self.factor == 1 else logits * self.factor
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


EXCLUDED = -1e4
"""What is added to the logit of an excluded token. Its probability is then 0, and 0 times its logit is 0, as 0 times -inf is
not."""


def with_bias(head: Any, bias: Float[Tensor, " V"]) -> nn.Module:
    """A head that adds to its logits. A plain linear head without a bias stays one."""
    is_plain = type(head) is nn.Linear and not is_intercepted(head)
    if not is_plain or dict(head.named_parameters()).keys() != {"weight"}:
        return nn.Sequential(head, Plus(bias))
    linear = nn.Linear(1, 1, device="meta")
    linear.weight, linear.bias = head.weight, nn.Parameter(bias.to(head.weight.dtype), requires_grad=False)
    return linear


class Plus(nn.Module):
    """Adds a bias to logits."""

    def __init__(self, bias: Float[Tensor, " V"]) -> None:
        super().__init__()
        self._bias = bias

    def forward(self, logits: Float[Tensor, "*any V"]) -> Float[Tensor, "*any V"]:
        """The logits with the bias."""
        return logits + self._bias.to(logits.dtype)
