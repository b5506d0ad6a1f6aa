"""Reasons that metrics, `/server_info`, the status page and the log name: a code for each, and what it means.

A code is a label value of a metric, so it never changes with an error or a number; those are in the log.
docs/operating.md tells what to do about each.
"""

from __future__ import annotations

from enum import Enum


class Reason(str, Enum):
    """A code, as its value.

    Attributes:
        text: for the log; numbers that are only known then are in braces.
    """

    text: str

    def __new__(cls, code: str, text: str) -> Reason:
        self = str.__new__(cls, code)
        self._value_, self.text = code, text
        return self


class Fallback(Reason):
    """Why something was done by plain absorb that was meant to be shared (`fallbacks`)."""

    # At the start.
    PREFIX_MEMORY_TOO_SMALL = (
        "prefix_memory_too_small",
        "--hybrid-mla-prefix-memory-gb is too small for a single chunk: set at least {gib:.3g}",
    )
    RANK_EXPANDS_NOTHING = "rank_expands_nothing", "nothing is expanded, because another rank expands nothing"
    NAIVE_KERNELS = "naive_kernels", "the kernels of shared attention do not run here"
    GROUPED_ABSORB_HEADS = (
        "grouped_absorb_heads",
        "grouped absorb does not support {heads} heads: every step is plain absorb",
    )
    GROUPED_ABSORB_KERNELS = (
        "grouped_absorb_kernels",
        "the kernels of grouped absorb do not run here: every step is plain absorb",
    )
    FP8_CACHE_KERNELS = "fp8_cache_kernels", "the FP8 cache's Hopper kernels do not run here: Triton's are used"
    TRANSIENT_EXPANSION = "transient_expansion", "transient expansion does not run here"
    PREFILL_GRAPH = "prefill_graph", "sharing in prefill graphs does not run here"
    SHADOW_CHECK_WEIGHTS = (
        "shadow_check_weights",
        "no shadow check: only DeepGEMM can read this form of the model's weights",
    )
    SHADOW_CHECK_KERNELS = "shadow_check_kernels", "no shadow check: it does not run here"

    # Limits of a running server.
    PREFIX_MEMORY_FULL = "prefix_memory_full", "the memory for expanded prefixes is full"
    MORE_REQUESTS = "more_requests", "more than {most} requests in a batch"
    MORE_GROUPS = "more_groups", "more groups than a step has room for"
    TREE_TOO_DEEP = "tree_too_deep", "the tree is too deep to be searched in one step"

    # Failures of a running server, by what was being done.
    BEGIN_PASS = "begin_pass", "beginning a pass failed"
    PLAN_PASS = "plan_pass", "planning failed"
    EXPAND = "expand", "expanding failed"
    PREPARE_STEP = "prepare_step", "preparing a step failed"
    PREPARE_PREFILL_GRAPH = "prepare_prefill_graph", "preparing a prefill graph failed"
    WRITE_PLAN = "write_plan", "writing a plan failed"
    CHOOSE_ATTENTION = "choose_attention", "choosing how to attend failed"
    SCALE_QUERY = "scale_query", "scaling a query failed"
    JOIN_QUERY = "join_query", "joining a query failed"
    ATTENTION = "attention", "attention failed"
    MERGE = "merge", "merging failed"
    SKIP_EXPANDED = "skip_expanded", "leaving expanded prefixes out failed"
    PREFILL_ATTENTION = "prefill_attention", "prefill over expanded prefixes failed"
    PREFILL_IN_GRAPH = "prefill_in_graph", "prefill in a graph failed"
    END_PASS = "end_pass", "ending a pass failed"
    SHADOW_CHECK = "shadow_check", "the shadow check failed"
    PREDICT_MIXED = "predict_mixed", "predicting a mixed pass failed"
    SIZE_MIXED = "size_mixed", "deciding how many tokens are mixed failed"
    ADMIT_MIXED = "admit_mixed", "deciding which requests are mixed failed"
    CHOOSE_MIXED = "choose_mixed", "deciding whether a batch is mixed failed"
    MAKE_ROWS = "make_rows", "making rows of new tokens failed"
    SELECT_LAST_ROWS = "select_last_rows", "selecting last rows failed"
    TAKE_LAST_LOGITS = "take_last_logits", "taking the logits of last rows failed"
    EXTEND_DRAFT = "extend_draft", "extending the draft over mixed tokens failed"
    COUNT_DECODED = "count_decoded", "counting decoded tokens failed"
    OPEN_VOTE = "open_vote", "opening a vote of ranks failed"
    CAST_VOTE = "cast_vote", "voting failed"
    REPORT_SHARED = "report_shared", "reporting to other ranks what is shared failed"
    AGREE_SHARED = "agree_shared", "agreeing with other ranks on what is shared failed"
    FLUSH_CACHE = "flush_cache", "dropping what was flushed failed"
    UPDATE_WEIGHTS = "update_weights", "dropping what old weights gave failed"
    RELEASE_MEMORY = "release_memory", "dropping released memory failed"
    RESUME_MEMORY = "resume_memory", "clearing resumed memory failed"
    LOAD_FROM_HOST = "load_from_host", "waiting before rows come from the host failed"
    BECOME_IDLE = "become_idle", "becoming idle failed"
    REPAIR = "repair", "repairing failed"
    CHECK_PROMPT = "check_prompt", "looking for an empty prompt failed"
    REPORT_STATE = "report_state", "reporting failed"
    SHOW_SEGMENTS = "show_segments", "showing the tree of shared segments failed"
    PUBLISH_METRICS = "publish_metrics", "publishing metrics failed"


class NotMixed(Reason):
    """Why new tokens had a prefill pass (`not_mixed`)."""

    MORE_ROWS = "more_rows", "more new tokens than a decode graph has rows"
    PASS_IS_FASTER = "pass_is_faster", "a prefill pass is predicted to be faster"
    RANK_PREFILLING = "rank_prefilling", "another rank prefills"
    LOADING_FROM_HOST = "loading_from_host", "rows are on their way from the host"
    INPUT_LOGPROBS = "input_logprobs", "input log-probabilities"
    INPUT_EMBEDS = "input_embeds", "embeddings as input"
    MULTIMODAL = "multimodal", "images or other media"
    ENCODER = "encoder", "an encoder"
    HIDDEN_STATES = "hidden_states", "hidden states"
    PREFILL_ONLY = "prefill_only", "nothing is generated"


class NotSharded(Reason):
    """Why ranks shared nothing in a step, with sharded prefixes (`not_sharded`)."""

    RANK_PREFILLING = "rank_prefilling", "a rank prefills"
    RANK_PAUSED = "rank_paused", "a rank shares nothing for a while, after a failure"
    RANK_WITHOUT_ROWS = "rank_without_rows", "a rank has no rows, and no decode graph to pad"
    MORE_ROWS = "more_rows", "no shared attention in a step of so many rows"
    PLANS_DIFFER = "plans_differ", "ranks made different plans"
