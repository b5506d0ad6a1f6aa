"""Expanded prefixes that ranks of DP attention hold together: each has some heads of every prefix, and attends with
them for the requests of all ranks. What a step shares all of them decide alike, from what all know."""
