"""The HTTP server: an OpenAI-compatible API in front of a SchedulerManager that refuses over its limit."""

from roseinfer.errors import SchedulerManagerOverloadedError
from roseinfer.manager import SchedulerManager
from roseinfer.server.app import create_app

__all__ = ["SchedulerManager", "SchedulerManagerOverloadedError", "create_app"]
