# SPDX-License-Identifier: Apache-2.0
"""A sublayer and a whole decoder step on a GPU with the fused operations around the attention and without them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from csa_model.attention import AttentionMode
from csa_model.config import HyperConnectionsConfig
from csa_model.decoder import Decoder
from csa_model.hyper_connections import HyperConnection, HyperHead
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


@pytest.mark.parametrize(
    ("tokens", "n", "d", "dtype"),
    [
        (1000, 4, 512, torch.bfloat16),  # each tile of the projection
        (8200, 4, 512, torch.bfloat16),
        (16400, 4, 512, torch.bfloat16),
        (600, 4, 4096, torch.bfloat16),
        (777, 4, 528, torch.float32),
        (300, 8, 512, torch.float32),
        (300, 8, 272, torch.bfloat16),
        (300, 2, 512, torch.float16),
        (300, 1, 512, torch.bfloat16),
    ],
)
def test_a_sublayer_is_as_close_to_float64_as_with_the_plain_operations(tokens: int, n: int, d: int, dtype: torch.dtype) -> None:
    from kernels.triton_fused.row_operations import TritonRowOperations

    torch.manual_seed(0)
    tensors = [torch.randn(shape, device="cuda").to(dtype) for shape in ((tokens, n, d), (d,), (tokens, d), (tokens, n, d))]

    def run(fused: TritonRowOperations | None, kind: torch.dtype) -> list[Tensor]:
        torch.manual_seed(1)
        config = plain_config(hidden_size=d, hyper_connections=HyperConnectionsConfig(hc_mult=n))
        module, head = HyperConnection(config, fused).cuda(), HyperHead(config, fused).cuda()
        parameters = [*module.parameters(), *head.parameters()]
        for p in parameters:
            torch.nn.init.normal_(p, std=(n * d) ** -0.5 if p.dim() == 2 else 0.5)
        if kind == torch.float64:
            module.double(), head.double()
        streams, gain, d_x, d_new = (t.to(kind) for t in tensors)
        leaves = [streams.requires_grad_(), gain.requires_grad_(), *parameters]
        x, put_back = module.around(leaves[0])
        new = put_back(x * leaves[1])
        hidden = head(new)
        gradients = torch.autograd.grad([x, new, hidden], leaves, [d_x, d_new, d_x])
        return [t.detach() for t in (x, new, hidden, *gradients)]

    exact, fused, plain = run(None, torch.float64), run(TritonRowOperations(), dtype), run(None, dtype)
    again = run(TritonRowOperations(), dtype)
    for i, reference in enumerate(exact):
        errors = [float((values[i].double() - reference).norm() / reference.norm()) for values in (fused, plain)]
        # Both are noise of the dtype. Of a handful of numbers, the gradients of scale and base, the ratio of two such draws says little: the plain
        # operations may happen to round nearly nothing there. What one rounding of the dtype brings is legitimate whatever they got.
        bound = 1.5 * errors[1] if reference.numel() > 32 else max(4 * errors[1], torch.finfo(dtype).eps)
        assert errors[0] <= bound + 5e-6, (i, errors)
        assert torch.equal(fused[i], again[i]), i
