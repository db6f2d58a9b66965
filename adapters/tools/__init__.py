"""GRPO for policies that choose tools and are rewarded for the tools' results.

Requires jsonschema. Tools of MCP servers also require the MCP SDK (`pip install "model-agnostic-grpo[tools]"`).

Example:
    Train a policy on two tools of your own::

        from adapters.tools import Tool, ToolCatalogue, ToolExecutor, ToolRewards, ToolSelectionPolicy
        from grpo import GRPOConfig, GRPOTrainer
        from my_tools import add, shout  # functions at the top level of a module, annotated, with docstrings

        catalogue = ToolCatalogue([Tool.from_function(add), Tool.from_function(shout)])
        policy = ToolSelectionPolicy(catalogue)

        def useful(request, call, result):
            return float(result.ok)

        with ToolExecutor(catalogue) as executor:
            trainer = GRPOTrainer(
                config=GRPOConfig(group_size=8, learning_rate=0.02),
                policy=policy,
                reward_model=ToolRewards(executor, {"useful": useful}),
            )
            trainer.train(["add two and two", "say it louder"], num_iterations=100)
"""

try:
    import jsonschema as _jsonschema  # noqa: F401  # only to raise the error below
except ImportError as error:
    raise ImportError('adapters.tools needs jsonschema: pip install "model-agnostic-grpo[tools]"') from error

from .calls import ToolCall, ToolResult
from .catalogue import Tool, ToolCatalogue
from .commands import Command, CommandFailedError
from .encoders import HashingEncoder
from .errors import (
    InvalidArgumentsError,
    InvalidOutputError,
    LoopBlockedError,
    LostCallError,
    OutputTooLargeError,
    PathOutsideRootError,
    ServerLostError,
    ToolError,
    ToolNotAllowedError,
    ToolRaisedError,
    ToolTimeoutError,
    UnknownToolError,
    WorkerDiedError,
    WorkerLostError,
)
from .evaluation import Accuracy, ToolReport, evaluate_tools
from .executor import ToolExecutor
from .mcp_tools import MCPServer
from .plots import plot_accuracy, plot_confusion
from .policies import ToolSelectionPolicy
from .rewards import (
    ToolRewards,
    call_cost,
    executed,
    latency_cost,
    right_parameters,
    right_tool,
    standard_rewards,
)
from .sample_batches import batch_from_groups, groups_from_batch
from .samples import SampleError, ToolGroup, ToolSample
from .task_errors import classify_error, make_erroneous_call
from .tasks import TaskError, ToolTask, load_tasks, save_tasks, split_tasks
from .workers import WorkerLimits

__all__ = [
    "Accuracy",
    "Command",
    "CommandFailedError",
    "HashingEncoder",
    "InvalidArgumentsError",
    "InvalidOutputError",
    "LoopBlockedError",
    "LostCallError",
    "MCPServer",
    "OutputTooLargeError",
    "PathOutsideRootError",
    "SampleError",
    "ServerLostError",
    "TaskError",
    "Tool",
    "ToolCall",
    "ToolCatalogue",
    "ToolError",
    "ToolExecutor",
    "ToolGroup",
    "ToolNotAllowedError",
    "ToolRaisedError",
    "ToolReport",
    "ToolResult",
    "ToolRewards",
    "ToolSample",
    "ToolSelectionPolicy",
    "ToolTask",
    "ToolTimeoutError",
    "UnknownToolError",
    "WorkerDiedError",
    "WorkerLimits",
    "WorkerLostError",
    "batch_from_groups",
    "call_cost",
    "classify_error",
    "evaluate_tools",
    "executed",
    "groups_from_batch",
    "latency_cost",
    "load_tasks",
    "make_erroneous_call",
    "plot_accuracy",
    "plot_confusion",
    "right_parameters",
    "right_tool",
    "save_tasks",
    "split_tasks",
    "standard_rewards",
]
