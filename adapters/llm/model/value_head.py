"""A value head: what a language model expects to gain from a state on, for credit with a critic."""

import json
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from grpo.errors import ConfigError

VALUE_HEAD_FILE = "value_head.safetensors"
"""Name of the file with a saved value head."""


class ValueHead(nn.Module):
    """Linear, ReLU, dropout and Linear, from the last hidden state of a state's last token to the value of the state.

    V = w · dropout(relu(U h + a)) + b

    The head computes in float32 or better beside a model of any precision, also under autocast. At first, w and b are 0, so
    all values are 0, whatever the size of the hidden states. The gradient of the values reaches the model too.

    Args:
        hidden_size: Size of the model's hidden states, H.
        width: Number of hidden units. None uses H. More can express more, and need more memory.
        dropout: Share of the hidden units that are left out, in training mode only. More makes the values smoother and their
            gradient noisier. Log-probs do not depend on it.
        bootstrap_truncated: Whether the value of the state after a truncated completion counts as the rest of its return. Pass
            False if rewards judge a truncated completion as if it had ended: then nothing follows.

    Example:
        >>> ValueHead(64, dropout=0.0)(torch.ones(3, 64))
        tensor([0., 0., 0.], grad_fn=<SqueezeBackward1>)

    Raises:
        ConfigError: A size or the rate is out of range.

    Source:
        Schulman et al. 2017, arXiv:1707.06347, section 5: policy and values share a network.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        width: int | None = None,
        dropout: float = 0.1,
        bootstrap_truncated: bool = True,
    ) -> None:
        super().__init__()
        width = hidden_size if width is None else width
        if hidden_size < 1 or width < 1 or not 0 <= dropout < 1:
            raise ConfigError(
                "ValueHead: hidden_size and width must be at least 1, and dropout at least 0 and below 1; got "
                f"{hidden_size}, {width} and {dropout}."
            )
        self.hidden_size, self.bootstrap_truncated = hidden_size, bootstrap_truncated
        last = nn.Linear(width, 1)
        # values start at 0, so that the first advantages depend on rewards alone
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.layers = nn.Sequential(nn.Linear(hidden_size, width), nn.ReLU(), nn.Dropout(dropout), last)

    def forward(self, hidden: Float[Tensor, "M H"]) -> Float[Tensor, " M"]:
        """The value of each of M states."""
        # in float32, whatever the model computes in
        with torch.autocast(hidden.device.type, enabled=False):
            return self.layers(hidden.to(next(self.parameters()))).squeeze(1)

    def save(self, folder: str | Path) -> None:
        """Save the head as `value_head.safetensors`."""
        settings = {"dropout": self.layers[2].p, "bootstrap_truncated": self.bootstrap_truncated}
        save_file(self.state_dict(), Path(folder) / VALUE_HEAD_FILE, metadata={"settings": json.dumps(settings)})

    @classmethod
    def load(cls, folder: str | Path) -> "ValueHead":
        """The head that `save` saved."""
        with safe_open(Path(folder) / VALUE_HEAD_FILE, "pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a dict
            settings = json.loads(file.metadata()["settings"])
        width, hidden_size = weights["layers.0.weight"].shape
        head = cls(hidden_size, width=width, **settings)
        head.load_state_dict(weights)
        return head
