"""The auxiliary loss of a mixture of experts, which keeps its experts equally busy."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo.errors import ConfigError

from .causal_lm import CausalLM


class RouterBalance:
    """The load-balancing loss of each row, for a coefficient c and the E experts of all layers:

    loss[n,t] = c E sum_e f[n,e] p[n,t,e]

    p is the softmax of the router's logits, averaged over the layers. f is how many of a step's k experts are e, averaged over
    the layers and the row's steps; it has no gradient. The steps are the positions that predict the tokens that count: no
    prompt, except for its last token, and no padding. So a row's loss does not depend on other rows or on shared prompts. The
    mean over the steps is `load_balancing_loss_func` of transformers for this row alone.

    Args:
        lm: The model.
        coef: The coefficient c. A larger value keeps the experts more equally busy, and moves the policy more.

    Source:
        Fedus et al. 2021, arXiv:2101.03961, eq. 4 to 6; per row as in DeepSeek-AI 2024, arXiv:2412.19437, eq. 17 to 20.
    """

    def __init__(self, lm: CausalLM, coef: float) -> None:
        self._lm, self._coef = lm, coef
        self._top_k: Any = getattr(lm.plain, "num_experts_per_tok", None)
        self._dtype = lm.plain.dtype
        with lm.on_trial():
            row = torch.zeros(1, 1, dtype=torch.int64, device=lm.device)
            routers = getattr(
                lm.decoder(input_ids=row, use_cache=False, output_router_logits=True), "router_logits", None
            )
        if not routers or self._top_k is None:
            raise ConfigError(
                f"HFPolicy: options.router_aux_loss_coef={coef} needs a mixture of experts whose router logits transformers "
                f"returns; {type(lm.plain).__name__} returns none. Set router_aux_loss_coef=0."
            )
        self._num_experts = routers[0].shape[-1]

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context in which the decoder appends p and f of each position to its hidden states. They travel with them, whatever
        positions are shared, packed or padded."""

        def ask(_: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            return args, kwargs | {"output_router_logits": True}

        def append(_module: Any, _args: Any, output: Any) -> Any:
            hidden = output.last_hidden_state
            self._dtype = hidden.dtype
            probs = torch.stack([logits.to(hidden.device) for logits in output.router_logits]).float().softmax(-1)
            chosen = torch.zeros_like(probs).scatter_(-1, probs.topk(self._top_k, -1).indices, 1.0)
            of_positions = torch.cat([probs.mean(0), chosen.mean(0)], -1).view(*hidden.shape[:2], -1)
            output.last_hidden_state = torch.cat(
                [hidden, of_positions.to(torch.promote_types(hidden.dtype, torch.float32))], -1
            )
            return output

        hooks = [
            self._lm.decoder.register_forward_pre_hook(ask, with_kwargs=True),
            self._lm.decoder.register_forward_hook(append),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def split(self, hidden: Float[Tensor, "N T W"], mask: Bool[Tensor, "N T"]) -> tuple[Tensor, Float[Tensor, "N T"]]:
        """Separate the hidden states, in the model's precision, from what `recording` has appended; return the loss of it."""
        size = self._num_experts
        hidden, probs, chosen = hidden.split([hidden.shape[-1] - 2 * size, size, size], -1)
        mask = mask.to(hidden.device)
        busy = (chosen * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True).clamp_min(1)
        return hidden.to(self._dtype), (self._coef * size * (busy[:, None] * probs).sum(-1)).where(mask, 0.0)
