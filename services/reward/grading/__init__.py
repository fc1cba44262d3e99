"""How one completion is graded. Runs in worker processes only; imports nothing heavy at the top."""
