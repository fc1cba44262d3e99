"""Scores completions; serves gRPC RewardService and REST /v1/score."""
