"""What one SGLang engine with SGLang's memory saver answers before and after it slept, as JSON, and the GPU's memory.

python engine_sleep.py MODEL OUT
"""

import json
import sys

PREFIX, BATCH, NEW_TOKENS = 7069, 32, 16


def main() -> None:
    import sglang
    import torch

    model, out = sys.argv[1:]
    engine = sglang.Engine(
        model_path=model,
        attention_backend="hybrid_mla",
        skip_tokenizer_init=True,
        mem_fraction_static=0.3,
        max_total_tokens=PREFIX + BATCH * 1024,
        cuda_graph_max_bs_decode=BATCH,
        enable_memory_saver=True,
        log_level="warning",
    )
    prefix = [token % 2000 + 10 for token in range(PREFIX)]
    requests = [[*prefix, *range(100 + index, 150 + index)] for index in range(BATCH)]
    sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": NEW_TOKENS}
    found: dict[str, list] = {"answers": [], "steps": [], "free_bytes": []}

    def look() -> dict:
        found["free_bytes"].append(torch.cuda.mem_get_info()[0])
        return engine.get_server_info()["internal_states"][0]["hybrid_mla"]

    def ask() -> None:
        engine.generate(input_ids=[prefix], sampling_params=sampling | {"max_new_tokens": 1})
        found["answers"].append(
            [a["output_ids"] for a in engine.generate(input_ids=requests, sampling_params=sampling)]
        )
        found["steps"].append(look()["counters"]["steps_naive"])

    ask()
    found["budget_bytes"] = look()["budget_bytes"]
    engine.release_memory_occupation(tags=["kv_cache"])
    look()
    engine.resume_memory_occupation(tags=["kv_cache"])
    ask()
    found["fallbacks"] = look()["counters"]["fallbacks"]
    engine.shutdown()
    with open(out, "w", encoding="utf-8") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main()
