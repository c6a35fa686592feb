# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from csa_model.data.tokenizers import BPETokenizer
from csa_model.decoder import Decoder
from csa_model.hf import export
from tests.hf.parity import model_of, pair, save_checkpoint
from tests.hf.test_export import TEXTS
from tests.model.helpers import build, logits_of, random_tokens


def continuation(decoder: Decoder, prompt: torch.Tensor, count: int) -> tuple[list[int], float]:
    """Greedy tokens of whole forwards, and the smallest lead of the best token over the second."""
    tokens, lead = prompt, float("inf")
    for _ in range(count):
        with torch.no_grad():
            best = logits_of(decoder, tokens)[-1].topk(2)
        lead = min(lead, float(best.values[0] - best.values[1]))
        tokens = torch.cat([tokens, best.indices[:1]])
    return tokens[len(prompt) :].tolist(), lead


@pytest.mark.parametrize("length", [1, 3, 9, 30])
def test_greedy_tokens_equal_our_argmax(length: int) -> None:
    """The class decodes token by token from caches of window, compressor and overlap; we run whole forwards."""
    decoder, model, _ = pair("mixed")
    prompt = random_tokens(length, seed=40 + length)
    expected, lead = continuation(decoder, prompt, 24)
    assert lead > 1e-4
    seen = torch.ones_like(prompt)[None]  # a prompt may hold the id that generate would take for padding
    made = model.eval().generate(prompt[None], attention_mask=seen, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
    model.train()
    assert made[0, length:].tolist() == expected


def test_example_of_the_readme(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = model_of("mixed")
    tokenizer = BPETokenizer.train(TEXTS, 300)
    tokenizer.save(tmp_path / "tok.json")
    path = save_checkpoint(build(dataclasses.replace(config, vocab_size=tokenizer.vocab_size), seed=9), tmp_path / "a.ckpt")
    export(path, tmp_path / "exported", tokenizer=str(tmp_path / "tok.json"))
    tokenizer_hf = AutoTokenizer.from_pretrained(tmp_path / "exported")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    prompt = tokenizer_hf("def f(", return_tensors="pt")
    tokens = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    assert isinstance(tokenizer_hf.decode(tokens[0]), str)
    assert tokens.shape[1] > prompt["input_ids"].shape[1]
    assert model.generation_config.eos_token_id == tokenizer.eos
