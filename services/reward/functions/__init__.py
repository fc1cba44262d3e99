"""Users' reward functions: each source in a child process of a worker, sandboxed unless trusted."""
