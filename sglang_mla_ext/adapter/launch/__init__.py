"""Checks of a launch, its defaults and findings, and what else the launching process does."""
