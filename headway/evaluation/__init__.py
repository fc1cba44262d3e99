"""Evaluation: what a model answers to held-out prompts, and what can be said of that."""
