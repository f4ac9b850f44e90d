#!/usr/bin/env python3
"""Compares the speed of meshnode and llama.cpp for a model, on this machine, within the same minutes.

Alternates `meshnode bench decode` with the `llama-bench` on the PATH, and prints the median ratio over the pairs. Pairs in
which llama.cpp is more than 10 % below its own best are dropped: another program used the machine then.

    cargo build --release
    tests/peers/llama_bench.py ~/.cache/meshnode/models/SmolLM2-135M-Instruct.Q4_1.gguf --threads 1
    tests/peers/llama_bench.py model.gguf --device cuda --prompt 512 --tokens 128
"""
import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys

SHARE_OF_BEST = 0.9


def main():
    args = arguments()
    program = args.meshnode or shutil.which("meshnode") or "target/release/meshnode"
    peer = shutil.which("llama-bench")
    if peer is None:
        sys.exit("llama-bench is not on the PATH: build llama.cpp and add its bin folder")
    if not os.access(program, os.X_OK):
        sys.exit(f"{program} is not an executable: run `cargo build --release`, or name it with --meshnode")
    rounds = []
    for number in range(args.rounds):
        ours, theirs = run_ours(program, args), run_theirs(peer, args)
        rounds.append((ours, theirs))
        print(f"round {number + 1}: " + "; ".join(describe(name, ours[name], theirs[name]) for name in ("prefill", "decode")))
    for name in ("prefill", "decode"):
        best = max(theirs[name] for _, theirs in rounds)
        valid = [(o, t) for o, t in rounds if t[name] >= SHARE_OF_BEST * best]
        ratio = statistics.median(o[name] / t[name] for o, t in valid)
        print(
            f"{name}: {ratio:.2f} times llama.cpp (medians {statistics.median(o[name] for o, _ in valid):.1f} and "
            f"{statistics.median(t[name] for _, t in valid):.1f} tok/s, {len(valid)} of {len(rounds)} rounds)"
        )
    tokens = args.prompt + args.tokens
    ours, theirs = (statistics.median(side["cpu_s"] for side in sides) for sides in zip(*rounds))
    print(f"user CPU of a whole run, loading included: {ours:.2f} s and {theirs:.2f} s ({tokens} tokens per repetition)")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a GGUF file that both programs can read")
    parser.add_argument("--meshnode", help="the program [default: on the PATH, else target/release/meshnode]")
    parser.add_argument("--device", default="cpu", help="cpu, cuda[:i] or vulkan[:i]")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


def timed(command):
    """Runs a command; returns its standard output and its user CPU seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed ({done.returncode}): {done.stderr.strip()[-500:]}")
    return done.stdout, resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before


def run_ours(program, args):
    command = [program, "bench", "decode", args.model, "--json", "--device", args.device, "--threads", str(args.threads)]
    out, cpu_s = timed(command + ["--prompt", str(args.prompt), "--tokens", str(args.tokens)])
    figures = json.loads(out)
    figures = figures["runs"][-1] if "runs" in figures else figures
    return {"prefill": figures["prefill_tok_s"], "decode": figures["decode_tok_s"], "cpu_s": cpu_s}


def run_theirs(peer, args):
    layers = "0" if args.device == "cpu" else "99"
    command = [peer, "-m", args.model, "-p", str(args.prompt), "-n", str(args.tokens), "-t", str(args.threads), "-ngl", layers]
    out, cpu_s = timed(command + ["-r", "3", "-o", "json"])
    found = {"cpu_s": cpu_s}
    for test in json.loads(out):
        found["prefill" if test["n_gen"] == 0 else "decode"] = test["avg_ts"]
    return found


def describe(name, ours, theirs):
    return f"{name} {ours:.1f} and {theirs:.1f} tok/s, {ours / theirs:.2f} times"


if __name__ == "__main__":
    main()
