"""Samples completions; serves gRPC RolloutService."""
