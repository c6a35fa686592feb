# SPDX-License-Identifier: Apache-2.0
"""A second decoder, written from the formulas alone: one document at a time, loops where a loop is clearest, no code of csa_model or kernels.

It reads parameters by name from a Decoder, so that autograd through it yields gradients for the same parameters. Keys are the values; every mask is
built per query. S tokens of the document, n compressed entries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from csa_model.config import ModelConfig


@dataclass
class ReferenceOutput:
    """Logits [S, V] of one document and sums of its losses; kl per CSA layer, balance per scored layer."""

    logits: Tensor
    mtp_logits: Tensor | None
    kl: list[Tensor]
    balance: list[Tensor]


class Reference:
    """`weights`: name -> tensor, as named by Decoder. `teacher` as in the configuration; support "sparse" or "dense"."""

    def __init__(
        self, config: ModelConfig, weights: dict[str, Tensor], attention: str = "sparse", support: str = "sparse", teacher: str = "full_csa"
    ):
        self.c, self.w, self.attention, self.support, self.teacher = config, weights, attention, support, teacher

    # -- pieces ------------------------------------------------------------------------------------------------------------------------------

    def norm(self, x: Tensor, name: str | None) -> Tensor:
        y = x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.c.rms_norm_eps)
        return y if name is None else y * self.w[name + ".weight"]

    def frequencies(self, ratio: int) -> Tensor:
        r, s = self.c.qk_rope_head_dim, self.c.rope_scaling
        base = self.c.compress_rope_theta if ratio else self.c.rope_theta
        plain = base ** (-torch.arange(0, r, 2, dtype=torch.float64) / r)
        if not ratio:
            return plain
        corner = [r * math.log(s.original_max_position_embeddings / (2 * math.pi * b)) / (2 * math.log(base)) for b in (s.beta_fast, s.beta_slow)]
        low, high = max(math.floor(corner[0]), 0), min(math.ceil(corner[1]), r - 1)
        ramp = ((torch.arange(r // 2, dtype=torch.float64) - low) / (high - low if high > low else 0.001)).clamp(0, 1)
        return plain * (1 - ramp) + plain / s.factor * ramp

    def rope(self, x: Tensor, positions: Tensor, ratio: int, sign: int = 1) -> Tensor:
        """x [S, ..., D]; complex multiplication of the last r dims, pairs interleaved."""
        r = self.c.qk_rope_head_dim
        turn = torch.polar(torch.ones((), dtype=torch.float64), sign * positions.double()[:, None] * self.frequencies(ratio))
        turn = turn.view(turn.shape[0], *[1] * (x.dim() - 2), r // 2)
        pairs = torch.view_as_complex(x[..., -r:].double().unflatten(-1, (r // 2, 2)).contiguous()) * turn
        return torch.cat([x[..., :-r], torch.view_as_real(pairs).flatten(-2).to(x.dtype)], -1)

    def compress(self, x: Tensor, name: str, dim: int, m: int) -> Tensor:
        n = len(x) // m
        kv, z, entries = x @ self.w[name + ".wkv.weight"].T, x @ self.w[name + ".wgate.weight"].T, []
        for i in range(n):
            own = slice(i * m, (i + 1) * m)
            gate, value = z[own] + self.w[name + ".ape"], kv[own]
            if m == 4:
                gate, value = gate[:, dim:], value[:, dim:]
                if i > 0:
                    before = slice((i - 1) * m, i * m)
                    gate = torch.cat([z[before, :dim] + self.w[name + ".ape"][:, :dim], gate])
                    value = torch.cat([kv[before, :dim], value])
            entries.append((torch.softmax(gate, 0) * value).sum(0))
        pooled = torch.stack(entries) if entries else x.new_zeros(0, dim)
        return self.rope(self.norm(pooled, name + ".norm"), torch.arange(n) * m, m)

    # -- attention ---------------------------------------------------------------------------------------------------------------------------

    def attend(self, x: Tensor, name: str, m: int, kl: list[Tensor]) -> Tensor:
        c, w, S = self.c, self.w, len(x)
        H, D, g = c.num_attention_heads, c.head_dim, c.o_groups
        positions = torch.arange(S)
        latent = self.norm(x @ w[name + ".wq_a.weight"].T, name + ".q_norm")
        q = self.rope(self.norm((latent @ w[name + ".wq_b.weight"].T).view(S, H, D), None), positions, m)
        kv = self.rope(self.norm(x @ w[name + ".wkv.weight"].T, name + ".kv_norm"), positions, m)
        keys = torch.cat([kv, self.compress(x, name + ".compressor", D, m)]) if m else kv
        n = len(keys) - S
        index = self.index_scores(x.detach(), latent.detach(), name + ".indexer", m) if m == 4 else None
        rows, sink, loss = [], w[name + ".attn_sink"], x.new_zeros(())
        for t in range(S):
            window = list(range(max(0, t - c.sliding_window + 1), t + 1))
            visible = list(range((t + 1) // m)) if m else []
            chosen = visible
            if index is not None and c.index_topk is not None and len(visible) > c.index_topk:
                order = sorted(visible, key=lambda j: (-index[t, j].item(), j))
                chosen = order[: c.index_topk]
            read = chosen if self.attention == "sparse" else visible
            logits = q[t] @ keys[window + [S + j for j in read]].T * D**-0.5
            full = torch.softmax(torch.cat([logits, sink[:, None]], 1), 1)[:, :-1]
            rows.append(full @ keys[window + [S + j for j in read]])
            support = chosen if self.support == "sparse" else visible
            if index is not None and support:
                loss = loss + self.divergence(q[t].detach(), kv[window].detach(), keys[S:][support].detach(), sink.detach(), index[t, support])
        if index is not None:
            kl.append(loss)
        out = self.rope(torch.stack(rows), positions, m, sign=-1)
        assert n == (S // m if m else 0)
        groups = out.view(S, g, H * D // g)
        low = [groups[:, a] @ w[name + ".wo_a.weight"].view(g, -1, H * D // g)[a].T for a in range(g)]
        return torch.cat(low, 1) @ w[name + ".wo_b.weight"].T

    def index_scores(self, x: Tensor, latent: Tensor, name: str, m: int) -> Tensor:
        c, w, S = self.c, self.w, len(x)
        q = self.rope((latent @ w[name + ".wq_b.weight"].T).view(S, c.index_n_heads, c.index_head_dim), torch.arange(S), m)
        k = self.compress(x, name + ".compressor", c.index_head_dim, m)
        weight = x @ w[name + ".weights_proj.weight"].T * c.index_head_dim**-0.5 * c.index_n_heads**-0.5
        return sum(weight[:, h, None] * torch.relu(q[:, h] @ k.T) for h in range(c.index_n_heads))  # type: ignore[return-value]

    def divergence(self, q: Tensor, window: Tensor, entries: Tensor, sink: Tensor, student: Tensor) -> Tensor:
        scale = q.shape[-1] ** -0.5
        compressed = torch.exp(q @ entries.T * scale)
        total = compressed.sum(1)
        if self.teacher == "full_csa":
            total = total + torch.exp(q @ window.T * scale).sum(1) + torch.exp(sink)
        p = (compressed / total[:, None]).sum(0)
        p = p / p.sum()
        return (p * (p.log() - torch.log_softmax(student, 0))).sum()

    # -- block -------------------------------------------------------------------------------------------------------------------------------

    def maps(self, X: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
        n, hc = self.c.hyper_connections.hc_mult, self.c.hyper_connections
        z = X.flatten(1)
        mix = (z @ self.w[name + ".fn"].T) / torch.sqrt((z * z).mean(-1, keepdim=True) + self.c.rms_norm_eps)
        scale, base = self.w[name + ".scale"], self.w[name + ".base"]
        pre = torch.sigmoid(mix[:, :n] * scale[0] + base[:n]) + hc.hc_eps
        post = 2 * torch.sigmoid(mix[:, n : 2 * n] * scale[1] + base[n : 2 * n])
        M = torch.softmax(mix[:, 2 * n :].view(-1, n, n) * scale[2] + base[2 * n :].view(n, n), -1) + hc.hc_eps
        M = M / (M.sum(1, keepdim=True) + hc.hc_eps)
        for _ in range(hc.hc_sinkhorn_iters - 1):
            M = M / (M.sum(2, keepdim=True) + hc.hc_eps)
            M = M / (M.sum(1, keepdim=True) + hc.hc_eps)
        return pre, post, M

    def reduce(self, X: Tensor, name: str) -> Tensor:
        if not self.c.hyper_connections.enabled:
            return X
        z = X.flatten(1)
        mix = (z @ self.w[name + ".fn"].T) / torch.sqrt((z * z).mean(-1, keepdim=True) + self.c.rms_norm_eps)
        a = torch.sigmoid(mix * self.w[name + ".scale"] + self.w[name + ".base"]) + self.c.hyper_connections.hc_eps
        return torch.einsum("tn,tnd->td", a, X)

    def sublayer(self, X: Tensor, name: str, function) -> Tensor:  # type: ignore[no-untyped-def]
        if not self.c.hyper_connections.enabled:
            return X + function(X)
        pre, post, M = self.maps(X, name)
        y = function(torch.einsum("tn,tnd->td", pre, X))
        return torch.stack([post[:, k, None] * y + sum(M[:, j, k, None] * X[:, j] for j in range(X.shape[1])) for k in range(X.shape[1])], 1)

    def swiglu(self, x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
        limit = self.c.moe.swiglu_limit
        return (torch.nn.functional.silu((x @ w1.T).clamp(max=limit)) * (x @ w3.T).clamp(-limit, limit)) @ w2.T

    def feed_forward(self, x: Tensor, name: str, ids: Tensor, balance: list[Tensor]) -> Tensor:
        w, moe = self.w, self.c.moe
        if not moe.enabled:
            return self.swiglu(x, *(w[f"{name}.w{i}.weight"] for i in (1, 2, 3)))
        E, K = moe.n_routed_experts, moe.num_experts_per_tok
        scores = torch.sqrt(torch.nn.functional.softplus(x @ w[name + ".gate.weight"].T))
        hashed = name + ".gate.tid2eid" in w
        rows, load = [], torch.zeros(E, dtype=x.dtype)
        for t in range(len(x)):
            chosen = w[name + ".gate.tid2eid"][ids[t]] if hashed else (scores[t] + w[name + ".gate.bias"]).topk(K).indices
            weight = scores[t, chosen] / scores[t, chosen].sum() * moe.routed_scaling_factor
            rows.append(sum(weight[k] * self.swiglu(x[t], *(w[f"{name}.experts.w{i}"][e] for i in (1, 2, 3))) for k, e in enumerate(chosen)))
            load[chosen] += 1
        if not hashed:
            share = (scores / scores.sum(1, keepdim=True)).mean(0)
            balance.append((E / (K * len(x)) * load * share).sum())
        shared = self.swiglu(x, *(w[f"{name}.shared_experts.w{i}.weight"] for i in (1, 2, 3))) if moe.n_shared_experts else 0
        return torch.stack(rows) + shared  # type: ignore[arg-type]

    def block(self, X: Tensor, name: str, m: int, ids: Tensor, kl: list[Tensor], balance: list[Tensor]) -> Tensor:
        X = self.sublayer(X, name + ".hc_attn", lambda x: self.attend(self.norm(x, name + ".attn_norm"), name + ".attn", m, kl))
        return self.sublayer(X, name + ".hc_ffn", lambda x: self.feed_forward(self.norm(x, name + ".ffn_norm"), name + ".ffn", ids, balance))

    def __call__(self, ids: Tensor, next_ids: Tensor | None = None) -> ReferenceOutput:
        """One document: ids int64 [S] and, for the MTP block, the id after each (0 where there is none)."""
        c, w = self.c, self.w
        kl: list[Tensor] = []
        balance: list[Tensor] = []
        X = w["embed.weight"][ids]
        if c.hyper_connections.enabled:
            X = torch.stack([X] * c.hyper_connections.hc_mult, 1)
        for layer in range(c.num_hidden_layers):
            X = self.block(X, f"layers.{layer}", c.compress_ratios[layer], ids, kl, balance)
        logits = self.norm(self.reduce(X, "hc_head"), "norm") @ w["head.weight"].T
        mtp_logits = None
        if c.mtp.enabled and next_ids is not None:
            joined = self.norm(w["embed.weight"][next_ids], "mtp.enorm") @ w["mtp.e_proj.weight"].T
            X = self.norm(X, "mtp.hnorm") @ w["mtp.h_proj.weight"].T + (joined[:, None] if X.dim() == 3 else joined)
            X = self.block(X, "mtp", c.compress_ratios[c.num_hidden_layers], next_ids, kl, balance)
            mtp_logits = self.norm(self.reduce(X, "mtp.hc_head"), "mtp.norm") @ w["head.weight"].T
        return ReferenceOutput(logits, mtp_logits, kl, balance)
