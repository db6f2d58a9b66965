"""One program for each framework: an agent with a tool, written as on the framework's own pages.

Each gets the URL of its conversation and a topic, and returns what its agent said last.
"""

from typing import Any

from tests.support.agents import lookup

ASKED = "What about {}?"
"""The user's question."""


def with_langchain(base_url: str, topic: str) -> str:
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="policy", base_url=base_url, api_key="none")  # type: ignore[arg-type]
    agent = create_agent(model, tools=[lookup])
    return agent.invoke({"messages": [{"role": "user", "content": ASKED.format(topic)}]})["messages"][-1].content


def with_langgraph(base_url: str, topic: str) -> str:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition

    tools = [tool(lookup)]
    model = ChatOpenAI(model="policy", base_url=base_url, api_key="none").bind_tools(tools)  # type: ignore[arg-type]

    def ask(state: MessagesState) -> Any:
        return {"messages": [model.invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("ask", ask)
    graph.add_node("tools", ToolNode(tools))
    graph.add_edge(START, "ask")
    graph.add_conditional_edges("ask", tools_condition)
    graph.add_edge("tools", "ask")
    return graph.compile().invoke({"messages": [("user", ASKED.format(topic))]})["messages"][-1].content


def with_litellm(base_url: str, topic: str) -> str:
    import json

    from litellm import completion

    text = {"type": "string", "description": "What to look up."}
    parameters = {"type": "object", "properties": {"topic": text}, "required": ["topic"]}
    function = {"name": "lookup", "description": "Looks something up.", "parameters": parameters}
    tools = [{"type": "function", "function": function}]
    messages: list[Any] = [{"role": "user", "content": ASKED.format(topic)}]
    while True:
        common: Any = {"model": "openai/policy", "api_base": base_url, "api_key": "none"}
        said = completion(messages=messages, tools=tools, **common).choices[0].message
        messages.append(said)
        if not said.tool_calls:
            return said.content
        for call in said.tool_calls:
            result = lookup(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def with_smolagents(base_url: str, topic: str) -> str:
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    model = OpenAIServerModel("policy", api_base=base_url, api_key="none")
    agent = ToolCallingAgent(tools=[tool(lookup)], model=model, verbosity_level=0)
    return str(agent.run(ASKED.format(topic)))


async def with_openai_agents(base_url: str, topic: str) -> str:
    from agents import Agent, OpenAIResponsesModel, Runner, function_tool
    from openai import AsyncOpenAI

    model = OpenAIResponsesModel("policy", openai_client=AsyncOpenAI(base_url=base_url, api_key="none"))
    agent = Agent(name="agent", model=model, tools=[function_tool(lookup)])
    return (await Runner.run(agent, ASKED.format(topic))).final_output


async def with_pydantic_ai(base_url: str, topic: str) -> str:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("policy", provider=OpenAIProvider(base_url=base_url, api_key="none"))
    return (await Agent(model, tools=[lookup]).run(ASKED.format(topic))).output


async def with_llama_index(base_url: str, topic: str) -> str:
    from llama_index.core.agent.workflow import FunctionAgent
    from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike(
        model="policy", api_base=base_url, api_key="none", is_chat_model=True, is_function_calling_model=True
    )
    return str(await FunctionAgent(tools=[lookup], llm=model).run(ASKED.format(topic)))


def with_haystack(base_url: str, topic: str) -> str:
    from haystack.components.agents import Agent
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.tools import create_tool_from_function
    from haystack.utils import Secret

    generator = OpenAIChatGenerator(model="policy", api_base_url=base_url, api_key=Secret.from_token("none"))
    agent = Agent(chat_generator=generator, tools=[create_tool_from_function(lookup)])
    return agent.run(messages=[ChatMessage.from_user(ASKED.format(topic))])["messages"][-1].text


def with_agno(base_url: str, topic: str) -> str:
    from agno.agent import Agent
    from agno.models.openai.like import OpenAILike

    agent = Agent(model=OpenAILike(id="policy", base_url=base_url, api_key="none"), tools=[lookup])
    return agent.run(ASKED.format(topic)).content


async def with_google_adk(base_url: str, topic: str) -> str:
    from google.adk.agents import LlmAgent
    from google.adk.models.lite_llm import LiteLlm
    from google.adk.runners import InMemoryRunner

    model = LiteLlm(model="openai/policy", api_base=base_url, api_key="none")
    runner = InMemoryRunner(agent=LlmAgent(name="agent", model=model, tools=[lookup]), app_name="app")
    events = await runner.run_debug(ASKED.format(topic), quiet=True)
    return events[-1].content.parts[-1].text


def with_dspy(base_url: str, topic: str) -> str:
    import dspy

    model = dspy.LM("openai/policy", api_base=base_url, api_key="none", cache=False)
    with dspy.context(lm=model):
        return dspy.ReAct("question -> answer", tools=[lookup])(question=ASKED.format(topic)).answer


async def with_strands(base_url: str, topic: str) -> str:
    from strands import Agent, tool
    from strands.models.openai import OpenAIModel

    model = OpenAIModel(client_args={"base_url": base_url, "api_key": "none"}, model_id="policy")
    agent = Agent(model=model, tools=[tool(lookup)], callback_handler=None)
    return str(await agent.invoke_async(ASKED.format(topic))).strip()


async def with_agent_framework(base_url: str, topic: str) -> str:
    from agent_framework.openai import OpenAIChatCompletionClient

    client = OpenAIChatCompletionClient(model="policy", base_url=base_url, api_key="none")
    agent = client.as_agent(name="agent", tools=[lookup])
    return (await agent.run(ASKED.format(topic))).text
