"""GRPO for policies that choose tools and are rewarded for the tools' results.

Requires jsonschema and pydantic. Tools of MCP servers also require the MCP SDK (`pip install ".[tools]"`).

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
    import pydantic as _pydantic  # noqa: F401
except ImportError as error:
    from grpo.arguments import install_command

    raise ImportError(f"adapters.tools needs jsonschema and pydantic: {install_command('tools')}") from error

from .catalogue.calls import ToolCall, ToolResult
from .catalogue.tools import Tool, ToolCatalogue
from .errors import (
    FolderFullError,
    InvalidArgumentsError,
    InvalidOutputError,
    LoopBlockedError,
    LostCallError,
    OutputTooLargeError,
    PathOutsideRootError,
    RootFullError,
    ServerLostError,
    ToolError,
    ToolNotAllowedError,
    ToolRaisedError,
    ToolTimeoutError,
    UnknownToolError,
    WorkerDiedError,
    WorkerLostError,
)
from .execution.commands import Command, CommandFailedError
from .execution.executor import ToolExecutor
from .execution.mcp_tools import MCPServer
from .execution.options import ExecutorOptions
from .execution.workers import WorkerLimits
from .learning.buffers import ExperienceBuffer, GroupBuffer, mini_batches
from .learning.evaluation import Abstention, Accuracy, ToolReport, classify_error, evaluate_tools
from .learning.held_out import HeldOut
from .learning.records import SampleError, ToolGroup, ToolSample
from .learning.reward_regression import RewardRegression
from .learning.rewards import (
    ToolRewards,
    call_cost,
    executed,
    latency_cost,
    right_parameters,
    right_tool,
    standard_rewards,
)
from .learning.sample_batches import batch_from_groups, groups_from_batch
from .learning.statistics import RunningStatistics
from .learning.tasks import TaskError, ToolTask, load_tasks, save_tasks, split_tasks
from .policy.distribution import Prediction
from .policy.fitting import FitReport
from .policy.policy import ToolSelectionPolicy
from .text.encoders import HashingEncoder
from .text.fill import fill_from_request
from .text.fitted import FittedEncoder, JoinedEncoder

__all__ = [
    "Abstention", "Accuracy", "Command", "CommandFailedError", "ExecutorOptions", "ExperienceBuffer",
    "FitReport", "FittedEncoder", "FolderFullError", "GroupBuffer", "HashingEncoder", "HeldOut", "InvalidArgumentsError",
    "InvalidOutputError",
    "JoinedEncoder", "LoopBlockedError", "LostCallError", "MCPServer", "OutputTooLargeError",
    "PathOutsideRootError", "Prediction", "RewardRegression", "RootFullError", "RunningStatistics", "SampleError",
    "ServerLostError", "TaskError", "Tool", "ToolCall", "ToolCatalogue", "ToolError", "ToolExecutor", "ToolGroup",
    "ToolNotAllowedError", "ToolRaisedError", "ToolReport", "ToolResult", "ToolRewards", "ToolSample",
    "ToolSelectionPolicy", "ToolTask", "ToolTimeoutError", "UnknownToolError", "WorkerDiedError", "WorkerLimits",
    "WorkerLostError", "batch_from_groups", "call_cost", "classify_error", "evaluate_tools", "executed",
    "fill_from_request", "groups_from_batch", "latency_cost", "load_tasks", "mini_batches", "right_parameters",
    "right_tool", "save_tasks", "split_tasks", "standard_rewards",
]  # fmt: skip
