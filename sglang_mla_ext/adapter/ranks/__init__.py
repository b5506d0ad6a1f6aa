"""Agreement of ranks: on their rules at start; before a pass on mixed tokens and on sharded prefixes."""
