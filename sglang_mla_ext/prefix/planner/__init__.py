"""Which rows of a step attend together to which tokens, and in which way: costs, choice and plan. Pure Python."""
