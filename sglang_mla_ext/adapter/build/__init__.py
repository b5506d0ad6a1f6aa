"""Parts of the backend that are made at start, and how much memory they may take."""
