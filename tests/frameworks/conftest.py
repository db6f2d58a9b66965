"""Frameworks send nothing to anybody while they are tested."""

import os

os.environ |= {
    "AGNO_TELEMETRY": "false",
    "HAYSTACK_TELEMETRY_ENABLED": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # it would be fetched
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
}
