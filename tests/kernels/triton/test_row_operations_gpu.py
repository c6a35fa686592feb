# SPDX-License-Identifier: Apache-2.0
"""A whole decoder step on a GPU with the fused operations around the attention and without them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from csa_model.attention import AttentionMode
from csa_model.config import HyperConnectionsConfig
from csa_model.decoder import Decoder
from kernels import PackedLayout, get_backend
from tests.model.helpers import build, next_of, plain_config, random_tokens

pytest.importorskip("triton")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")]


@pytest.mark.parametrize("recompute", [False, True])
def test_a_step_is_as_close_to_float32_as_with_the_plain_operations(monkeypatch: pytest.MonkeyPatch, recompute: bool) -> None:
    from kernels.triton_fused import TritonBackend

    # every entry is selected and nothing is routed: no choice can tip over for a rounding
    config = plain_config(
        hidden_size=256, head_dim=64, qk_rope_head_dim=16, q_lora_rank=64, index_head_dim=32, index_topk=128, recompute=recompute,
        hyper_connections=HyperConnectionsConfig(),
    )  # fmt: skip
    lengths, tokens = [300, 1, 150, 2], random_tokens(500)
    targets = next_of(tokens, lengths).cuda()
    state = build(dataclasses.replace(config, initializer_range=0.006)).state_dict()

    def step(backend: str, autocast: bool) -> dict[str, Tensor]:
        decoder = Decoder(config, get_backend(backend), device_type="cuda", dtype=torch.bfloat16 if autocast else torch.float32)
        decoder.load_state_dict(state)
        decoder.cuda()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            layout = PackedLayout.from_lengths(lengths, 500, device="cuda")
            out = decoder(tokens.cuda(), layout, AttentionMode("sparse", "sparse", "full_csa"))
            loss = torch.nn.functional.cross_entropy(decoder.logits(out.hidden), targets, ignore_index=-100)
            (loss + sum(r.kl_sum for r in out.indexer) / 500).backward()
        return {"loss": loss.detach()} | {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None}

    exact, fused = step("unfused", False), step("triton", True)
    monkeypatch.setattr(TritonBackend, "row_operations", lambda self: None)
    plain = step("triton", True)
    assert exact.keys() == fused.keys() == plain.keys()
    for name, reference in exact.items():
        errors = [float((values[name].float() - reference).norm()) for values in (fused, plain)]
        assert errors[0] <= 2 * errors[1] + 2e-2 * float(reference.norm()), (name, errors)
