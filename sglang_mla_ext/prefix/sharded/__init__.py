"""Sharded prefixes: with DP attention each rank has some heads of every expanded prefix, and attends with them for the
requests of all ranks. All ranks decide alike what a step shares, from the reports of all."""
