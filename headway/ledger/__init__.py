"""The work ledger: exactly once, and never too old."""
