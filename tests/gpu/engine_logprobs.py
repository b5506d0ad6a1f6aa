"""Greedy tokens and their log-probabilities from one SGLang engine, as JSON; a process of its own for each backend.

python engine_logprobs.py MODEL BACKEND OUT PREFIX_TOKENS BATCH NEW_TOKENS SERVER_ARGUMENTS

The last one is a JSON object; with `"nested": true` in it, two thirds of the requests go on with one of two documents
below the prefix, and half of those with a conversation below their document. With `"in_turn": true` the first half of
the requests goes to the first data-parallel rank, and the second half to the second one while the first one decodes.
With `"fillers": n` so many other prompts, each longer than the prefix, come between it and the requests, and then the
fillers and the requests once more: the answers are those of the second time, `before` has the tokens of the first.
With `"meet": port` the engine is one of a prefill and a decode server, which meet at that port of the former; both are
sent the same.
"""

import asyncio
import json
import random
import sys
from typing import Any

PREFILL_GRAPHS = [16, 128, 1024, 8192]
"""New tokens of the prefill graphs that engines of tests capture. SGLang's own 60 sizes take half of a start."""


async def in_turn(engine, requests: list[list[int]], arguments: dict) -> tuple[list[dict], bool]:
    """Answers, and whether the second rank's first token came while the first rank's requests were decoding."""
    half = len(requests) // 2
    # Alone: the other rank has nothing to do. Its answer says nothing, and its prompt is cached already.
    await engine.async_generate(input_ids=requests[0], routed_dp_rank=0, **arguments)
    first = asyncio.create_task(engine.async_generate(input_ids=requests[:half], routed_dp_rank=0, **arguments))
    watched = await engine.async_generate(input_ids=requests[1], routed_dp_rank=0, stream=True, **arguments)
    async for _ in watched:
        break
    second = asyncio.create_task(engine.async_generate(input_ids=requests[half:], routed_dp_rank=1, **arguments))
    watched_too = await engine.async_generate(input_ids=requests[half], routed_dp_rank=1, stream=True, **arguments)
    async for _ in watched_too:
        break
    overlapped = not first.done()
    answers = await first + await second
    async for _ in watched:
        pass
    async for _ in watched_too:
        pass
    return answers, overlapped


def main() -> None:
    import sglang

    model, backend, out = sys.argv[1:4]
    prefix_tokens, batch, new_tokens = map(int, sys.argv[4:7])
    # Room for every request's whole prompt, and no more, so that several engines can run beside each other.
    defaults: dict[str, Any] = {"max_total_tokens": batch * (prefix_tokens + 2700), "log_level": "warning"}
    defaults["cuda_graph_bs_prefill"] = PREFILL_GRAPHS
    if backend == "flashmla":
        defaults["page_size"] = 64
    arguments = defaults | json.loads(sys.argv[7])
    nested, turns, fillers, port = (arguments.pop(name, 0) for name in ("nested", "in_turn", "fillers", "meet"))
    engine = sglang.Engine(
        model_path=model,
        attention_backend=backend,
        skip_tokenizer_init=True,
        mem_fraction_static=0.85,
        cuda_graph_max_bs_decode=batch,
        **arguments,
    )
    rng = random.Random(0)

    def text(tokens: int) -> list[int]:
        return [rng.randrange(10, 2000) for _ in range(tokens)]

    prefix = text(prefix_tokens)
    below: list[list[int]] = [[] for _ in range(batch)]
    if nested:
        documents, conversations = [[text(tokens) for _ in range(2)] for tokens in (1500, 700)]
        for index in range(batch):
            if index % 3 < 2:
                below[index] = documents[index % 3] + (conversations[index % 3] if index % 2 else [])
    requests = [prefix + path + text(rng.randrange(1, 200)) for path in below]
    sampling = {"temperature": 0, "ignore_eos": True}

    def rooms(*numbers: int) -> dict[str, Any]:
        """Where the two servers meet for each request."""
        return dict(bootstrap_host="127.0.0.1", bootstrap_port=port, bootstrap_room=list(numbers)) if port else {}

    engine.generate(input_ids=[prefix], sampling_params={**sampling, "max_new_tokens": 1}, **rooms(1))
    asked = {
        "sampling_params": {**sampling, "max_new_tokens": new_tokens},
        "return_logprob": True,
        "top_logprobs_num": 4,
    }
    overlapped, rounds = False, []
    for _ in range(2 if fillers else 1):
        for filler in [text(prefix_tokens + 1000) for _ in range(fillers)]:  # one by one: each needs its room
            engine.generate(input_ids=[filler], sampling_params={**sampling, "max_new_tokens": 1})
        if turns:
            answers, overlapped = engine.loop.run_until_complete(in_turn(engine, requests, asked))
        else:
            answers = engine.generate(input_ids=requests, **asked, **rooms(*range(2, batch + 2)))
        rounds.append(answers)
    ranks = [state.get("hybrid_mla") for state in engine.get_server_info()["internal_states"]]
    engine.shutdown()
    before, tokens = (
        [[(value, token) for value, token, _ in a["meta_info"]["output_token_logprobs"]] for a in of_round]
        for of_round in (rounds[0], answers)
    )
    top = [
        [[(value, token) for value, token, _ in best] for best in a["meta_info"]["output_top_logprobs"]]
        for a in answers
    ]
    retractions = sum(answer["meta_info"]["num_retractions"] for answer in answers)
    # Tokens that a verify step yields, for each request; none without speculative decoding.
    accepted = [answer["meta_info"].get("spec_accept_length") for answer in answers]
    # Tokens of each round that SGLang counts as cached on the host.
    from_host = [sum((a["meta_info"].get("cached_tokens_details") or {"host": 0})["host"] for a in r) for r in rounds]
    found = {
        "tokens": tokens,
        "before": before,
        "top": top,
        "info": ranks[0],
        "ranks": ranks,
        "retractions": retractions,
        "accepted": accepted,
        "overlapped": overlapped,
        "from_host": from_host,
    }
    with open(out, "w", encoding="utf-8") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main()
