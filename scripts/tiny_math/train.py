"""Train the tiny MLA model, evaluate it in float32 and write a checkpoint that transformers and SGLang load.

    python scripts/tiny_math/train.py --out DIR [--minutes 6] [--seed 0]

Writes config.json, model.safetensors (bfloat16), tokenizer.json, tokenizer_config.json and training_log.json. The
learning rate follows the clock, so a run always ends annealed. Every half minute both tasks are asked, and the
checkpoint with the best worse task is kept, so a run that is killed leaves one too. The data of batch i depends on the
seed, i and the phase (short or long contexts); how many batches fit into the minutes depends on the machine.
"""

import argparse
import itertools
import json
import math
import multiprocessing
import os
import platform
import random
import signal
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "2")

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny_math import problems
from tiny_math.model import TinyDeepseekV2, make_config
from tiny_math.tokenizer import BOS, SPECIAL, Tokenizer, build_vocabulary

SHORT_SHARE = 0.3  # of the time: only short contexts, where lookups are learned fastest
SHORT_MIX = {256: 0.3, 512: 0.4, 1024: 0.3}
LONG_MIX = {256: 0.05, 512: 0.15, 1024: 0.2, 2048: 0.25, 4096: 0.15, 8192: 0.2}
# Shares of word problems, needles and echoes in a batch
TASKS = ("word_problems", "needles", "echoes")
SHORT_TASKS, LONG_TASKS = (0.45, 0.4, 0.15), (0.25, 0.65, 0.1)
TASK_WEIGHTS = (0.4, 0.5, 0.1)  # of the tasks' mean answer losses
BACKGROUND = 0.1  # weight of the mean loss of the tokens that no rule predicts


def fill_row(segments, tokenizer: Tokenizer, length: int) -> tuple[list[int], list[bool]]:
    """`length`+1 token ids of one document and which of them are answers."""
    ids, answers = [BOS], [False]
    for text, is_answer in segments:
        new = tokenizer.encode(text)
        ids += new
        answers += [is_answer] * len(new)
        if len(ids) > length:
            return ids[: length + 1], answers[: length + 1]
    raise ValueError("a training document must be endless")


def make_batch(seed: int, index: int, tokens: int, mix: dict[int, float], tokenizer: Tokenizer):
    """ids [rows, length+1] int16, answers [rows, length+1] bool and task [rows] int8 (an index into `TASKS`),
    about `tokens` tokens in all.
    """
    rng = random.Random(f"train {seed} {index}")
    length = rng.choices(list(mix), list(mix.values()))[0]
    count = max(1, tokens // length)
    tasks = rng.choices(range(3), SHORT_TASKS if length <= 1024 else LONG_TASKS, k=count)
    words = tokenizer.words[len(SPECIAL) :]
    rows = []
    for task in tasks:
        if task == 0:
            document = problems.math_document(rng)
        elif task == 1:
            document = problems.needle_document(rng, length)
        else:
            document = problems.echo_document(rng, length, words)
        rows.append(fill_row(document, tokenizer, length))
    ids, answers = np.array([r[0] for r in rows], dtype=np.int16), np.array([r[1] for r in rows])
    return ids, answers, np.array(tasks, dtype=np.int8)


def produce(worker: int, workers: int, seed: int, tokens: int, long_phase, queue) -> None:
    torch.set_num_threads(1)
    tokenizer = Tokenizer(build_vocabulary())
    index = worker
    while True:
        queue.put(make_batch(seed, index, tokens, LONG_MIX if long_phase.value else SHORT_MIX, tokenizer))
        index += workers


def learning_rate(progress: float, peak: float) -> float:
    """Linear warm-up over 2% of the time, then a cosine to 2% of the peak."""
    if progress < 0.02:
        return peak * max(progress / 0.02, 0.01)
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - 0.02) / 0.98))))


class Best:
    """Asks both tasks now and then, and keeps the weights whose worse task is best; of equals the later."""

    def __init__(self, model, arguments, tokenizer: Tokenizer, log: dict):
        self.model, self.arguments, self.tokenizer, self.log = model, arguments, tokenizer, log
        self.problems = problems.evaluation_set(8, 8, seed=2)
        self.needles = {
            n: problems.needle_set(n, [i / 10 for i in range(11)], 3, seed=2) for n in arguments.check_lengths
        }
        self.reached = -1.0

    def check(self, seconds: float) -> None:
        started = time.time()
        shares = {"word_problems": self.share(self.problems, 64)}
        shares |= {f"needle_{length}": self.share(prompts, 16) for length, prompts in self.needles.items()}
        entry = dict(seconds=round(seconds, 1), checked=shares, took=round(time.time() - started, 1))
        print(json.dumps(entry), flush=True)
        self.log["training"].append(entry)
        if min(shares.values()) >= self.reached:
            self.reached = min(shares.values())
            self.log["kept"] = entry
            save(self.model, self.arguments.out, self.tokenizer)
        write_log(self.arguments.out, self.log)

    def share(self, prompts, new_tokens: int) -> float:
        result = score(self.model, self.tokenizer, prompts, new_tokens, batch=64)
        return round(result["right"] / result["asked"], 3)


def train(model, arguments, tokenizer: Tokenizer, device: str, log: dict) -> None:
    context = multiprocessing.get_context("spawn")
    long_phase = context.Value("b", 0)
    queues = [context.Queue(maxsize=8) for _ in range(arguments.workers)]
    producers = [
        context.Process(
            target=produce, args=(w, arguments.workers, arguments.seed, arguments.tokens, long_phase, q), daemon=True
        )
        for w, q in enumerate(queues)
    ]
    for process in producers:
        process.start()
    decayed = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
        lr=arguments.lr,
        betas=(0.9, 0.98),
        fused=device == "cuda",
    )
    batches = (queue.get() for queue in itertools.cycle(queues))
    batches = itertools.chain([next(batches)], batches)  # the clock starts when data flows
    best = Best(model, arguments, tokenizer, log)
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
    start = time.time()
    budget, step, seen, waited, next_print, next_check = arguments.minutes * 60, 0, 0, 0.0, 0.0, arguments.check_seconds
    recent: list[torch.Tensor] = []
    task_weights = torch.tensor(TASK_WEIGHTS, device=device)
    while (elapsed := time.time() - start) < budget and not stopped:
        progress = elapsed / budget
        long_phase.value = int(progress >= SHORT_SHARE)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(progress, arguments.lr)
        before = time.time()
        ids, answers, tasks = next(batches)
        waited += time.time() - before
        ids = torch.from_numpy(ids).to(device, non_blocking=True).long()
        answers = torch.from_numpy(answers).to(device, non_blocking=True)[:, 1:]
        tasks = torch.from_numpy(tasks).to(device, non_blocking=True)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            logits = model(ids[:, :-1])
        losses = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none").view_as(answers)
        of_task = (tasks == torch.arange(len(TASKS), device=device)[:, None]).float()  # [tasks, rows]
        asked = (of_task @ answers.sum(1).float()).clamp(min=1)
        task_losses = of_task @ (losses * answers).sum(1) / asked
        # By task: needles have few answer tokens, and would be drowned by echoes, which are nearly all answer.
        loss = (task_losses * task_weights).sum() + BACKGROUND * losses[~answers].mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            right = (logits.argmax(-1) == ids[:, 1:]) & answers
            recent.append(torch.stack([task_losses * asked, of_task @ right.sum(1).float(), asked], 1))
        step, seen = step + 1, seen + answers.numel()
        if elapsed >= next_print:
            sums = torch.stack(recent).sum(0).tolist()
            recent.clear()
            entry = dict(
                seconds=round(elapsed, 1),
                step=step,
                million_tokens=round(seen / 1e6, 2),
                answer_loss={t: round(s[0] / max(s[2], 1), 4) for t, s in zip(TASKS, sums, strict=True)},
                answer_token_accuracy={t: round(s[1] / max(s[2], 1), 4) for t, s in zip(TASKS, sums, strict=True)},
                lr=round(optimizer.param_groups[0]["lr"], 6),
                waited_for_data=round(waited, 1),
            )
            log["training"].append(entry)
            print(json.dumps(entry), flush=True)
            next_print = elapsed + (5 if elapsed < 60 else 15)
        if elapsed >= next_check:
            best.check(elapsed)
            next_check = elapsed + arguments.check_seconds
    best.check(time.time() - start)
    for process in producers:
        process.terminate()


def evaluate(model, tokenizer: Tokenizer, arguments) -> dict:
    """Exact match in float32 greedy decoding: held-out word problems, and needles by context length and depth."""
    torch.backends.cuda.matmul.allow_tf32 = False
    prompts = problems.evaluation_set(arguments.eval_groups, 8, seed=1)
    result = {"word_problems": score(model, tokenizer, prompts, 64, batch=64)}
    depths = [i / 10 for i in range(11)]
    for length in arguments.needle_lengths:
        by_depth = {}
        needles = problems.needle_set(length, depths, arguments.needles, seed=1)
        for depth in depths:
            here = [prompt for prompt in needles if prompt.depth == depth]
            by_depth[depth] = score(model, tokenizer, here, 16, batch=max(1, 65536 // length))
        right, asked = (sum(d[k] for d in by_depth.values()) for k in ("right", "asked"))
        result[f"needle_{length}"] = dict(right=right, asked=asked, by_depth=by_depth)
    return result


def score(model, tokenizer: Tokenizer, prompts, new_tokens: int, batch: int) -> dict:
    right, wrong, lengths = 0, [], []
    for start in range(0, len(prompts), batch):
        part = prompts[start : start + batch]
        ids = [[BOS, *tokenizer.encode(p.text)] for p in part]
        lengths += map(len, ids)
        for prompt, output in zip(part, model.generate(ids, new_tokens, tokenizer.stop_id), strict=True):
            text = tokenizer.decode(output)
            if problems.final_answer(text) == prompt.answer:
                right += 1
            else:
                wrong.append([prompt.solution, text])
    return dict(right=right, asked=len(prompts), context=[min(lengths), max(lengths)], examples_of_wrong=wrong[:3])


def save(model, directory: Path, tokenizer: Tokenizer) -> None:
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    weights = {name: p.detach().to("cpu", torch.bfloat16).contiguous() for name, p in model.state_dict().items()}
    unfinished = directory / "model.unfinished"
    save_file(weights, unfinished, metadata={"format": "pt"})
    os.replace(unfinished, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(model.config, indent=1) + "\n")
    tokenizer.save(directory)


def load_kept(model, directory: Path) -> None:
    """The kept bfloat16 weights: what is measured is what is stored."""
    from safetensors.torch import load_file

    model.load_state_dict({name: weight.float() for name, weight in load_file(directory / "model.safetensors").items()})


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=6.0, help="training time; evaluation comes after it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--intermediate", type=int, default=512)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--check-seconds", type=float, default=30.0)
    parser.add_argument("--check-lengths", type=int, nargs="*", default=[2048, 7900], help="needle contexts")
    parser.add_argument("--tokens", type=int, default=65536, help="tokens per batch")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--eval-groups", type=int, default=64, help="groups of 8 held-out problems")
    parser.add_argument("--needles", type=int, default=20, help="needle contexts of each length, eleven needles each")
    parser.add_argument("--needle-lengths", type=int, nargs="*", default=[1024, 2048, 4096, 8192])
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(arguments.seed)
    tokenizer = Tokenizer(build_vocabulary())
    config = make_config(len(tokenizer), arguments.layers, arguments.hidden, arguments.heads, arguments.intermediate)
    model = TinyDeepseekV2(config).to(device)
    log = {
        "arguments": {k: str(v) if isinstance(v, Path) else v for k, v in vars(arguments).items() if k != "out"},
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor(),
        "torch": torch.__version__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "vocabulary": len(tokenizer),
        "training": [],
    }
    print(json.dumps({k: v for k, v in log.items() if k != "training"}), flush=True)
    train(model, arguments, tokenizer, device, log)
    load_kept(model, arguments.out)
    started = time.time()
    log["evaluation"] = evaluate(model, tokenizer, arguments)
    log["evaluation"]["seconds"] = round(time.time() - started, 1)
    write_log(arguments.out, log)
    for name, figures in log["evaluation"].items():
        print(name, json.dumps(figures), flush=True)


def write_log(directory: Path, log: dict) -> None:
    (directory / "training_log.json").write_text(json.dumps(log, indent=1) + "\n")


if __name__ == "__main__":
    main()
