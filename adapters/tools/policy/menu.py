"""The tools that a policy chooses from, as tensors."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from adapters.tools.catalogue.tools import Tool, ToolCatalogue
from grpo.errors import ConfigError

from .choice_tables import ChoiceTables
from .encoders import CachedEncoder, with_own_feature


class Menu(nn.Module):
    """The encoded tools and their tables, on the policy's device and in its precision, with the offsets of added tools."""

    tool_vectors: Tensor
    """Encoded text of each tool, [K, D]."""
    value_vectors: Tensor
    """Encoded text of each distinct parameter value, [C, D]."""
    offsets: Tensor
    """c_k of each tool, [K]."""
    values: Tensor
    exists: Tensor
    decides: Tensor

    def __init__(self, catalogue: ToolCatalogue, encoder: CachedEncoder) -> None:
        super().__init__()
        self.encoder = encoder
        self.added: frozenset[str] = frozenset()
        self.offset_of: dict[str, float] = {}
        """c_k by name. 0 for the other tools."""
        self._use(catalogue)

    def add(self, *tools: Tool) -> None:
        """See `ToolSelectionPolicy.add_tools`."""
        self._use(self.catalogue.with_tools(*tools))
        self.added |= {tool.name for tool in tools}

    def remove(self, *names: str) -> None:
        """See `ToolSelectionPolicy.remove_tools`."""
        unknown = [name for name in names if name not in self.catalogue]
        if unknown:
            raise ConfigError(
                f"ToolSelectionPolicy.remove_tools: the catalogue must have the tools; it lacks {', '.join(unknown)}."
            )
        self._use(self.catalogue.without(*names))
        self.added -= set(names)
        self.set_offsets({name: offset for name, offset in self.offset_of.items() if name not in names})

    def set_offsets(self, offsets: dict[str, float]) -> None:
        """Set c_k of the named tools, and 0 for all others."""
        self.offset_of = offsets
        self.offsets.copy_(self._offsets())

    def _offsets(self) -> Float[Tensor, " K"]:
        return torch.tensor([self.offset_of.get(name, 0.0) for name in self.catalogue])

    def _use(self, catalogue: ToolCatalogue) -> None:
        self.catalogue, self.tables = catalogue, ChoiceTables(catalogue)
        known = next(self.buffers(), torch.zeros(()))  # the current tools' vectors
        tool_vectors, texts = self.encoder(self.tables.tool_texts), self.tables.value_texts
        for name, value in {
            "tool_vectors": tool_vectors,
            "value_vectors": with_own_feature(texts, self.encoder(texts)) if texts else tool_vectors[:0],
            "offsets": self._offsets(),
            "values": self.tables.values,
            "exists": self.tables.exists,
            "decides": self.tables.decides,
        }.items():
            dtype = known.dtype if value.is_floating_point() else value.dtype
            self.register_buffer(name, value.to(known.device, dtype), persistent=False)
