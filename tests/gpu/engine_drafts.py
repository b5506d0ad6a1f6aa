"""How many steps verify the demo model's drafts of short answers that come while a long one is made, from one engine.

PYTHONPATH=scripts python engine_drafts.py OUT SERVER_ARGUMENTS
"""

import json
import sys
from pathlib import Path

from engine_logprobs import PREFILL_GRAPHS

MODEL = Path(__file__).parents[2] / "configs" / "demo_model"


def main() -> None:
    import sglang
    from demo import SYSTEM_PROMPT, WORD_QUESTIONS
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    system, questions = SYSTEM_PROMPT.read_text(encoding="utf-8"), list(WORD_QUESTIONS)

    def prompt(text: str) -> list[int]:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]

    engine = sglang.Engine(
        model_path=str(MODEL),
        max_running_requests=2,
        log_level="warning",
        cuda_graph_bs_prefill=PREFILL_GRAPHS,
        **json.loads(sys.argv[2]),
    )
    asked = [questions[at % len(questions) :] + questions for at in range(24)]
    texts = [" ".join(each[: 2 + number % 3]) for number, each in enumerate(asked)]  # that differ, and known answers
    prompts = [prompt(questions[0]), *map(prompt, texts)]
    engine.generate(input_ids=prompts[:2], sampling_params={"temperature": 0, "max_new_tokens": 4})
    lengths = [900, *[24] * len(texts)]
    sampling = [{"temperature": 0, "ignore_eos": True, "max_new_tokens": length} for length in lengths]
    answers = engine.generate(input_ids=prompts, sampling_params=sampling)
    verified = [answer["meta_info"]["spec_verify_ct"] for answer in answers[1:]]
    info = engine.get_server_info()["internal_states"][0]["hybrid_mla"]
    engine.shutdown()
    Path(sys.argv[1]).write_text(json.dumps({"verified": verified, "counters": info["counters"]}), encoding="utf-8")


if __name__ == "__main__":
    main()
