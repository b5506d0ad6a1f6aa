"""Memory for expanded prefixes: who owns a chunk, what is asked for, and what is expanded. Pure Python."""
