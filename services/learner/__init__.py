"""Optimises the policy; serves gRPC LearnerService."""
