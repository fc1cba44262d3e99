"""Where processes are put, and how they stay in touch with the coordinator."""
