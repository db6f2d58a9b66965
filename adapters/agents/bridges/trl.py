"""Environments written for TRL's `GRPOTrainer(environment_factory=...)`, unchanged."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from adapters.agents.calls import call_functions
from adapters.agents.chat import Chat, ConversationEnded
from adapters.agents.threads import OwnThread


def trl_environments(factory: Callable[[], Any], *reward_functions: Callable[..., Any]) -> Callable[..., Any]:
    """An agent program for `AgentPolicy`. States are rows: dicts with the columns of the data set.

    Args:
        factory: TRL's `environment_factory`.
        reward_functions: TRL's `reward_funcs`, each called once per conversation, with lists of one entry. The reward is the
            sum of their results and of the environment's `get_reward()`. `None` does not count, and only `None`s are NaN.
    """

    async def play(chat: Chat, row: Mapping[str, Any]) -> float:
        thread = OwnThread()
        chat.threads.append(thread)
        try:
            environment = await thread.run(factory)
            names = [name for name, _ in inspect.getmembers(type(environment), inspect.isfunction) if name[0] != "_"]
            tools = {name: getattr(environment, name) for name in names if name not in ("reset", "get_reward")}
            shown = await thread.run(environment.reset, **row)
            *before, last = row.get("prompt", [{"role": "user", "content": ""}])
            messages = prompt = [*before, {**last, "content": last["content"] + (shown or "")}]
            try:
                while (message := await chat(messages, list(tools.values()))).get("tool_calls"):
                    results, num_failed = await call_functions(message, tools, thread.run)
                    chat.counts["failed_calls"] += num_failed
                    messages = [*chat.messages, *results]
            except ConversationEnded:  # TRL asks for the reward at a limit, too
                pass
            columns = {name: [value] for name, value in row.items() if name != "prompt"} | {
                "environments": [environment]
            }
            said = {"prompts": [prompt], "completions": [chat.messages[len(prompt) :]]}
            rewards = [(await thread.run(function, **said, **columns))[0] for function in reward_functions]
            rewards += [await thread.run(environment.get_reward)] if "get_reward" in names else []
            return sum(reward for reward in rewards if reward is not None) if {*rewards} - {None} else float("nan")
        finally:
            await thread.finish()

    return play
