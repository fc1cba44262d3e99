"""Headway: asynchronous reinforcement learning for language models, as services."""

__version__ = "0.1.0"
