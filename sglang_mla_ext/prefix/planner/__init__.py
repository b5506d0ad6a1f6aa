"""Planning of a step: which rows attend together to which tokens, in which mode. Pure Python."""
