# SPDX-License-Identifier: Apache-2.0
"""The decoder on a GPU: the gradients of the CPU, the grouped GEMM, and no wait for the device outside the attention kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from csa_model import moe
from csa_model.config import MoEConfig
from csa_model.decoder import Decoder, DecoderOutput
from csa_model.moe import Experts
from kernels import IndexerStats, PackedLayout
from kernels.unfused import UnfusedBackend
from tests.model.helpers import SPARSE, build, next_of, random_tokens, tiny_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU is visible")]
EXPERTS = MoEConfig(n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, num_hash_layers=1)


def loss_of(decoder: Decoder, out: DecoderOutput, targets: Tensor) -> Tensor:
    assert out.mtp_hidden is not None
    lm = torch.nn.functional.cross_entropy(decoder.logits(out.hidden), targets, ignore_index=-100, reduction="sum")
    return lm + decoder.logits(out.mtp_hidden).square().mean() + sum(r.kl_sum for r in out.indexer) + sum(r.balance_sum for r in out.router)


def test_float64_gradients_equal_those_of_the_cpu() -> None:
    tokens, lengths, results = random_tokens(64), [33, 3, 20], []
    for device in ("cpu", "cuda"):
        decoder = build(tiny_config(moe=EXPERTS), dtype=torch.float64).to(device)
        ids, targets = tokens.to(device), next_of(tokens, lengths).to(device)
        out = decoder(ids, PackedLayout.from_lengths(lengths, 64, device=device), SPARSE, targets)
        loss_of(decoder, out, targets).backward()
        results.append({name: p.grad.cpu() for name, p in decoder.named_parameters() if p.grad is not None})
    assert results[0].keys() == results[1].keys()
    for name, grad in results[0].items():
        torch.testing.assert_close(results[1][name], grad, rtol=1e-7, atol=1e-9 * max(1.0, float(grad.abs().max())), msg=name)


def test_grouped_gemm_equals_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    experts = Experts(tiny_config(hidden_size=64, moe=EXPERTS), 0.5).cuda()
    x, weights = torch.randn(300, 64, device="cuda", requires_grad=True), torch.rand(300, 2, device="cuda", requires_grad=True)
    chosen = torch.rand(300, 7, device="cuda").topk(2).indices  # expert 7 has no token
    assert moe.grouped_gemm_applies(x.bfloat16(), experts.w1)
    results = []
    for loop in (False, True):
        if loop:
            monkeypatch.setattr(moe, "grouped_gemm_applies", lambda x, weight: False)
        with torch.autocast("cuda", torch.bfloat16):
            y = experts(x, chosen, weights)
        results.append([y, *torch.autograd.grad(y.float().square().sum(), [x, weights, experts.w1, experts.w2, experts.w3])])
    for grouped, looped in zip(*results, strict=True):
        assert grouped.isfinite().all()
        torch.testing.assert_close(grouped.float(), looped.float(), rtol=2e-2, atol=2e-2 * float(looped.detach().abs().max()))


class _NoAttention(UnfusedBackend):
    """Stands in for the kernels, which have tests of their own: touches every argument and never waits."""

    def select(self, index_q: Tensor, *args: Any) -> Tensor:
        return torch.full((index_q.shape[0], args[-1]), -1, dtype=torch.int32, device=index_q.device)

    def attend(self, q: Tensor, window_kv: Tensor, compressed_kv: Tensor | None, *args: Any) -> tuple[Tensor, Tensor]:
        out = q + window_kv[:, None]
        return (out if compressed_kv is None else out + compressed_kv.mean(0)) + args[1].to(q.dtype)[:, None], q.detach().float().sum(-1)

    def attend_with_indexer_loss(self, index_q: Tensor, index_k: Tensor, index_w: Tensor, *args: Any, **kwargs: Any) -> Any:
        kl_sum = index_q.float().sum() + index_k.float().sum() + index_w.sum()
        return *self.attend(*args[1:4], None, args[4]), kl_sum, IndexerStats(kl_sum.detach(), kl_sum.detach().long())


@pytest.mark.parametrize("recompute", [False, True])
def test_a_step_never_waits_for_the_device(recompute: bool) -> None:
    torch.manual_seed(0)
    decoder = Decoder(tiny_config(moe=EXPERTS, recompute=recompute), _NoAttention()).cuda()
    tokens, lengths = random_tokens(64), [33, 3, 20]
    ids, targets = tokens.cuda(), next_of(tokens, lengths).cuda()
    for warm in (True, False):
        layout = PackedLayout.from_lengths(lengths, 64, device="cuda")
        torch.cuda.set_sync_debug_mode("default" if warm else "error")
        try:
            with torch.autocast("cuda", torch.bfloat16):
                loss = loss_of(decoder, decoder(ids, layout, SPARSE, targets), targets)
            loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert loss.isfinite()
