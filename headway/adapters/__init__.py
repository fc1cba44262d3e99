"""Headway's graders inside other harnesses: lm-evaluation-harness, lighteval, TRL.

Each module imports nothing of its harness at its top. All score through a reward service: the one
of `address` or HEADWAY_REWARD (`http://host:port`), else one that is started for this process.
"""
