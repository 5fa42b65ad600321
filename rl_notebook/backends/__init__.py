"""Where a policy lives and what draws from it."""
