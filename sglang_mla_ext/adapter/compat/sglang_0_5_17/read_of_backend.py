"""Contract with SGLang 0.5.17: attributes that it reads of an attention backend for an MLA model."""

from __future__ import annotations

from sglang_mla_ext.adapter.compat.table import Read

_FORWARD = "models/deepseek_common/attention_forward_methods/forward_mha.py"
_EAGER = "model_executor/runner/eager_runner.py"
_DECODE_GRAPH = "model_executor/runner/decode_cuda_graph_runner.py"
_PREFILL_GRAPH = "model_executor/runner/prefill_cuda_graph_runner.py"
_SPECULATIVE = "speculative/eagle_worker_common.py"
_OTHER_BACKEND = "layers/attention/hybrid_attn_backend.py"
READ_OF_BACKEND = (
    Read("forward", "layers/radix_attention.py", "every layer"),
    Read("forward_decode", _OTHER_BACKEND, "decode, where another backend does prefill"),
    Read("forward_extend", _OTHER_BACKEND, "a verify step, where another backend does prefill"),
    Read("forward_metadata", _EAGER, "set to None after an idle step"),
    Read("init_forward_metadata", _EAGER, "every step without a graph"),
    Read("init_forward_metadata_out_graph", _DECODE_GRAPH, "before a graph is captured or replayed"),
    Read("init_forward_metadata_in_graph", _DECODE_GRAPH, "while a graph is captured"),
    Read("init_cuda_graph_state", _DECODE_GRAPH, "before graphs are captured"),
    Read("get_cuda_graph_seq_len_fill_value", _DECODE_GRAPH, "lengths of padded rows"),
    Read("on_after_cuda_graph_warmup", _PREFILL_GRAPH, "between a graph's warm-up and its capture", optional=True),
    Read("init_mha_chunk_metadata", _FORWARD, "prefill with keys per head", True),
    Read("needs_cpu_seq_lens", "managers/overlap_utils.py", "whether lengths are copied to the host in every step"),
    Read("token_to_kv_pool", "model_executor/forward_context.py", "the pool of the step"),
    Read("req_to_token_pool", "model_executor/forward_context.py", "the slots of the step"),
    Read("prefill_attention_backend_str", "models/deepseek_v2.py", "which forward method; set when it is built"),
    Read("decode_attention_backend_str", "models/deepseek_v2.py", "which forward method; set when it is built"),
    Read("use_captured_forward_metadata_for_breakable_cuda_graph", _PREFILL_GRAPH, "graphs in prefill"),
    Read("init_forward_metadata_for_breakable_cuda_graph_capture", _PREFILL_GRAPH, "the same, where the flag is set"),
    Read("prepare_forward_metadata_for_breakable_cuda_graph_replay", _PREFILL_GRAPH, "the same, where the flag is set"),
    Read("supports_full_cuda_graph_chunked_prefix", _PREFILL_GRAPH, "graphs of prefill over a prefix"),
    Read("prepare_full_cuda_graph_chunked_prefix", _PREFILL_GRAPH, "the same, where the flag is set"),
    Read("supports_ragged_verify_graph", _DECODE_GRAPH, "speculative decoding: verify steps of several lengths"),
    Read("verify_mask", _SPECULATIVE, "speculative decoding: the mask of a tree of tokens"),
    Read("max_context_len", _SPECULATIVE, "speculative decoding: the size of that mask"),
    Read("update_verify_buffers_to_fill_after_draft", _SPECULATIVE, "speculative decoding, planned on a stream"),
)
