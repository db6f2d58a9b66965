"""The executor of calls, its workers, programs and MCP servers."""
