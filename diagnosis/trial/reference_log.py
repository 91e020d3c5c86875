"""Generate the log that every site entry is tried on: output of healthy runs, and lines that nearly match its example.

It is generated, not stored, and the same each time.
"""

from __future__ import annotations

import random

HEALTHY_BYTES = 4 << 20  # bytes
NEAR_BYTES = 1 << 20
REPETITIONS = 3  # how often a line is there again with nothing changed, as rank after rank prints it
LONG_LINE_LENGTH = 100_000  # one line that has no end

_FORMS = (
    "[rank{r}]:[I1121 03:{m:02d}:31.{n:09d} ProcessGroupNCCL.cpp:1234] [PG ID 1 PG GUID 1 Rank {r}] using GPU {g}",
    "dgx-{h:02d}:{p}:{q} [{g}] NCCL INFO Channel {g:02d}/0 : {r}[{g}] -> {s}[{g}] via NET/IB/{g}/GDRDMA",
    "2026-11-21 03:{m:02d}:31,{k:03d} - megatron.training - INFO -  iteration {n:8d}/  500000 | consumed samples: "
    "{n:12d} | elapsed time per iteration (ms): {p}.{k} | learning rate: {k:.3E} | lm loss: 2.{k:05d}E+00 | grad norm: "
    "0.{k:03d} |",
    "/opt/env/lib/python3.11/site-packages/torch/utils/checkpoint.py:{p}: FutureWarning: `torch.cpu.amp.autocast(args"
    "...)` is deprecated. Please use `torch.amp.autocast('cpu', args...)` instead.",
    "INFO:data.loader:shard {n:06d}.tar opened in 0.{k:03d} s, {p} samples, cache hit rate 0.{g}{m:02d}, errors: 0",
    "{{'loss': 2.{k:04d}, 'grad_norm': 0.{k:03d}, 'learning_rate': 0.000{g}, 'epoch': {g}.{m:02d}}}",
    "Epoch {g}:  {m:2d}%|███▌      | {n}/500000 [03:{m:02d}<5:12:{m:02d}, {g}.{m:02d}it/s, v_num={p}, loss=2.{k:03d}]",
    "[2026-11-21 03:{m:02d}:31,{k:03d}] [INFO] [engine.py:{p}:step] rank={r} time (ms) | fwd: {p}.{m:02d} | bwd: {q}",
    "slurmstepd: task {r} on dgx-{h:02d}: GPU {g} bound, cpu mask 0x{n:08x}, memory limit {p}M",
    "W1121 03:{m:02d}:31.{k:03d} {p} torch/distributed/run.py:{q}] Setting OMP_NUM_THREADS to be 1 by default",
    "[ {n}.{k:06d}] nvidia-nvlink: GPU {g} link {g} is up, rx {p} tx {q}",
    "Saving model checkpoint to /lustre/runs/mira/wren-7b/step-{n}/rank{r}.pt ({p} MB in {g}.{m:02d} s, retries 0)",
    "wandb: Run data is saved locally in /home/mira/wandb/run-20261121_03{m:02d}31-{n:08x}",
    "step {n} loss 2.{k:04d} lr 3.0e-04 tokens/s {q}{m:02d} mfu 0.4{g} mem 61.{m:02d}GiB",
)


def healthy_log(size: int = HEALTHY_BYTES) -> bytes:
    """Return about `size` bytes of output from healthy runs."""
    chance = random.Random(14)
    lines: list[bytes] = []
    made = 0
    while made < size:
        numbers = {
            name: chance.randrange(most)
            for name, most in zip("rshgmkpqn", (1024, 1024, 64, 8, 60, 1000, 9999, 65536, 500_000), strict=True)
        }
        line = (chance.choice(_FORMS).format_map(numbers) + "\n").encode()
        lines += [line] * REPETITIONS
        made += REPETITIONS * len(line)
    return b"".join(lines)


def near_matches(example: str, size: int = NEAR_BYTES) -> bytes:
    """Return lines that begin like the example, or have all of it but a letter, alone and over and over."""
    words = example.encode()[:1000] or b"x"
    long = words[:-1] * (LONG_LINE_LENGTH // max(1, len(words) - 1) + 1)
    lines = [long[:LONG_LINE_LENGTH], words[:1] * LONG_LINE_LENGTH]
    chance = random.Random(14)
    made = 2 * LONG_LINE_LENGTH
    while made < size:
        cut, gone = chance.randrange(len(words)), chance.randrange(len(words))
        line = (words[:cut] + words[:gone] + words[gone + 1 :])[:1000]
        lines.append(line)
        made += len(line) + 1
    return b"\n".join(lines) + b"\n"
