"""A policy in files: from a model on the hub or in a folder, and into a folder with a model card."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

import torch

from grpo.arguments import refuse_options

from .model.cards import save_with_card
from .model.causal_lm import CausalLM, is_adapted
from .model.loading import load_model, save_model
from .model.parts import Part
from .model.value_head import VALUE_HEAD_FILE, ValueHead
from .options import HFOptions
from .sampling.sampling_config import SamplingConfig


class PretrainedPolicy:
    """What `HFPolicy` reads from files and writes to them."""

    model: Any
    tokenizer: Any
    processor: Any
    sampling: SamplingConfig
    _lm: CausalLM
    _base_model: str | None

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
    ) -> Self:
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
        return cls(model, tokenizer, **arguments)  # type: ignore[call-arg]

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
            if self._lm.value_head is not None:
                self._lm.value_head.save(folder)

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
