"""Where foreign libraries meet the engine: the only rooms that import them."""
