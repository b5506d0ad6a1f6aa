"""What is asked for at launch: what it may be, what has to change, and what else the launching process does."""
