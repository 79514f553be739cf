"""Run vLLM's offline engine as a peer process; see `peer_process`.

python vllm_peer.py FOLDER LONGEST THREADS
"""

import json
import os
import sys
import time


def main() -> None:
    """Answer lines of JSON until the input is closed."""
    # Other output must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    folder, longest, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if threads:
        cores = sorted(os.sched_getaffinity(0))[:threads]
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
        os.environ["OMP_NUM_THREADS"] = str(threads)
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM, SamplingParams

    engine = LLM(model=folder, dtype="auto", max_model_len=longest, enable_prefix_caching=True, seed=0)
    wanted = SamplingParams(max_tokens=1, temperature=0.0, logprobs=1, detokenize=False)
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        prompts = [{"prompt_token_ids": prompt} for prompt in json.loads(line)["prompts"]]
        engine.reset_prefix_cache()
        started = time.perf_counter()
        outputs = engine.generate(prompts, wanted, use_tqdm=False)
        seconds = time.perf_counter() - started
        tokens = [output.outputs[0].token_ids[0] for output in outputs]
        values = [output.outputs[0].logprobs[0][token].logprob for output, token in zip(outputs, tokens, strict=True)]
        result = {"seconds": seconds, "tokens": tokens, "log_probabilities": values}
        print(json.dumps(result), file=answers, flush=True)


if __name__ == "__main__":
    main()
