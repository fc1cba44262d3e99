"""The quickstart under every algorithm: reward against steps and against seconds."""
