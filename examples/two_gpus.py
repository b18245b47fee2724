"""Which of two GPUs trains this model cheaper? One prediction for each, in a table.

    python examples/two_gpus.py

Prints memory, step time, throughput and dollars for a billion tokens on each, then which one is cheaper.
"""

import foretell

ASKED = {"micro_batch": 8, "seq": 1024, "tokens": 1e9, "advice_seconds": 0}

cheapest, least = "", float("inf")
print(f"{'GPU':<10} {'memory':>9} {'step':>8} {'tokens/s':>9} {'dollars':>8}")
for gpu in ("L40S", "H100"):
    answer = foretell.fit("gpt2", hardware=gpu, **ASKED)
    if not (answer.fits and answer.time and answer.throughput and answer.run and answer.run.money):
        print(f"{gpu:<10} {answer.verdict}")
        continue
    gib, seconds, rate, dollars = answer.memory.device_bytes / 2**30, answer.time.step_seconds, answer.throughput.per_second, answer.run.money
    print(f"{gpu:<10} {gib:5.1f} GiB {1e3 * seconds:5.0f} ms {rate:9,.0f} {dollars:8.2f}")
    if dollars < least:
        cheapest, least = gpu, dollars
print(f"cheaper: {cheapest}")
