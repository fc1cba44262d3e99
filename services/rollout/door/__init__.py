"""A rollout node's OpenAI-compatible door: models, chat completions, completions."""
