"""Reasons that metrics, `/server_info`, the status page and the log name: a code for each, and what it means.

A code is a label value of a metric, so it never changes with an error or a number; those are in the log.
docs/operating.md tells what to do about each.
"""

from __future__ import annotations

from enum import Enum


class Reason(Enum):
    """A reason. Its value is a text for the log, with numbers in braces that are only known then."""

    @property
    def code(self) -> str:
        """Return the label."""
        return self.name.lower()


class Fallback(Reason):
    """Reasons why an operation of the extension failed or could not run (`fallbacks`)."""

    # At the start.
    PREFIX_MEMORY_TOO_SMALL = "--hybrid-mla-prefix-memory-gb is too small for a single chunk: set at least {gib:.3g}"
    RANK_EXPANDS_NOTHING = "nothing is expanded, because another rank expands nothing"
    NAIVE_KERNELS = "the kernels of shared attention do not run here"
    GROUPED_ABSORB_HEADS = "grouped absorb does not support {heads} heads: every step is plain absorb"
    GROUPED_ABSORB_KERNELS = "the kernels of grouped absorb do not run here: every step is plain absorb"
    FP8_CACHE_KERNELS = "the FP8 cache's Hopper kernels do not run here: Triton's are used"
    TRANSIENT_EXPANSION = "transient expansion does not run here"
    PREFILL_GRAPH = "sharing in prefill graphs does not run here"
    SHADOW_CHECK_WEIGHTS = "no shadow check: only DeepGEMM can read this form of the model's weights"
    SHADOW_CHECK_KERNELS = "no shadow check: it does not run here"

    # Limits of a running server.
    PREFIX_MEMORY_FULL = "the memory for expanded prefixes is full"
    MORE_REQUESTS = "more than {most} requests in a batch"
    MORE_GROUPS = "more groups than a step has room for"
    TREE_TOO_DEEP = "the tree is too deep to be searched in one step"

    # Failures of a running server, by what was being done.
    BEGIN_PASS = "beginning a pass failed"
    PLAN_PASS = "planning failed"
    EXPAND = "expanding failed"
    PREPARE_STEP = "preparing a step failed"
    PREPARE_PREFILL_GRAPH = "preparing a prefill graph failed"
    WRITE_PLAN = "writing a plan failed"
    CHOOSE_ATTENTION = "choosing how to attend failed"
    SCALE_QUERY = "scaling a query failed"
    JOIN_QUERY = "joining a query failed"
    ATTENTION = "attention failed"
    MERGE = "merging failed"
    SKIP_EXPANDED = "leaving expanded prefixes out failed"
    PREFILL_ATTENTION = "prefill over expanded prefixes failed"
    PREFILL_IN_GRAPH = "prefill in a graph failed"
    END_PASS = "ending a pass failed"
    SHADOW_CHECK = "the shadow check failed"
    PREDICT_MIXED = "predicting a mixed pass failed"
    SIZE_MIXED = "deciding how many tokens are mixed failed"
    ADMIT_MIXED = "deciding which requests are mixed failed"
    COUNT_NEW_TOKENS = "counting the new tokens of a batch failed"
    CHOOSE_MIXED = "deciding whether a batch is mixed failed"
    MAKE_ROWS = "making rows of new tokens failed"
    SELECT_LAST_ROWS = "selecting last rows failed"
    TAKE_LAST_LOGITS = "taking the logits of last rows failed"
    EXTEND_DRAFT = "extending the draft over mixed tokens failed"
    COUNT_DECODED = "counting decoded tokens failed"
    OPEN_VOTE = "opening a vote of ranks failed"
    CAST_VOTE = "voting failed"
    REPORT_SHARED = "reporting to other ranks what is shared failed"
    AGREE_SHARED = "agreeing with other ranks on what is shared failed"
    FLUSH_CACHE = "dropping what was flushed failed"
    UPDATE_WEIGHTS = "dropping what old weights gave failed"
    RELEASE_MEMORY = "dropping released memory failed"
    RESUME_MEMORY = "clearing resumed memory failed"
    LOAD_FROM_HOST = "waiting before rows come from the host failed"
    BECOME_IDLE = "becoming idle failed"
    REPAIR = "repairing failed"
    CHECK_PROMPT = "looking for an empty prompt failed"
    REPORT_STATE = "reporting failed"
    SHOW_SEGMENTS = "showing the tree of shared segments failed"
    PUBLISH_METRICS = "publishing metrics failed"


class NotMixed(Reason):
    """Reasons why new tokens were computed in a prefill pass (`not_mixed`)."""

    MORE_ROWS = "more new tokens than a decode graph has rows"
    PASS_IS_FASTER = "a prefill pass is predicted to be faster"
    RANK_PREFILLING = "another rank prefills"
    LOADING_FROM_HOST = "rows are on their way from the host"
    INPUT_LOGPROBS = "input log-probabilities"
    INPUT_EMBEDS = "embeddings as input"
    MULTIMODAL = "images or other media"
    ENCODER = "an encoder"
    HIDDEN_STATES = "hidden states"
    PREFILL_ONLY = "nothing is generated"


class NotSharded(Reason):
    """Reasons why ranks with sharded prefixes shared nothing in a step (`not_sharded`)."""

    RANK_PREFILLING = "a rank prefills"
    RANK_PAUSED = "a rank shares nothing for a while, after a failure"
    RANK_WITHOUT_ROWS = "a rank has no rows, and no decode graph to pad"
    MORE_ROWS = "no shared attention in a step of so many rows"
    PLANS_DIFFER = "ranks made different plans"
