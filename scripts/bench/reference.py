"""The Python reference side of the benchmarks: environment, token ids and a transformers model of a GGUF file."""

import os
import pathlib
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]


def enter_bench_venv() -> None:
    """Starts the calling script again under the bench venv's Python, unless it runs there already."""
    venv = pathlib.Path(os.environ.get("KVCALIB_BENCH_VENV", ROOT / ".bench-venv"))
    python = venv / "bin/python"
    if pathlib.Path(sys.prefix).resolve() == venv.resolve():
        return
    if not python.exists():
        sys.exit(f"error: no bench venv at {venv}; run scripts/bench/setup_bench_venv or set KVCALIB_BENCH_VENV")
    os.execv(python, [str(python), *sys.argv])


def gguf_field(model: pathlib.Path, *names: str) -> list:
    from gguf import GGUFReader

    fields = GGUFReader(model).fields
    return [fields[name].contents() for name in names]


def smollm_tokenizer(model: pathlib.Path):
    """The tokenizer of pre type `smollm`: digits one by one, then GPT-2's byte-level rule. transformers ignores the pre
    type when it opens a GGUF file, so its own tokenizer of this model splits digits wrongly."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pre, tokens, merges = gguf_field(model, "tokenizer.ggml.pre", "tokenizer.ggml.tokens", "tokenizer.ggml.merges")
    if pre != "smollm":
        sys.exit(f"error: {model} has tokenizer.ggml.pre '{pre}'; this reference knows 'smollm' only")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[tuple(merge.split(" ")) for merge in merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def token_windows(model: pathlib.Path, text: pathlib.Path, seq_len: int, num: int):
    """[num, seq_len] ids: the first windows of the text."""
    import torch

    ids = smollm_tokenizer(model).encode(text.read_text(encoding="utf-8")).ids
    if len(ids) < seq_len * num:
        sys.exit(f"error: {text} has {len(ids)} tokens, {num} windows of {seq_len} need {seq_len * num}")
    return torch.tensor(ids[: seq_len * num]).view(num, seq_len)


def reference_model(model: pathlib.Path):
    """The dequantised model in fp32, ready for inference."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(str(model.parent), gguf_file=model.name, dtype=torch.float32)
    return loaded.eval()


def timed_run(command: list, environment: dict | None = None) -> tuple[float, subprocess.CompletedProcess]:
    """Wall seconds of a program and its captured output; the script ends if the program fails."""
    start = time.perf_counter()
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False,
                          env={**os.environ, **(environment or {})})
    seconds = time.perf_counter() - start
    if done.returncode != 0:
        sys.exit(f"error: exit code {done.returncode} of {' '.join(map(str, command))}\n{done.stderr[-4000:]}")
    return seconds, done
