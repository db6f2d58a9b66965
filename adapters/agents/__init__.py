"""GRPO for language models that talk and act over many turns, with environments and agent programs of any kind.

Requires transformers and PEFT (`pip install ".[llm]"`).

Example:
    Train a model to use a tool::

        from adapters.agents import AgentPolicy, EnvironmentReward
        from adapters.llm import HFPolicy, SamplingConfig
        from grpo import GRPOConfig, GRPOTrainer

        def add(a: int, b: int) -> int:
            '''Adds two numbers.

            Args:
                a: The first number.
                b: The second number.
            '''
            return a + b

        class Sum:
            def __init__(self, task):
                self.task = task

            def tools(self):
                return [add]

            def reset(self, *, seed=None, options=None):
                return self.task["question"], {}

            def step(self, action):
                return "", float(self.task["answer"] in action["content"]), True, False, {}

        model = HFPolicy.from_pretrained("Qwen/Qwen3-0.6B", lora=True, sampling=SamplingConfig(max_new_tokens=128))
        policy = AgentPolicy(model, Sum, max_turns=4)
        trainer = GRPOTrainer(config=GRPOConfig(group_size=8), policy=policy, reward_model=EnvironmentReward())
        trainer.train([{"question": "What is 1234 + 5678?", "answer": "6912"}], num_iterations=100)
"""

from .branching import Branching
from .chat import Chat, ConversationEnded
from .conversations import Conversation, SeatReply, Segment, Turn
from .endpoint import ChatEndpoint
from .environments import Environment
from .executed_calls import ToolCallLostError
from .messages import Message
from .policy import AgentPolicy
from .rewards import EnvironmentReward
from .speakers import Seat, seat_advantages
from .templates import ChatTemplate
from .transcripts import save_transcripts, transcript_page
from .trl import train_with_trl, trl_environment, trl_reward_functions

__all__ = [
    "AgentPolicy", "Branching", "Chat", "ChatEndpoint", "ChatTemplate", "Conversation", "ConversationEnded",
    "Environment", "EnvironmentReward", "Message", "Seat", "SeatReply", "Segment", "ToolCallLostError", "Turn",
    "save_transcripts", "seat_advantages", "train_with_trl", "transcript_page", "trl_environment", "trl_reward_functions",
]  # fmt: skip
