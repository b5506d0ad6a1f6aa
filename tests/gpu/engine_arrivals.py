"""Greedy answers to requests that come while others decode, or how likely such answers are, from one SGLang engine.

python engine_arrivals.py MODEL BACKEND OUT PREFIX_TOKENS REQUESTS AT_A_TIME SERVER_ARGUMENTS [ANSWERS ...]

Two thirds of the requests go on with one of two documents below the prefix. With files of ANSWERS nothing is generated:
for each of these and each of its tokens it finds by how much the likeliest token's log-probability is above its own.
"""

import json
import random
import sys

from engine_logprobs import PREFILL_GRAPHS


def main() -> None:
    import sglang

    model, backend, out = sys.argv[1:4]
    prefix_tokens, count, at_a_time = map(int, sys.argv[4:7])
    scored = sys.argv[8:]
    engine = sglang.Engine(
        model_path=model,
        attention_backend=backend,
        skip_tokenizer_init=True,
        page_size=64,
        max_total_tokens=at_a_time * (prefix_tokens + 2700),
        max_running_requests=at_a_time,
        cuda_graph_bs_prefill=PREFILL_GRAPHS,
        log_level="warning",
        **json.loads(sys.argv[7]),
    )
    rng = random.Random(0)

    def text(tokens: int) -> list[int]:
        return [rng.randrange(10, 2000) for _ in range(tokens)]

    prefix, documents = text(prefix_tokens), [text(1500), text(700), []]
    prompts = [prefix + documents[index % 3] + text(rng.randrange(1, 200)) for index in range(count)]
    lengths = [rng.randrange(4, 90) for _ in prompts]
    found: dict = {}
    if not scored:
        for document in documents:  # what is shared is cached and expanded before anybody comes
            shared = [prefix + document + text(5) for _ in range(4)]
            engine.generate(input_ids=shared, sampling_params={"temperature": 0, "max_new_tokens": 8})
        sampling = [{"temperature": 0, "ignore_eos": True, "max_new_tokens": length} for length in lengths]
        answers = engine.generate(input_ids=prompts, sampling_params=sampling)
        found["tokens"] = [answer["output_ids"] for answer in answers]
        found["info"] = engine.get_server_info()["internal_states"][0].get("hybrid_mla")
    for file in scored:
        with open(file, encoding="utf-8") as answers_file:
            tokens = json.load(answers_file)["tokens"]
        gaps: list[float] = []
        for start in range(0, count, at_a_time):
            some = range(start, min(start + at_a_time, count))
            results = engine.generate(
                input_ids=[prompts[index] + tokens[index] for index in some],
                sampling_params={"temperature": 0, "max_new_tokens": 1},
                return_logprob=True,
                logprob_start_len=[len(prompts[index]) - 1 for index in some],
                top_logprobs_num=1,
            )
            for index, result in zip(some, results, strict=True):
                length, info = len(tokens[index]), result["meta_info"]
                own = [value for value, _, _ in info["input_token_logprobs"][-length:]]
                best = [top[0][0] for top in info["input_top_logprobs"][-length:]]
                gaps += [above - value for above, value in zip(best, own, strict=True)]
        found[file] = gaps
    engine.shutdown()
    with open(out, "w", encoding="utf-8") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main()
