"""The contract with SGLang: what is used of each release, and one class per release for what differs."""
