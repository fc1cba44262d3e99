"""Pure maths of reinforcement learning: schedule, advantages, losses, corrections, packing."""
