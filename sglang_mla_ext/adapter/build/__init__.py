"""The start of a worker process: what the backend is made of, and how much memory that may take."""
