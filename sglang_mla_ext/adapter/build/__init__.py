"""What is made at start: how much memory it may take, and the parts of the backend."""
