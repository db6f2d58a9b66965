"""Tool calls that an executor of `adapters.tools` runs, in processes of its own, where a deadline ends them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from grpo.arguments import describe
from grpo.errors import ConfigError, ContractError

from .calls import result_content
from .messages import Message, tool_message

if TYPE_CHECKING:
    from adapters.tools import Tool, ToolExecutor

MOST_LOST = 32
"""Number of calls of one tool that may be lost in a row, as in `ToolRewards`."""


class ToolCallLostError(Exception):
    """A worker or a server is gone, so a tool call has no result, and the conversation says nothing about the policy.

    An agent program may catch this error. Otherwise, the conversation is held again (`AgentPolicy(num_retries=...)`), or has no
    reward.
    """


class ExecutedCalls:
    """Runs the tool calls of conversations on an executor. Each conversation has a folder of its own there.

    Args:
        executor: Has the tools. It stays the user's: it is not closed here.

    Raises:
        ConfigError: It is no executor.
    """

    def __init__(self, executor: "ToolExecutor") -> None:
        from adapters.tools import ToolExecutor  # optional packages

        if not isinstance(executor, ToolExecutor):
            raise ConfigError(
                f"AgentPolicy: executor must be a ToolExecutor of adapters.tools; got {describe(executor)}. Pass "
                "ToolExecutor(ToolCatalogue([Tool.from_function(function)]))."
            )
        self.tools: Mapping[str, Tool] = executor.tools
        """The tools that may be called, by name."""
        self.num_lost = 0
        """Number of calls that the infrastructure has lost."""
        self._executor = executor
        self._lost_in_a_row: Counter[str] = Counter()

    def named(self, owner: str, given: Sequence[Any]) -> dict[str, "Tool"]:
        """The executor's tools that an environment has, by name. The environment says them as they are in the catalogue, or
        by their functions.

        Raises:
            ContractError: The executor lacks one of them.
        """
        found = {}
        for one in given:
            tool = next((tool for tool in self.tools.values() if one is tool.function or one == tool), None)
            if tool is None:
                raise ContractError(
                    f"{owner}.tools must return tools of AgentPolicy's executor, or their functions; got {describe(one)}. Add "
                    "Tool.from_function(function) to the executor's catalogue, or leave executor=... out."
                )
            found[tool.name] = tool
        return found

    async def run(self, message: Message, tools: Mapping[str, "Tool"], folder: str) -> tuple[list[Message], int]:
        """Results of the message's tool calls, in the order of the calls, and how many of the calls failed.

        Args:
            message: The policy's message.
            tools: The tools that it may call.
            folder: Name of the conversation's folder.

        Raises:
            ToolCallLostError: The infrastructure has lost a call.
            LostCallError: The last `MOST_LOST` calls of a tool were lost.
        """
        from adapters.tools import LostCallError, ToolCall

        calls = message.get("tool_calls", [])
        known = [call["function"] for call in calls if call["function"]["name"] in tools]
        asked = [ToolCall(tool=function["name"], arguments=function["arguments"]) for function in known]
        executed = iter(await self._executor.run_async(asked, [folder] * len(asked)))
        results, num_failed = [], 0
        for call in calls:
            name = call["function"]["name"]
            if name not in tools:
                results.append(
                    tool_message(call, f"Error: there is no tool {name!r}. The tools are {', '.join(tools)}.")
                )
                num_failed += 1
                continue
            result = next(executed)
            if isinstance(result.error, LostCallError):
                self.num_lost += 1
                self._lost_in_a_row[name] += 1
                if self._lost_in_a_row[name] == MOST_LOST:
                    raise type(result.error)(
                        f"AgentPolicy: {MOST_LOST} calls of the tool {name} were lost in a row. Repair the worker or server, "
                        f"and resume the run. The last error: {result.error}"
                    ) from result.error
                raise ToolCallLostError(f"{type(result.error).__name__}: {result.error}") from result.error
            self._lost_in_a_row[name] = 0
            num_failed += not result.ok
            error = result.error
            said = result_content(name, result.output) if error is None else f"Error: {type(error).__name__}: {error}"
            results.append(tool_message(call, said))
        return results, num_failed

    def remove(self, folder: str) -> None:
        """Remove a conversation's folder, once its calls have ended."""
        self._executor.remove_folder(folder)
