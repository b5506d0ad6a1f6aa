"""What is used of SGLang, release by release, and how its radix tree is read."""
